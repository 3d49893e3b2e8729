"""Attention over pages in plain torch: the keys and values of the sequences are gathered, then

    P = softmax(cap tanh(scale Q K' / cap) + mask)      O = P V

for each key head, with the query heads that share it side by side. With sinks, P has one more column of scores, which
adds nothing to the output. If every sequence has one new token, all are computed together, else one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graftune.arithmetic import ceil_div
from graftune.kernels import rehearsal

if TYPE_CHECKING:
    from graftune.kernels.paged_attention import PagedKeys

PAGE = 16  # rows


def store_(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
    keys.index_copy_(0, rows, k)
    values.index_copy_(0, rows, v)


def forward(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, paged: PagedKeys, scale: float, window: int,
    out: torch.Tensor, cap: float, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    if paged.lengths is None:
        _attend(q.unsqueeze(1), keys, values, paged.table, paged, scale, window, out.unsqueeze(1), cap, sinks)
        return
    ends = torch.tensor(paged.lengths).cumsum(0).tolist()
    spans = [(i, end - n, end) for i, (n, end) in enumerate(zip(paged.lengths, ends, strict=True)) if n]
    for index, start, end in rehearsal.few(spans):
        one = paged._replace(before=paged.before[index : index + 1])
        new, result = q[start:end].unsqueeze(0), out[start:end].unsqueeze(0)
        _attend(new, keys, values, paged.table[index : index + 1], one, scale, window, result, cap, sinks)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, paged: PagedKeys, scale: float,
    window: int, out: torch.Tensor, cap: float, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    """q and out [S, L, N, H], L new tokens of every sequence."""
    sequences, new, heads, width = q.shape
    key_heads, pages = keys.shape[1], ceil_div(paged.bound, PAGE)
    group = heads // key_heads
    k, v = (_gathered(pool, table[:, :pages]) for pool in (keys, values))  # [S, bound, K, H]
    at = torch.arange(k.shape[1], device=q.device)
    positions = paged.before.view(-1, 1, 1) + torch.arange(new, device=q.device).view(-1, 1)
    hidden = at > positions  # [S, L, bound]
    v.masked_fill_(hidden[:, -1, :, None, None], 0.0)  # rows that no token has written may hold anything
    if window:
        hidden |= at <= positions - window
    grouped = q.view(sequences, new, key_heads, group, width).permute(0, 2, 1, 3, 4).flatten(2, 3)
    scores = (grouped @ k.permute(0, 2, 3, 1)).float() * scale  # [S, K, L * group, bound]
    if cap:
        scores = torch.tanh(scores / cap) * cap
    scores.masked_fill_(hidden.repeat_interleave(group, 1).unsqueeze(1), float("-inf"))
    if sinks is not None:
        column = sinks.view(1, key_heads, 1, group).expand(sequences, -1, new, -1).reshape(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    shares = torch.softmax(scores, -1)[..., : len(at)].to(v.dtype)
    mixed = (shares @ v.transpose(1, 2)).unflatten(2, (new, group))  # [S, K, L, group, H]
    out.copy_(mixed.transpose(1, 2).flatten(2, 3))


def _gathered(pool: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows of pages [S, P] in order: [S, P * PAGE, K, H]."""
    pages = pool.view(-1, PAGE, *pool.shape[1:])
    return pages.index_select(0, table.reshape(-1)).view(len(table), -1, *pool.shape[1:])
