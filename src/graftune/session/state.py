"""A session on disk, to go on from: weights, moments, the update count, the loss scale, the place in the data, and what
`auto` came to. The layout is a run's checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from graftune.errors import GraftuneError
from graftune.session.parts import Parts
from graftune.weights import checkpoint
from graftune.weights.checkpoint import Progress

RESOLVED = ("recompute", "tokens_per_micro_batch", "tokens_per_step", "seed")  # settings that decide the batches


@dataclass(frozen=True)
class Place:
    """Where in the data a session stands: steps of `epoch` that are done."""

    epoch: int = 0
    step: int = 0
    data: str = ""  # digest


def save(parts: Parts, folder: Path, steps: int, updates: int, place: Place) -> Path:
    settings = {name: getattr(parts.config.train, name) for name in RESOLVED}
    progress = Progress(step=steps, epoch=place.epoch, epoch_step=place.step, updates=updates)
    identity: dict[str, Any] = {"base": parts.base.sha256, "examples": place.data, "resolved": settings}
    scaler = parts.step.scaler if "step" in vars(parts) else None
    return checkpoint.write(folder, parts.arena, progress, identity, scaler)


def load(parts: Parts, folder: Path) -> tuple[Progress, Place, dict[str, Any], dict[str, torch.Tensor]]:
    """Fills the arena. Returns the counts, the place, the resolved settings, and the loss scale where there is one."""
    if not (folder / checkpoint.STATE).is_file():
        raise GraftuneError("is not a saved state", where=str(folder), mend="give a folder that save_state wrote")
    _, identity = checkpoint.read_state(folder)
    progress = checkpoint.load(folder, parts.arena, {"base": parts.base.sha256})
    stored = identity.get("resolved")
    resolved = {name: stored[name] for name in RESOLVED if name in stored} if isinstance(stored, dict) else {}
    scale = {name: tensor for name, tensor in load_file(folder / checkpoint.TENSORS).items() if name == "loss_scale"}
    return progress, Place(progress.epoch, progress.epoch_step, str(identity.get("examples", ""))), resolved, scale
