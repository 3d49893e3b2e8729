"""NF4: quantised here while the weights are read, or taken from a checkpoint of bitsandbytes.

Such a checkpoint stores one weight in several tensors of a safetensors folder:

    q_proj.weight                                   codes, two a byte
    q_proj.weight.absmax, .nested_absmax            scales, and the scales of the scales
    q_proj.weight.quant_map, .nested_quant_map      what the codes mean
    q_proj.weight.quant_state.bitsandbytes__nf4     JSON: shape, dtype, block sizes, offset

Opening reads the JSON alone; bitsandbytes itself is not needed. Tensors that it left unquantised stay so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graftune.arithmetic import ceil_div
from graftune.kernels import nf4
from graftune.kernels.nf4 import Nf4
from graftune.kernels.nf4.reference import BLOCK, GROUP
from graftune.model.bundles import MoveTensor
from graftune.model.frozen.interface import CheckpointWeight, RowsByReading, RowSource
from graftune.model.frozen.mapped import few_read, pieces, read_to
from graftune.model.frozen.weight_format import WeightFormat

MANY = 3  # the most members of a projection outside mixtures: q, k and v
PARTS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")


@dataclass(frozen=True)
class Nf4Rows(RowsByReading):
    """A weight in memory, in bitsandbytes' layout."""

    nf4: Nf4
    dtype_name: str = "nf4"

    @staticmethod
    def quantised(source: RowSource, device: torch.device) -> Nf4Rows:
        """Quantises a source on the device. Beside the result only a few rows exist at a time, in the file's dtype."""
        rows, width = source.shape
        dtype = source.read(0, 1).dtype
        parts = (read_to(source, start, stop, device) for start, stop in pieces(rows, width))
        return Nf4Rows(nf4.quantise_pieces(parts, source.shape, dtype))

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.nf4.shape

    @property
    def nbytes(self) -> int:
        return self.nf4.nbytes

    def unpack(self, out: torch.Tensor, start: int = 0, used: torch.Tensor | None = None) -> None:
        nf4.dequantise(self.nf4, out=out, rows=(start, start + len(out)), used=used)

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return nf4.gather(self.nf4, ids, dtype)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return nf4.dequantise(self.nf4, torch.float32, rows=(start, stop))

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return nf4.gather(self.nf4, ids, torch.float32)

    def values(self) -> torch.Tensor:
        return nf4.dequantise(self.nf4, torch.float32)

    def moved(self, place: MoveTensor) -> Nf4Rows:
        elsewhere: dict[str, Any] = {
            name: place(x) for name, x in vars(self.nf4).items() if isinstance(x, torch.Tensor)
        }
        return replace(self, nf4=replace(self.nf4, **elsewhere))

    def numbers(self) -> Iterator[torch.Tensor]:
        yield from (x for x in self.nf4.tensors.values() if x.is_floating_point())


class Nf4Tensor(CheckpointWeight):
    def load(self, device: torch.device) -> Nf4Rows:
        tensors = {name: part.values() for name, part in self.parts.items()}
        return Nf4Rows(nf4.from_checkpoint(tensors, self.name).to(device))

    def empty(self, device: torch.device) -> Nf4Rows:
        count = math.prod(self.shape)
        blocks = ceil_div(count, BLOCK)
        codes = torch.empty((count + 1) // 2, dtype=torch.uint8, device=device)
        if not any(name.endswith(".nested_absmax") for name in self.parts):
            return Nf4Rows(Nf4(self.shape, torch.bfloat16, codes, torch.empty(blocks, device=device)))
        scales = torch.empty(blocks, dtype=torch.uint8, device=device)
        groups, entries, offset = (torch.empty(n, device=device) for n in ((ceil_div(blocks, GROUP),), (256,), ()))
        return Nf4Rows(Nf4(self.shape, torch.bfloat16, codes, scales, groups, entries, offset))


class Nf4Format(WeightFormat):
    name = "nf4"
    quantises = True
    value_bytes = nf4.VALUE_BYTES

    def reads(self, quantisation: Mapping[str, Any]) -> bool:
        get = quantisation.get
        of_bnb = get("quant_method") == "bitsandbytes" and not get("load_in_8bit")
        return of_bnb and get("bnb_4bit_quant_type") == "nf4"

    def assemble(
        self, tensors: Mapping[str, RowSource], folder: Path
    ) -> tuple[dict[str, RowSource], dict[str, RowSource]]:
        found: dict[str, RowSource] = {}
        taken: set[str] = set()
        for name in tensors:
            weight, mark, _ = name.partition(nf4.STATE)
            if mark:
                keys = (weight, *(weight + part for part in PARTS), name)
                parts = {key: tensors[key] for key in keys if key in tensors}
                shape = nf4.checkpoint_shape({name: tensors[name].values()}, weight)
                found[weight] = Nf4Tensor(weight, parts, shape, "nf4")
                taken |= parts.keys()
        return found, {name: tensor for name, tensor in tensors.items() if name not in taken}

    def claims(self, source: RowSource) -> bool:
        return source.dtype_name == "nf4"

    def pack(self, source: RowSource, device: torch.device) -> Nf4Rows:
        return source.load(device) if isinstance(source, Nf4Tensor) else Nf4Rows.quantised(source, device)

    def pack_all(self, sources: Sequence[RowSource], device: torch.device) -> list[Nf4Rows]:
        """Joins the many weights of experts into one member if possible: then one launch dequantises them."""
        members: list[Nf4Rows] = []
        for source, is_read in few_read(sources):
            skipped = not is_read and source.shape == members[0].shape  # takes as much memory as the first member
            members.append(members[0].moved(torch.empty_like) if skipped else self.pack(source, device))
        together = nf4.joined([member.nf4 for member in members]) if len(members) > MANY else None
        return members if together is None else [Nf4Rows(together)]


FORMATS = (Nf4Format(),)
