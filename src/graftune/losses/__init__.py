"""The losses, one file each, and the choice between them (`choose`). A user's own loss declares with `DataKind`,
`BatchLayout` and `Field` which data it takes and what its batches contain."""

from __future__ import annotations

from graftune.batch import BatchLayout, Example, Field, PackedBatch
from graftune.data.kind import DataKind
from graftune.errors import GraftuneError
from graftune.losses.anchored import Anchored
from graftune.losses.cross_entropy import CrossEntropy
from graftune.losses.interface import Computed, LogProbLoss, Loss, checked, reference_log_probs
from graftune.settings.config import TrainConfig

__all__ = [
    "Anchored",
    "BatchLayout",
    "Computed",
    "CrossEntropy",
    "DataKind",
    "Example",
    "Field",
    "LogProbLoss",
    "Loss",
    "PackedBatch",
    "checked",
    "choose",
    "reference_log_probs",
]


def choose(settings: TrainConfig) -> Loss:
    """The loss that the settings name. Refuses settings that do not fit together."""
    if settings.loss == "cross_entropy":
        if settings.anchor != TrainConfig.anchor:
            raise GraftuneError(
                "anchor is set and loss is cross_entropy, which has none",
                fix="leave anchor out, or set loss to anchored",
            )
        return CrossEntropy()
    if settings.method != "lora":
        raise GraftuneError(
            f"loss is anchored and method is {settings.method}, which leaves no base to compare with",
            fix="set loss to cross_entropy, or method to lora",
        )
    return Anchored(settings.anchor)
