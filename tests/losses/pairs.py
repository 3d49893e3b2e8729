"""Preference data and its loss, as docs/extending.md says: a kind and a class, and nothing else is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from graftune.batch import BatchLayout, Example, Field, PackedBatch
from graftune.data.encoded import lengths_of, numbers_of
from graftune.data.kind import DataKind
from graftune.data.record import Record, to_record
from graftune.data.row import Refusal
from graftune.losses import LogProbLoss
from tests.support import tiny

BETA = 0.4


@dataclass(frozen=True)
class PairKind(DataKind):
    def records(self, row: dict[str, Any]) -> list[Record]:
        for name in ("chosen", "rejected"):
            if not row.get(name):
                raise Refusal("an incomplete group", f"there is no {name} answer")
        return [to_record({"prompt": row["prompt"], "response": row[name]}) for name in ("chosen", "rejected")]


PAIRS = PairKind("pairs of answers", members=2)
RATED_PAIRS = PairKind("rated pairs", members=2, numbers=("margin",))


def document_of_each_token(held: Sequence[Example]) -> np.ndarray:
    return np.repeat(np.arange(len(held)), lengths_of(held))


class Dpo(LogProbLoss):
    """The chosen answer first. -log sigmoid(beta (moved(chosen) - moved(rejected)) - margin), the margin the data's."""

    figures = ("accuracy",)
    data: DataKind = PAIRS

    def __init__(self, reference: Literal["base", "start"] = "base", data: DataKind = PAIRS):
        self.reference, self.data = reference, data

    def fields_of(self, examples: Sequence[Example]) -> BatchLayout:
        return BatchLayout(
            fields=(
                Field("document", torch.int64, document_of_each_token),
                Field("real", torch.float32, lambda held: np.ones(len(held)), per="document"),
                Field("margin", torch.float32, lambda held: numbers_of(held, "margin", 0.0), per="document"),
            ),
            shares=lambda held: np.full(len(held), 0.5),
        )

    def of_log_probs(
        self, log_probs: torch.Tensor, reference: torch.Tensor | None, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert reference is not None
        documents = 2 * (len(batch.extra["real"]) // 2)
        real, document = batch.extra["real"][:documents:2], batch.extra["document"]
        moved = log_probs.new_zeros(documents).index_add(0, document, log_probs - reference)
        margins = BETA * (moved[0::2] - moved[1::2]) - batch.extra["margin"][:documents:2]
        return (real * F.softplus(-margins)).sum(), (real * (margins > 0)).sum().unsqueeze(0)


def pairs(count: int) -> list[Example]:
    made = []
    for pair in range(count):
        prompt = torch.randint(3, tiny.VOCAB, (4,)).tolist()
        for length in torch.randint(2, 12, (2,)).tolist():
            tokens = prompt + torch.randint(3, tiny.VOCAB, (length,)).tolist()
            made.append(Example(tokens, [False] * 4 + [True] * length, group=pair, numbers={"margin": 0.1 * pair}))
    return made
