"""The hyperparameters of each step. Its learning rate is a pure function of the step: linear warm-up, then cosine,
linear or constant."""

from __future__ import annotations

import math

from graftune.kernels.adamw import Hyper
from graftune.settings.sections import OptimConfig


def learning_rate(step: int, total: int, config: OptimConfig) -> float:
    """The learning rate of a step, 0 to total - 1. Warm-up ends on the peak; the last step ends near min_lr."""
    warmup, peak = math.ceil(config.warmup * total), config.peak_lr
    if step < warmup:
        return peak * (step + 1) / warmup
    floor = min(config.min_lr, peak)
    progress = (step - warmup) / max(1, total - warmup)
    if config.schedule == "constant":
        return peak
    if config.schedule == "linear":
        return floor + (peak - floor) * (1 - progress)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def hyperparameters(config: OptimConfig, **live: float) -> dict[str, float]:
    """The values of an update by name: those of the settings, and `live` ones (lr, divisor) that replace them."""
    return {name: getattr(config, name) for name in Hyper._fields if name != "divisor"} | live
