"""Sums over a router's choices in Triton. Each program takes every PARTS-th tile of tokens and adds to its own row."""
# mypy: disallow-untyped-defs=False
# The parameters of a kernel are pointers and numbers of the device; there is no Python type for them.

from __future__ import annotations

import torch
import triton.language as tl

from graftune.kernels import launch

TILE = 2048  # scores at a time


@launch.kernel
def _add(
    sums_ptr, scores_ptr, chosen_ptr, counted_ptr, T, E, W, K: tl.constexpr, PARTS: tl.constexpr, BT: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    experts = tl.arange(0, BE)
    counts = tl.zeros((BE,), dtype=tl.float32)
    entropies = tl.zeros((BT,), dtype=tl.float32)
    tokens = tl.zeros((BT,), dtype=tl.float32)
    for start in range(part * BT, T, PARTS * BT):
        rows = start + tl.arange(0, BT)
        inside, rows64 = rows < T, rows.to(tl.int64)
        counted = tl.load(counted_ptr + rows, inside, other=0).to(tl.float32)
        mask = inside[:, None] & (experts[None, :] < E)
        p = tl.load(scores_ptr + rows64[:, None] * E + experts[None, :], mask, other=0.0)
        p = p / tl.maximum(tl.sum(p, 1), 1e-30)[:, None]
        entropies -= counted * tl.sum(p * tl.log(tl.maximum(p, 1e-30)), 1)
        tokens += counted
        for choice in range(K):
            expert = tl.load(chosen_ptr + rows64 * K + choice, inside, other=-1).to(tl.int32)
            counts += tl.sum(tl.where(expert[:, None] == experts[None, :], counted[:, None], 0.0), 0)
    own = sums_ptr + part * W
    tl.store(own + experts, tl.load(own + experts, experts < E, other=0.0) + counts, experts < E)
    tl.store(own + W - 2, tl.load(own + W - 2) + tl.sum(entropies, 0))
    tl.store(own + W - 1, tl.load(own + W - 1) + tl.sum(tokens, 0))


def add_(sums: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, counted: torch.Tensor) -> None:
    tokens, experts = scores.shape
    be = launch.power_of_two(experts)
    _add[(len(sums),)](
        sums, scores, chosen, counted, tokens, experts, sums.shape[1], K=chosen.shape[1], PARTS=len(sums),
        BT=max(1, TILE // be), BE=be, num_warps=4,
    )  # fmt: skip
