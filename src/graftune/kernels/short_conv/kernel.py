"""Short convolutions in tiles of tokens and columns. A program also reads the few rows before its own (after them, in
the backward); they come from cache. The backward with SiLU computes the convolution again at each of the rows that have
read a row: that is arithmetic in a kernel that waits for memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch

TOKENS, COLUMNS, WARPS = 16, 128, 4  # per program


@triton.jit
def _convolved(x_ptr, taps_ptr, rows, cols, position, live, D, stride, K: tl.constexpr, GATED: tl.constexpr):
    """The convolution of x at the given rows, or of B * x where x is B, C and x; `position`: the rows' positions in
    their documents."""
    total = tl.zeros(live.shape, dtype=tl.float32)
    for j in tl.static_range(K):
        seen = live & (position >= j)[:, None]
        at = x_ptr + (rows - j)[:, None] * stride + cols[None, :]
        u = tl.load(at, seen, other=0.0).to(tl.float32)
        if GATED:
            u *= tl.load(at + 2 * D, seen, other=0.0).to(tl.float32)
        tap = tl.load(taps_ptr + cols * K + (K - 1 - j), cols < D, other=0.0)
        total += tap[None, :] * u
    return total


@launch.kernel
def _forward(
    bcx_ptr, taps_ptr, positions_ptr, out_ptr, T, D, stride, out_stride,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    live = (rows < T)[:, None] & (cols < D)[None, :]
    position = tl.load(positions_ptr + rows, rows < T, other=0)
    total = _convolved(bcx_ptr, taps_ptr, rows, cols, position, live, D, stride, K, True)
    c = tl.load(bcx_ptr + rows[:, None] * stride + D + cols[None, :], live, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], (c * total).to(out_ptr.dtype.element_ty), live)


@launch.kernel
def _backward(
    grad_ptr, bcx_ptr, taps_ptr, positions_ptr, out_ptr, mixed_ptr, T, D, grad_stride, stride, out_stride, mixed_stride,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    live = (rows < T)[:, None] & (cols < D)[None, :]
    position = tl.load(positions_ptr + rows, rows < T, other=0)
    total = _convolved(bcx_ptr, taps_ptr, rows, cols, position, live, D, stride, K, True)
    grad_u = tl.zeros(live.shape, dtype=tl.float32)
    for j in tl.static_range(K):  # the token j rows later has read this one if both are in the same document
        later = rows + j
        its = tl.load(positions_ptr + later, later < T, other=-1)
        reached = live & ((later < T) & (its >= j))[:, None]
        grad = tl.load(grad_ptr + later[:, None] * grad_stride + cols[None, :], reached, other=0.0).to(tl.float32)
        c = tl.load(bcx_ptr + later[:, None] * stride + D + cols[None, :], reached, other=0.0).to(tl.float32)
        tap = tl.load(taps_ptr + cols * K + (K - 1 - j), cols < D, other=0.0)
        grad_u += tap[None, :] * (grad * c)
    at, to = bcx_ptr + rows[:, None] * stride + cols[None, :], out_ptr + rows[:, None] * out_stride + cols[None, :]
    b = tl.load(at, live, other=0.0).to(tl.float32)
    c = tl.load(at + D, live, other=0.0).to(tl.float32)
    x = tl.load(at + 2 * D, live, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + rows[:, None] * grad_stride + cols[None, :], live, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(to, (grad_u * x).to(kind), live)
    tl.store(to + D, (grad * total).to(kind), live)
    tl.store(to + 2 * D, (grad_u * b).to(kind), live)
    tl.store(mixed_ptr + rows[:, None] * mixed_stride + cols[None, :], (c * total).to(kind), live)


@launch.kernel
def _silu_forward(
    x_ptr, taps_ptr, positions_ptr, out_ptr, T, D, stride, out_stride,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    live = (rows < T)[:, None] & (cols < D)[None, :]
    position = tl.load(positions_ptr + rows, rows < T, other=0)
    total = _convolved(x_ptr, taps_ptr, rows, cols, position, live, D, stride, K, False)
    out = total * tl.sigmoid(total)
    tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], out.to(out_ptr.dtype.element_ty), live)


@launch.kernel
def _silu_backward(
    grad_ptr, x_ptr, taps_ptr, positions_ptr, out_ptr, T, D, grad_stride, stride, out_stride,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    live = (rows < T)[:, None] & (cols < D)[None, :]
    grad_x = tl.zeros(live.shape, dtype=tl.float32)
    for j in tl.static_range(K):  # the token j rows later has read this one if both are in the same document
        later = rows + j
        its = tl.load(positions_ptr + later, later < T, other=-1)
        reached = live & ((later < T) & (its >= j))[:, None]
        total = _convolved(x_ptr, taps_ptr, later, cols, its, reached, D, stride, K, False)
        share = tl.sigmoid(total)
        grad = tl.load(grad_ptr + later[:, None] * grad_stride + cols[None, :], reached, other=0.0).to(tl.float32)
        tap = tl.load(taps_ptr + cols * K + (K - 1 - j), cols < D, other=0.0)
        grad_x += tap[None, :] * (grad * share * (1.0 + total * (1.0 - share)))
    tl.store(out_ptr + rows[:, None] * out_stride + cols[None, :], grad_x.to(out_ptr.dtype.element_ty), live)


def forward(bcx: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    tokens, width = out.shape
    _forward[_grid(tokens, width)](
        bcx, taps, positions, out, tokens, width, bcx.stride(0), out.stride(0),
        K=taps.shape[1], BT=TOKENS, BD=COLUMNS, num_warps=WARPS,
    )  # fmt: skip


def backward(
    grad: torch.Tensor, bcx: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor,
    mixed: torch.Tensor,
) -> None:  # fmt: skip
    tokens, width = grad.shape
    _backward[_grid(tokens, width)](
        grad, bcx, taps, positions, out, mixed, tokens, width,
        grad.stride(0), bcx.stride(0), out.stride(0), mixed.stride(0),
        K=taps.shape[1], BT=TOKENS, BD=COLUMNS, num_warps=WARPS,
    )  # fmt: skip


def silu_forward(x: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    tokens, width = out.shape
    _silu_forward[_grid(tokens, width)](
        x, taps, positions, out, tokens, width, x.stride(0), out.stride(0),
        K=taps.shape[1], BT=TOKENS, BD=COLUMNS, num_warps=WARPS,
    )  # fmt: skip


def silu_backward(
    grad: torch.Tensor, x: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
) -> None:
    tokens, width = grad.shape
    _silu_backward[_grid(tokens, width)](
        grad, x, taps, positions, out, tokens, width, grad.stride(0), x.stride(0), out.stride(0),
        K=taps.shape[1], BT=TOKENS, BD=COLUMNS, num_warps=WARPS,
    )  # fmt: skip


def _grid(tokens: int, width: int) -> tuple[int, int]:
    return triton.cdiv(tokens, TOKENS), triton.cdiv(width, COLUMNS)
