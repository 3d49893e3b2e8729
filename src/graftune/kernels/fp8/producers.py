# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""The kernels before a product, writing its codes while they have the row: no pass of their own for quantising.

Bytes a row of 8B's projections (D = 4096, F = 14336; 2 a value, 1 a code), apart and here:

    norm           reads x and y, writes their sum: 6 D. Apart it writes the normed row, which is read, and codes: 5 D.
                   Here only codes: 1 D. The adapters' h = n A' is computed from the sum and rstd, as dA is.
    SwiGLU         reads 4 F, writes the activation 2 F (h reads it). Apart 2 F read again, codes 1 F. Here 1 F.
    its way back   reads 6 F, writes 4 F + 2 F. Apart dY is read again for g and again for the codes, 4 F each, and
                   these are written, 2 F. Here the row's scale comes of writing dY, so that g's kernel, which reads
                   dY anyway, writes the codes: 4 F + 2 F.
    norm's way     reads 2 D and the stream's gradient, writes it. Apart 2 D read again, codes 1 D. Here 1 D.
    back

Summed over a layer at 8192 tokens: 0.43 ms apart, 0.13 here. What attention writes (o's input, qkv's gradient) is
quantised apart: its kernels are not ours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels.fp8.kernel import lay_pieces, scale_of, warps
from graftune.kernels.fp8.reference import LARGEST, PIECES, SMALLEST
from graftune.kernels.launch import power_of_two
from graftune.kernels.lora_linear.kernel import _add_up as add_up
from graftune.kernels.lora_linear.kernel import _member as member_of

ONE_ACT = 1 << 14  # values of a SwiGLU row that one program holds
ACT_BLOCK = 2048


@triton.jit
def _norm(
    x_ptr, y_ptr, w_ptr, sum_ptr, reach_ptr, codes_ptr, rstd_ptr, scale_ptr, eps, codes_stride,
    D: tl.constexpr, ADD: tl.constexpr, REACH: tl.constexpr, B: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, B)
    inside = cols < D
    v = tl.load(x_ptr + row * D + cols, inside, other=0.0).to(tl.float32)
    if ADD:
        v = (v + tl.load(y_ptr + row * D + cols, inside, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * D + cols, v, inside)
        v = v.to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / D + eps)
    tl.store(rstd_ptr + row, rstd)
    n = v * rstd * tl.load(w_ptr + cols, inside, other=0.0)
    square = tl.sum(n * n, 0) if REACH else 0.0
    scale = scale_of(tl.max(tl.abs(n), 0), square, reach_ptr, 1.0, REACH, LARGEST, SMALLEST)
    tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + row * codes_stride + cols, (n * tl.div_rn(1.0, scale)).to(codes_ptr.dtype.element_ty), inside)


