"""Log-probabilities of a loss's reference model, computed once before the first step instead of in every step.

They are numbers of the data: one per example, or one per token where the loss needs each (`Loss.reference_per`), held
beside the encoded examples and packed into the batches like any other field. So steps, evaluations, the plan and the
loader need to know nothing of them, and a step has no second forward pass.

A file in the folder of encoded data keeps them for resumed and later runs, under a key of everything that decides them:
the examples, the base, its dtype, the compute dtype and, if the reference is the start of the run, its weights. The
reference model is the loaded one with adapters off, or with the weights of the start: there is no second copy.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import graftune
from graftune.data import cached
from graftune.data.encoded import Examples, token_places, unit_of
from graftune.io import digest, files
from graftune.losses import Loss
from graftune.session.parts import UNPLANNED, SessionParts
from graftune.settings.sections import TrainConfig
from graftune.step.evaluate import reference_pass

SUFFIX = ".reference"
DIGEST = hashlib.sha256().digest_size


def with_references(examples: Examples, loss: Loss, settings: TrainConfig) -> Examples:
    """The examples with a column for the reference's log-probabilities, where the settings want them stored."""
    if not loss.reference or settings.reference_pass == "each":  # noqa: S105 (no password)
        return examples
    store = examples.store.with_reference(loss.reference, per_token=loss.reference_per == "label")
    return Examples(store, examples.chosen)


def fill(parts: SessionParts, examples: Examples, between: Callable[[int], None] = lambda done: None) -> str:
    """Find or compute the log-probabilities of these examples. Returns what was done, in one line. All ranks call it
    together, and each computes its share."""
    column, world = examples.store.reference, parts.world
    assert column is not None, "with_references makes the place for them"
    _, first = np.unique(examples.stored, return_index=True)
    part = Examples(examples.store, examples.chosen[first])  # each example once
    what = f"the reference's log-probabilities of {len(part)} {unit_of(part)}"
    places = token_places(part) if parts.loss.reference_per == "label" else part.stored
    path = cached.folder() / f"{_key(parts, part)}{SUFFIX}"
    found = _read(path, column.dtype, len(places))
    if all([found is not None] if world is None else world.gather(found is not None)):
        column[places] = found
        return f"{what} were computed earlier"
    values = reference_pass(
        parts.decoder,
        part,
        parts.loss,
        capacity=parts.config.train.tokens_per_micro_batch or UNPLANNED,
        backend=parts.attention.backend,
        between=between,
        share=parts.share,
        start=parts.start_of(parts.loss),
    )
    if world is not None:
        world.add_up(values)  # exact: all but one rank add 0
    column[places] = values.cpu().numpy()
    why = _write(path, column[places]) if world is None or not world.local_rank else ""
    kept = f"are kept for this run only ({why})" if why else "are stored"
    return f"{what} {kept}"


def _key(parts: SessionParts, examples: Examples) -> str:
    """Digest of everything that decides the numbers."""
    loss, start, data = parts.loss, "", hashlib.sha256(examples.digests.tobytes()).hexdigest()
    if loss.reference == "start" and parts.config.train.method != "full":  # a full run starts from the base
        held = parts.start_of(loss)
        assert held is not None
        start = hashlib.sha256(held.values.cpu().numpy().tobytes()).hexdigest()
    facts = [
        *(parts.base.sha256, repr(parts.base.spec), parts.placement.base_dtype, parts.runtime.compute_name),
        *(parts.runtime.device.type, loss.reference, loss.reference_per, loss.temperature, start),
        *(data, torch.__version__, _code()),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


@functools.cache
def _code() -> str:
    """Digest of the code that computes them, so that values of an earlier version are not used."""
    root = Path(graftune.__file__).parent
    return digest.sha256(sorted(file for name in ("model", "kernels") for file in (root / name).rglob("*.py")))


def _read(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray | None:
    """The values of a file (a digest, then the values); None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != DIGEST + dtype.itemsize * count or hashlib.sha256(content[DIGEST:]).digest() != content[:DIGEST]:
        return None
    with suppress(OSError):  # another user's folder can be read, but the file not marked as used
        os.utime(path)
    return np.frombuffer(content, dtype, offset=DIGEST)


def _write(path: Path, values: np.ndarray) -> str:
    """Write the values. Returns why that failed; empty if it worked."""
    content = values.tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.new_file(path, unique=True) as aside:
            aside.write_bytes(hashlib.sha256(content).digest() + content)
    except (OSError, RuntimeError) as error:  # the last: there is no home folder
        return getattr(error, "strerror", "") or str(error)
    files.prune_folder(path, cached.LIMIT)
    return ""
