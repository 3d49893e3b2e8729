"""Checkpoints: the arena's weights and moments (in fp16 the loss scale too) and the run's Progress, written aside,
flushed and renamed.

A folder `step-N` is therefore whole or absent, at whatever moment the process dies. Progress is the step, the epoch,
the step in the epoch, the number of updates and what evaluations found; there is no generator state, because shuffles
and dropout follow from Progress. Its numbers are checked against their checksum and against the run before a tensor is
read, and the file of tensors against the digest in the state: a disk may lose data that it reported as written. NaN and
Inf are never written (`is_sound`). A resume takes the newest checkpoint that is whole (`newest_whole`) and renames
damaged ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from graftune.errors import GraftuneError
from graftune.io.files import OLD, PART, new_folder, remove, remove_at_once
from graftune.io.json_file import read_object
from graftune.model.arena import Arena
from graftune.weights import safetensors_io
from graftune.weights.finite import is_finite

STATE, TENSORS = "state.json", "state.safetensors"
# Part of a run's identity. Raise it when an unfinished run of an earlier version cannot be continued: its digests are
# computed in another way, as after a new field of ModelSpec, or its settings have another meaning.
FORMAT = 2
DAMAGED = ".damaged"  # appended to the name of a damaged checkpoint
_PIECE = 1 << 26  # bytes that one thread hashes at a time
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class DamagedCheckpoint(GraftuneError):
    """A checkpoint does not hold what was written."""


Identity = dict[str, Any]  # digests of a run's inputs, and its settings by name


class Scale(Protocol):
    def state_dict(self) -> dict[str, torch.Tensor]: ...
    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None: ...


@dataclass
class Progress:
    """How far a run has come. Everything it does next follows from this."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    epoch_step: int = 0  # steps done within the epoch
    updates: int = 0  # counts applied updates only
    last_eval: int = -1  # step of the latest evaluation
    first_loss: float | None = None  # of the evaluation before step 1
    best_loss: float | None = None  # of the best step
    best_step: int = -1
    stale: int = 0  # evaluations since the best
    first_metric: float | None = None  # as first_loss and best_loss, where a metric is set
    best_metric: float | None = None
    best_failed: int = 0  # calls of the metric that failed at the best step
    own_shape: list[int] = field(default_factory=list)  # of micro-batches without a data set (SessionParts.own_shape)


def is_sound(arena: Arena) -> bool:
    """Whether weights, moments and the copy in the compute dtype are finite: one NaN or Inf would spread to all weights
    in the next steps. In fp16 a weight beyond 65504 is infinite only in the copy."""
    return all(is_finite(buffer) for buffer in (*_buffers(arena).values(), arena.compute))


def save(root: Path, arena: Arena, progress: Progress, identity: Identity, scaler: Scale | None = None) -> Path:
    """`identity` is compared on resume. The same step may be saved again with newer Progress, such as after an
    evaluation."""
    return write(root / f"step-{progress.step}", arena, progress, identity, scaler)


def write(final: Path, arena: Arena, progress: Progress, identity: Identity, scaler: Scale | None = None) -> Path:
    state: dict[str, Any] = {"progress": asdict(progress), "identity": identity}
    with new_folder(final) as aside:
        scale = scaler.state_dict() if scaler else {}
        safetensors_io.write(_buffers(arena) | scale, aside / TENSORS)
        state["tensors"] = _digest(aside / TENSORS)
        (aside / STATE).write_text(json.dumps(state | {"sha256": _checksum(state)}, indent=1))
    return final


