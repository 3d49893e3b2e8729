"""MXFP4: floats of four bits with a power of two for each 32, as gpt-oss stores its experts. They stay as they are.

A folder stores the weights [E, out, in] of all experts in two tensors of bytes, a GGUF in blocks of 17 bytes:

    gate_up_proj_blocks [E, out, in / 32, 16]     byte j: the codes of values 2j (low half) and 2j + 1
    gate_up_proj_scales [E, out, in / 32]         the exponents
    a GGUF's block                                the exponent, then byte j: the codes of values j (low half) and j + 16

In memory they are GGUF's blocks, so that kernels, plan and exports have one layout. Converting either into the other
moves halves of bytes and loses no bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.kernels import gguf_dequant
from graftune.model.frozen.formats.gguf import GgufFormat
from graftune.model.frozen.interface import RowsByReading, RowSource

KIND = "MXFP4"  # GGUF's name
VALUES, BYTES = 32, 16  # of a block, without its exponent
BLOCKS, SCALES = "_blocks", "_scales"
_FLOATS = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
QUANTISATION = {"quant_method": "mxfp4", "modules_to_not_convert": list(_FLOATS)}  # of a configuration


def to_gguf(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A folder's codes [rows, blocks, 16] and exponents [rows, blocks] as a GGUF's blocks [rows, 17 blocks]."""
    first, second = codes.chunk(2, -1)
    halves = torch.stack(((first & 15) | (second << 4), (first >> 4) | (second & 240)), -1).flatten(-2)
    return torch.cat((scales[..., None], halves), -1).flatten(1)


def to_folder(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse of `to_gguf`."""
    blocks = blocks.unflatten(1, (-1, 1 + BYTES))
    low, high = blocks[..., 1::2], blocks[..., 2::2]
    codes = torch.cat(((low & 15) | (high << 4), (low >> 4) | (high & 240)), -1)
    return codes, blocks[..., 0].contiguous()


@dataclass(frozen=True)
class Mxfp4Tensor(RowsByReading):
    """The weights of all experts in a folder, [E, out, in]; a row is an expert."""

    codes: RowSource  # [E, out, in / 32, 16]
    scales: RowSource  # [E, out, in / 32]
    dtype_name: str = KIND

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        experts, out, blocks = self.scales.shape
        return experts, out, blocks * VALUES

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def raw(self, start: int, stop: int) -> torch.Tensor:
        """The GGUF blocks of experts `start` to `stop`, their rows one after the other: [rows, bytes of a row]."""
        codes, scales = self.codes.read(start, stop), self.scales.read(start, stop)
        return to_gguf(codes.flatten(0, 1), scales.flatten(0, 1))

    def read(self, start: int, stop: int) -> torch.Tensor:
        _, out, width = self.shape
        values = torch.empty((stop - start) * out, width)
        gguf_dequant.dequantise(self.raw(start, stop), KIND, values)
        return values.view(-1, out, width)


class Mxfp4Format(GgufFormat):
    """The settings `keep` and `auto` leave the experts in this format."""

    name = "mxfp4"

    def reads(self, quantisation: Mapping[str, Any]) -> bool:
        return quantisation.get("quant_method") == "mxfp4"

    def assemble(
        self, tensors: Mapping[str, RowSource], folder: Path
    ) -> tuple[dict[str, RowSource], dict[str, RowSource]]:
        rest, found = dict(tensors), dict[str, RowSource]()
        for name, codes in tensors.items():
            stem = name.removesuffix(BLOCKS)
            if name == stem or codes.dtype_name != "U8" or stem + SCALES not in tensors:
                continue
            scales = tensors[stem + SCALES]
            if len(codes.shape) != 4 or tuple(codes.shape) != (*scales.shape, BYTES) or scales.dtype_name != "U8":
                raise GraftuneError(
                    f"{name} is {list(codes.shape)} and its scales are {list(scales.shape)}",
                    where=str(folder),
                    fix="download the model again",
                )
            found[stem] = Mxfp4Tensor(codes, scales)
            del rest[name], rest[stem + SCALES]
        return found, rest

    def claims(self, source: RowSource) -> bool:
        return source.dtype_name == KIND and source.raw is not None


FORMATS = (Mxfp4Format(),)
