"""Keeps rehearsals between runs: a step's memory stays the same as long as nothing that it depends on changes.

The key contains all of that: the shapes and formats of the base's tensors, every setting of the rehearsal, the versions
of the libraries that allocate, and the package's source, so that there is no version number to forget. A rehearsal also
reports the kernels to compile ahead, which a cached one does not. So the key names Triton's cache folder, which has
them compiled; if it was removed, the key differs. An entry only saves time.
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
    """The key of a setup; None if a value has no unique text, so that different setups could get the same key."""
    tensors = [
        [name, type(source).__name__, source.dtype_name, list(source.shape), source.nbytes]
        for name, source in setup.base.tensors.items()
    ]
    rest = {field.name: getattr(setup, field.name) for field in dataclasses.fields(setup) if field.name != "base"}
    rest |= {"loss": [type(setup.loss).__qualname__, vars(setup.loss)]}
    rest |= {"placement": dataclasses.replace(setup.placement, reason="")}  # the reason mentions the free memory
    if setup.card is not None:
        rest |= {"card": setup.card.device}  # a step does not depend on the free memory
    text = json.dumps([setup.base.spec, tensors, rest, _surroundings(setup.runtime.device.type)], default=repr)
    return None if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()


def find(key: str) -> Bytes | None:
    found = user_cache.recall(KIND).get(key)
    try:
        return _read(found)
    except (AttributeError, KeyError, TypeError, ValueError):  # the file may be damaged
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
    """Triton's cache folder, created if it is missing (as Triton does), so that the next run has the same key."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [str(folder), folder.stat().st_ino]
    except OSError:
        return [str(folder), None]
