"""What generation keeps of an attention layer's past, and attention of one new token over it.

Legend: T tokens, N heads, K key heads, H head width, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graftune.model.context import Past

if TYPE_CHECKING:
    from graftune.model.mixers.attention import Attention


class KeyValues:
    """Keys and values of one layer while text is generated: [S, K, capacity, H], each sequence filled up to its own
    length."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype):
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def keep(self, sequences: torch.Tensor) -> None:
        self.keys = self.keys.index_select(0, sequences)
        self.values = self.values.index_select(0, sequences)

    def fill(self, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> None:
        """The packed prompts' [T, K, H]."""
        start = 0
        for sequence, length in enumerate(lengths):
            for stored, fresh in ((self.keys, k), (self.values, v)):
                stored[sequence, :, :length] = fresh[start : start + length].transpose(0, 1)
            start += length

    def attend(
        self, of: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, past: Past
    ) -> None:
        """One new token a sequence, each seeing its own past."""
        (heads, key_heads, width), lengths = of.heads, past.lengths
        self.keys[past.sequences, :, lengths] = k
        self.values[past.sequences, :, lengths] = v
        grouped = q.reshape(-1, key_heads, heads // key_heads, width)
        scores = (grouped @ self.keys.transpose(2, 3)).float() * of.score_scale
        if of.score_cap:
            scores = torch.tanh(scores / of.score_cap) * of.score_cap
        hidden = past.token_indices > lengths[:, None]
        if of.window:
            hidden |= past.token_indices <= lengths[:, None] - of.window
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
        if of.sinks.value is not None:
            column = of.sinks.value.view(key_heads, -1, 1).expand(len(scores), -1, -1, -1)
            shares = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
        else:
            shares = torch.softmax(scores, -1)
        out.copy_((shares.to(v.dtype) @ self.values).reshape(-1, heads, width))
