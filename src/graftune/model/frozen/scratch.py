"""Weights in fewer bits, on a GPU: dequantised for each product into one buffer that all layers share.

The buffer fits the largest weight of the model with its adapters. Each weight is a matrix of its own shape at the start
of the buffer: address and row stride never change, so products are tuned and captured as for a resident weight. Every
product overwrites what it reads there: it dequantises the weight and then writes the adapter columns or rows.
(Dequantising inside the product was rejected: at the row counts of training a product does hundreds of operations for
each value it reads, and a library's product after a pass at memory speed loses a few percent; a product of our own
would lose more.)

Only the stream of the products may use the buffer, one product after the other. The other streams of model/context.py
read activations and adapters, never a weight, so nothing else has to wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from graftune import spans
from graftune.model.bundles import MoveTensor
from graftune.model.frozen.interface import Augmented, Packed, row_stride
from graftune.model.frozen.mapped import ByPieces

ROWS = 256  # a table's pieces are whole multiples of it: whole tiles of the product


class Scratch:
    def __init__(self, values: int, device: torch.device, dtype: torch.dtype):
        self.flat = torch.empty(values, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @staticmethod
    def size(rows: int, width: int, adapter_columns: int = 0) -> int:
        """Values that a weight takes with adapters beside and below it."""
        return (rows + adapter_columns) * row_stride(width, adapter_columns)

    def matrix(self, rows: int, width: int, adapter_columns: int = 0) -> torch.Tensor:
        """[rows + adapter_columns, width + adapter_columns]"""
        whole = self.flat[: self.size(rows, width, adapter_columns)].view(rows + adapter_columns, -1)
        return whole[:, : width + adapter_columns]


class Unpacked(Augmented):
    """A packed weight that every product dequantises into the scratch."""

    def __init__(self, members: Sequence[Packed], scratch: Scratch, adapter_columns: int = 0):
        self.members, self.adapter_columns = list(members), adapter_columns
        self.out_features, self.in_features = sum(m.shape[0] for m in members), members[0].shape[1]
        self.kind = "+".join(dict.fromkeys(m.dtype_name for m in members))
        self.storage = scratch.matrix(self.out_features, self.in_features, adapter_columns)

    @property
    def nbytes(self) -> int:
        """The packed members; the scratch is shared."""
        return sum(m.nbytes for m in self.members)

    @property
    def shared(self) -> tuple[torch.Tensor, ...]:
        return (self.storage,)

    def move(self, place: MoveTensor) -> None:
        self.members = [member.moved(place) for member in self.members]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        assert len(self.members) == 1, "lookups are made in a single table"
        return self.members[0].lookup(ids, self.storage.dtype)

    def dense(self, used: torch.Tensor | None = None) -> torch.Tensor:
        """Dequantises the weight into the scratch; the adapters beside and below it are left as they are."""
        at, weight = 0, self.weight
        if len(self.members) > 1:
            used = None
        for member in self.members:
            member.unpack(weight[at : at + member.shape[0]], used=used)
            at += member.shape[0]
        return weight


class Table(ByPieces):
    """An embedding or head too large for the scratch: a lookup dequantises its rows, and a product takes as many rows
    at a time as fit."""

    def __init__(self, packed: Packed, scratch: Scratch):
        self.members, self.scratch = [packed], scratch
        self.out_features, self.in_features = packed.shape
        self.kind = packed.dtype_name
        fits = len(scratch.flat) // self.in_features
        self.step = fits // ROWS * ROWS or fits
        assert self.step > 0

    @property
    def nbytes(self) -> int:
        return self.members[0].nbytes

    def move(self, place: MoveTensor) -> None:
        self.members = [self.members[0].moved(place)]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.members[0].lookup(ids, self.scratch.dtype)

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for start in range(0, self.out_features, self.step):
            stop = min(start + self.step, self.out_features)
            weight = self.scratch.matrix(stop - start, self.in_features)
            self.members[0].unpack(weight, start)
            spans.operation(spans.PRODUCT)
            yield slice(start, stop), weight
