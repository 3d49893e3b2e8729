"""Attention for the floor: the fastest of all there is, by the time of a few layers. A floor must not be higher than it
need be, so torch's own kernels are tried beside ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from graftune.kernels import attention as kernels

LAYERS = 8  # that are timed together


class Heads(NamedTuple):
    query: int
    key: int
    width: int
    window: int = 0

    @property
    def split(self) -> list[int]:
        return [self.query, self.key, self.key]


class Attention(Protocol):
    name: str

    def begin(self) -> None:
        """A pass begins."""

    def forward(self) -> Any:
        """What the backward needs."""

    def backward(self, kept: Any) -> None: ...


class Sdpa:
    """torch's own, over rows of one length."""

    def __init__(self, heads: Heads, rows: int, length: int, qkv: torch.Tensor, name: str, backend: SDPBackend):
        self.name, self.backend = f"torch {name}", backend
        parts = qkv.view(rows, length, -1, heads.width)
        self.qkv = [part.transpose(1, 2).requires_grad_() for part in parts.split(heads.split, 2)]
        self.grad = torch.randn_like(self.qkv[0])

    def begin(self) -> None: ...

    def forward(self) -> torch.Tensor:
        with sdpa_kernel(self.backend):
            q, k, v = self.qkv
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def backward(self, kept: torch.Tensor) -> None:
        torch.autograd.grad(kept, self.qkv, self.grad)


class Packed:
    """graftune's, over documents laid end to end."""

    def __init__(self, heads: Heads, lengths: Sequence[int], qkv: torch.Tensor, backend: str):
        device = qkv.device
        self.window = heads.window if heads.window < max(lengths) else 0
        self.scale = heads.width**-0.5
        self.backend, self.name = backend, f"graftune {backend}"
        self.lengths = tuple(lengths)
        edges = [0, *itertools.accumulate(lengths)]
        self.edges = torch.tensor(edges, dtype=torch.int32, device=device)
        q, k, v = qkv.split(heads.split, 1)
        self.qkv = q, k, v
        made = kernels.grad_buffers(q, k, self.backend)
        self.grads: Any = made or torch.empty_like(qkv).split(heads.split, 1)
        self.grad = torch.randn(self.qkv[0].shape, dtype=qkv.dtype, device=device)

    def begin(self) -> None:
        self.documents = kernels.Documents(self.edges, self.lengths, max(self.lengths))

    def forward(self) -> Any:
        return kernels.forward(*self.qkv, self.documents, self.scale, self.window, self.backend)

    def backward(self, kept: Any) -> None:
        q, k, v = self.qkv
        out, stats = kept
        more = self.documents, self.scale, self.window, self.grads, self.backend
        kernels.backward(self.grad, q, k, v, out, stats, *more)


def fastest(
    heads: Heads,
    lengths: Sequence[int],
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    sustained: Callable[..., float],
    say: Callable[[str], None],
) -> Attention:
    """Over these documents, whose lengths add up to `tokens`; torch's own only where all are of one length."""
    assert sum(lengths) == tokens, (sum(lengths), tokens)
    even, windowed = len(set(lengths)) == 1, 0 < heads.window < max(lengths)

    def qkv() -> torch.Tensor:
        return torch.randn(tokens, sum(heads.split), heads.width, dtype=dtype, device=device)

    def sdpa(name: str, backend: SDPBackend) -> Callable[[], Attention]:
        return lambda: Sdpa(heads, len(lengths), lengths[0], qkv(), name, backend)

    if device.type != "cuda":
        return sdpa("math", SDPBackend.MATH)() if even and not windowed else Packed(heads, lengths, qkv(), "cpu")
    choice = kernels.choose(device, dtype, heads.width, False, windowed)
    ours = dict.fromkeys((choice.backend, *choice.others, "triton"))  # whichever a step may take, and our own
    makers: list[Callable[[], Attention]] = [partial(_packed, heads, lengths, qkv, backend) for backend in ours]
    if even and not windowed:
        makers += [sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION), sdpa("flash", SDPBackend.FLASH_ATTENTION)]
    times: list[tuple[float, Attention]] = []
    for make in makers:
        try:
            candidate = make()
            ms = sustained(partial(_layers, candidate, LAYERS), device, 5, sustain=0.05)
        except (RuntimeError, ImportError, ValueError, AttributeError, TypeError, AssertionError) as error:
            # Not there, or not for these sizes: one of the others is.
            say(f"floor: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            continue
        say(f"floor: {candidate.name}: {ms / LAYERS:.4f} ms a layer")
        times.append((ms, candidate))
    if not times:
        raise RuntimeError("no fused attention for these sizes")
    return min(times, key=lambda pair: pair[0])[1]


def _packed(heads: Heads, lengths: Sequence[int], qkv: Callable[[], torch.Tensor], backend: str) -> Attention:
    return Packed(heads, lengths, qkv(), backend)


def _layers(attention: Attention, count: int) -> None:
    attention.begin()
    for _ in range(count):
        attention.backward(attention.forward())
