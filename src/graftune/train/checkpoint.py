"""Checkpoints: the arena's three buffers (in fp16 the loss scale too) and the place in the run, written aside, flushed
and renamed.

A folder `step-N` is therefore whole or absent, at whatever moment the process dies. The place is (step, epoch, step in
epoch) and the early-stopping counters; there is no generator state, because shuffles and dropout are functions of it.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from graftune.errors import GraftuneError
from graftune.model.lora import Arena
from graftune.train.scaler import LossScaler
from graftune.weights import safetensors_io

STATE, TENSORS = "state.json", "state.safetensors"


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    epoch_step: int = 0  # steps done within the epoch
    updates: int = 0  # of those, not skipped
    last_eval: int = -1  # step of the latest evaluation
    first_loss: float | None = None  # of the evaluation before step 1
    best_loss: float | None = None
    best_step: int = -1
    stale: int = 0  # evaluations since the best one


def save(
    root: Path, arena: Arena, progress: Progress, identity: dict[str, str], scaler: LossScaler | None = None
) -> Path:
    """`identity` (hashes of data, base and settings) is what a resume is checked against."""
    final = root / f"step-{progress.step}"
    aside = root / f"step-{progress.step}.part"
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    try:
        scale = scaler.state_dict() if scaler else {}
        safetensors_io.write(_buffers(arena) | scale, aside / TENSORS)
        (aside / STATE).write_text(json.dumps({"progress": asdict(progress), "identity": identity}, indent=1))
        safetensors_io.flush(aside / STATE)
        safetensors_io.flush(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if final.exists():  # the same step with a newer place in the run, such as an evaluation that has been made since
        old = root / f"step-{progress.step}.old"
        if old.exists():
            shutil.rmtree(old)
        os.rename(final, old)
        os.rename(aside, final)
        shutil.rmtree(old)
    else:
        os.rename(aside, final)
    safetensors_io.flush(root)
    return final


def latest(root: Path) -> Path | None:
    found = steps(root)
    return found[max(found)] if found else None


def steps(root: Path) -> dict[int, Path]:
    """Whole checkpoints by step. One that a kill left between two renames of `save` counts under its old name."""
    found: dict[int, Path] = {}
    for path in sorted(root.glob("step-*"), key=lambda p: p.suffix != ".old"):  # a fresh one wins over an .old one
        number = path.name.removeprefix("step-").removesuffix(".old")
        if number.isdigit() and (path / STATE).exists():
            found[int(number)] = path
    return found


def load(
    path: Path, arena: Arena, identity: dict[str, str] | None = None, scaler: LossScaler | None = None
) -> Progress:
    """Fill the arena (and the loss scale, where one was saved) and return the place. With `identity`, a checkpoint of
    another run is refused."""
    try:
        state = json.loads((path / STATE).read_text())
        tensors = load_file(path / TENSORS)
        known = {f.name for f in fields(Progress)}
        progress = Progress(**{k: v for k, v in state["progress"].items() if k in known})
        stored = dict(state["identity"])
        buffers = [(tensors[name], buffer) for name, buffer in _buffers(arena).items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise _damaged(path, error) from None
    for name, place in asdict(progress).items():
        if not isinstance(place, int if not name.endswith("_loss") else int | float | None):
            raise _damaged(path, f"{name} is {place!r}")
    check_identity(identity or {}, stored, path.parent.parent)
    if any(tensor.shape != buffer.shape for tensor, buffer in buffers):
        raise GraftuneError("this checkpoint holds other adapters", where=str(path), mend="resume with its own config")
    if scaler is not None and "loss_scale" in tensors:
        try:
            scaler.load_state_dict(tensors)
        except GraftuneError as error:
            raise _damaged(path, error.what) from None
    for tensor, buffer in buffers:
        buffer.copy_(tensor)
    arena.publish()
    return progress


def check_identity(now: dict[str, str], stored: dict[str, str], folder: Path) -> None:
    """Refuse to go on with anything else than the run was started with."""
    for key, value in now.items():
        if stored.get(key) != value:
            raise GraftuneError(
                f"the run was made with other {key}", where=str(folder), mend=f"resume with the same {key}"
            )


def read_weights(path: Path, arena: Arena) -> None:
    """Only the trained weights, for the best checkpoint at the end of a run."""
    try:
        arena.weights.copy_(load_file(path / TENSORS)["weights"].to(torch.float32))
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise _damaged(path, error) from None
    arena.publish()


def _buffers(arena: Arena) -> dict[str, torch.Tensor]:
    return {"weights": arena.weights, "m": arena.m, "v": arena.v}


def _damaged(path: Path, why: object) -> GraftuneError:
    return GraftuneError(
        f"this checkpoint is damaged ({why})", where=str(path), mend="delete it to fall back on an earlier one"
    )


def prune(root: Path, keep_last: int, best_step: int) -> None:
    """Delete all but the best and the last few, and whatever a kill left half-written."""
    left = [*root.glob("step-*.part"), *(p for p in root.glob("step-*.old") if p.with_suffix("").exists())]
    for path in left:
        shutil.rmtree(path)
    found = steps(root)
    kept = set(sorted(found)[-keep_last:]) | {best_step}
    for number, path in found.items():
        if number not in kept:
            shutil.rmtree(path)