def _checksum(state: dict[str, Any]) -> str:
    held = {name: state[name] for name in ("progress", "identity", "tensors") if name in state}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    """The digest of the digests of a file's pieces, which threads compute in parallel: the run waits for it."""

    def of_piece(offset: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return hashlib.sha256(file.read(_PIECE)).digest()

    offsets = range(0, path.stat().st_size, _PIECE)
    if len(offsets) == 1:
        return hashlib.sha256(of_piece(0)).hexdigest()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return hashlib.sha256(b"".join(threads.map(of_piece, offsets))).hexdigest()


def latest(root: Path) -> Path | None:
    found = steps(root)
    return found[max(found)] if found else None


def steps(root: Path) -> dict[int, Path]:
    """Whole checkpoints by step. One that a kill left between two renames counts under its old name. Everything else in
    the folder, such as links, is ignored."""
    found: dict[int, Path] = {}
    for path in sorted(root.glob("step-*"), key=lambda p: p.suffix != OLD):  # a new one replaces an old one
        number = re.fullmatch(r"step-([0-9]{1,15})(\.old)?", path.name)
        if number and not path.is_symlink() and (path / STATE).exists():
            found[int(number[1])] = path
    return found


def newest_whole(
    root: Path, identity: Identity, epoch_steps: Sequence[int], warn: Callable[[str], None]
) -> Path | None:
    """The checkpoint that a resume continues from; None if there is none. Checkpoints of another run are refused.
    Damaged ones are renamed: from an earlier one, the run repeats the same steps. The best checkpoint has to be whole
    too, since the end of the run needs it."""
    found, whole = steps(root), dict[int, bool]()

    def is_whole(step: int) -> bool:
        if step not in whole:
            try:
                check_whole(found[step], identity, epoch_steps)
                whole[step] = True
            except DamagedCheckpoint as error:
                whole[step] = False
                aside = root / f"step-{step}{DAMAGED}"
                remove(aside)
                found[step].rename(aside)
                warn(f"{error.where}: {error.what}; it was renamed to {aside.name}")
        return whole[step]

    for step in sorted(found, reverse=True):
        if is_whole(step):
            best = read_state(found[step])[0].best_step
            if best in (-1, step) or (best in found and is_whole(best)):
                return found[step]
    if found:
        raise GraftuneError(
            "none of its checkpoints is whole together with the best one, so the run would start again",
            where=str(root),
            fix="delete this folder to start again, or restore it",
        )
    return None


def check_whole(path: Path, identity: Identity | None = None, epoch_steps: Sequence[int] = ()) -> None:
    """Raises `DamagedCheckpoint` unless it holds what was written, and its Progress is possible in this run."""
    progress, stored = read_state(path)
    check_identity(identity or {}, stored, path.parent.parent)
    if epoch_steps:
        check_place(path, progress, epoch_steps)
    _check_tensors(path)


def _check_tensors(path: Path) -> None:
    """Compares the file of tensors with the digest in the state."""
    wanted = read_object(path / STATE).get("tensors", "")
    try:
        found = _digest(path / TENSORS)
    except FileNotFoundError:
        raise _damaged(path, f"{TENSORS} is gone") from None
    if found != wanted:
        raise _damaged(path, "its tensors are not those that were written")


def read_state(path: Path) -> tuple[Progress, Identity]:
    """The Progress and the identity; reads no tensor."""
    try:
        state = read_object(path / STATE)
        known = {f.name for f in fields(Progress)}
        progress = Progress(**{k: v for k, v in state["progress"].items() if k in known})
        identity = dict(state["identity"])
        if state.get("sha256") != _checksum(state):
            raise ValueError("its numbers are not those that were written")
    except OSError:  # a disk that cannot be read does not mean that the checkpoint is damaged
        raise
    except _UNREADABLE as error:
        raise _damaged(path, error) from None
    return progress, identity


def check_place(path: Path, place: Progress, epoch_steps: Sequence[int]) -> None:
    """Refuses Progress that is impossible in a run whose epochs have so many steps."""
    fits = place.epoch < len(epoch_steps) and place.epoch_step <= epoch_steps[place.epoch]
    if not fits or place.step != sum(epoch_steps[: place.epoch]) + place.epoch_step:
        where = f"step {place.step} as step {place.epoch_step} of epoch {place.epoch + 1}"
        raise _damaged(path, f"it gives {where}, which this run does not have")


def load(path: Path, arena: Arena, scaler: Scale | None = None) -> Progress:
    """Fills the arena (and the loss scale, where one was saved) from a checkpoint that `check_whole` has accepted, and
    returns the Progress."""
    progress, _ = read_state(path)
    try:
        tensors = safetensors_io.load(path / TENSORS)
        buffers = [(tensors[name], buffer) for name, buffer in _buffers(arena).items()]
    except (GraftuneError, KeyError) as error:
        raise _damaged(path, getattr(error, "what", error)) from None
    if any(tensor.shape != buffer.shape for tensor, buffer in buffers):
        raise GraftuneError("this checkpoint holds other adapters", where=str(path), fix="resume with its own config")
    if scaler is not None and "loss_scale" in tensors:
        scaler.load_state_dict(tensors)
    for tensor, buffer in buffers:
        buffer.copy_(tensor)
    arena.publish()
    return progress


def check_identity(now: Identity, stored: Identity, folder: Path) -> None:
    """Refuses to continue with other inputs than the run was started with. Settings are compared by name, so that a
    setting added by a later version does not prevent a resume."""
    if "format" in now and stored.get("format") != now["format"]:
        raise GraftuneError(
            "this run was written by an earlier version of graftune, and this version cannot continue it",
            where=str(folder),
            fix="resume it with that version, or start a new run",
        )
    for key, value in now.items():
        had = stored.get(key)
        if key == "settings" and isinstance(value, dict) and isinstance(had, dict):
            _check_settings(value, had, folder)
        elif had != value:
            raise GraftuneError(
                f"the {key} has changed since the run started",
                where=str(folder),
                fix=f"resume with the same {key} and the same version of graftune",
            )


def _check_settings(now: Identity, stored: Identity, folder: Path) -> None:
    for name in now.keys() & stored.keys():
        if json.loads(json.dumps(now[name])) != stored[name]:
            raise GraftuneError(
                f"{name} was {stored[name]!r} when the run started, and config.yaml now has {now[name]!r}",
                where=str(folder),
                fix=f"set {name} in config.yaml back to what it was",
            )


def weights_of(path: Path) -> torch.Tensor:
    """The trained weights alone. A checkpoint that has been deleted raises FileNotFoundError."""
    (path / TENSORS).stat()
    try:
        weights: torch.Tensor = safetensors_io.open_shard(path / TENSORS).get_tensor("weights")
    except (GraftuneError, SafetensorError) as error:
        raise _damaged(path, getattr(error, "what", error)) from None
    return weights


def _buffers(arena: Arena) -> dict[str, torch.Tensor]:
    return {"weights": arena.weights, "m": arena.m, "v": arena.v}


def _damaged(path: Path, why: object) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"this checkpoint is damaged ({why})", where=str(path), fix="take an earlier one")


def prune(root: Path, keep_last: int, best_step: int) -> None:
    """Deletes all checkpoints but the best and the last `keep_last`, and folders that a kill left half-written."""
    for path in root.glob(f"step-*{PART}"):
        remove(path)
    for path in root.glob(f"step-*{OLD}"):
        if path.with_suffix("").exists():
            remove(path)
    found = steps(root)
    kept = set(sorted(found)[-keep_last:]) | {best_step}
    for number, path in found.items():
        if number not in kept:
            remove_at_once(path)
