"""FP8 as a way to hold a base (way.py): on GPUs that have units for it, with or without transposed codes kept."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from graftune.kernels import fp8
from graftune.model.fp8_projection import Fp8Projections
from graftune.model.frozen import RowSource
from graftune.runtime import Runtime
from graftune.weights.base import Base
from graftune.weights.fp8_io import Fp8Tensor, RowScaled
from graftune.weights.way import Option

SPARE = 1 / 8  # share of the free memory that codes may take if they are kept transposed too
BOTH = "both"  # the option that keeps the codes transposed too
ROUNDED = ", the checkpoint's block scales rounded again to row scales"
KEPT = ", its codes kept for forward and backward"


class Fp8Way:
    def check(self, runtime: Runtime) -> None:
        fp8.require(runtime.device, runtime.compute)

    def options(self, base: Base, free: int) -> tuple[Option, ...]:
        """Transposed codes are kept, instead of made in every step, where there is memory to spare: that saves 1% of a
        step's time at 8B and takes as much memory as a bf16 base."""
        rounded = ROUNDED if any(map(rounded_again, base.tensors.values())) else ""
        least = Option(why=rounded)
        if 2 * base.spec.parameters > SPARE * free:
            return (least,)
        return Option(BOTH, rounded + KEPT), least

    def projections(
        self,
        option: str,
        products: Iterable[tuple[int, int, int]],
        device: torch.device,
        compute: torch.dtype,
        *,
        dropout: float,
        fetched: bool,
    ) -> Fp8Projections:
        return Fp8Projections(products, device, compute, dropout=dropout, both=option == BOTH, fetched=fetched)


def rounded_again(source: RowSource) -> bool:
    """Whether an FP8 checkpoint's tensor has scales of blocks, which our products do not know."""
    return isinstance(source, Fp8Tensor) and not isinstance(source, RowScaled)
