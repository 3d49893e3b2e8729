"""kept(i) = hash(i; seed, mask_id) >= p 2^32 for element i of the flattened x; there is no generator state.

    hash(i) = mix(mix(i ^ k1) ^ k2)        k1, k2 = mix(mix(mix(mask_id ^ c) ^ seed's low half) ^ its high half)

The arithmetic is on 32-bit words that wrap. `mix` is a permutation in which every input bit flips each output bit with
a probability of about one half (its constants are lowbias32's, by Chris Wellons, in the public domain). Since every
layer of the hash is a permutation, no two masks of a step share a key. Seeding a generator for each mask would take as
much work and give other numbers on every device. The CPU path uses numpy, because torch has no unsigned arithmetic.
"""

from __future__ import annotations

import numpy as np
import torch

CHUNK = 1 << 15  # elements hashed at a time: their words stay in a core's cache


def apply(x: torch.Tensor, p: float, seed: torch.Tensor, mask_id: int) -> torch.Tensor:
    out = x * scaling(p)
    flat = out.view(-1)
    k1, k2 = keys(int(seed), mask_id)
    index, limit = np.arange(CHUNK, dtype=np.uint32), np.uint32(keep_from(p))
    for start in range(0, len(flat), CHUNK):
        words = index[: len(flat) - start] ^ (np.uint32(start) ^ k1)  # equals start + index, since the two share no bit
        mix_(words)
        words ^= k2
        dropped = mix_(words) < limit
        flat[start : start + CHUNK].masked_fill_(torch.from_numpy(dropped).to(x.device), 0.0)
    return out


def keys(seed: int, mask_id: int) -> np.ndarray:
    words = np.array([0x9E3779B9, 0x85EBCA6B], dtype=np.uint32)
    for part in (mask_id, seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF):
        words ^= np.uint32(part)
        mix_(words)
    return words


def mix_(words: np.ndarray) -> np.ndarray:
    words ^= words >> 16
    words *= 0x7FEB352D
    words ^= words >> 15
    words *= 0x846CA68B
    words ^= words >> 16
    return words


def keep_from(p: float) -> int:
    return int(p * 2**32)


def scaling(p: float) -> float:
    return 1.0 / (1.0 - p)
