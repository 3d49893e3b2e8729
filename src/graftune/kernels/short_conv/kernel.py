"""Short convolutions in tiles of tokens and columns. A program also reads the few rows before its own (after them, in
the backward); they come from cache. The backward with SiLU goes through the rows one after the other instead: a tile
would have to compute each row's convolution once for every tap."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch

TOKENS, COLUMNS, WARPS = 16, 128, 4  # per program
ROWS, ROW_COLUMNS = 32, 512  # of the backward with SiLU


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


@triton.jit
def _row(ptr, row, cols, stride, T, D):
    """One row of x or of a gradient, zero if it does not exist."""
    width = tl.where((row >= 0) & (row < T), D, 0)
    return tl.load(ptr + row * stride + cols, cols < width, other=0.0).to(tl.float32)


@triton.jit
def _tap(taps_ptr, cols, D, j: tl.constexpr, K: tl.constexpr):
    """The tap for the token j rows back, zero if there is none."""
    return tl.load(taps_ptr + cols * K + (K - 1 - j), cols < (D if j < K else 0), other=0.0)


@launch.kernel
def _silu_backward(
    grad_ptr, x_ptr, taps_ptr, positions_ptr, out_ptr, T, D, grad_stride, stride, out_stride,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Row after row through BT rows and three more, up to four taps: x1 to x3 are the rows before a row, and d1 to d3
    what is known of their gradients, so that everything is read and computed once. The row ahead is loaded early."""
    first = tl.program_id(0).to(tl.int64) * BT
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    t0, t1 = _tap(taps_ptr, cols, D, 0, K), _tap(taps_ptr, cols, D, 1, K)
    t2, t3 = _tap(taps_ptr, cols, D, 2, K), _tap(taps_ptr, cols, D, 3, K)
    x1, x2 = _row(x_ptr, first - 1, cols, stride, T, D), _row(x_ptr, first - 2, cols, stride, T, D)
    x3 = _row(x_ptr, first - 3, cols, stride, T, D)
    d1, d2, d3 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    next_x, next_grad = _row(x_ptr, first, cols, stride, T, D), _row(grad_ptr, first, cols, grad_stride, T, D)
    for step in tl.static_range(BT + 3):
        row = first + step
        x, grad = next_x, next_grad
        next_x = _row(x_ptr, row + 1, cols, stride, T, D)
        next_grad = _row(grad_ptr, row + 1, cols, grad_stride, T, D)
        position = tl.load(positions_ptr + row, row < T, other=-1)
        total = t0 * x + tl.where(position >= 1, t1 * x1, 0.0)
        total += tl.where(position >= 2, t2 * x2, 0.0) + tl.where(position >= 3, t3 * x3, 0.0)
        share = tl.sigmoid(total)
        grad *= share * (1.0 + total * (1.0 - share))
        whole = d3 + tl.where(position >= 3, t3 * grad, 0.0)
        if step >= 3:
            width = tl.where(row - 3 < T, D, 0)
            tl.store(out_ptr + (row - 3) * out_stride + cols, whole.to(out_ptr.dtype.element_ty), cols < width)
        d3, d2 = d2 + tl.where(position >= 2, t2 * grad, 0.0), d1 + tl.where(position >= 1, t1 * grad, 0.0)
        d1 = t0 * grad
        x3, x2, x1 = x2, x1, x


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
    _silu_backward[(triton.cdiv(tokens, ROWS), triton.cdiv(width, ROW_COLUMNS))](
        grad, x, taps, positions, out, tokens, width, grad.stride(0), x.stride(0), out.stride(0),
        K=taps.shape[1], BT=ROWS, BD=ROW_COLUMNS, num_warps=WARPS,
    )  # fmt: skip


def _grid(tokens: int, width: int) -> tuple[int, int]:
    return triton.cdiv(tokens, TOKENS), triton.cdiv(width, COLUMNS)
