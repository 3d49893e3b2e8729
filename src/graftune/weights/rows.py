"""Where files hold other numbers than the engine computes with: the order of Q's and K's rows, and Gemma's norms.

Hugging Face lays a head out as two halves that rope turns against each other; the
llama architecture of GGUF and its kin interleave the halves, so that rope turns neighbours. Others keep the halves.

The same order holds for an adapter's B, whose rows are the weight's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graftune.model.frozen import RowSource
from graftune.model.spec import ModelSpec

INTERLEAVED = ("llama", "granite", "smollm3")  # architectures of GGUF


def heads_of(spec: ModelSpec, name: str) -> tuple[int, int] | None:
    """How many heads the rows of a tensor are divided into and how wide each is, if rope turns them."""
    part, inner = spec.part_of(name)
    return None if part is None else part.rotated.get(inner.partition(".")[0])


def gguf_order(heads: int, head_width: int) -> torch.Tensor:
    """Row i of the GGUF is row order[i] of Hugging Face's."""
    order = torch.arange(heads * head_width).view(heads, 2, head_width // 2)
    return order.transpose(1, 2).reshape(-1)


def hf_order(heads: int, head_width: int) -> torch.Tensor:
    """The other way round."""
    return gguf_order(heads, head_width).argsort()


@dataclass(frozen=True)
class Over:
    """A source of rows made of another: what it does not say is the other's, bytes by its share of the values."""

    source: RowSource

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype_name(self) -> str:
        return self.source.dtype_name

    @property
    def nbytes(self) -> int:
        return self.source.nbytes * math.prod(self.shape) // max(1, math.prod(self.source.shape))


@dataclass(frozen=True)
class Reordered(Over):
    """Another source with its rows in another order (a RowSource)."""

    order: torch.Tensor

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows change places within a head: those of a few heads are read, not the whole weight."""
        ids = self.order[start:stop]
        first, last = int(ids.min()), int(ids.max())
        return self.source.read(first, last + 1)[ids - first]

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.source.gather(self.order[ids.cpu()])

    def values(self) -> torch.Tensor:
        return self.source.values()[self.order]


@dataclass(frozen=True)
class Shifted(Over):
    """A vector with a number added (a RowSource). Gemma's checkpoints hold norm weights less one; here, and in GGUF, a
    weight is what the normed value is multiplied by."""

    by: float

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.source.read(start, stop).float() + self.by

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.source.gather(ids).float() + self.by

    def values(self) -> torch.Tensor:
        return self.source.values().float() + self.by


@dataclass(frozen=True)
class Reshaped(Over):
    """Rows in another shape (a RowSource). GGUF leaves out the middle dimension of a depthwise convolution's taps."""

    to: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.to

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.source.read(start, stop).reshape(-1, *self.to[1:])

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.source.gather(ids).reshape(-1, *self.to[1:])

    def values(self) -> torch.Tensor:
        return self.source.values().reshape(self.to)


def shapes_of(spec: ModelSpec, name: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Of a tensor that a part has beside its projections: its shape here, and in a GGUF, which leaves out dimensions of
    one (a depthwise convolution's taps are [D, 1, K] in Hugging Face's folders). None where they are the same."""
    part, inner = spec.part_of(name)
    shape = part.tensors.get(inner, ()) if part is not None else ()
    return (shape, tuple(size for size in shape if size != 1)) if 1 in shape else None


def shift_of(spec: ModelSpec, name: str) -> float:
    """What Hugging Face's checkpoints leave off a tensor: of a norm what the family does, unless its part says not."""
    if not spec.norm_shift or not name.endswith("norm.weight"):
        return 0.0
    part, inner = spec.part_of(name)
    return 0.0 if part is not None and inner.removesuffix(".weight") in part.unshifted_norms else spec.norm_shift


def from_hf_norms(tensors: Mapping[str, RowSource], spec: ModelSpec) -> dict[str, RowSource]:
    """Tensors by our names, as a checkpoint of Hugging Face holds them -> as the engine computes with them."""
    return _shifted(tensors, spec, 1)


def to_hf_norms(tensors: Mapping[str, RowSource], spec: ModelSpec) -> dict[str, RowSource]:
    return _shifted(tensors, spec, -1)


def _shifted(tensors: Mapping[str, RowSource], spec: ModelSpec, sign: int) -> dict[str, RowSource]:
    shifts = {name: sign * shift_of(spec, name) for name in tensors}
    return {name: Shifted(t, shifts[name]) if shifts[name] else t for name, t in tensors.items()}