@triton.jit
def _norm_backward(
    grad_ptr, x_ptr, rstd_ptr, w_ptr, residual_ptr, factor_ptr, reach_ptr, codes_ptr, scale_ptr,
    grad_stride, residual_stride, codes_stride,
    D: tl.constexpr, REACH: tl.constexpr, B: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, B)
    inside = cols < D
    rstd = tl.load(rstd_ptr + row)
    grad = tl.load(grad_ptr + row * grad_stride + cols, inside, other=0.0).to(tl.float32)
    n = tl.load(x_ptr + row * D + cols, inside, other=0.0).to(tl.float32) * rstd
    grad *= tl.load(w_ptr + cols, inside, other=0.0)
    out = (grad - n * (tl.sum(grad * n, 0) / D)) * rstd
    place = residual_ptr + row * residual_stride + cols
    out = (out + tl.load(place, inside, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
    tl.store(place, out, inside)
    z = out.to(tl.float32) * tl.load(factor_ptr + cols, inside, other=0.0)
    square = tl.sum(z * z, 0) if REACH else 0.0
    scale = scale_of(tl.max(tl.abs(z), 0), square, reach_ptr, 1.0, REACH, LARGEST, SMALLEST)
    tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + row * codes_stride + cols, (z * tl.div_rn(1.0, scale)).to(codes_ptr.dtype.element_ty), inside)


@triton.jit
def _silu_up(gate_ptr, up_ptr, cols, F, kind: tl.constexpr):
    """silu(gate) * up, rounded to what is stored."""
    gate = tl.load(gate_ptr + cols, cols < F, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + cols, cols < F, other=0.0).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(kind)


@triton.jit
def _act(
    gate_up_ptr, reach_ptr, act_ptr, codes_ptr, scale_ptr, F, act_stride, codes_stride,
    REACH: tl.constexpr, WHOLE: tl.constexpr, B: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, B)
    gate_ptr = gate_up_ptr + row * (2 * F)
    act_ptr += row * act_stride
    codes_ptr += row * codes_stride
    kind = codes_ptr.dtype.element_ty
    if WHOLE:
        act = _silu_up(gate_ptr, gate_ptr + F, cols, F, act_ptr.dtype.element_ty)
        tl.store(act_ptr + cols, act, cols < F)
        wide = act.to(tl.float32)
        square = tl.sum(wide * wide, 0) if REACH else 0.0
        scale = scale_of(tl.max(tl.abs(wide), 0), square, reach_ptr, 1.0, REACH, LARGEST, SMALLEST)
        tl.store(codes_ptr + cols, (wide * tl.div_rn(1.0, scale)).to(kind), cols < F)
    else:
        most, total = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
        for start in range(0, F, B):
            act = _silu_up(gate_ptr, gate_ptr + F, start + cols, F, act_ptr.dtype.element_ty)
            tl.store(act_ptr + start + cols, act, start + cols < F)
            wide = act.to(tl.float32)
            most = tl.maximum(most, tl.abs(wide))
            total += wide * wide
        scale = scale_of(tl.max(most, 0), tl.sum(total, 0), reach_ptr, 1.0, REACH, LARGEST, SMALLEST)
        inverse = tl.div_rn(1.0, scale)
        for start in range(0, F, B):
            act = _silu_up(gate_ptr, gate_ptr + F, start + cols, F, act_ptr.dtype.element_ty)
            tl.store(codes_ptr + start + cols, (act.to(tl.float32) * inverse).to(kind), start + cols < F)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _act_backward(
    grad_ptr, gate_up_ptr, factor_ptr, reach_ptr, out_ptr, act_ptr, scale_ptr, F, grad_stride, out_stride, act_stride,
    REACH: tl.constexpr, B: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kind = out_ptr.dtype.element_ty
    most, total = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    for start in range(0, F, B):
        cols = start + tl.arange(0, B)
        inside = cols < F
        gate = tl.load(gate_up_ptr + row * (2 * F) + cols, inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + row * (2 * F) + F + cols, inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + cols, inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        silu = gate * s
        of_gate = (grad * up * (s + silu * (1.0 - s))).to(kind)
        of_up = (grad * silu).to(kind)
        tl.store(out_ptr + row * out_stride + cols, of_gate, inside)
        tl.store(out_ptr + row * out_stride + F + cols, of_up, inside)
        tl.store(act_ptr + row * act_stride + cols, (silu * up).to(kind), inside)
        a = of_gate.to(tl.float32) * tl.load(factor_ptr + cols, inside, other=0.0)
        b = of_up.to(tl.float32) * tl.load(factor_ptr + F + cols, inside, other=0.0)
        most = tl.maximum(most, tl.maximum(tl.abs(a), tl.abs(b)))
        total += a * a + b * b
    scale = scale_of(tl.max(most, 0), tl.sum(total, 0), reach_ptr, 1.0, REACH, LARGEST, SMALLEST)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _thin(
    y_ptr, w_ptr, rstd_ptr, norm_ptr, factor_ptr, scale_ptr, shift_ptr, out_ptr, codes_ptr, tail_ptr,
    tokens, per_split, y_stride, w_c, w_r, split_stride, out_stride, codes_stride, alpha,
    c0, c1, c2, s0, s1, s2, o0, o1, o2,
    N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, NORM: tl.constexpr, CODES: tl.constexpr, TAIL: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """lora_linear's `_rows`, which also writes codes of what it reads (CODES), and of what it leaves (TAIL)."""
    member = tl.program_id(1)
    start = tl.where(member == 0, c0, tl.where(member == 1, c1, c2))
    stop = tl.where(member == 0, s0, tl.where(member == 1, s1, s2))
    row = tl.where(member == 0, o0, tl.where(member == 1, o1, o2))
    split = tl.program_id(2)
    at = tl.program_id(0) * BT + tl.arange(0, BT)
    alive = at < tokens
    rows = at.to(tl.int64)
    ranks = tl.arange(0, RP)
    inverse = tl.div_rn(1.0, tl.load(scale_ptr + at, alive, other=1.0))
    acc = tl.zeros([BT, RP], tl.float32)
    first = split * per_split
    for c in range(first, min(first + per_split, stop - start), BC):
        local = c + tl.arange(0, BC)
        inside = local < stop - start
        mask = alive[:, None] & inside[None, :]
        y = tl.load(y_ptr + rows[:, None] * y_stride + (start + local)[None, :], mask, other=0.0)
        w = tl.load(
            w_ptr + (row + local)[:, None].to(tl.int64) * w_c + ranks[None, :] * w_r,
            inside[:, None] & (ranks < R)[None, :], other=0.0,
        )  # fmt: skip
        if NORM:
            w = (w.to(tl.float32) * tl.load(norm_ptr + local, inside, other=0.0)[:, None]).to(w.dtype)
        acc = tl.dot(y, w, acc, input_precision=PRECISION)
        if CODES:
            z = y.to(tl.float32) * tl.load(factor_ptr + start + local, inside, other=0.0)[None, :] * inverse[:, None]
            place = codes_ptr + rows[:, None] * codes_stride + (start + local)[None, :]
            tl.store(place, z.to(codes_ptr.dtype.element_ty), mask)
    acc *= alpha
    if NORM:
        acc *= tl.load(rstd_ptr + at, alive, other=0.0)[:, None]
    value = acc.to(out_ptr.dtype.element_ty)
    mask = alive[:, None] & (ranks < R)[None, :]
    column = member * R + ranks[None, :]
    tl.store(out_ptr + split * split_stride + rows[:, None] * out_stride + column, value, mask)
    if TAIL:
        share = value.to(tl.float32) * (inverse * tl.load(shift_ptr))[:, None]
        lay_pieces(share, tail_ptr + rows[:, None] * codes_stride + column, N, mask, tail_ptr.dtype.element_ty)


@triton.jit
def _both(
    y_ptr, h_ptr, w_ptr, factor_ptr, scale_ptr, g_ptr, sum_ptr, codes_ptr, tokens, per_split, y_stride, h_stride,
    g_stride, split_stride, codes_stride, alpha, c0, c1, c2, s0, s1, s2, o0, o1, o2, n0, n1, n2,
    N: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, CODES: tl.constexpr, ADD: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """lora_linear's `_both` (dB of some columns, and their part of g), which also writes codes of what it reads."""
    member, block = member_of(tl.program_id(0), n0, n1, n2)
    start = tl.where(member == 0, c0, tl.where(member == 1, c1, c2))
    stop = tl.where(member == 0, s0, tl.where(member == 1, s1, s2))
    row = tl.where(member == 0, o0, tl.where(member == 1, o1, o2))
    split = tl.program_id(1)
    local = block * BC + tl.arange(0, BC)
    cols = start + local
    inside = cols < stop
    ranks = tl.arange(0, RP)
    real = (ranks < R)[None, :]
    here = (row + local)[:, None].to(tl.int64) * R + ranks[None, :]
    w = tl.load(w_ptr + here, inside[:, None] & real, other=0.0)
    factor = tl.zeros([BC], tl.float32)
    if CODES:
        factor = tl.load(factor_ptr + cols, inside, other=0.0)
    acc = tl.zeros([BC, RP], tl.float32)
    first = split * per_split
    for t in range(first, min(first + per_split, tokens), BT):
        at = t + tl.arange(0, BT)
        alive = (at < tokens)[:, None]
        there = at[:, None].to(tl.int64)
        y = tl.load(y_ptr + there * y_stride + cols[None, :], alive & inside[None, :], other=0.0)
        h = tl.load(h_ptr + there * h_stride + member * R + ranks[None, :], alive & real, other=0.0)
        acc = tl.dot(tl.trans(y), h, acc, input_precision=PRECISION)
        part = g_ptr + block.to(tl.int64) * g_stride + there * N + member * R + ranks[None, :]
        tl.store(part, tl.dot(y, w, input_precision=PRECISION) * alpha, alive & real)
        if CODES:
            inverse = tl.div_rn(1.0, tl.load(scale_ptr + at, at < tokens, other=1.0))
            z = y.to(tl.float32) * factor[None, :] * inverse[:, None]
            place = codes_ptr + there * codes_stride + cols[None, :]
            tl.store(place, z.to(codes_ptr.dtype.element_ty), alive & inside[None, :])
    acc *= alpha
    where = sum_ptr + split * split_stride + here
    if ADD:
        acc += tl.load(where, inside[:, None] & real, other=0.0)
    tl.store(where, acc, inside[:, None] & real)


@triton.jit
def _gather(
    parts_ptr, scale_ptr, shift_ptr, out_ptr, tail_ptr, count, n0, n1, n2, tail_stride, N, R, P: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """The sum of a product's parts, of which each member may have its own number, in the same order every time; and
    its codes."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    mask = at < count
    row, member = at // N, at % N // R
    have = tl.where(member == 0, n0, tl.where(member == 1, n1, n2))
    part = tl.arange(0, P)
    places = parts_ptr + part[:, None].to(tl.int64) * count + at[None, :]
    value = tl.sum(tl.load(places, (part[:, None] < have[None, :]) & mask[None, :], other=0.0), 0)
    value = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, value, mask)
    inverse = tl.div_rn(1.0, tl.load(scale_ptr + row, mask, other=1.0)) * tl.load(shift_ptr)
    place = tail_ptr + row.to(tl.int64) * tail_stride + at % N
    lay_pieces(value.to(tl.float32) * inverse, place, N, mask, tail_ptr.dtype.element_ty)


def norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    codes: torch.Tensor,
    reach: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, width = x.shape
    total = x if y is None else y
    rstd, scale = (torch.empty(tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    _norm[(tokens,)](
        x, y, weight, total, reach, codes, rstd, scale, eps, codes.stride(0), D=width, ADD=y is not None,
        REACH=reach is not None, B=power_of_two(width), LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=warps(width),
    )  # fmt: skip
    return total, rstd, scale


def norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    codes: torch.Tensor,
    factor: torch.Tensor,
    reach: torch.Tensor | None,
) -> torch.Tensor:
    tokens, width = x.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    _norm_backward[(tokens,)](
        grad_y, x, rstd, weight, residual, factor, reach, codes, scale, grad_y.stride(0), residual.stride(0),
        codes.stride(0), D=width, REACH=reach is not None, B=power_of_two(width), LARGEST=LARGEST,
        SMALLEST=SMALLEST, num_warps=warps(width),
    )  # fmt: skip
    return scale


def act(gate_up: torch.Tensor, out: torch.Tensor, codes: torch.Tensor, reach: torch.Tensor | None) -> torch.Tensor:
    tokens, width = out.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=out.device)
    block = min(ONE_ACT, power_of_two(width))
    _act[(tokens,)](
        gate_up, reach, out, codes, scale, width, out.stride(0), codes.stride(0), REACH=reach is not None,
        WHOLE=width <= block, B=block, LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=min(16, warps(block)),
    )  # fmt: skip
    return scale


def act_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    out: torch.Tensor,
    act: torch.Tensor,
    factor: torch.Tensor,
    reach: torch.Tensor | None,
) -> torch.Tensor:
    tokens, width = grad.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=grad.device)
    _act_backward[(tokens,)](
        grad, gate_up, factor, reach, out, act, scale, width, grad.stride(0), out.stride(0), act.stride(0),
        REACH=reach is not None, B=min(ACT_BLOCK, power_of_two(width)), LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=4,
    )  # fmt: skip
    return scale


def thin(
    y: torch.Tensor,
    weight: torch.Tensor,
    columns: tuple[tuple[int, int], ...],
    *,
    rank: int,
    alpha: float,
    transposed: bool,
    scale: torch.Tensor,
    shift: torch.Tensor,
    codes: torch.Tensor,
    width: int,
    factor: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, rank * members] = alpha * y[:, columns] weight, and its codes in the tail of `codes` behind `width`; with a
    `factor` also the codes of y * factor before it."""
    tokens, n = len(y), rank * len(columns)
    rp = power_of_two(rank, 16)
    bt, bc, wanted = 64, (128 if tokens >= 4096 else 64), (128 if tokens >= 4096 else 256)
    starts, stops, offsets = _places(columns)
    widest = max(stop - start for start, stop in columns)
    programs = triton.cdiv(tokens, bt) * len(columns)
    splits = max(1, min(triton.cdiv(widest, 4 * bc), triton.cdiv(wanted, programs)))
    per_split = triton.cdiv(triton.cdiv(widest, splits), bc) * bc
    splits = triton.cdiv(widest, per_split)
    out = torch.empty(tokens, n, dtype=y.dtype, device=y.device)
    parts = out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=y.device)
    strides = (1, weight.stride(0)) if transposed else (weight.stride(0), 1)
    tail = codes[:, width:]
    _thin[(triton.cdiv(tokens, bt), len(columns), splits)](
        y, weight, rstd, norm_weight, factor, scale, shift, parts, codes, tail, tokens, per_split, y.stride(0),
        *strides, out.numel(), n, codes.stride(0), alpha, *starts, *stops, *offsets, N=n, R=rank, RP=rp,
        NORM=rstd is not None, CODES=factor is not None, TAIL=splits == 1, BT=bt, BC=bc,
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3 if tokens >= 4096 else 4,
    )  # fmt: skip
    if splits > 1:
        _gather_parts(parts, out, [splits] * len(columns), scale, shift, tail)
    _clear(tail, n)
    return out


def both(
    total: torch.Tensor,
    y: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    columns: tuple[tuple[int, int], ...],
    *,
    alpha: float,
    scale: torch.Tensor,
    shift: torch.Tensor,
    codes: torch.Tensor,
    width: int,
    factor: torch.Tensor | None,
) -> torch.Tensor:
    """`thin` of y and weight, and total [sum of widths, rank] (fp32) += alpha * y' h, in one reading of y."""
    assert total.is_contiguous() and weight.is_contiguous()
    tokens, rank, n = len(y), weight.shape[1], weight.shape[1] * len(columns)
    rp = power_of_two(rank, 16)
    bc, bt = (128, 64) if rp > 32 else (256, 64)
    starts, stops, offsets = _places(columns)
    counts = [triton.cdiv(stop - start, bc) for start, stop in columns]
    splits = max(1, min(triton.cdiv(tokens, 4 * bt), triton.cdiv(264, sum(counts))))
    per_split = triton.cdiv(triton.cdiv(tokens, splits), bt) * bt
    splits = triton.cdiv(tokens, per_split)
    sums = total if splits == 1 else torch.empty(splits, *total.shape, dtype=torch.float32, device=y.device)
    parts = torch.empty(max(counts), tokens, n, dtype=torch.float32, device=y.device)
    _both[(sum(counts), splits)](
        y, h, weight, factor, scale, parts, sums, codes, tokens, per_split, y.stride(0), h.stride(0), tokens * n,
        total.numel(), codes.stride(0), alpha, *starts, *stops, *offsets, *[*counts, 0, 0][:3], N=n, R=rank, RP=rp,
        CODES=factor is not None, ADD=splits == 1, BT=bt, BC=bc,
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        add_up(sums, total, add=True)
    g, tail = torch.empty(tokens, n, dtype=y.dtype, device=y.device), codes[:, width:]
    _gather_parts(parts, g, counts, scale, shift, tail)
    _clear(tail, n)
    return g


def _gather_parts(
    parts: torch.Tensor,
    out: torch.Tensor,
    counts: list[int],
    scale: torch.Tensor,
    shift: torch.Tensor,
    tail: torch.Tensor,
) -> None:
    many, n = power_of_two(max(counts)), out.shape[1]
    block = max(32, 4096 // many)
    _gather[(triton.cdiv(out.numel(), block),)](
        parts, scale, shift, out, tail, out.numel(), *[*counts, 0, 0][:3], tail.stride(0), n, n // len(counts),
        P=many, B=block, num_warps=4,
    )  # fmt: skip


def _clear(tail: torch.Tensor, n: int) -> None:
    if tail.shape[1] > PIECES * n:
        tail[:, PIECES * n :].view(torch.uint8).zero_()


def _places(columns: tuple[tuple[int, int], ...]) -> tuple[list[int], list[int], list[int]]:
    """Starts, stops and rows of the stacked weight, for three members whatever there are."""
    starts, stops, offsets, row = [], [], [], 0
    for start, stop in columns:
        starts.append(start)
        stops.append(stop)
        offsets.append(row)
        row += stop - start
    spare = [0] * (3 - len(columns))
    return starts + spare, stops + spare, offsets + spare
