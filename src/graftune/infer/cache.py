"""Keys and values of every layer, kept while text is generated.

Prompts of different lengths are prefilled packed, as in training, so that no padding is computed; the cache is then
[sequences, key heads, capacity, width], each sequence filled up to its own length.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from graftune.kernels import attention
from graftune.model.block import Block
from graftune.model.spec import ModelSpec


class Cache:
    def __init__(
        self,
        spec: ModelSpec,
        lengths: list[int],
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        reaches: list[int] | None = None,
    ):
        """For sequences of `lengths` tokens each, none of which will grow past `capacity`, each to its own of
        `reaches` at most."""
        shape = (len(lengths), spec.kv_heads, capacity, spec.head_width)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(spec.layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(spec.layers)]
        self.lengths = torch.tensor(lengths, device=device)
        self.reaches = torch.tensor(reaches or lengths, device=device)

    def keep(self, sequences: torch.Tensor) -> None:
        """Drop the sequences that have ended."""
        for stored in (self.keys, self.values):
            for i, tensor in enumerate(stored):
                stored[i] = tensor.index_select(0, sequences)
        self.lengths = self.lengths.index_select(0, sequences)
        self.reaches = self.reaches.index_select(0, sequences)


class _Attend:
    def grad_buffers(self, *args: Any) -> None:
        raise AssertionError("generation has no backward")

    def backward(self, *args: Any) -> None:
        raise AssertionError("generation has no backward")


class Prefill(_Attend):
    """All prompts at once, packed; their keys and values go into the cache."""

    def __init__(self, cache: Cache, lengths: tuple[int, ...], backend: str = "cpu"):
        self.cache, self.lengths, self.backend = cache, lengths, backend
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=cache.lengths.device)
        self.documents = attention.Documents(starts, lengths, max(lengths))

    def reach(self, positions: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor(self.lengths, device=positions.device)
        return self.cache.reaches.repeat_interleave(lengths, output_size=len(positions))

    def forward(
        self, block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        start = 0
        for sequence, length in enumerate(self.lengths):
            for stored, fresh in ((self.cache.keys, k), (self.cache.values, v)):
                stored[block.index][sequence, :, :length] = fresh[start : start + length].transpose(0, 1)
            start += length
        return attention.forward(
            q, k, v, self.documents, block.score_scale, block.window, self.backend, out, block.score_cap
        )[1]


class Decode(_Attend):
    """One new token a sequence, each seeing its own past."""

    def __init__(self, cache: Cache):
        self.cache = cache
        capacity = cache.keys[0].shape[2]
        self.places = torch.arange(capacity, device=cache.lengths.device)
        self.sequences = torch.arange(len(cache.lengths), device=cache.lengths.device)

    def reach(self, positions: torch.Tensor) -> torch.Tensor:
        return self.cache.reaches

    def forward(
        self, block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        heads, key_heads, width = block.heads
        keys, values, now = self.cache.keys[block.index], self.cache.values[block.index], self.cache.lengths
        keys[self.sequences, :, now] = k
        values[self.sequences, :, now] = v
        grouped = q.reshape(-1, key_heads, heads // key_heads, width)
        scores = (grouped @ keys.transpose(2, 3)).float() * block.score_scale
        if block.score_cap:
            scores = torch.tanh(scores / block.score_cap) * block.score_cap
        hidden = self.places > now[:, None]
        if block.window:
            hidden |= self.places <= now[:, None] - block.window
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
        out.copy_((torch.softmax(scores, -1).to(v.dtype) @ values).reshape(-1, heads, width))
        return scores.new_empty(0)
