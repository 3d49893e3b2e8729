"""Packed causal attention with grouped heads. q [T, N, H], k and v [T, K, H]; documents given by `Documents`.

The backend is chosen once for each kind of layer, at the start (`choose`), and passed to every call: cuDNN on GPUs that
have it, or its forward with our backward ("mixed"); torch's flash kernels where cuDNN is missing or results must be
bit-identical; our own for fp32, sliding windows, soft caps and odd head widths; on the CPU torch's fused kernel or the
reference ("cpu" runs the reference on any other device).
q, k and v may be column ranges of one packed buffer, [T, (N + 2K) H] or wider, and so may their gradients unless the
backend has its own wishes (`grad_buffers`); all are read and written in place. `stats` is what the forward leaves for
the backward: the log-sum-exp of the scores in the backend's own layout, empty where it is recomputed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from graftune.kernels import launch
from graftune.kernels.attention import flash_cpu, reference

SHORT = 128  # tokens of an average document below which the fused CPU backward loses in bf16

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the documents of one pass lie. Slots may be empty; the lengths add up to T.

    One object a pass: it keeps what a backend computes from cu_seqlens for all layers.
    """

    cu_seqlens: torch.Tensor  # [S + 1] int32 on the device: document i is tokens cu_seqlens[i] to cu_seqlens[i + 1]
    lengths: tuple[int, ...] | None  # the same on the host; the CPU's path needs them, the GPU's never look
    longest: int  # no document is longer: a fixed bound, not the longest of this pass
    fixed: bool = False  # the shape will come again, so that a plan for it is worth its time
    prepared: dict[str, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Documents:
        """Documents of exactly these lengths, end to end."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return Documents(starts, tuple(lengths), max(lengths))


class HeadKind(NamedTuple):
    """What the choice of a layer's backend depends on."""

    width: int
    capped: bool  # whether scores are soft-capped


class Choice(NamedTuple):
    backend: str
    why: str
    others: tuple[str, ...] = ()  # alternatives: which is faster depends on the documents (`timing`)


def choose(
    device: torch.device,
    dtype: torch.dtype,
    head_width: int,
    deterministic: bool,
    windowed: bool,
    capped: bool = False,
) -> Choice:
    """The backend for such heads on this device, and the reason. Called once at the start, and printed."""
    device = torch.device(device)
    if not launch.on_gpu(device):
        return Choice("cpu", f"on {device.type} torch's fused kernel or the textbook formula")
    from graftune.kernels.attention import cudnn_frontend, flash

    if windowed or capped:
        return _ours(head_width, "sliding windows" if windowed else "soft caps")
    if dtype == torch.float32:
        return _ours(head_width, "fp32")
    flashless = flash.lacks(device, dtype, head_width)
    if deterministic and not flashless:
        return Choice("flash", "torch's flash kernels add in a fixed order in deterministic mode; cuDNN does not")
    cudnnless = cudnn_frontend.lacks(device, dtype, head_width)
    others = ("triton",) if head_width <= 128 and importlib.util.find_spec("triton") else ()
    if not deterministic and not cudnnless:
        return Choice("cudnn", "cuDNN's packed attention is the fastest", ("mixed", *others) if others else ())
    if not flashless:
        others = () if deterministic else others
        return Choice("flash", f"{cudnnless}; torch's flash kernels are the next fastest", others)
    return _ours(head_width, f"{flashless}; {'deterministic mode' if deterministic else cudnnless}")


def for_any_shape(backend: str, device: torch.device, dtype: torch.dtype, head_width: int) -> str:
    """The backend for shapes that change from batch to batch: cuDNN would build a plan for every one of them."""
    if backend not in ("cudnn", "mixed"):
        return backend
    from graftune.kernels.attention import flash

    return "triton" if flash.lacks(device, dtype, head_width) else "flash"


def _ours(head_width: int, reason: str) -> Choice:
    from graftune.errors import GraftuneError

    if head_width > 256:
        raise GraftuneError(f"heads of {head_width} values are wider than the 256 that attention on the GPU serves")
    if importlib.util.find_spec("triton") is None:
        raise GraftuneError(f"attention needs the package triton here ({reason})", fix="pip install triton")
    return Choice("triton", f"our own kernels: {reason}")


@launch.operation("attention")
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    docs: Documents,
    scale: float,
    window: int = 0,
    backend: str = "cpu",
    out: torch.Tensor | None = None,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, N, H], stats); with `window` > 0 token i sees j only if i - window < j, with `cap` > 0 scores are
    soft-capped at it by a tanh.

    The output goes into the given `out`, whose tokens may lie apart, or a fresh contiguous one.
    """
    _check(q, k, v)
    if backend == "flash":
        from graftune.kernels.attention import flash

        assert not cap, "flash kernels know no soft cap"
        return flash.forward(q, k, v, docs, scale, window, out)
    out = q.new_empty(q.shape) if out is None else out
    _check(out, k, v)
    if backend == "cpu":
        lengths = _lengths(docs, q)
        if _fused(q, window, cap):
            return out, flash_cpu.forward(q, k, v, lengths, scale, out)
        return reference.forward(q, k, v, lengths, scale, window, out, cap), q.new_empty(0)
    if backend in ("cudnn", "mixed"):
        from graftune.kernels.attention import cudnn_frontend

        assert not window and not cap, "cuDNN's plans know no window and no soft cap"
        return out, cudnn_frontend.forward(q, k, v, docs, scale, out)
    from graftune.kernels.attention import kernel

    assert backend == "triton", backend
    return out, kernel.forward(q, k, v, docs, scale, window, out, cap)


@launch.operation("attention")
def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    docs: Documents,
    scale: float,
    window: int,
    grads: Grads,
    backend: str = "cpu",
    cap: float = 0.0,
) -> None:
    """Writes dq, dk and dv into `grads`, which have the shapes of q, k and v or are those of `grad_buffers`; what was
    there does not matter."""
    _check(q, k, v)
    _check(*grads)
    _check(out, k, v)
    _check(grad_out, k, v)
    assert grad_out.shape == out.shape == q.shape == grads[0].shape, (grad_out.shape, out.shape, q.shape)
    assert grads[1].shape == k.shape or backend in ("triton", "mixed"), (grads[1].shape, k.shape)
    if backend == "cpu":
        lengths = _lengths(docs, q)
        short = q.dtype == torch.bfloat16 and len(q) < SHORT * sum(length > 0 for length in lengths)
        if _fused(q, window, cap) and not short:
            return flash_cpu.backward(grad_out, q, k, v, out, stats, lengths, scale, grads)
        return reference.backward(grad_out, q, k, v, out, lengths, scale, window, grads, cap)
    if backend == "cudnn":
        from graftune.kernels.attention import cudnn_frontend

        assert not window and not cap, "cuDNN's plans know no window and no soft cap"
        return cudnn_frontend.backward(grad_out, q, k, v, out, stats, docs, scale, grads)
    if backend == "flash":
        from graftune.kernels.attention import flash

        assert not cap, "flash kernels know no soft cap"
        return flash.backward(grad_out, q, k, v, out, stats, docs, scale, window, grads)
    from graftune.kernels.attention import kernel

    assert backend in ("triton", "mixed"), backend
    theirs = backend == "mixed"
    return kernel.backward(grad_out, q, k, v, out, stats, docs, scale, window, grads, cap, by_token=theirs)


def grad_buffers(q: torch.Tensor, k: torch.Tensor, backend: str) -> Grads | None:
    """Where the backend wants to leave dq, dk and dv; None: wherever the caller likes. dk and dv may be [T, N, H] in
    fp32: then those of the query heads that share a key head are still to be added up."""
    if backend == "cudnn":
        from graftune.kernels.attention import cudnn_frontend

        return cudnn_frontend.grad_buffers(q, k)
    if backend in ("triton", "mixed"):
        from graftune.kernels.attention import kernel

        return kernel.grad_buffers(q, k)
    return None


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The layout contract: tokens any distance apart, heads of a token side by side."""
    assert len(q) == len(k) and k.shape == v.shape and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape, v.shape)
    width = q.shape[2]
    for x in (q, k, v):
        assert x.shape[2] == width and x.stride(2) == 1 and (x.stride(1) == width or x.shape[1] == 1), x.stride()


def _lengths(docs: Documents, q: torch.Tensor) -> tuple[int, ...]:
    assert docs.lengths is not None and sum(docs.lengths) == len(q), (docs.lengths, len(q))
    return docs.lengths


def _fused(q: torch.Tensor, window: int, cap: float) -> bool:
    return launch.kind_of(q) == "cpu" and not window and not cap
