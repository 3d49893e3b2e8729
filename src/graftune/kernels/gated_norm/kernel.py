"""The gated norm in tiles of heads: each tensor is read or written once, and the backward divides by the root mean
square again instead of reading it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.lora_linear.kernel import add_up

VALUES, WARPS = 4096, 4  # per tile
PROGRAMS = 1024  # that share the tiles when a weight gradient is summed


@triton.jit
def _place(tile, count, V, BR: tl.constexpr, E: tl.constexpr, BE: tl.constexpr):
    """The tokens [BR, 1] and columns [BR, BE] of a tile's heads, and a mask of those that exist."""
    heads = tl.cast(tile, tl.int64) * BR + tl.arange(0, BR)
    within = tl.arange(0, BE)
    columns = (heads % V)[:, None] * E + within[None, :]
    return (heads // V)[:, None], columns, (heads < count)[:, None] & (within < E)[None, :]


@triton.jit
def _normed(x_ptr, rows, columns, live, stride, eps, E: tl.constexpr):
    """x of each head divided by its root mean square, and that factor [BR, 1]."""
    x = tl.load(x_ptr + rows * stride + columns, live, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / E + eps)[:, None]
    return x * rstd, rstd


@launch.kernel
def _forward(
    x_ptr, gate_ptr, w_ptr, out_ptr, count, V, eps, x_stride, gate_stride, out_stride,
    BR: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    rows, columns, live = _place(tl.program_id(0), count, V, BR, E, BE)
    n, _ = _normed(x_ptr, rows, columns, live, x_stride, eps, E)
    within = tl.arange(0, BE)
    w = tl.load(w_ptr + within, within < E, other=0.0)[None, :]
    z = tl.load(gate_ptr + rows * gate_stride + columns, live, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * out_stride + columns, (n * w * z * tl.sigmoid(z)).to(out_ptr.dtype.element_ty), live)


@launch.kernel
def _backward(
    grad_ptr, x_ptr, gate_ptr, w_ptr, grad_x_ptr, grad_gate_ptr, mixed_ptr, parts_ptr, count, V, eps, per_program,
    grad_stride, x_stride, gate_stride, grad_x_stride, grad_gate_stride, mixed_stride,
    WEIGHT: tl.constexpr, BR: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """May work in place: a program reads every value before it writes there."""
    within = tl.arange(0, BE)
    w = tl.load(w_ptr + within, within < E, other=0.0)[None, :]
    kind = grad_x_ptr.dtype.element_ty
    if WEIGHT:
        part = tl.zeros([BE], tl.float32)
    first = tl.program_id(0) * per_program
    for tile in range(first, first + per_program):
        rows, columns, live = _place(tile, count, V, BR, E, BE)
        n, rstd = _normed(x_ptr, rows, columns, live, x_stride, eps, E)
        z = tl.load(gate_ptr + rows * gate_stride + columns, live, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + rows * grad_stride + columns, live, other=0.0).to(tl.float32)
        share = tl.sigmoid(z)
        act, slope = z * share, share * (1.0 + z * (1.0 - share))
        if WEIGHT:
            part += tl.sum(grad * act * n, 0)
        tl.store(mixed_ptr + rows * mixed_stride + columns, (n * w * act).to(kind), live)
        tl.store(grad_gate_ptr + rows * grad_gate_stride + columns, (grad * n * w * slope).to(kind), live)
        through = grad * act * w
        grad_x = rstd * (through - n * (tl.sum(through * n, 1) / E)[:, None])
        tl.store(grad_x_ptr + rows * grad_x_stride + columns, grad_x.to(kind), live)
    if WEIGHT:
        tl.store(parts_ptr + tl.program_id(0) * E + within, part, within < E)


def forward(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    count, heads, rows, columns = _tiles(x, weight)
    _forward[(triton.cdiv(count, rows),)](
        x, gate, weight, out, count, heads, eps, x.stride(0), gate.stride(0), out.stride(0), BR=rows, E=len(weight),
        BE=columns, num_warps=WARPS,
    )  # fmt: skip


def backward(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, grad_x: torch.Tensor,
    grad_gate: torch.Tensor, mixed: torch.Tensor, grad_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    count, heads, rows, columns = _tiles(x, weight)
    tiles = triton.cdiv(count, rows)
    per_program = 1 if grad_weight is None else triton.cdiv(tiles, PROGRAMS)
    programs = triton.cdiv(tiles, per_program)
    parts = None if grad_weight is None else torch.empty(programs, len(weight), dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grad, x, gate, weight, grad_x, grad_gate, mixed, parts, count, heads, eps, per_program, grad.stride(0),
        x.stride(0), gate.stride(0), grad_x.stride(0), grad_gate.stride(0), mixed.stride(0),
        WEIGHT=grad_weight is not None, BR=rows, E=len(weight), BE=columns, num_warps=WARPS,
    )  # fmt: skip
    if grad_weight is not None and parts is not None:
        add_up(parts, grad_weight, add=True)


def _tiles(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int, int]:
    """Heads in all, heads of a token, and the size of a tile."""
    heads, columns = x.shape[1] // len(weight), launch.power_of_two(len(weight))
    return len(x) * heads, heads, max(1, VALUES // columns), columns
