"""The random base of a case.

Weights are random and made on the device when they are read, so that a 70B becomes NF4 a few rows at a time. Blocks of
a GGUF are random codes under scales that give the same deviation as the floats (0.02).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
from benchmarks.cases import BLOCKS, Case
from benchmarks.synthetic import STD, random_base

from graftune.kernels.gguf_dequant import KINDS, reference, row_bytes
from graftune.model.families import from_config
from graftune.weights.base import Base

# Bytes of a block where its fp16 scales begin, and what each is of the first for values of mean zero.
SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1.0),),
    "Q4_1": ((0, 1.0), (2, -7.5)),
    "Q5_0": ((0, 1.0),),
    "Q5_1": ((0, 1.0), (2, -15.5)),
    "Q8_0": ((0, 1.0),),
    "Q2_K": ((80, 1.0), (82, 1.5)),
    "Q3_K": ((108, 1.0),),
    "Q4_K": ((0, 1.0), (2, 7.5)),
    "Q5_K": ((0, 1.0), (2, 15.5)),
    "Q6_K": ((208, 1.0),),
    "IQ4_NL": ((0, 1.0),),
    "IQ4_XS": ((0, 1.0),),
}
EXPONENT = 127 - 7  # of a block of MXFP4, whose codes deviate by 2.7


def base_of(case: Case, device: torch.device) -> Base:
    base = random_base(from_config(case.shape.settings, case.name), device)
    if case.base == "mxfp4":
        return with_mxfp4_experts(base)
    if case.base not in BLOCKS:
        return base
    blocks = {
        name: RandomBlocks(case.base.upper(), source.shape, device) if len(source.shape) == 2 else source
        for name, source in base.tensors.items()
    }
    return dataclasses.replace(base, kind="gguf", tensors=cast(Any, blocks))


def with_mxfp4_experts(base: Base) -> Base:
    """The weights of the experts as blocks, as gpt-oss stores them."""
    blocks = {
        name: RandomBlocks("MXFP4", source.shape, source.device)
        for name, source in cast(Any, base.tensors).items()
        if ".experts." in name and name.endswith("_proj.weight")
    }
    return dataclasses.replace(base, tensors=base.tensors | blocks)


@dataclass(frozen=True)
class RandomBlocks:
    """Rows of GGUF blocks, drawn when read: every reading gives other values."""

    dtype_name: str
    shape: tuple[int, ...]
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.shape[0] * row_bytes(self.dtype_name, self.shape[1])

    def raw(self, start: int, stop: int) -> torch.Tensor:
        return codes(self.dtype_name, stop - start, self.shape[1], self.device)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return values(self.raw(start, stop).cpu(), self.dtype_name)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.read(0, len(ids))

    def values(self) -> torch.Tensor:
        return self.read(0, self.shape[0])


def codes(kind: str, rows: int, width: int, device: torch.device) -> torch.Tensor:
    """[rows, bytes of a row], random except for the scales."""
    size = KINDS[kind].bytes
    raw = torch.randint(256, (rows, row_bytes(kind, width) // size, size), dtype=torch.uint8, device=device)
    if kind == "MXFP4":
        raw[:, :, 0] = EXPONENT
    else:
        _scale(raw, kind, STD / _deviation(kind))
    return raw.view(rows, -1)


def values(raw: torch.Tensor, kind: str) -> torch.Tensor:
    block = KINDS[kind]
    out = torch.empty(len(raw), raw.shape[1] // block.bytes * block.values)
    reference.dequantise(raw, kind, out)
    return out


def _scale(raw: torch.Tensor, kind: str, by: float) -> None:
    for at, share in SCALES[kind]:
        scale = torch.tensor([by * share], dtype=torch.float16).view(torch.uint8)
        raw[:, :, at : at + 2] = scale.to(raw.device)


@functools.cache
def _deviation(kind: str) -> float:
    """Of values under scales of one."""
    drawn = torch.Generator().manual_seed(0)
    raw = torch.randint(256, (64, 16, KINDS[kind].bytes), generator=drawn, dtype=torch.uint8)
    _scale(raw, kind, 1.0)
    return float(values(raw.view(64, -1), kind).std())
