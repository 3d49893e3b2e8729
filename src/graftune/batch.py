"""The types that are passed from the data to the step: an example and a packed micro-batch; and `BatchLayout`, which
holds a loss's requirements on batches, so that the data can pack for a loss without knowing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch


@dataclass(frozen=True)
class Example:
    """A tokenised example. `supervised[i]` says whether token i is trained (predicted from those before it)."""

    tokens: list[int]
    supervised: list[bool]
    row: int = 0  # row of the source file it came from, counted from 1
    weights: list[float] | None = None  # of each token's loss, read where it is supervised; None: 1 for all
    # Examples with the same number, which follow each other, belong together: the answers of a pair. -1: it is alone.
    group: int = -1
    # Numbers from the data that a loss reads, by name: one for the example, or one per token.
    numbers: Mapping[str, float | list[float]] = field(default_factory=dict)
    shortened: bool = False  # whether a part of its prompt was left out to fit max_seq_len

    @property
    def response_tokens(self) -> int:
        """Targets this example contributes; its first token has nothing before it and cannot be one."""
        return self.supervised.count(True) - sum(self.supervised[:1])

    @property
    def response_weight(self) -> float:
        """The sum of its targets' weights."""
        if self.weights is None:
            return float(self.response_tokens)
        return sum(weight for weight, on in zip(self.weights[1:], self.supervised[1:], strict=True) if on)


@dataclass(frozen=True)
class Field:
    """A tensor that a loss adds to the batch: a number per label, or a number per document.

    `read` gives the numbers of some examples: one per token, laid end to end, of which packing keeps those of the
    labels; or one per example. In a batch of fixed shape the tail is filled with `padding`.
    """

    name: str
    dtype: torch.dtype
    read: Callable[[Sequence[Example]], np.ndarray]
    per: Literal["label", "document"] = "label"
    padding: float = 0

    def length(self, documents: int, rows: int) -> int:
        return rows if self.per == "label" else documents


@dataclass(frozen=True)
class Ahead:
    """Other examples, made of all those of an optimizer step, whose sums the loss needs before its micro-batches."""

    make: Callable[[Sequence[Example]], Sequence[Example]]
    longest: Callable[[Sequence[Example]], int]  # an upper bound on the tokens of one, made of any of these examples
    fields: tuple[Field, ...]  # of their batches


@dataclass(frozen=True)
class BatchLayout:
    """A loss's requirements on batches. The default is cross-entropy's: labels alone, divided by their number."""

    fields: tuple[Field, ...] = ()
    # What each example adds to the divisor of its optimizer step. None: its response tokens.
    shares: Callable[[Sequence[Example]], np.ndarray] | None = None
    # A number per example: those with the same number, which follow each other, stay together in one micro-batch. Set
    # from the data where a loss takes data of groups.
    groups: Callable[[Sequence[Example]], np.ndarray] | None = None
    ahead: Ahead | None = None


PLAIN = BatchLayout()


@dataclass
class PackedBatch:
    """Examples laid end to end, without padding between them and without attention across them.

    Shapes: T tokens, S documents (+1), R rows whose hidden state predicts a response token. On a captured step all
    three are capacities and the tails are padding (token 0 in a document of its own, row 0 with label -1); eagerly
    they are exact. `lengths` repeats cu_seqlens on the host for the attention path that loops over documents.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, from 0 in every document
    cu_seqlens: torch.Tensor  # [S+1] int32
    rows: torch.Tensor  # [R] int64, position in T of the state that predicts labels[r]
    labels: torch.Tensor  # [R] int64, -1 where the row is padding
    lengths: tuple[int, ...]  # document lengths; they add up to T
    response_tokens: int  # labels that are not -1
    # What this batch adds to the divisor of its optimizer step; unless given, its response tokens.
    divisor: float = None  # type: ignore[assignment]
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the fields of the loss's layout, by name
    # Of the first micro-batch of a step, if the layout has `ahead`: this rank's batches of those examples.
    ahead: tuple[PackedBatch, ...] | None = None

    def __post_init__(self) -> None:
        if self.divisor is None:
            self.divisor = float(self.response_tokens)

    def to(self, device: torch.device) -> PackedBatch:
        if self.tokens.device == device:
            return self
        names = ("tokens", "positions", "cu_seqlens", "rows", "labels")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        extra = {name: value.to(device, non_blocking=True) for name, value in self.extra.items()}
        return replace(self, **moved, extra=extra)
