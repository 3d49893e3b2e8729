"""Weights that products read in place: frozen ones in a float dtype, and those that train."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any, Self

import torch

from graftune.arithmetic import ceil_div
from graftune.kernels import matmul
from graftune.kernels.augmented_weight import Adapters
from graftune.kernels.lora_linear import Copy, add_product_, members
from graftune.model.bundles import MoveTensor
from graftune.model.frozen.interface import Augmented, RowSource, row_stride
from graftune.model.frozen.mapped import few_read, fill

PAGE = 2 << 20
HUGE_PAGES = 14  # MADV_HUGEPAGE
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Dense(Augmented):
    """A resident weight, as a rule in the compute dtype, with `adapter_columns` columns beside it and as many rows
    below it, zero at first. Adapters stay there from update to update."""

    def __init__(
        self,
        rows: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        compute: torch.dtype,
        adapter_columns: int = 0,
    ):
        """Allocates memory for the weight; adapter columns and rows are zero."""
        self.out_features, self.in_features, self.compute, self.adapter_columns = rows, width, compute, adapter_columns
        self.kind = KINDS[dtype]
        self.whole = _in_large_pages(
            torch.empty(rows + adapter_columns, row_stride(width, adapter_columns), dtype=dtype, device=device)
        )
        self.storage = self.whole[:, : width + adapter_columns]
        self.storage[rows:].zero_()
        self.storage[:, width:].zero_()

    @classmethod
    def of(
        cls,
        sources: Sequence[RowSource],
        device: torch.device,
        dtype: torch.dtype,
        compute: torch.dtype,
        adapter_columns: int = 0,
    ) -> Self:
        """Reads a weight straight from the sources, a few rows at a time: peak memory is the weight and one piece."""
        rows, width = sum(s.shape[0] for s in sources), sources[0].shape[1]
        dense = cls(rows, width, device, dtype, compute, adapter_columns)
        at = 0
        for source, is_read in few_read(sources):
            if is_read:
                fill(dense.weight[at : at + source.shape[0]], source)
            at += source.shape[0]
        return dense

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes

    def place_adapters(self, adapters: Adapters) -> list[Copy]:
        below = Copy(adapters.down, self.below[: len(adapters.down)], 1.0)
        places = members(adapters.columns, adapters.up.shape[1])
        return [
            below,
            *(Copy(adapters.up[rows], self.beside[columns, ranks], adapters.scale) for columns, rows, ranks in places),
        ]

    def matmul(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return matmul.mm(x, self._as(x.dtype).t(), out)

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return matmul.mm(grad, self._as(grad.dtype))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids).to(self.compute)

    def _as(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in the product's dtype: itself, or (bf16 weights on a CPU without bf16 units) a cast copy."""
        return self.weight if self.storage.dtype == dtype else self.weight.to(dtype)


class Fetched(Dense):
    """A dense weight in a buffer that other blocks use too (model/bundles.py): they overwrite the columns beside it and
    the rows below it, so the adapters are written there for each product."""

    def move(self, place: MoveTensor) -> None:
        self.whole = place(self.whole)
        self.storage = self.whole[:, : self.in_features + self.adapter_columns]

    def place_adapters(self, adapters: Adapters) -> list[Copy]:
        return Augmented.place_adapters(self, adapters)


class Trained:
    """A weight that trains: its copy in the compute dtype and its fp32 gradient are views into the arena."""

    kind = "trained"

    def __init__(self, weight: torch.Tensor, grad: torch.Tensor):
        self.weight, self.grad = weight, grad
        self.out_features, self.in_features = weight.shape

    @property
    def nbytes(self) -> int:
        return 0  # the arena counts it

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return matmul.mm(x, self.weight.t())

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return matmul.mm(grad, self.weight)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids)

    def accumulate_grad(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Adds dW = dY' x in fp32."""
        add_product_(self.grad, grad.t(), x)

    def accumulate_row_grads(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds the gradient of a lookup."""
        self.grad.index_add_(0, ids, grad.float())


def _in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Asks Linux for pages of 2 MiB for a large CPU tensor that is about to be filled; returns the tensor.

    A fresh allocation has no memory yet: the first touch of every 4 KiB page goes through the kernel, and while a
    model is loaded that takes longer than copying it does. With pages of 2 MiB it happens 512 times less often
    (measured: 2.3 GB/s became 5.9 out of the page cache, on one core), and products need fewer entries of the page
    table. Only whole large pages within the tensor are asked for. Where the kernel ignores this advice, everything
    works as before."""
    if tensor.device.type == "cpu" and tensor.nbytes >= 2 * PAGE and (madvise := _madvise()) is not None:
        start = ceil_div(tensor.data_ptr(), PAGE) * PAGE
        stop = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
        madvise(start, stop - start, HUGE_PAGES)
    return tensor


@functools.cache
def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
