"""Dequantises GGUF blocks. A row is a run of blocks; a block has one or two fp16 scales and a small code per value:

    Q4_0 Q5_0 Q8_0             value = d (code - half)
    Q4_1 Q5_1                  value = d code + m
    Q2_K Q4_K Q5_K             value = (d s) code - (d' s')       s, s': small integers, for each 16 or 32 values of 256
    Q3_K Q6_K                  value = (d s) (code - half)
    IQ4_NL                     value = d CURVE[code]
    IQ4_XS                     value = (d s) CURVE[code]
    MXFP4                      value = 2^(e - 128) FP4[code]      one byte e; FP4: floats of four bits, doubled

Every value equals, to the bit, that of the gguf package in fp32, and is only then rounded to the dtype asked for. That
holds on every device: the products are exact (11 bits of a fp16 scale, 7 of a small one and 5 of a code are less than
fp32's 24), so neither their order nor a multiply-add changes them, and only one sum is rounded.

A few rows are decoded at a time: a full copy in fp32 never exists, and a piece stays in a core's cache. On a CPU every
core takes pieces of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from graftune.kernels import cores

PIECE = 1 << 17  # values decoded at a time, at most
CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4_NL and IQ4_XS
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of MXFP4
MXFP4_LARGEST = 252  # the exponent byte up to which every code is finite in fp32


class BlockFormat(NamedTuple):
    values: int
    bytes: int


KINDS = {
    "F32": BlockFormat(1, 4),
    "F16": BlockFormat(1, 2),
    "BF16": BlockFormat(1, 2),
    "Q4_0": BlockFormat(32, 18),
    "Q4_1": BlockFormat(32, 20),
    "Q5_0": BlockFormat(32, 22),
    "Q5_1": BlockFormat(32, 24),
    "Q8_0": BlockFormat(32, 34),
    "Q2_K": BlockFormat(256, 84),
    "Q3_K": BlockFormat(256, 110),
    "Q4_K": BlockFormat(256, 144),
    "Q5_K": BlockFormat(256, 176),
    "Q6_K": BlockFormat(256, 210),
    "IQ4_NL": BlockFormat(32, 18),
    "IQ4_XS": BlockFormat(256, 136),
    "MXFP4": BlockFormat(32, 17),
}
# Bytes of a block where its fp16 scales begin; every value is finite where these are.
SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def row_bytes(kind: str, width: int) -> int:
    """Bytes of a row of `width` values."""
    block = KINDS[kind]
    assert width % block.values == 0, f"a row of {width} values is not made of whole blocks of {block.values}"
    return width // block.values * block.bytes


def dequantise(blocks: torch.Tensor, kind: str, out: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    size = cores.piece_size(out.numel(), PIECE) if out.device.type == "cpu" else PIECE
    step = max(1, size // out.shape[1])

    def decode(start: int) -> None:
        target = out[start : start + step]
        piece = blocks[start : start + step] if rows is None else blocks.index_select(0, rows[start : start + step])
        if kind in PLAIN:
            target.copy_(piece.view(PLAIN[kind]))
        else:
            target.copy_(_DECODE[kind](piece.reshape(-1, KINDS[kind].bytes)).view(target.shape))

    starts = range(0, len(out), step)
    if out.device.type == "cpu":
        cores.share(decode, starts)
    else:
        for start in starts:
            decode(start)


# The functions below take the bytes of n blocks [n, bytes] and return all their values in fp32.


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 number at a byte of each block, [n, 1, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()[:, :, None]


def _fields(packed: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Unpacks codes of `bits` bits, [n, bytes] -> [n, -1, run]: the lowest bits of each run of bytes come first."""
    of, kind = (8, torch.int64) if run % 8 == 0 else (1, torch.uint8)  # eight bytes at a time where they stay together
    words = packed.clone(memory_format=torch.contiguous_format).view(kind).unflatten(1, (-1, run // of))
    mask = int.from_bytes(of * bytes([2**bits - 1]), "little")
    # One shift after another: all at once, over a dimension of shifts, takes twice as long.
    return torch.stack([(words >> at) & mask for at in range(0, 8, bits)], 2).flatten(1, 2).view(torch.uint8)


# For every byte, its bits as the fifth bits of eight codes: eight bytes, which are looked up as one word.
_FIFTH = (_fields(torch.arange(256, dtype=torch.uint8)[:, None], 1, 1).view(256, 8) << 4).view(torch.int64).view(256)


def _legacy(blocks: torch.Tensor, header: int, fifth: bool) -> torch.Tensor:
    """The 32 codes after `header` bytes, [n, 2, 16]: four bits each; `fifth`: with the fifth bits from before them."""
    codes = _fields(blocks[:, header:], 16, 4)
    if fifth:
        codes |= _FIFTH.index_select(0, blocks[:, header - 4 : header].flatten().int()).view(torch.uint8).view_as(codes)
    return codes


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _legacy(blocks, 2, False).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _legacy(blocks, 4, False).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _legacy(blocks, 6, True).float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _legacy(blocks, 8, True).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, None, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, codes = blocks[:, :16, None], _fields(blocks[:, 16:80], 32, 2).view(-1, 16, 16)
    values = codes.float().mul_((scales & 15).float().mul_(_half(blocks, 80)))
    return values.sub_((scales >> 4).float().mul_(_half(blocks, 82)))


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """The third bits of the codes are stored apart from the lower two; 4 is subtracted from the three-bit code."""
    scales = _fields(blocks[:, 96:104], 8, 4).flatten(1) | _fields(blocks[:, 104:108], 4, 2).flatten(1) << 4
    codes = _fields(blocks[:, 32:96], 32, 2) | _fields(blocks[:, :32], 32, 1) << 2
    return codes.view(-1, 16, 16).float().sub_(4).mul_(scales[:, :, None].float().sub_(32).mul_(_half(blocks, 108)))


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_with_minimum(blocks, _fields(blocks[:, 16:], 32, 4))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_with_minimum(blocks, _fields(blocks[:, 48:], 32, 4) | _fields(blocks[:, 16:48], 32, 1) << 4)


def _scaled_with_minimum(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Eight scales and minima of six bits in three runs of four bytes: the last four of each have their low bits in the
    third run and their high ones on top of the first four."""
    scale, least, rest = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((scale & 63, rest & 15 | scale >> 6 << 4), 1)[:, :, None]
    minima = torch.cat((least & 63, rest >> 4 | least >> 6 << 4), 1)[:, :, None]
    return codes.float().mul_(scales.float().mul_(_half(blocks, 0))).sub_(minima.float().mul_(_half(blocks, 2)))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, 192:208, None].view(torch.int8)
    codes = _fields(blocks[:, :128], 64, 4).view(-1, 8, 32) | _fields(blocks[:, 128:192], 32, 2) << 4
    return codes.view(-1, 16, 16).float().sub_(32).mul_(scales.float().mul_(_half(blocks, 208)))


def _curved(codes: torch.Tensor, curve: Sequence[int] = CURVE) -> torch.Tensor:
    return torch.tensor(curve, dtype=torch.float32).index_select(0, codes.view(-1).int()).view(codes.shape)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _curved(_fields(blocks[:, 2:], 16, 4)).mul_(_half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scales = _fields(blocks[:, 4:8], 1, 4) | _fields(blocks[:, 2:4], 1, 2) << 4
    values = _curved(_fields(blocks[:, 8:], 16, 4)).view(-1, 8, 32)
    return values.mul_(scales.float().sub_(32).mul_(_half(blocks, 0)))


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Makes the power of two from its bits, since its two smallest values are subnormal."""
    exponent = blocks[:, :1, None].int()
    bits = torch.where(exponent < 2, (1 << 21) << exponent, (exponent - 1) << 23)
    return _curved(_fields(blocks[:, 1:], 16, 4), FP4).mul_(bits.view(torch.float32))


_DECODE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
