"""Builds the frozen weights of one model: by the format of each tensor, or, if that has no products, dequantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from graftune.kernels import launch
from graftune.model.frozen.interface import Frozen, Packed, RowSource, loaded
from graftune.model.frozen.mapped import Mapped
from graftune.model.frozen.scratch import Scratch, Table, Unpacked
from graftune.model.frozen.weight_format import WeightFormat


@dataclass
class WeightBuilder:
    device: torch.device
    compute: torch.dtype
    scratch_values: int  # size of the scratch, if one is needed
    products: Sequence[tuple[int, int, int]] = ()  # (out, in, adapter columns) of all projections
    rank: int = 0  # of the adapters
    dropout: float = 0.0  # of the adapters
    option: str = ""  # of the format (weight_format.Option)
    fetched: bool = False  # blocks share their memory (model/bundles.py)
    workspaces: dict[str, Any] = field(default_factory=dict)  # buffers that the weights of a format share, by its name

    @cached_property
    def augments(self) -> bool:
        return launch.augments(self.device)

    @cached_property
    def scratch(self) -> Scratch:
        """Allocated for the first weight that needs it, and shared by all."""
        return Scratch(self.scratch_values, self.device, self.compute)

    def weight(
        self,
        sources: Sequence[RowSource],
        formats: Sequence[WeightFormat],
        adapter_columns: int = 0,
        *,
        as_stored: bool = False,
    ) -> Frozen:
        """One weight whose rows are those of all sources, each in its format. `as_stored`: the formats are those of the
        file, and a CPU then leaves the tensors in the file."""
        in_file = as_stored and not self.augments
        if in_file and not self.fetched:
            return Mapped([loaded(source) for source in sources], self.device, self.compute)
        if not in_file and len(set(formats)) == 1:
            weight = formats[0].weight(sources, self, adapter_columns)
            if weight is not None:
                return weight
        if not self.augments:  # dequantised by pieces
            packed = [form.pack(source, self.device) for form, source in zip(formats, sources, strict=True)]
            return Mapped(packed, self.device, self.compute)
        members: list[Packed] = []
        for form, group in groupby(zip(formats, sources, strict=True), lambda pair: pair[0]):
            members += form.pack_all([source for _, source in group], self.device)
        return self._dequantised(members, adapter_columns)

    def _dequantised(self, members: Sequence[Packed], adapter_columns: int) -> Frozen:
        """A weight on a GPU that each product dequantises into the scratch, as a whole or, of a table, by pieces."""
        rows, width = sum(member.shape[0] for member in members), members[0].shape[1]
        if Scratch.size(rows, width, adapter_columns) <= self.scratch_values:
            return Unpacked(members, self.scratch, adapter_columns)
        assert len(members) == 1 and not adapter_columns, "the scratch holds every projection"
        return Table(members[0], self.scratch)
