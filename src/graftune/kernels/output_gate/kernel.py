"""The output gate in tiles [BT, H] of one head, so that one gate for a whole head is the sum over a tile's columns.
Each wide tensor is read or written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch


@triton.jit
def _tile(tokens, N: tl.constexpr, H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr):
    """(the head, rows [BT, 1], columns [1, BH], which of them exist)."""
    at = (tl.program_id(0) // N) * BT + tl.arange(0, BT)
    cols = tl.arange(0, BH)[None, :]
    return tl.program_id(0) % N, at.to(tl.int64)[:, None], cols, (at < tokens)[:, None], cols < H


@launch.kernel
def _forward(
    x_ptr, gate_ptr, out_ptr, tokens, x_stride, gate_stride, gate_step, out_stride, N: tl.constexpr, H: tl.constexpr,
    BY_HEAD: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    head, rows, cols, alive, inside = _tile(tokens, N, H, BT, BH)
    x = tl.load(x_ptr + rows * x_stride + head * H + cols, alive & inside, other=0.0).to(tl.float32)
    place = gate_ptr + rows * gate_stride + head * gate_step
    if BY_HEAD:
        share = tl.sigmoid(tl.load(place, alive, other=0.0).to(tl.float32))
    else:
        share = tl.sigmoid(tl.load(place + cols, alive & inside, other=0.0).to(tl.float32))
    tl.store(out_ptr + rows * out_stride + head * H + cols, (x * share).to(out_ptr.dtype.element_ty), alive & inside)


@launch.kernel
def _backward(
    grad_ptr, x_ptr, gate_ptr, grad_x_ptr, grad_gate_ptr, out_ptr, tokens, grad_stride, x_stride, gate_stride,
    gate_step, grad_x_stride, grad_gate_stride, grad_gate_step, out_stride, N: tl.constexpr, H: tl.constexpr,
    BY_HEAD: tl.constexpr, HAS_OUT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """grad_x may be grad: a program writes only where it alone has read before."""
    head, rows, cols, alive, inside = _tile(tokens, N, H, BT, BH)
    mask = alive & inside
    grad = tl.load(grad_ptr + rows * grad_stride + head * H + cols, mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows * x_stride + head * H + cols, mask, other=0.0).to(tl.float32)
    kind = grad_x_ptr.dtype.element_ty
    place = gate_ptr + rows * gate_stride + head * gate_step
    target = grad_gate_ptr + rows * grad_gate_stride + head * grad_gate_step
    if BY_HEAD:
        share = tl.sigmoid(tl.load(place, alive, other=0.0).to(tl.float32))
        total = tl.sum(grad * x, 1)[:, None]
        tl.store(target, (total * share * (1.0 - share)).to(kind), alive)
    else:
        share = tl.sigmoid(tl.load(place + cols, mask, other=0.0).to(tl.float32))
        tl.store(target + cols, (grad * x * share * (1.0 - share)).to(kind), mask)
    tl.store(grad_x_ptr + rows * grad_x_stride + head * H + cols, (grad * share).to(kind), mask)
    if HAS_OUT:
        tl.store(out_ptr + rows * out_stride + head * H + cols, (x * share).to(kind), mask)


def forward(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    tokens, heads, width = x.shape
    bt, bh = _blocks(tokens, width)
    _forward[(triton.cdiv(tokens, bt) * heads,)](
        x, gate, out, tokens, x.stride(0), gate.stride(0), gate.stride(1), out.stride(0), N=heads, H=width,
        BY_HEAD=gate.shape[2] == 1, BT=bt, BH=bh, num_warps=4,
    )  # fmt: skip


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    grad_x: torch.Tensor,
    grad_gate: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    tokens, heads, width = x.shape
    bt, bh = _blocks(tokens, width)
    _backward[(triton.cdiv(tokens, bt) * heads,)](
        grad, x, gate, grad_x, grad_gate, out, tokens, grad.stride(0), x.stride(0), gate.stride(0), gate.stride(1),
        grad_x.stride(0), grad_gate.stride(0), grad_gate.stride(1), 0 if out is None else out.stride(0), N=heads,
        H=width, BY_HEAD=gate.shape[2] == 1, HAS_OUT=out is not None, BT=bt, BH=bh, num_warps=4,
    )  # fmt: skip


def _blocks(tokens: int, width: int) -> tuple[int, int]:
    """Tokens and padded columns per tile: sixteen values per thread."""
    columns = launch.power_of_two(width, 16)
    return min(max(4, 2048 // columns), launch.power_of_two(tokens)), columns
