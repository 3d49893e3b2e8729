"""Packed causal attention in Triton: any head width up to 512, fp32 too, sliding windows, soft caps, sinks, grouped
heads.

This is flash attention: scores stay in tiles on the chip and are never written to memory. The forward saves one
log-sum-exp for each token and head, from which the backward recomputes the probabilities. One program works on one tile
of one document, so scores across documents are never computed. The grid covers every slot up to the bound on the
document length, and programs past a document's end return at once. So the grid does not depend on the lengths, as a
CUDA graph requires.

The backward has two kinds of programs: for dk and dv (a tile of keys loops over the queries of all heads that share it)
and for dq. They compute a third more products than one kind with atomic adds, but their sums have a fixed order. Both
kinds run in one launch, the longest programs first, since a few hundred tokens give too few programs to fill the GPU.
In that case each query head also gets its own dk and dv (`grad_buffers`), and the caller sums those that share a key
head. A sink is one more term of the softmax's denominator: the forward adds it to the log-sum-exp, and the backward
needs nothing else.

Legend: T tokens, N heads, K key heads, H head width, BH H rounded up to a power of two, BM queries per tile, BN keys
per tile.
"""
# mypy: disallow-untyped-defs=False
# The parameters of a kernel are pointers and numbers on the device, which have no Python type.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from graftune.kernels import launch

if TYPE_CHECKING:
    from graftune.kernels.attention import Documents

# Scores, and with them the stats, are logarithms to base 2, because exp2 is cheaper than exp.
LOG2E = 1.4426950408889634


