"""`finish_` and its backward, one launch each. A program has some tokens of one head as two tiles [BT, R/2], so that
both halves are in registers and every value is read and written once. It computes in fp32. Where only a part of a head
is rotated and something else is done to all of it, the rest of the head is a third tile.

Programs for the heads of one token block are adjacent: they share its rows of cos and sin, which then come from cache.
STEP is the distance between the heads of q in a product: 2 H where gates lie between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch


@launch.kernel
def _finish(
    qkv_ptr, out_ptr, cos_ptr, sin_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, v_norm_ptr, scale_ptr, raw_ptr, tokens,
    qkv_stride, out_stride, eps, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, STEP: tl.constexpr, OUT_STEP: tl.constexpr, WORK: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORM_BEFORE: tl.constexpr, NORM_AFTER: tl.constexpr, V_NORM: tl.constexpr, HAS_SCALE: tl.constexpr,
    STORE_RAW: tl.constexpr, V_FROM_K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """REST: the columns of the third tile; 0: there is none. V_NORM: v has a norm too. V_FROM_K: v reads k's columns,
    and the output is another tensor."""
    head = tl.program_id(0) % WORK
    at = (tl.program_id(0) // WORK) * BT + tl.arange(0, BT)
    rows = at.to(tl.int64)[:, None]
    alive = at < tokens
    cols = tl.arange(0, BC)
    inside = cols < HALF
    mask = alive[:, None] & inside[None, :]
    read = head
    if V_FROM_K:
        read = tl.where(head < N + K, head, head - K)
    start = qkv_ptr + rows * qkv_stride + _column(read, N, H, STEP)
    place = start + cols[None, :]
    a = tl.load(place, mask, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask, other=0.0).to(tl.float32)
    c = a  # stands for a third tile that does not exist
    last = cols
    if REST > 0:
        last = 2 * HALF + tl.arange(0, REST)
        c = tl.load(start + last[None, :], alive[:, None] & (last < H)[None, :], other=0.0).to(tl.float32)
    if HAS_BIAS:
        a += tl.load(bias_ptr + head * H + cols, inside, other=0.0).to(tl.float32)[None, :]
        b += tl.load(bias_ptr + head * H + HALF + cols, inside, other=0.0).to(tl.float32)[None, :]
        if REST > 0:
            c += tl.load(bias_ptr + head * H + last, last < H, other=0.0).to(tl.float32)[None, :]
    kept = raw_ptr + rows * ((N + K + V_NORM * K) * H) + head * H
    if NORM_BEFORE and head < N + K + V_NORM * K:
        if STORE_RAW:
            _store(kept, a, b, c, alive, cols, last, H, HALF, REST)
        a, b, c = _normed(
            a, b, c, q_norm_ptr, k_norm_ptr, v_norm_ptr, head, alive, cols, last, eps, N, K, H, HALF, REST, V_NORM
        )
    if head < N + K:
        cos = tl.load(cos_ptr + rows * HALF + cols[None, :], mask, other=0.0)
        sin = tl.load(sin_ptr + rows * HALF + cols[None, :], mask, other=0.0)
        turned = b * cos + a * sin
        a = a * cos - b * sin
        b = turned
    if NORM_AFTER and head < N + K + V_NORM * K:
        _store(kept, a, b, c, alive, cols, last, H, HALF, REST)
        a, b, c = _normed(
            a, b, c, q_norm_ptr, k_norm_ptr, v_norm_ptr, head, alive, cols, last, eps, N, K, H, HALF, REST, V_NORM
        )
    if HAS_SCALE and head < N:
        factor = tl.load(scale_ptr + at, alive, other=1.0)[:, None]
        a *= factor
        b *= factor
        c *= factor
    _store(
        out_ptr + rows * out_stride + _column(head, N, H, OUT_STEP), a, b, c, alive, cols, last, H, HALF, REST
    )  # fmt: skip


@launch.kernel
def _finish_backward(
    dq_ptr, dk_ptr, dv_ptr, grad_ptr, cos_ptr, sin_ptr, scale_ptr, raw_ptr, q_norm_ptr, k_norm_ptr, v_norm_ptr,
    parts_ptr, tokens, dq_stride, dk_stride, dv_stride, grad_stride, raw_stride, eps,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    STEP: tl.constexpr, WORK: tl.constexpr, NORM_BEFORE: tl.constexpr, NORM_AFTER: tl.constexpr,
    V_NORM: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_PARTS: tl.constexpr, V_FROM_K: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dk and dv have K * GROUP heads; GROUP of them are summed. With n = x * rstd, g the gradient of a norm's output
    and w its weight: dx = rstd (g w - n mean(g w n)). The sum of g n over this program's tokens goes to parts
    [blocks, WORK, H]. V_FROM_K: programs of k's heads add what comes from v, through v's norm."""
    head = tl.program_id(0) % WORK
    at = (tl.program_id(0) // WORK) * BT + tl.arange(0, BT)
    rows = at.to(tl.int64)[:, None]
    alive = at < tokens
    cols = tl.arange(0, BC)
    mask = alive[:, None] & (cols < HALF)[None, :]
    last = cols
    if REST > 0:
        last = 2 * HALF + tl.arange(0, REST)
    target = grad_ptr + rows * grad_stride + _column(head, N, H, STEP)
    if head < N:
        a, b, c = _added(dq_ptr + rows * dq_stride + head * H, alive, cols, last, 1, H, HALF, REST)
    elif head < N + K:
        a, b, c = _added(
            dk_ptr + rows * dk_stride + (head - N) * (GROUP * H), alive, cols, last, GROUP, H, HALF, REST
        )  # fmt: skip
    else:
        a, b, c = _added(
            dv_ptr + rows * dv_stride + (head - N - K) * (GROUP * H), alive, cols, last, GROUP, H, HALF, REST
        )  # fmt: skip
    if HAS_SCALE and head < N:
        factor = tl.load(scale_ptr + at, alive, other=1.0)[:, None]
        a *= factor
        b *= factor
        c *= factor
    kept = raw_ptr + rows * raw_stride + _column(head, N, H, STEP)
    part = kept
    if HAS_PARTS:
        part = parts_ptr + tl.program_id(0).to(tl.int64) * H
    if NORM_AFTER and head < N + K + V_NORM * K:
        a, b, c = _norm_backward(
            a, b, c, kept, part, q_norm_ptr, k_norm_ptr, v_norm_ptr, head, alive, cols, last, eps, N, K, H, HALF,
            REST, V_NORM, HAS_PARTS,
        )  # fmt: skip
    if head < N + K:
        cos = tl.load(cos_ptr + rows * HALF + cols[None, :], mask, other=0.0)
        sin = tl.load(sin_ptr + rows * HALF + cols[None, :], mask, other=0.0)
        turned = a * cos + b * sin
        b = b * cos - a * sin
        a = turned
    if NORM_BEFORE and head < N + K + V_NORM * K:
        a, b, c = _norm_backward(
            a, b, c, kept, part, q_norm_ptr, k_norm_ptr, v_norm_ptr, head, alive, cols, last, eps, N, K, H, HALF,
            REST, V_NORM, HAS_PARTS,
        )  # fmt: skip
    if V_FROM_K and head >= N:
        v_a, v_b, v_c = _added(
            dv_ptr + rows * dv_stride + (head - N) * (GROUP * H), alive, cols, last, GROUP, H, HALF, REST
        )  # fmt: skip
        v_a, v_b, v_c = _norm_backward(
            v_a, v_b, v_c, kept, part, q_norm_ptr, k_norm_ptr, v_norm_ptr, head + K, alive, cols, last, eps, N, K, H,
            HALF, REST, V_NORM, False,
        )  # fmt: skip
        a += v_a
        b += v_b
        if REST > 0:
            c += v_c
    _store(target, a, b, c, alive, cols, last, H, HALF, REST)


@triton.jit
def _column(head, N: tl.constexpr, H: tl.constexpr, STEP: tl.constexpr):
    """The first column of a head in a product."""
    return head * H + tl.minimum(head, N) * (STEP - H)


@triton.jit
def _store(start, a, b, c, alive, cols, last, H: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):
    mask = alive[:, None] & (cols < HALF)[None, :]
    kind = start.dtype.element_ty
    tl.store(start + cols[None, :], a.to(kind), mask)
    tl.store(start + HALF + cols[None, :], b.to(kind), mask)
    if REST > 0:
        tl.store(start + last[None, :], c.to(kind), alive[:, None] & (last < H)[None, :])


@triton.jit
def _added(start, alive, cols, last, GROUP: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr):
    """The sum of GROUP heads from `start` on in fp32, as tiles."""
    mask = alive[:, None] & (cols < HALF)[None, :]
    first = _summed(start, cols, mask, GROUP, H)
    second = _summed(start, HALF + cols, mask, GROUP, H)
    rest = first
    if REST > 0:
        rest = _summed(start, last, alive[:, None] & (last < H)[None, :], GROUP, H)
    return first, second, rest


@triton.jit
def _summed(start, cols, mask, GROUP: tl.constexpr, H: tl.constexpr):
    total = tl.load(start + cols[None, :], mask, other=0.0).to(tl.float32)
    for member in tl.static_range(1, GROUP):
        total += tl.load(start + member * H + cols[None, :], mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _normed(
    a, b, c, q_norm_ptr, k_norm_ptr, v_norm_ptr, head, alive, cols, last, eps, N: tl.constexpr, K: tl.constexpr,
    H: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, V_NORM: tl.constexpr,
):  # fmt: skip
    rstd = _rstd(a, b, c, alive, eps, H, REST)[:, None]
    inside = cols < HALF
    a *= rstd * _weight(q_norm_ptr, k_norm_ptr, v_norm_ptr, head, N, K, cols, inside, V_NORM)[None, :]
    b *= rstd * _weight(q_norm_ptr, k_norm_ptr, v_norm_ptr, head, N, K, HALF + cols, inside, V_NORM)[None, :]
    if REST > 0:
        c *= rstd * _weight(q_norm_ptr, k_norm_ptr, v_norm_ptr, head, N, K, last, last < H, V_NORM)[None, :]
    return a, b, c


@triton.jit
def _norm_backward(
    a, b, c, kept, part, q_norm_ptr, k_norm_ptr, v_norm_ptr, head, alive, cols, last, eps, N: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, V_NORM: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):  # fmt: skip
    inside = cols < HALF
    n_a, n_b, n_c = _added(kept, alive, cols, last, 1, H, HALF, REST)
    rstd = _rstd(n_a, n_b, n_c, alive, eps, H, REST)[:, None]
    n_a *= rstd
    n_b *= rstd
    if HAS_PARTS:
        tl.store(part + cols, tl.sum(a * n_a, 0), inside)
        tl.store(part + HALF + cols, tl.sum(b * n_b, 0), inside)
    a *= _weight(q_norm_ptr, k_norm_ptr, v_norm_ptr, head, N, K, cols, inside, V_NORM)[None, :]
    b *= _weight(q_norm_ptr, k_norm_ptr, v_norm_ptr, head, N, K, HALF + cols, inside, V_NORM)[None, :]
    total = tl.sum(a * n_a, 1) + tl.sum(b * n_b, 1)
    if REST > 0:
        n_c *= rstd
        if HAS_PARTS:
            tl.store(part + last, tl.sum(c * n_c, 0), last < H)
        c *= _weight(q_norm_ptr, k_norm_ptr, v_norm_ptr, head, N, K, last, last < H, V_NORM)[None, :]
        total += tl.sum(c * n_c, 1)
    mean = (total / H)[:, None]
    a = (a - n_a * mean) * rstd
    b = (b - n_b * mean) * rstd
    if REST > 0:
        c = (c - n_c * mean) * rstd
    return a, b, c


@triton.jit
def _rstd(a, b, c, alive, eps, H: tl.constexpr, REST: tl.constexpr):
    """1 / sqrt(mean square + eps) of each row; rows after the last token get 1, since eps may be 0."""
    total = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if REST > 0:
        total += tl.sum(c * c, 1)
    return 1.0 / tl.sqrt(tl.where(alive, total / H + eps, 1.0))


@triton.jit
def _weight(
    q_norm_ptr, k_norm_ptr, v_norm_ptr, head, N: tl.constexpr, K: tl.constexpr, cols, inside, V_NORM: tl.constexpr
):
    of_q = tl.load(q_norm_ptr + cols, inside, other=0.0)
    of_k = tl.load(k_norm_ptr + cols, inside, other=0.0)
    found = tl.where(head < N, of_q, of_k)
    if V_NORM:
        found = tl.where(head < N + K, found, tl.load(v_norm_ptr + cols, inside, other=0.0))
    return found.to(tl.float32)


def finish_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int, int],
    bias: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    v_norm: torch.Tensor | None,
    eps: float,
    norm_after: bool,
    q_scale: torch.Tensor | None,
    gated: bool,
    v_from_k: bool,
) -> torch.Tensor:
    queries, keys, width = heads
    tokens, normed, elsewhere = len(qkv), q_norm is not None, gated or v_from_k
    # Without a bias or a norm, v stays unchanged and needs no program.
    work = queries + keys + (keys if bias is not None or v_norm is not None else 0)
    whole = queries + keys * (1 if v_norm is None else 2)
    made = qkv.new_empty((tokens, whole, width) if normed or gated else 0)  # the norms' input, or the finished heads
    # Columns that are not rotated are read only where something else is done to them.
    changed = gated or normed or bias is not None or q_scale is not None
    rest = _rest(width - 2 * cos.shape[1]) if changed else 0
    bt, bc, warps = _blocks(tokens, cos.shape[1], rest)
    if tokens:
        _finish[(triton.cdiv(tokens, bt) * work,)](
            qkv, made if elsewhere else qkv, cos, sin, bias, q_norm, k_norm, v_norm, q_scale, made, tokens,
            qkv.stride(0), whole * width if elsewhere else qkv.stride(0), eps, N=queries, K=keys, H=width,
            HALF=cos.shape[1], REST=rest, STEP=(1 + gated) * width, OUT_STEP=width, WORK=work,
            HAS_BIAS=bias is not None, NORM_BEFORE=normed and not norm_after, NORM_AFTER=normed and norm_after,
            V_NORM=v_norm is not None, HAS_SCALE=q_scale is not None, STORE_RAW=not elsewhere, V_FROM_K=v_from_k,
            BT=bt, BC=bc, num_warps=warps,
        )  # fmt: skip
    return made


