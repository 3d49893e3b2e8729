"""Tensors that are never loaded and go from a base's files into an export's byte for byte.

The vision tower of a text-and-vision checkpoint is one, and so are the blocks that predict further tokens (`mtp.*`,
GGUF's `nextn_predict_layers`): other programs need them, and training the text model changes none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class CarriedTensor:
    """A tensor as bytes of a mapped file. The dtype need not be one that torch knows."""

    shape: tuple[int, ...]
    dtype_name: str
    data: np.ndarray[Any, Any]  # uint8, a view of the map: nothing is read until it is copied

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def pieces(self) -> Iterator[memoryview]:
        for start in range(0, self.nbytes, PIECE_BYTES):
            yield self.data[start : start + PIECE_BYTES].data
