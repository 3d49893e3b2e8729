"""Rehearsals kept between runs: what a step takes is the same as long as nothing that it depends on has changed.

The key is all of that: the shapes and kinds of the base's tensors, every setting of the rehearsal, the versions of what
allocates, and the package's own source, so that no version number can be forgotten. A rehearsal also tells which
kernels to compile ahead, and whoever finds one here is not told: so the key names Triton's cache, where they lie
compiled since then, and one that was removed is another. Nothing but time hangs on an entry.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from graftune.io import user_cache
from graftune.plan.rehearse import Bytes, Setup

KIND, MOST = "rehearsals", 100
PACKAGES = ("triton", "nvidia-cudnn-frontend")


def key_of(setup: Setup) -> str | None:
    """None where something has no name of its own, so that two that differ might be taken for one."""
    tensors = [
        [name, type(source).__name__, source.dtype_name, list(source.shape), source.nbytes]
        for name, source in setup.base.tensors.items()
    ]
    rest = {field.name: getattr(setup, field.name) for field in dataclasses.fields(setup) if field.name != "base"}
    rest |= {"loss": [type(setup.loss).__qualname__, vars(setup.loss)]}
    rest |= {"placement": dataclasses.replace(setup.placement, reason="")}  # a sentence, with what is free in it
    if setup.card is not None:
        rest |= {"card": setup.card.device}  # what is free there decides nothing of what a step takes
    text = json.dumps([setup.base.spec, tensors, rest, _surroundings(setup.runtime.device.type)], default=repr)
    return None if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()


def find(key: str) -> Bytes | None:
    found = user_cache.recall(KIND).get(key)
    try:
        return _read(found)
    except (AttributeError, KeyError, TypeError, ValueError):  # the file may be anyone's
        return None


def keep(key: str, found: Bytes) -> None:
    user_cache.remember(KIND, key, dataclasses.asdict(found) | {"without_rule": sorted(found.without_rule)}, MOST)


def _read(found: Any) -> Bytes:
    phases = {
        phase: {owner: _size(size) for owner, size in owners.items()} for phase, owners in found["phases"].items()
    }
    if not phases:
        raise ValueError("no phase")
    sizes = {name: _size(found[name]) for name in ("after", "captured", "eager", "host")}
    return Bytes(phases, **sizes, without_rule=frozenset(map(str, found["without_rule"])))


def _size(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a number of bytes")
    return value


def _surroundings(kind: str) -> list[Any]:
    versions = [torch.__version__, torch.backends.cudnn.version() if kind == "cuda" else None, torch.get_num_threads()]
    return [*versions, *map(_version, PACKAGES), _code(), _triton_cache() if kind == "cuda" else None]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _code() -> str:
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _triton_cache() -> list[Any]:
    """Made if it is not there, as Triton would: the run that fills it has the same one as the next."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [str(folder), folder.stat().st_ino]
    except OSError:
        return [str(folder), None]
