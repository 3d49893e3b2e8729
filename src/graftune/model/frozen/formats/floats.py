"""Floats: resident in the compute dtype, or on a GPU in another float dtype, cast for each product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from graftune.kernels import gguf_dequant
from graftune.model.bundles import MoveTensor
from graftune.model.frozen.builder import WeightBuilder
from graftune.model.frozen.interface import Frozen, RowSource, TensorRows, loaded
from graftune.model.frozen.mapped import fill
from graftune.model.frozen.resident import KINDS, Dense, Fetched
from graftune.model.frozen.weight_format import WeightFormat
from graftune.runtime import DTYPES


class FloatRows(TensorRows):
    """Floats in another dtype than the compute dtype: each product casts them."""

    @property
    def dtype_name(self) -> str:
        return KINDS[self.tensor.dtype]

    def unpack(self, out: torch.Tensor, start: int = 0, used: torch.Tensor | None = None) -> None:
        gguf_dequant.cast(self.tensor[start : start + len(out)], out)

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.tensor.index_select(0, ids).to(dtype)

    def moved(self, place: MoveTensor) -> FloatRows:
        return replace(self, tensor=place(self.tensor))

    def numbers(self) -> Iterator[torch.Tensor]:
        yield self.tensor


class FloatFormat(WeightFormat):
    dequantised = False

    def __init__(self, name: str, stored: str):
        self.name, self.stored, self.dtype = name, stored, DTYPES[name]
        self.merged_dtype, self.value_bytes = self.dtype, self.dtype.itemsize

    def claims(self, source: RowSource) -> bool:
        return source.dtype_name == self.stored

    def pack(self, source: RowSource, device: torch.device) -> FloatRows:
        tensor = torch.empty(source.shape, dtype=self.dtype, device=device)
        fill(tensor, loaded(source))
        return FloatRows(tensor)

    def weight(self, sources: Sequence[RowSource], builder: WeightBuilder, adapter_columns: int) -> Frozen | None:
        if builder.augments and self.dtype != builder.compute:
            return None
        kind = Fetched if builder.fetched else Dense
        found = [loaded(source) for source in sources]
        return kind.of(found, builder.device, self.dtype, builder.compute, adapter_columns)


FORMATS = (FloatFormat("bf16", "BF16"), FloatFormat("fp16", "F16"), FloatFormat("fp32", "F32"))
