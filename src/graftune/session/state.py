"""A session's state on disk, to resume from: weights, moments, the update count, the loss scale, the position in the
data, and the settings that `auto` resolved to. The layout is that of a run's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.session.parts import Parts
from graftune.weights import checkpoint, safetensors_io
from graftune.weights.checkpoint import Progress

RESOLVED = ("recompute", "tokens_per_micro_batch", "tokens_per_step", "seed")  # settings that decide the batches


@dataclass(frozen=True)
class DataPosition:
    """Where in the data a session stands: steps of `epoch` that are done."""

    epoch: int = 0
    step: int = 0
    data: str = ""  # digest


def save(parts: Parts, folder: Path, steps: int, updates: int, position: DataPosition) -> Path:
    settings = {name: getattr(parts.config.train, name) for name in RESOLVED}
    progress = Progress(step=steps, epoch=position.epoch, epoch_step=position.step, updates=updates)
    identity: dict[str, Any] = {"base": parts.base.sha256, "examples": position.data, "resolved": settings}
    scaler = parts.step.scaler if "step" in vars(parts) else None
    return checkpoint.write(folder, parts.arena, progress, identity, scaler)


def load(parts: Parts, folder: Path) -> tuple[Progress, DataPosition, dict[str, Any], dict[str, torch.Tensor]]:
    """Fills the arena. Returns the counts, the position, the resolved settings, and the loss scale if there is one."""
    if not (folder / checkpoint.STATE).is_file():
        raise GraftuneError("is not a saved state", where=str(folder), fix="give a folder that save_state wrote")
    _, identity = checkpoint.read_state(folder)
    progress = checkpoint.load(folder, parts.arena, {"base": parts.base.sha256})
    stored = identity.get("resolved")
    resolved = {name: stored[name] for name in RESOLVED if name in stored} if isinstance(stored, dict) else {}
    scale = {
        name: tensor
        for name, tensor in safetensors_io.load(folder / checkpoint.TENSORS).items()
        if name == "loss_scale"
    }
    return (
        progress,
        DataPosition(progress.epoch, progress.epoch_step, str(identity.get("examples", ""))),
        resolved,
        scale,
    )
