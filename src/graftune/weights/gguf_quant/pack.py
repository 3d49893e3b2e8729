"""Scales and codes into the bytes of a block: kernels/gguf_dequant/reference.py read backwards.

Codes come as whole numbers in a float tensor [n, values], scales as fp16 [n]; every function gives [n, bytes] uint8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def _fields(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of so many bits, lowest first, laid over each other: [n, ..., 8 / bits, run] -> [n, ... run]."""
    packed = codes[..., 0, :].clone()
    for place in range(1, 8 // bits):
        packed |= codes[..., place, :] << (place * bits)
    return packed.flatten(1)


def _halves(scales: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(scales), 1).contiguous().view(torch.uint8)


def legacy(kind: str, scales: Sequence[torch.Tensor], codes: torch.Tensor) -> torch.Tensor:
    """Q4_0 Q4_1 Q5_0 Q5_1 Q8_0: scales, fifth bits where there are some, then codes."""
    if kind == "Q8_0":
        return torch.cat((_halves(scales), codes.to(torch.int8).contiguous().view(torch.uint8)), 1)
    whole = codes.to(torch.uint8)
    low = _fields((whole & 15).unflatten(1, (2, 16)), 4)
    if kind.startswith("Q4"):
        return torch.cat((_halves(scales), low), 1)
    fifth = _fields((whole >> 4).unflatten(1, (4, 8, 1)), 1)  # bit i of a word is code i's: eight in a row a byte
    return torch.cat((_halves(scales), fifth, low), 1)


def with_minima(
    kind: str, scales: Sequence[torch.Tensor], small: torch.Tensor, minima: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """Q4_K Q5_K: eight scales and minima of six bits in twelve bytes; the high bits of the last four lie on top of the
    first four, the low ones in the last run."""
    s, m, whole = small.to(torch.uint8), minima.to(torch.uint8), codes.to(torch.uint8)
    six = [
        s[:, :4] | (s[:, 4:] >> 4) << 6,
        m[:, :4] | (m[:, 4:] >> 4) << 6,
        s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
    ]
    fifth = [_fields((whole >> 4).unflatten(1, (8, 32)), 1)] if kind == "Q5_K" else []
    return torch.cat((_halves(scales), *six, *fifth, _fields((whole & 15).unflatten(1, (4, 2, 32)), 4)), 1)


def q6_k(scale: torch.Tensor, small: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    whole = codes.to(torch.uint8)
    low = _fields((whole & 15).unflatten(1, (2, 2, 64)), 4)
    high = _fields((whole >> 4).unflatten(1, (2, 4, 32)), 2)
    signed = small.to(torch.int8).contiguous().view(torch.uint8)
    return torch.cat((low, high, signed, _halves((scale,))), 1)