def finish_backward(
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int, int],
    raw: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    v_norm: torch.Tensor | None,
    eps: float,
    norm_after: bool,
    q_scale: torch.Tensor | None,
    gated: bool,
    v_from_k: bool,
    grad_q_norm: torch.Tensor | None,
    grad_k_norm: torch.Tensor | None,
    grad_v_norm: torch.Tensor | None,
) -> None:
    queries, keys, width = heads
    tokens = len(grad_qkv)
    if tokens == 0:
        return
    rest = _rest(width - 2 * cos.shape[1])
    bt, bc, warps = _blocks(tokens, cos.shape[1], rest)
    blocks = triton.cdiv(tokens, bt)
    parts, dv = None, grads[2]
    # v's gradient is only copied, or left alone if it is in grad_qkv already.
    work = queries + keys
    if v_from_k or not keys:
        pass  # v has no columns
    elif v_norm is not None or launch.address(dv) != launch.address(grad_qkv[:, (work + gated * queries) * width :]):
        work += keys
    if q_norm is not None and any(grad is not None for grad in (grad_q_norm, grad_k_norm, grad_v_norm)):
        parts = torch.empty(blocks, work, width, dtype=torch.float32, device=grad_qkv.device)
    _finish_backward[(blocks * work,)](
        *grads, grad_qkv, cos, sin, q_scale, raw, q_norm, k_norm, v_norm, parts, tokens, *(g.stride(0) for g in grads),
        grad_qkv.stride(0), raw.stride(0) if q_norm is not None else 0, eps, N=queries, K=keys, H=width,
        GROUP=dv.shape[1] // keys if keys else 1, HALF=cos.shape[1], REST=rest, STEP=(1 + gated) * width, WORK=work,
        NORM_BEFORE=q_norm is not None and not norm_after, NORM_AFTER=q_norm is not None and norm_after,
        V_NORM=v_norm is not None, HAS_SCALE=q_scale is not None,
        HAS_PARTS=parts is not None, V_FROM_K=v_from_k, BT=bt, BC=bc, num_warps=warps,
    )  # fmt: skip
    if parts is None:
        return
    ends = (0, queries, queries + keys, queries + 2 * keys)
    for grad, start, stop in zip((grad_q_norm, grad_k_norm, grad_v_norm), ends, ends[1:], strict=False):
        if grad is not None:
            grad.add_(parts[:, start:stop].sum((0, 1)))


def _rest(columns: int) -> int:
    """Columns of the tile for the part of a head that is not rotated."""
    return launch.power_of_two(columns, 16) if columns else 0


def _blocks(tokens: int, half: int, rest: int) -> tuple[int, int, int]:
    """Tokens per tile, padded columns of a rotated half, warps: eight values per thread and tile. (With 32 values the
    backward takes 66 microseconds instead of 53 at 8B and 8192 tokens, and 6.4 instead of 5.7 at 512 tokens.)"""
    columns = launch.power_of_two(half, 16)
    return min(max(4, 1024 // max(columns, rest // 2)), launch.power_of_two(tokens)), columns, 4
