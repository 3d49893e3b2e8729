"""The interface of a weight format: how a frozen weight is read, stored, dequantised, multiplied, planned and exported.

A format is one object in one file of formats/; `formats.FORMATS` is the table by name. The loader asks the table for
the format of each tensor, so that tensors of one model, and even the members of one product, may differ in format.

    read         `reads` and `assemble` recognise a checkpoint and put the tensors together that make up one weight;
                 `claims` says whether a tensor of a file is stored in this format
    stored       `pack` reads a tensor into memory on the device
    dequantised  by what `pack` returns (interface.Packed)
    multiplied   `weight` returns a frozen weight with products of its own, or None: then it is dequantised for each
                 product (builder.py); `projection` joins it with its adapters; `experts`: whether experts may use it
    planned      `value_bytes`, and `options`, which trade memory for time
    exported     `merged_dtype`, in which a merged model stores such a tensor
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from graftune.model.frozen.interface import Frozen, Packed, RowSource

if TYPE_CHECKING:
    from graftune.model.arena import LoraGroup
    from graftune.model.frozen.builder import WeightBuilder
    from graftune.model.projection import Projection


class Option(NamedTuple):
    """One trade of memory for time. The results are the same under each option, bit for bit."""

    name: str = ""  # "": the option that takes the least memory
    why: str = ""  # added to the sentence that says how the weights are held


class WeightFormat(ABC):
    name: str  # the value of the setting base_dtype that selects it, if `by_name`
    by_name: bool = True  # whether base_dtype may name it; if not, "keep" leaves tensors in it
    quantises: bool = False  # values are rounded while they are read: embedding and head keep the compute dtype
    experts: bool = True  # whether the stacked weights of experts can be multiplied in it
    merged_dtype: torch.dtype = torch.bfloat16  # what an exported model stores such a tensor in
    dequantised: bool = True  # for each product; False: products read the stored values
    value_bytes: float = 0.0  # of one value of a projection; 0: depends on the file's tensors

    def reads(self, quantisation: Mapping[str, Any]) -> bool:
        """Whether it reads checkpoints with this `quantization_config`."""
        return False

    def assemble(
        self, tensors: Mapping[str, RowSource], folder: Path
    ) -> tuple[dict[str, RowSource], dict[str, RowSource]]:
        """Splits a checkpoint's tensors into weights of this format, each put together, and all the others."""
        return {}, dict(tensors)

    def claims(self, source: RowSource) -> bool:
        """Whether a tensor of a file is stored in this format, and may stay so."""
        return False

    def has_kernel(self, source: RowSource) -> bool:
        """Whether a GPU can dequantise this tensor, which the format claims."""
        return True

    def check(self, device: torch.device, compute: torch.dtype) -> None:
        """Refuses a device that the format does not work on."""
        return

    def options(self, sources: Iterable[RowSource], parameters: int, free: int) -> tuple[Option, ...]:
        """The options worth trying with `free` bytes, the best first; the last takes the least memory."""
        return (Option(),)

    @abstractmethod
    def pack(self, source: RowSource, device: torch.device) -> Packed:
        """Reads the tensor to the device, in this format. Beside the result only a few rows exist at a time."""

    def pack_all(self, sources: Sequence[RowSource], device: torch.device) -> Sequence[Packed]:
        """All members of one weight, in order. Several sources may become one member."""
        return [self.pack(source, device) for source in sources]

    def weight(self, sources: Sequence[RowSource], builder: WeightBuilder, adapter_columns: int) -> Frozen | None:
        """One weight out of the rows of all sources. None: the builder dequantises it for each product."""
        return None

    def projection(self, weight: Frozen, lora: LoraGroup | None, mask_id: int, name: str) -> Projection:
        """The weight with its adapters."""
        from graftune.model.projection import Projection

        return Projection(weight, lora, mask_id, name)
