"""What the kernels' tests share: buffers that are full of NaN around what may be read or written, comparisons with a
reference, and one comparison of whole steps by the kernels with the same steps by the references."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from graftune.batch import Example
from graftune.data.pack import Capacities, pack
from graftune.kernels import launch
from graftune.step.step import Step
from tests.support import tiny

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One rounding of the result; twice that in bf16, which Triton's interpreter cuts off instead of rounding it.
ROUNDED = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4}
# A large epsilon: at 1e-8 the first update is the gradient's sign, and a gradient of nearly nothing has any.
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 0.1, "weight_decay": 0.01, "clip": 0.7}


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """The same shape, all values finite, and the norm of the difference within `tolerance` of the norm of `want`."""
    got, want = got.detach().float().cpu(), want.detach().float().cpu()
    assert got.shape == want.shape and got.isfinite().all()
    off = (got - want).norm() / (want.norm() + 1e-6)
    assert off <= tolerance, (off, (got - want).abs().max(), want.abs().max())


def buffer(rows: int, width: int, padding: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN with columns of padding beside and nine rows below, and its corner of rows x width."""
    wide = torch.full((rows + 9, width + padding), NAN, dtype=like.dtype, device=like.device)
    return wide, wide[:rows, :width]


def filled(x: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Such a buffer whose corner holds x."""
    wide, inner = buffer(*x.shape, padding, x)
    inner.copy_(x)
    return wide, inner


def untouched(wide: torch.Tensor, inner: torch.Tensor) -> bool:
    """Whether all of a buffer but its corner is still NaN."""
    return bool(wide[: len(inner), inner.shape[1] :].isnan().all() and wide[len(inner) :].isnan().all())


def batch(padded: bool = False) -> Any:
    """Two documents, with or without the padding of a captured step: tokens, an empty slot, rows."""
    tokens = torch.randint(3, tiny.VOCAB, (2, 8), generator=torch.Generator().manual_seed(4)).tolist()
    examples = [Example(t[: 8 - 3 * i], [j > 2 for j in range(8 - 3 * i)]) for i, t in enumerate(tokens)]
    return pack(examples, shape=Capacities(15, 3, 9, 15) if padded else None)


def stepped(
    side: Any, device: str, backend: str, packed: Any, dropout: float, recompute: str = "none", steps: int = 1
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The report, the gradients and the weights after each of some steps."""
    step = Step(
        side.decoder, side.arena, clip_mode="layer", dropout=dropout, attention_backend=backend, recompute=recompute
    )
    found = []
    for _ in range(steps):
        step.set_dropout_seed(11)
        step.micro_step(packed.to(torch.device(device)))
        step.set_hyper(HYPER | {"divisor": float(packed.response_tokens)})
        grads = side.arena.grads.cpu().clone()
        report = step.update_step().cpu().clone()
        found.append((report, grads, side.arena.weights.cpu().clone()))
        assert not side.arena.grads.any()
    return found


def through_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the kernels compute, with adapters beside the weights, as on a GPU."""
    monkeypatch.setattr(launch, "fused", lambda x: True)
    monkeypatch.setattr(launch, "augments", lambda device: True)


def start_from(side: Any, weights: torch.Tensor) -> None:
    side.arena.weights.copy_(weights)
    side.arena.publish()


def same_gradients(arena: Any, got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    for name in arena.slots:
        a, b = arena.view(name, got), arena.view(name, want)
        assert (a - b).norm() <= tolerance * (b.norm() + 1e-6), name


def same_steps(arena: Any, got: Iterable[Any], want: Iterable[Any], tolerance: float = 1e-4) -> None:
    """Loss and norms, every gradient, and the weights after the update."""
    for (report, grads, weights), (report_, grads_, weights_) in zip(got, want, strict=True):
        assert torch.allclose(report, report_, rtol=1e-4), (report, report_)
        same_gradients(arena, grads, grads_, tolerance)
        assert (weights - weights_).norm() <= 1e-3 * weights_.norm()


def check_steps(
    monkeypatch: pytest.MonkeyPatch, plain: Any, make: Callable[[], Any], device: str, dropout: float = 0.0,
    recompute: str = "none", steps: int = 1, tolerance: float = 1e-4,
) -> Any:  # fmt: skip
    """Steps of `make()` by the kernels, with adapters beside the weights, equal those of `plain` by the references on
    the CPU. Returns what was made."""
    start = plain.arena.weights.clone()
    want = stepped(plain, "cpu", "cpu", batch(), dropout, recompute, steps)
    through_kernels(monkeypatch)
    ours = make()
    start_from(ours, start)
    got = stepped(ours, device, "triton", batch(padded=True), dropout, recompute, steps)
    same_steps(plain.arena, got, want, tolerance)
    return ours
