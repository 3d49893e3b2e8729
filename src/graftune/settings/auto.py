"""Chooses what `auto` means for lr and tokens_per_step, from the size of the model, the method and the data.

Small data needs small steps: a run should have about a hundred updates, whatever its data. Large data takes steps of
the size that suits the model. Both choices are made once, when a run starts, and its config.yaml keeps the numbers.
docs/choosing.md has the same table and its reasons.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from graftune.settings.config import Config

UPDATES = 100  # optimizer steps that a run should have
TOO_FEW = 20  # a run of fewer steps learns little
ROUNDED = 8  # steps are multiples of this many tokens


class SizeDefaults(NamedTuple):
    parameters: float  # of models below this size
    lora_lr: float  # for scratch too
    full_lr: float
    tokens: int  # of a step, with enough data


SIZES = (
    SizeDefaults(1e9, 1e-3, 1e-4, 4096),
    SizeDefaults(5e9, 3e-4, 3e-5, 8192),
    SizeDefaults(20e9, 2e-4, 2e-5, 16384),
    SizeDefaults(math.inf, 1e-4, 1e-5, 32768),
)


def defaults_of(parameters: int) -> SizeDefaults:
    return next(size for size in SIZES if parameters < size.parameters)


def with_lr(config: Config, parameters: int, own: float | None = None) -> Config:
    """The settings with `lr` as a number. `own`: the loss's own, if it has one."""
    if config.optim.lr != "auto":
        return config
    if own is not None:
        return config.replace(lr=own)
    size = defaults_of(parameters)
    return config.replace(lr=size.full_lr if config.train.method == "full" else size.lora_lr)


def with_step_tokens(config: Config, parameters: int, tokens: int = 0, examples: int = 0) -> Config:
    """The settings with `tokens_per_step` as a number, for training data of so many tokens and examples; 0: unknown,
    taken as plenty."""
    if config.train.tokens_per_step != "auto":
        return config
    found = defaults_of(parameters).tokens
    if examples:
        enough = max(tokens * config.train.epochs / UPDATES, tokens / examples)  # at least one example
        found = min(found, math.ceil(enough / ROUNDED) * ROUNDED)
    return config.replace(tokens_per_step=found)


def explanation(asked: Config, found: Config, parameters: int, own: float | None = None) -> str:
    """What was chosen and why, in one line; empty if nothing was. `own`: the loss's own lr, if it has one."""
    chosen = []
    if asked.train.tokens_per_step == "auto" != found.train.tokens_per_step:
        few = found.train.step_tokens < defaults_of(parameters).tokens
        why = f"because the data is small (aim: {UPDATES} steps)" if few else "for the size of the model"
        chosen.append(f"tokens_per_step {found.train.step_tokens} {why}")
    if asked.optim.lr == "auto" != found.optim.lr:
        method = {"lora": "LoRA", "full": "every weight", "scratch": "training from scratch"}[found.train.method]
        why = f"{method} on {_count(parameters)} parameters" if own is None else f"the loss {found.train.loss}"
        chosen.append(f"lr {found.optim.peak_lr:g} for {why}")
    return f"auto: {', '.join(chosen)}" if chosen else ""


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


def warning(config: Config, steps: int, examples: int) -> str:
    """What to set if a run has too few steps; empty if it has enough, or as few as max_steps asks for."""
    settings = config.train
    if steps >= TOO_FEW or settings.max_steps:
        return ""
    fix = f"set epochs to {math.ceil(settings.epochs * TOO_FEW / steps)} or more"
    smaller = max(8, settings.step_tokens * steps // TOO_FEW)
    if examples * settings.epochs >= TOO_FEW and smaller < settings.step_tokens:
        fix += f", or tokens_per_step to {smaller} or less"
    return f"the run has only {steps} step{'' if steps == 1 else 's'}, in which a model learns little: {fix}"
