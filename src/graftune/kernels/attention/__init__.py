"""Packed causal attention with grouped heads: q [T, N, H], k and v [T, K, H], in the documents of `Documents`.

`choose` selects the backend once for each kind of layer, at the start, and every call gets its name:

    cudnn   the fastest, on GPUs with cuDNN's attention; "mixed" is its forward with our backward
    flash   torch's flash kernels, where cuDNN is missing or results must be identical to the bit
    triton  our kernels, for fp32, sliding windows, soft caps, sinks and odd head widths
    cpu     torch's fused CPU kernel, or the reference (on any device but a CPU, always the reference)

q, k and v may be column ranges of one buffer, [T, (N + 2K) H] or wider. So may their gradients, unless the backend
needs buffers of its own (`grad_buffers`). The forward leaves `stats` for the backward: the log-sum-exp of the scores in
the backend's layout, empty where the backward recomputes it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from graftune.kernels import launch

# The module of each backend. All have forward and backward; `grad_buffers`, where gradients need buffers of their own.
MODULES = {"cpu": "cpu", "flash": "flash", "cudnn": "cudnn_frontend", "mixed": "mixed", "triton": "kernel"}

WIDEST = 512  # values of a head that our kernels have tiles for
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Documents:
    """The document boundaries of one pass. Slots may be empty; the lengths add up to T.

    A pass has one such object, which keeps what a backend computes from cu_seqlens, for all layers.
    """

    cu_seqlens: torch.Tensor  # [S + 1] int32 on the device: document i is tokens cu_seqlens[i] to cu_seqlens[i + 1]
    lengths: tuple[int, ...] | None  # the same on the host; only the CPU backend reads them
    longest: int  # an upper bound on the length of a document, constant over passes
    fixed: bool = False  # the shape will occur again, so that building a plan for it is worth the time
    prepared: dict[int | str, torch.Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Documents:
        """Consecutive documents of these lengths."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return Documents(starts, tuple(lengths), max(lengths))


class HeadKind(NamedTuple):
    """The properties of a layer's heads that the choice of its backend depends on."""

    width: int
    capped: bool = False  # whether scores are soft-capped
    sinks: bool = False  # whether heads have a sink


class Choice(NamedTuple):
    """A chosen backend, and the reason, which is printed."""

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
    sinks: bool = False,
) -> Choice:
    """Choose the backend for heads of this kind on this device. Called once for each kind, at the start."""
    device = torch.device(device)
    if not launch.on_gpu(device):
        return Choice("cpu", f"on {device.type} torch's fused kernel or the textbook formula")
    from graftune.kernels.attention import cudnn_frontend, flash

    if windowed or capped or sinks:
        return _ours(head_width, "sliding windows" if windowed else "soft caps" if capped else "sinks")
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
    """The backend for shapes that change from batch to batch, without cuDNN: it would build a plan for each shape."""
    if backend not in ("cudnn", "mixed"):
        return backend
    from graftune.kernels.attention import flash

    return "triton" if flash.lacks(device, dtype, head_width) else "flash"


def _ours(head_width: int, reason: str) -> Choice:
    from graftune.errors import GraftuneError

    if head_width > WIDEST:
        raise GraftuneError(f"heads of {head_width} values are wider than the {WIDEST} that attention on the GPU has")
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
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out [T, N, H], stats). With `window` > 0, token i attends to token j only if i - window < j; with `cap`
    > 0, scores are soft-capped at it by a tanh. `sinks` [N] (fp32): a score of each head beside those of the keys; it
    takes a share of the softmax and adds nothing to the output. Only our kernels and the reference have them.

    Writes to `out` if given, with any row stride, or to a new contiguous tensor.
    """
    out = q.new_empty(q.shape) if out is None else out
    _check(q, k, v)
    _check(out, k, v)
    more = () if sinks is None else (sinks,)
    return out, _module(backend).forward(q, k, v, docs, scale, window, out, cap, *more)


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
    sinks: torch.Tensor | None = None,
    grad_sinks: torch.Tensor | None = None,
) -> None:
    """Write dq, dk and dv to `grads`: tensors of the shapes of q, k and v, or those of `grad_buffers`. Their previous
    contents are overwritten. Adds the sinks' gradient to `grad_sinks` [N] (fp32), if given."""
    _check(q, k, v)
    _check(*grads)
    _check(out, k, v)
    _check(grad_out, k, v)
    assert grad_out.shape == out.shape == q.shape == grads[0].shape, (grad_out.shape, out.shape, q.shape)
    assert grads[1].shape == k.shape or backend in ("triton", "mixed"), (grads[1].shape, k.shape)
    more = () if sinks is None else (sinks, grad_sinks)
    _module(backend).backward(grad_out, q, k, v, out, stats, docs, scale, window, grads, cap, *more)


def grad_buffers(q: torch.Tensor, k: torch.Tensor, backend: str) -> Grads | None:
    """The buffers that the backend needs for dq, dk and dv; None: the caller may pass any. dk and dv may be [T, N, H]
    in fp32: then the caller has to sum those of the query heads that share a key head."""
    make = getattr(_module(backend), "grad_buffers", None)
    return None if make is None else make(q, k)


def _module(backend: str) -> Any:
    return importlib.import_module(f"graftune.kernels.attention.{MODULES[backend]}")


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The layout contract: any row stride between tokens, the heads of a token adjacent."""
    assert len(q) == len(k) and k.shape == v.shape and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape, v.shape)
    width = q.shape[2]
    for x in (q, k, v):
        assert x.shape[2] == width and x.stride(2) == 1 and (x.stride(1) == width or x.shape[1] == 1), x.stride()
