"""Bases and data sets without files, for benchmarks and tests: random weights of a given shape, drawn on the device,
and examples in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers
import torch

from graftune.batch import Example
from graftune.data.dataset import Dataset
from graftune.data.encoded import Examples
from graftune.data.kind import ANSWERS, DataKind
from graftune.data.summary import Summary
from graftune.data.writer import NewExample, StoreWriter
from graftune.model.spec import ModelSpec
from graftune.tokenizer import Tokenizer
from graftune.weights.base import Base, tensor_shapes

STD = 0.02


@dataclass(frozen=True)
class RandomRows:
    """Gaussian rows, or ones for a vector; drawn when they are read."""

    shape: tuple[int, ...]
    device: torch.device
    dtype_name: str = "random"
    raw = None

    @property
    def nbytes(self) -> int:
        return 0

    def on(self, device: torch.device) -> RandomRows:
        """For a plan, which draws them without memory."""
        return replace(self, device=device)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.randn(stop - start, *self.shape[1:], device=self.device).mul_(STD)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.read(0, len(ids))

    def values(self) -> torch.Tensor:
        return torch.ones(self.shape, device=self.device)


def random_base(spec: ModelSpec, device: torch.device) -> Base:
    """The base; its tokenizer has one word, since tokens are drawn as numbers."""
    tensors = {name: RandomRows(shape, device) for name, shape in tensor_shapes(spec)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"unknown": 0}, unk_token="unknown"))
    return Base("random", Path("random"), "random", spec, Tokenizer(words), tensors)


def dataset_of(
    examples: Sequence[Example],
    prompts: Sequence[str] = (),
    references: Sequence[str] = (),
    path: str = "",
    kind: DataKind = ANSWERS,
) -> Dataset:
    """From examples in memory; `kind` says what their records are."""
    none = [""] * len(examples)
    writer = StoreWriter(1 + max((max(e.tokens, default=0) for e in examples), default=0))
    texts = zip(examples, prompts or none, references or none, strict=True)
    writer.add([NewExample(example, ask, answer, []) for example, ask, answer in texts])
    store = writer.in_memory(kind=kind.name)
    return Dataset(Examples(store), Summary(), "", path).subset(range(len(examples)))
