"""Attention over pages in Triton. A program takes a tile of new tokens of one sequence with all query heads that share
a key head, so that a key is read once for all of them, and reads only keys that exist.

One new token a sequence gives few programs, so the keys are split over several, whose results `_combine` adds. The
number of splits depends only on the number of sequences, and a split's share only on the length of its own sequence: a
sequence's result does not depend on the others. The grid does not depend on lengths, as a CUDA graph requires.

Legend: S sequences, N heads, K key heads, H head width, BH H rounded up to a power of two, BM rows of a tile (new token
times query head), BN keys of a tile.
"""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.attention.kernel import LOG2E, Tile, _scores
from graftune.kernels.paged_attention.reference import PAGE

if TYPE_CHECKING:
    from graftune.kernels.paged_attention import PagedKeys

MOST_SPLITS = 32
PROGRAMS = 4  # wanted on each multiprocessor
STORED = 1024  # values of a row that a program stores


def tile_of(width: int, dtype: torch.dtype, group: int, longest: int) -> Tile:
    """`group`: query heads of a key head, rounded up to a power of two."""
    small = longest == 1 or dtype == torch.float32 or width > 256
    rows = max(16 if small else 64, group)
    if dtype == torch.float32:
        return Tile(rows, 32 if width <= 64 else 16, 4, 1)
    return Tile(rows, 64, 4, 3) if width <= 128 else Tile(rows, 32, 4 if rows == 16 else 8, 2)


def splits_of(sequences: int, key_heads: int, longest: int, device: torch.device) -> int:
    """Programs that share the keys of a sequence."""
    if longest > 1:
        return 1
    wanted = PROGRAMS * launch.processors(device) if launch.on_gpu(device) else 16
    return min(MOST_SPLITS, launch.power_of_two(max(1, wanted // (sequences * key_heads))))


def store_(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
    width = keys[0].numel()
    block = min(STORED, launch.power_of_two(width))
    _store[(len(rows), triton.cdiv(width, block))](
        k, v, keys, values, rows, k.stride(0), v.stride(0), W=width, BLOCK=block, num_warps=4
    )


def forward(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, paged: PagedKeys, scale: float, window: int,
    out: torch.Tensor, cap: float, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    (tokens, heads, width), key_heads = q.shape, keys.shape[1]
    sequences, group, longest = len(paged.table), heads // key_heads, paged.longest
    members, padded = launch.power_of_two(group), launch.power_of_two(width, 16)
    tile = tile_of(padded, q.dtype, members, longest)
    splits = splits_of(sequences, key_heads, longest, q.device)
    parts, stats, plane = out, out, tokens * heads * splits
    if splits > 1:
        parts = torch.empty(tokens, heads, splits, width, dtype=torch.float32, device=q.device)
        stats = torch.empty(2, tokens, heads, splits, dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(longest, tile.queries // members)
    _attend[(splits * tiles, key_heads, sequences)](
        q, keys, values, paged.table, paged.starts, paged.before, out, parts, stats, sinks, scale * LOG2E, plane,
        q.stride(0), out.stride(0), paged.table.stride(0), K=key_heads, GROUP=group, MEMBERS=members, H=width,
        BH=padded, BM=tile.queries, BN=tile.keys, PAGE=PAGE, SPLITS=splits, WINDOW=window, CAP=cap * LOG2E,
        SINKS=sinks is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        _combine[(tokens, heads)](
            parts, stats, sinks, out, plane, out.stride(0), N=heads, H=width, BH=padded, SPLITS=splits,
            SINKS=sinks is not None, num_warps=4,
        )  # fmt: skip


@launch.kernel
def _store(k, v, keys, values, rows, k_stride, v_stride, W: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + token)
    tl.store(keys + row * W + at, tl.load(k + token * k_stride + at, at < W), at < W)
    tl.store(values + row * W + at, tl.load(v + token * v_stride + at, at < W), at < W)


@launch.kernel
def _attend(
    q, keys, values, table, starts, before, out, parts, stats, sinks, scale, plane, q_stride, out_stride, table_stride,
    K: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    split, key_head, sequence = tl.program_id(0) % SPLITS, tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    first = (tl.program_id(0) // SPLITS) * (BM // MEMBERS)
    if first >= count:
        return
    rows, columns = tl.arange(0, BM), tl.arange(0, BH)
    token, member = first + rows // MEMBERS, rows % MEMBERS
    real = (token < count) & (member < GROUP)
    head = key_head * GROUP + member
    token64 = (start + token).to(tl.int64)
    inside = real[:, None] & (columns < H)[None, :]
    queries = tl.load(q + (token64 * q_stride + head * H)[:, None] + columns[None, :], mask=inside, other=0.0)
    past = tl.load(before + sequence).to(tl.int32)
    position = past + token
    end = past + tl.minimum(first + BM // MEMBERS, count)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(past + first - WINDOW + 1, 0)
    if SPLITS > 1:  # whole tiles of keys
        share = tl.cdiv(tl.cdiv(end - begin, SPLITS), BN) * BN
        begin += split * share
        end = tl.minimum(begin + share, end)
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    mixed = tl.zeros([BM, BH], tl.float32)
    pages = table + sequence.to(tl.int64) * table_stride
    for other in range(begin, end, BN):
        at = other + tl.arange(0, BN)
        exists = at < end
        row = tl.load(pages + at // PAGE, mask=exists, other=0).to(tl.int64) * PAGE + at % PAGE
        place = (row * (K * H) + key_head * H)[:, None] + columns[None, :]
        there = exists[:, None] & (columns < H)[None, :]
        k = tl.load(keys + place, mask=there, other=0.0)
        scores = _scores(tl.dot(queries, tl.trans(k), input_precision="ieee"), scale, CAP)
        seen = exists[None, :] & (at[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (position[:, None] - at[None, :] < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may attend to no key so far
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + place, mask=there, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        highest = higher
    N: tl.constexpr = K * GROUP
    if SPLITS > 1:
        place = (token64 * N + head) * SPLITS + split
        tl.store(parts + (place * H)[:, None] + columns[None, :], mixed, mask=inside)
        tl.store(stats + place, highest, mask=real)
        tl.store(stats + plane + place, total, mask=real)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634
            higher = tl.maximum(highest, sink)
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.exp2(sink - higher)
            mixed = mixed * shrink[:, None]
        mixed = mixed / tl.where(real, total, 1.0)[:, None]
        place = (token64 * out_stride + head * H)[:, None] + columns[None, :]
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=inside)


@launch.kernel
def _combine(
    parts, stats, sinks, out, plane, out_stride, N: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The splits of one token and head: a split without keys has a highest score of -inf and adds nothing."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, columns = tl.arange(0, SPLITS), tl.arange(0, BH)
    place = (token * N + head) * SPLITS + split
    highest = tl.load(stats + place)
    total = tl.load(stats + plane + place)
    top = tl.max(highest, 0)
    if SINKS:
        top = tl.maximum(top, tl.load(sinks + head) * 1.4426950408889634)
    shrink = tl.exp2(highest - top)
    whole = tl.sum(total * shrink, 0)
    if SINKS:
        whole += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - top)
    mixed = tl.load(parts + (place * H)[:, None] + columns[None, :], mask=(columns < H)[None, :], other=0.0)
    mixed = tl.sum(mixed * shrink[:, None], 0) / whole
    tl.store(out + token * out_stride + head * H + columns, mixed.to(out.dtype.element_ty), mask=columns < H)
