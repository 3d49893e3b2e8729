"""Packs scales and codes into the bytes of a block: the inverse of kernels/gguf_dequant/reference.py.

Codes are uint8 [n, values], scales fp16 [n], and the small numbers beside them float [n, groups]. Every function
returns parts [n, ...] uint8 that follow each other in the block. Eight codes at a time are packed, as words of 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Parts = list[torch.Tensor]


def _words(codes: torch.Tensor) -> torch.Tensor:
    """[n, values] uint8 -> [n, values / 8] int64. Flat first: a contiguous tensor of one row may have any stride."""
    return codes.view(-1).view(torch.int64).view(len(codes), -1)


def _mask(bits: int) -> int:
    return int.from_bytes(8 * bytes([2**bits - 1]), "little")


def fields(codes: torch.Tensor, run: int, bits: int, above: int = 0) -> torch.Tensor:
    """Packs `bits` bits of each code, from bit `above` on. Runs of `run` codes share `run` bytes, the first run in the
    lowest bits: [n, values] -> [n, values * bits / 8]."""
    if run % 8:
        places = (codes >> above & 2**bits - 1).unflatten(1, (-1, 8 // bits, run))
    else:
        places = (_words(codes) >> above & _mask(bits)).unflatten(1, (-1, 8 // bits, run // 8))
    packed = places[:, :, 0].clone()
    for place in range(1, 8 // bits):
        packed |= places[:, :, place] << (place * bits)
    return packed.flatten(1).view(torch.uint8)


def halves(*scales: torch.Tensor) -> torch.Tensor:
    return torch.stack(scales, 1).view(torch.uint8)


def legacy(scale: torch.Tensor, codes: torch.Tensor) -> Parts:
    """Q4_0 IQ4_NL: the scale, then codes."""
    return [halves(scale), fields(codes, 16, 4)]


def with_minima(
    kind: str, scales: Sequence[torch.Tensor], small: torch.Tensor, minima: torch.Tensor, codes: torch.Tensor
) -> Parts:
    """Q4_K Q5_K: eight scales and minima of six bits in twelve bytes; the high bits of the last four lie on top of the
    first four, the low ones in the last run."""
    s, m = small.to(torch.uint8), minima.to(torch.uint8)
    six = [
        s[:, :4] | (s[:, 4:] >> 4) << 6,
        m[:, :4] | (m[:, 4:] >> 4) << 6,
        s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
    ]
    fifth = [fields(codes, 32, 1, above=4)] if kind == "Q5_K" else []
    return [halves(*scales), *six, *fifth, fields(codes, 32, 4)]


def q3_k(scale: torch.Tensor, small: torch.Tensor, codes: torch.Tensor) -> Parts:
    """The third bits first, then the two low ones; sixteen scales of six bits plus 32, low four before high two."""
    s = (small + 32).to(torch.uint8).contiguous()
    return [
        fields(codes, 32, 1, above=2),
        fields(codes, 32, 2),
        fields(s, 8, 4),
        fields(s, 4, 2, above=4),
        halves(scale),
    ]


def q6_k(scale: torch.Tensor, small: torch.Tensor, codes: torch.Tensor) -> Parts:
    signed = small.to(torch.int8).contiguous().view(torch.uint8)
    return [fields(codes, 64, 4), fields(codes, 32, 2, above=4), signed, halves(scale)]


def iq4_xs(scale: torch.Tensor, small: torch.Tensor, codes: torch.Tensor) -> Parts:
    """Eight scales of six bits plus 32, the high two bits before the low four."""
    s = (small + 32).to(torch.uint8).contiguous()
    return [halves(scale), fields(s, 1, 2, above=4), fields(s, 1, 4), fields(codes, 16, 4)]
