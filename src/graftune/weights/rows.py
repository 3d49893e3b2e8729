"""The order of Q's and K's rows. Hugging Face lays a head out as two halves that rope turns against each other; the
llama architecture of GGUF interleaves the halves, so that rope turns neighbours. Other architectures keep the halves.

The same order holds for an adapter's B, whose rows are the weight's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graftune.model.frozen import RowSource
from graftune.model.spec import ModelSpec

INTERLEAVED = ("llama",)  # architectures of GGUF


def heads_of(spec: ModelSpec, name: str) -> int | None:
    """How many heads the rows of a tensor are divided into, if rope turns them."""
    if ".q_proj." in name:
        return spec.heads
    return spec.kv_heads if ".k_proj." in name else None


def gguf_order(heads: int, head_width: int) -> torch.Tensor:
    """Row i of the GGUF is row order[i] of Hugging Face's."""
    order = torch.arange(heads * head_width).view(heads, 2, head_width // 2)
    return order.transpose(1, 2).reshape(-1)


def hf_order(heads: int, head_width: int) -> torch.Tensor:
    """The other way round."""
    return gguf_order(heads, head_width).argsort()


@dataclass(frozen=True)
class Reordered:
    """Another source with its rows in another order (a RowSource)."""

    source: RowSource
    order: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype_name(self) -> str:
        return self.source.dtype_name

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows change places within a head: those of a few heads are read, not the whole weight."""
        ids = self.order[start:stop]
        first, last = int(ids.min()), int(ids.max())
        return self.source.read(first, last + 1)[ids - first]

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.source.gather(self.order[ids.cpu()])

    def values(self) -> torch.Tensor:
        return self.source.values()[self.order]
