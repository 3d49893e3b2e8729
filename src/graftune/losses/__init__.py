"""The losses, one file or family of formulas each, and the table in which `choose` looks them up by name (`LOSSES`). A
user's own loss declares with `DataKind`, `BatchLayout` and `Field` which data it takes and what its batches contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from graftune.batch import BatchLayout, Example, Field, PackedBatch
from graftune.data.kind import DataKind
from graftune.errors import GraftuneError
from graftune.losses import policy
from graftune.losses import preference as pairs
from graftune.losses.cross_entropy import Anchored, CrossEntropy
from graftune.losses.interface import (
    Computed,
    LogProbLoss,
    Loss,
    checked,
    reference_log_probs,
    reference_of,
    stores_reference,
    sums_ahead,
)
from graftune.losses.kto import Kto, KtoZero
from graftune.settings.sections import LOSS_SETTINGS, TrainConfig

__all__ = [
    "LOSSES",
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
    "reference_of",
    "stores_reference",
    "sums_ahead",
]


class LossRow(NamedTuple):
    make: Callable[..., Loss]
    # The settings that the loss uses, arguments of `make` except for reference_pass. Others are refused if set.
    settings: tuple[str, ...] = ()
    beta: float = 0.0  # default of the setting
    lr: float | None = None  # default of the setting; None: by the size of the model (settings/auto.py)
    clip_high: float = 0.0  # default of the setting


_BETA, _LR = 0.1, 1e-5
_COMPARED = ("reference", "reference_pass")
_PAIR = ("beta", "sft_share", *_COMPARED)
_RATED = ("beta", "desirable_weight", "undesirable_weight", *_COMPARED)
_POLICY = ("divide", "divide_by", "ratios", "kl", "temperature", *_COMPARED)
LOSSES: dict[str, LossRow] = {
    "cross_entropy": LossRow(CrossEntropy),
    "anchored": LossRow(Anchored, ("anchor", "reference_pass")),
    "dpo": LossRow(pairs.Dpo, _PAIR, _BETA, _LR),
    "dpo_norm": LossRow(pairs.DpoNorm, _PAIR, _BETA, _LR),
    "ipo": LossRow(pairs.Ipo, _PAIR, _BETA, _LR),
    "hinge": LossRow(pairs.Hinge, _PAIR, _BETA, _LR),
    "robust": LossRow(pairs.Robust, (*_PAIR, "label_smoothing"), _BETA, _LR),
    "apo_zero": LossRow(pairs.ApoZero, _PAIR, _BETA, _LR),
    "simpo": LossRow(pairs.SimPo, ("beta", "sft_share", "gamma"), 2.5, _LR),
    "orpo": LossRow(pairs.Orpo, ("beta",), _BETA, _LR),
    "kto": LossRow(Kto, _RATED, _BETA, _LR),
    "kto_zero": LossRow(KtoZero, _RATED, _BETA, _LR),
    "importance_sampling": LossRow(policy.ImportanceSampling, _POLICY, lr=_LR),
    "ppo": LossRow(policy.Ppo, (*_POLICY, "clip_low", "clip_high"), clip_high=0.28, lr=_LR),
    "cispo": LossRow(policy.Cispo, (*_POLICY, "clip_high"), clip_high=4.0, lr=_LR),
}


def choose(settings: TrainConfig) -> Loss:
    """The loss that the settings name. Refuses settings that do not fit together."""
    name, row, default = settings.loss, LOSSES[settings.loss], TrainConfig()
    for setting in LOSS_SETTINGS[1:]:
        if setting not in row.settings and getattr(settings, setting) != getattr(default, setting):
            users = " or ".join(other for other, one in LOSSES.items() if setting in one.settings)
            raise GraftuneError(
                f"{setting} is set and loss is {name}, which does not use it",
                fix=f"leave {setting} out, or set loss to {users}",
            )
    if "divide_by" in row.settings and settings.divide != "constant" and settings.divide_by != default.divide_by:
        raise GraftuneError(
            f"divide_by is set and divide is {settings.divide}, which does not use it",
            fix="leave divide_by out, or set divide to constant",
        )
    values = {setting: getattr(settings, setting) for setting in row.settings if setting != "reference_pass"}
    values |= {name: values[name] or getattr(row, name) for name in ("beta", "clip_high") if name in values}
    loss = row.make(**values)
    if loss.reference == "base" and settings.method != "lora":
        other = "reference to start" if "reference" in row.settings else "loss to cross_entropy"
        raise GraftuneError(
            f"loss is {name} and method is {settings.method}, which leaves no base to compare with",
            fix=f"set {other}, or method to lora",
        )
    return loss
