"""Prequantised checkpoints as bitsandbytes writes them: several tensors of a safetensors folder are one NF4 weight.

    q_proj.weight                                   codes, two a byte
    q_proj.weight.absmax, .nested_absmax            scales and, of those, scales
    q_proj.weight.quant_map, .nested_quant_map      what the codes mean
    q_proj.weight.quant_state.bitsandbytes__nf4     JSON: shape, dtype, block sizes, offset

Opening reads the JSON alone; bitsandbytes itself is not needed. What it left unquantised is read as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from graftune.errors import GraftuneError
from graftune.kernels import nf4
from graftune.model.frozen import Nf4Rows, RowSource
from graftune.weights.safetensors_io import READABLE, SafetensorsTensor

PARTS = (".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")


@dataclass(frozen=True, eq=False)
class Nf4Tensor:
    """One quantised weight (a RowSource). The last one that was read stays in memory: rows are read in runs."""

    name: str
    parts: Mapping[str, SafetensorsTensor]
    shape: tuple[int, ...]
    dtype_name: str = "nf4"

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def load(self, device: torch.device) -> Nf4Rows:
        return Nf4Rows(nf4.from_checkpoint(_Tensors(self.parts), self.name).to(device))

    def read(self, start: int, stop: int) -> torch.Tensor:
        return _on_cpu(self).read(start, stop)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return _on_cpu(self).gather(ids.cpu())

    def values(self) -> torch.Tensor:
        return _on_cpu(self).values()


@lru_cache(maxsize=1)
def _on_cpu(tensor: Nf4Tensor) -> Nf4Rows:
    return tensor.load(torch.device("cpu"))


@dataclass(frozen=True)
class _Tensors(Mapping[str, torch.Tensor]):
    """The parts, each read when it is asked for."""

    parts: Mapping[str, SafetensorsTensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.parts[name].values()

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def assembled(tensors: Mapping[str, SafetensorsTensor], folder: Path) -> dict[str, RowSource]:
    """The folder's tensors with those that make up a quantised weight put together. Others may be floats only."""
    found: dict[str, RowSource] = {}
    taken: set[str] = set()
    for name in tensors:
        weight, mark, _ = name.partition(nf4.STATE)
        if mark:
            parts = {key: tensors[key] for key in (weight, *(weight + part for part in PARTS), name) if key in tensors}
            found[weight] = Nf4Tensor(weight, parts, nf4.checkpoint_shape(_Tensors(parts), weight))
            taken |= parts.keys()
    for name, tensor in tensors.items():
        if name in taken:
            continue
        if tensor.dtype_name not in READABLE:
            int8 = name.removesuffix("weight") + "SCB" in tensors
            raise GraftuneError(
                f"tensor {name} is {'int8 (llm_int8)' if int8 else tensor.dtype_name}",
                where=str(folder),
                fix="give an NF4 or an unquantised checkpoint" if int8 else f"give one of {', '.join(READABLE)}",
            )
        found[name] = tensor
    return found


def is_quantised(tensors: Mapping[str, RowSource]) -> bool:
    return any(isinstance(tensor, Nf4Tensor) for tensor in tensors.values())
