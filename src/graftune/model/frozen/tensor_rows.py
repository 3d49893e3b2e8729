"""A tensor in memory as a row source, and the names of its dtype in files."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graftune.kernels.gguf_dequant.reference import PLAIN

DTYPES = PLAIN  # by their names in safetensors and GGUF files
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorRows:
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype_name(self) -> str:
        return NAMES[self.tensor.dtype]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tensor.index_select(0, ids.to(self.tensor.device))

    def values(self) -> torch.Tensor:
        return self.tensor
