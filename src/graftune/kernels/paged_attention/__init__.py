"""Attention of new tokens over keys and values in pages, for generation. See reference.py for the formulas.

keys and values [R, K, H] are the pool of a layer: a page is `PAGE` consecutive rows. The pages of sequence i are those
of table[i] in order: its key at position p is row table[i, p // PAGE] * PAGE + p % PAGE. Page 0 belongs to no
sequence: the keys and values of sequences that have ended are written there.

    store_    writes the keys and values of new tokens to their rows
    forward   q [T, N, H] of the new tokens, over all keys up to each token's own (or as many as a window reaches)

Legend: T new tokens, S sequences, N heads, K key heads, H head width, P pages of a sequence at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graftune.kernels import launch
from graftune.kernels.paged_attention import reference
from graftune.kernels.paged_attention.reference import PAGE

__all__ = ["PAGE", "PagedKeys", "forward", "store_"]


class PagedKeys(NamedTuple):
    """The keys that the tokens of a pass attend to, for all layers with the same window."""

    table: torch.Tensor  # [S, P] int32
    starts: torch.Tensor  # [S + 1] int32: tokens starts[i] to starts[i + 1] are the new ones of sequence i
    before: torch.Tensor  # [S] int64: the position of each sequence's first new token
    rows: torch.Tensor  # [T] int64: the rows of the new tokens' keys
    lengths: tuple[int, ...] | None  # new tokens of each sequence, on the host; None: one each
    bound: int  # an upper bound on the keys of a sequence, on the host; only the reference reads it

    @property
    def longest(self) -> int:
        """New tokens of a sequence at most."""
        return 1 if self.lengths is None else max(self.lengths)


@launch.operation("attention")
def store_(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
    """k and v [T, K, H] with any row stride. Of tokens with the same row, any one may be kept."""
    assert k.shape == v.shape == (len(rows), *keys.shape[1:]) and keys.is_contiguous() and values.is_contiguous()
    launch.implementation(reference, k).store_(k, v, keys, values, rows)


@launch.operation("attention")
def forward(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    paged: PagedKeys,
    scale: float,
    window: int,
    out: torch.Tensor,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write out [T, N, H]. `window`, `cap` and `sinks` as in kernels/attention."""
    assert q.shape == out.shape and q.shape[1] % keys.shape[1] == 0 and q.shape[2] == keys.shape[2], q.shape
    assert q.stride(2) == out.stride(2) == 1 and all(x.stride(1) == x.shape[2] or x.shape[1] == 1 for x in (q, out))
    launch.implementation(reference, q).forward(q, keys, values, paged, scale, window, out, cap, sinks)
