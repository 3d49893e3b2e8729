"""Per-layer caches for generation: keys and values, or the states of short convolutions.

Each layer's mixer makes its own cache. Prompts of different lengths are prefilled packed, as in training, so that no
padding is computed; after that, each pass computes one new token per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graftune.kernels import attention
from graftune.model.context import LayerCache
from graftune.model.spec import ModelSpec


class CacheSize(NamedTuple):
    """The bytes of a cache, from the mixers: a state per sequence, and keys and values per token."""

    per_sequence: int
    per_token: int
    most_per_token: int  # if every layer kept as much as the largest

    @staticmethod
    def of(spec: ModelSpec, dtype: torch.dtype) -> CacheSize:
        kinds = [(kind.mixer.cache_bytes(dtype), count) for kind, count in spec.kinds.items()]
        per_sequence = sum(one.per_sequence * count for one, count in kinds)
        per_token = sum(one.per_token * count for one, count in kinds)
        # Where no layer keeps anything per token: as much as the residual stream has.
        most = max(one.per_token for one, _ in kinds) or spec.width * dtype.itemsize
        return CacheSize(per_sequence, per_token, most * len(spec.layers))

    def bytes(self, sequences: int, capacity: int) -> int:
        return sequences * (self.per_sequence + self.per_token * capacity)


class Cache:
    def __init__(
        self,
        spec: ModelSpec,
        lengths: list[int],
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        final_lengths: list[int] | None = None,
    ):
        """Allocate for sequences that have `lengths` tokens now. None grows past `capacity`, nor past its own entry of
        `final_lengths`."""
        mixers = [layer.mixer for layer in spec.layers]
        self.layers: list[LayerCache] = [mixer.new_cache(len(lengths), capacity, device, dtype) for mixer in mixers]
        self.lengths = torch.tensor(lengths, device=device)
        self.final_lengths = torch.tensor(final_lengths or lengths, device=device)
        self.sequences = torch.arange(len(lengths), device=device)
        self.token_indices = torch.arange(capacity, device=device)

    def keep(self, sequences: torch.Tensor) -> None:
        """Drop the sequences that have ended."""
        for layer in self.layers:
            layer.keep(sequences)
        self.lengths = self.lengths.index_select(0, sequences)
        self.final_lengths = self.final_lengths.index_select(0, sequences)
        self.sequences = self.sequences[: len(sequences)]


class Prefill:
    """Runs all prompts in one packed pass; the mixers write their keys, values and states to the cache."""

    def __init__(self, cache: Cache, lengths: tuple[int, ...], backend: str = "cpu"):
        self.past, self.backend = cache, backend
        self.documents = attention.Documents.of(lengths, cache.lengths.device)

    def final_lengths(self, positions: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor(self.documents.lengths, device=positions.device)
        return self.past.final_lengths.repeat_interleave(lengths, output_size=len(positions))


class Decode:
    """Runs one new token per sequence; each attends to its own past."""

    documents, backend = None, ""

    def __init__(self, cache: Cache):
        self.past = cache

    def final_lengths(self, positions: torch.Tensor) -> torch.Tensor:
        return self.past.final_lengths