class Tile(NamedTuple):
    """The tile sizes and launch options of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


def forward_tile(width: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:  # exact products do not use tensor cores; larger tiles would not fit the registers
        return Tile(32, 32, 4, 1) if width <= 64 else Tile(16, 16, 4, 1)
    return Tile(64, 64, 4, 3) if width <= 128 else Tile(64, 32, 8, 2)


def backward_tile(width: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        if width <= 128:
            return Tile(32, 32, 4 if width <= 64 else 8, 1)
        return Tile(16, 16, 4 if width <= 256 else 8, 1)
    if width > 256:  # dk and dv of a tile fill half of the registers; larger tiles spill or do not fit shared memory
        return Tile(32, 32, 8, 2)
    if width > 128:
        return Tile(64, 32, 8, 1)
    return Tile(64, 64, 4, 3 if width <= 64 else 2)  # so that two programs fit on a multiprocessor


def programs_wanted(device: torch.device) -> int:
    """Two programs for each multiprocessor."""
    return 2 * launch.processors(device) if launch.on_gpu(device) else 0


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    docs: Documents,
    scale: float,
    window: int,
    out: torch.Tensor,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write out [T, N, H]; returns the log-sum-exp of the scores to base 2, [N, T]."""
    tokens, heads, width = q.shape
    stats = q.new_empty((heads, tokens), dtype=torch.float32)
    tile = forward_tile(width, q.dtype)
    _forward[(triton.cdiv(docs.longest, tile.queries), heads, _slots(docs))](
        q, k, v, out, stats, sinks, docs.cu_seqlens, scale * LOG2E, tokens, q.stride(0), k.stride(0), v.stride(0),
        out.stride(0), GROUP=heads // k.shape[1], H=width, BH=launch.power_of_two(width, 16), BM=tile.queries,
        BN=tile.keys, WINDOW=window, CAP=cap * LOG2E, SINKS=sinks is not None, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return stats


def grad_buffers(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """dk and dv for every query head in fp32, if one program for each key head would not fill the GPU."""
    (tokens, heads, width), key_heads = q.shape, k.shape[1]
    tiles = triton.cdiv(tokens, backward_tile(width, q.dtype).keys)
    if heads == key_heads or tiles * key_heads >= programs_wanted(q.device):
        return None
    dk, dv = q.new_empty((2, tokens, heads, width), dtype=torch.float32)
    return q.new_empty((tokens, heads, width)), dk, dv


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
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    grad_sinks: torch.Tensor | None = None,
    *,
    by_token: bool = False,
) -> None:
    """`by_token`: stats are those of cuDNN's forward, [T, N] and natural logarithms."""
    tokens, heads, width = q.shape
    dq, dk, dv = grads
    padded = launch.power_of_two(width, 16)
    delta = stats.new_empty((heads, tokens))
    theirs, stats = (stats, torch.empty_like(delta)) if by_token else (None, stats)
    rows = 64 if tokens >= 4096 and width <= 256 else 16
    _delta[(triton.cdiv(tokens, rows), heads)](
        grad_out, out, delta, theirs, stats, tokens, grad_out.stride(0), out.stride(0), N=heads, H=width, BH=padded,
        ROWS=rows, BY_TOKEN=by_token, num_warps=4,
    )  # fmt: skip
    if sinks is not None and grad_sinks is not None:
        grad_sinks.sub_((torch.exp2(sinks[:, None] * LOG2E - stats) * delta).sum(1))
    tile = backward_tile(width, q.dtype)
    tiles = triton.cdiv(docs.longest, min(tile.queries, tile.keys))
    _grads[(heads, 2 * tiles, _slots(docs))](
        q, k, v, grad_out, stats, delta, dq, dk, dv, docs.cu_seqlens, scale * LOG2E, scale, tokens, q.stride(0),
        k.stride(0), v.stride(0), grad_out.stride(0), dq.stride(0), dk.stride(0), dv.stride(0),
        GROUP=heads // k.shape[1], MEMBERS=heads // dk.shape[1], H=width, BH=padded, BM=tile.queries, BN=tile.keys,
        WINDOW=window, CAP=cap * LOG2E, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _slots(docs: Documents) -> int:
    return len(docs.cu_seqlens) - 1


@triton.jit
def _place(first, rows, length, start, stride, head, H: tl.constexpr, BH: tl.constexpr):
    """Offsets of rows [first + rows] of a document in one head's columns, and a mask of those that exist."""
    columns = tl.arange(0, BH)
    place = (start + first + rows).to(tl.int64) * stride + head * H
    return place[:, None] + columns[None, :], (first + rows < length)[:, None] & (columns < H)[None, :]


@triton.jit
def _load(base, first, rows, length, start, stride, head, H: tl.constexpr, BH: tl.constexpr):
    place, exists = _place(first, rows, length, start, stride, head, H, BH)
    return tl.load(base + place, mask=exists, other=0.0)


@triton.jit
def _store(base, value, first, rows, length, start, stride, head, H: tl.constexpr, BH: tl.constexpr):
    place, exists = _place(first, rows, length, start, stride, head, H, BH)
    tl.store(base + place, value.to(base.dtype.element_ty), mask=exists)


@triton.jit
def _seen(queries, keys, length, WINDOW: tl.constexpr):
    """Whether a query attends to a key: causal, in the document, in the window. The arguments broadcast."""
    seen = (keys <= queries) & (queries < length)
    if WINDOW > 0:
        seen = seen & (queries - keys < WINDOW)
    return seen


@triton.jit
def _scores(product, scale, CAP: tl.constexpr):
    """scale * product to base 2, soft-capped at CAP (also to base 2; 0: no cap)."""
    scores = product * scale
    if CAP > 0:
        scores = CAP - 2 * CAP / (1.0 + tl.exp2(scores * (2 * 1.4426950408889634 / CAP)))
    return scores


@triton.jit
def _through_cap(grad, scores, CAP: tl.constexpr):
    """The gradient before the soft cap, from the gradient of the scores: tanh' = 1 - tanh^2."""
    if CAP > 0:
        capped = scores * (1.0 / CAP)
        grad = grad * (1.0 - capped * capped)
    return grad


@launch.kernel
def _forward(
    q, k, v, out, stats, sinks, cu_seqlens, scale, tokens, q_stride, k_stride, v_stride, out_stride,
    GROUP: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    head, slot = tl.program_id(1), tl.program_id(2)
    first = tl.program_id(0) * BM
    start = tl.load(cu_seqlens + slot)
    length = tl.load(cu_seqlens + slot + 1) - start
    if first >= length:
        return
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    key_head = head // GROUP
    queries = _load(q, first, rows, length, start, q_stride, head, H, BH)
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    mixed = tl.zeros([BM, BH], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // BN * BN
    for other in range(begin, tl.minimum(first + BM, length), BN):
        keys = _load(k, other, columns, length, start, k_stride, key_head, H, BH)
        scores = _scores(tl.dot(queries, tl.trans(keys), input_precision="ieee"), scale, CAP)
        seen = _seen((first + rows)[:, None], (other + columns)[None, :], length, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may attend to no key so far
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        values = _load(v, other, columns, length, start, v_stride, key_head, H, BH)
        mixed = mixed * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        highest = higher
    real = first + rows < length
    if SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        higher = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.exp2(sink - higher)
        mixed = mixed * shrink[:, None]
        highest = higher
    total = tl.where(real, total, 1.0)
    _store(out, mixed / total[:, None], first, rows, length, start, out_stride, head, H, BH)
    lse = stats + head.to(tl.int64) * tokens + start + first + rows
    tl.store(lse, tl.where(real, highest, 0.0) + tl.log2(total), mask=real)


@launch.kernel
def _delta(
    grad_out, out, delta, theirs, stats, tokens, grad_stride, out_stride, N: tl.constexpr, H: tl.constexpr,
    BH: tl.constexpr, ROWS: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """rowsum(dO * O), fp32 [N, T]; with BY_TOKEN, also convert cuDNN's stats `theirs` [T, N] to ours."""
    head = tl.program_id(1)
    first, rows = tl.program_id(0) * ROWS, tl.arange(0, ROWS)
    grad = _load(grad_out, first, rows, tokens, 0, grad_stride, head, H, BH).to(tl.float32)
    value = _load(out, first, rows, tokens, 0, out_stride, head, H, BH).to(tl.float32)
    line, real = head.to(tl.int64) * tokens + first + rows, first + rows < tokens
    tl.store(delta + line, tl.sum(grad * value, 1), mask=real)
    if BY_TOKEN:
        natural = tl.load(theirs + (first + rows).to(tl.int64) * N + head, mask=real, other=0.0)
        tl.store(stats + line, natural * 1.4426950408889634, mask=real)


@launch.kernel
def _grads(
    q, k, v, grad_out, stats, delta, grad_q, grad_k, grad_v, cu_seqlens, scale2, scale, tokens,
    q_stride, k_stride, v_stride, out_stride, grad_q_stride, grad_k_stride, grad_v_stride,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Even programs take a tile of keys, starting with the first; odd ones a tile of queries, starting with the last.
    So long programs start first. GROUP query heads share a key head; MEMBERS of them (all or one) are summed into one
    dk and dv."""
    place, slot = tl.program_id(0), tl.program_id(2)
    number = tl.program_id(1) // 2
    start = tl.load(cu_seqlens + slot)
    length = tl.load(cu_seqlens + slot + 1) - start
    if tl.program_id(1) % 2 == 0:
        first = number * BN
        if (first < length) & (place % MEMBERS == 0):
            _key_grads(
                q, k, v, grad_out, stats, delta, grad_k, grad_v, first, length, start, place // MEMBERS, scale2, scale,
                tokens, q_stride, k_stride, v_stride, out_stride, grad_k_stride, grad_v_stride, GROUP, MEMBERS, H, BH,
                BM, BN, WINDOW, CAP,
            )  # fmt: skip
    else:
        first = (tl.cdiv(length, BM) - 1 - number) * BM
        if first >= 0:
            _query_grads(
                q, k, v, grad_out, stats, delta, grad_q, first, length, start, place, scale2, scale, tokens, q_stride,
                k_stride, v_stride, out_stride, grad_q_stride, GROUP, H, BH, BM, BN, WINDOW, CAP,
            )  # fmt: skip


@triton.jit
def _key_grads(
    q, k, v, grad_out, stats, delta, grad_k, grad_v, first, length, start, place, scale2, scale, tokens,
    q_stride, k_stride, v_stride, out_stride, grad_k_stride, grad_v_stride,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dk and dv of keys [first, first + BN), summed over MEMBERS query heads from place * MEMBERS on."""
    key_head = place * MEMBERS // GROUP
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    keys = _load(k, first, columns, length, start, k_stride, key_head, H, BH)
    values = _load(v, first, columns, length, start, v_stride, key_head, H, BH)
    dk, dv = tl.zeros([BN, BH], tl.float32), tl.zeros([BN, BH], tl.float32)
    end = length
    if WINDOW > 0:
        end = tl.minimum(length, first + BN - 1 + WINDOW)
    for member in range(MEMBERS):
        head = place * MEMBERS + member
        line = head.to(tl.int64) * tokens + start
        for other in range(first // BM * BM, end, BM):
            queries = _load(q, other, rows, length, start, q_stride, head, H, BH)
            grads = _load(grad_out, other, rows, length, start, out_stride, head, H, BH)
            real = other + rows < length
            lse = tl.load(stats + line + other + rows, mask=real, other=0.0)
            correction = tl.load(delta + line + other + rows, mask=real, other=0.0)
            scores = _scores(tl.dot(keys, tl.trans(queries), input_precision="ieee"), scale2, CAP)
            seen = _seen((other + rows)[None, :], (first + columns)[:, None], length, WINDOW)
            p = tl.exp2(tl.where(seen, scores - lse[None, :], float("-inf")))
            dv += tl.dot(p.to(grads.dtype), grads, input_precision="ieee")
            dp = tl.dot(values, tl.trans(grads), input_precision="ieee")
            ds = _through_cap(p * (dp - correction[None, :]), scores, CAP)
            dk += tl.dot(ds.to(queries.dtype), queries, input_precision="ieee")
    _store(grad_k, dk * scale, first, columns, length, start, grad_k_stride, place, H, BH)
    _store(grad_v, dv, first, columns, length, start, grad_v_stride, place, H, BH)


@triton.jit
def _query_grads(
    q, k, v, grad_out, stats, delta, grad_q, first, length, start, head, scale2, scale, tokens,
    q_stride, k_stride, v_stride, out_stride, grad_q_stride,
    GROUP: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    key_head = head // GROUP
    queries = _load(q, first, rows, length, start, q_stride, head, H, BH)
    grads = _load(grad_out, first, rows, length, start, out_stride, head, H, BH)
    real = first + rows < length
    line = head.to(tl.int64) * tokens + start + first + rows
    lse = tl.load(stats + line, mask=real, other=0.0)
    correction = tl.load(delta + line, mask=real, other=0.0)
    dq = tl.zeros([BM, BH], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // BN * BN
    for other in range(begin, tl.minimum(first + BM, length), BN):
        keys = _load(k, other, columns, length, start, k_stride, key_head, H, BH)
        values = _load(v, other, columns, length, start, v_stride, key_head, H, BH)
        scores = _scores(tl.dot(queries, tl.trans(keys), input_precision="ieee"), scale2, CAP)
        seen = _seen((first + rows)[:, None], (other + columns)[None, :], length, WINDOW)
        p = tl.exp2(tl.where(seen, scores - lse[:, None], float("-inf")))
        dp = tl.dot(grads, tl.trans(values), input_precision="ieee")
        ds = _through_cap(p * (dp - correction[:, None]), scores, CAP)
        dq += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
    _store(grad_q, dq * scale, first, rows, length, start, grad_q_stride, head, H, BH)
