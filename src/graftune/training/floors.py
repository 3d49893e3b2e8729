"""The floor of a session's steps (step/floor.py), measured once for a card, a model and a shape, and kept in the user's
cache: a run then shows at every step which share of the floor it reaches."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from graftune.data.pack import Capacities
from graftune.io import user_cache
from graftune.model.feed_forward.routing import LayerRouting
from graftune.observe.console import Console
from graftune.session import SessionParts
from graftune.step import floor

KIND, MOST = "floors", 200


def lacks(parts: SessionParts) -> tuple[str, str] | None:
    """Why there is no floor for these steps, in a word and in a sentence; None: there is one."""
    spec, recompute = parts.base.spec, parts.config.train.recompute
    if parts.runtime.device.type != "cuda":
        return parts.runtime.device.type, "the floor is measured on CUDA devices"
    if spec.experts and (parts.config.train.method != "lora" or parts.runtime.compute != torch.bfloat16):
        return "experts", "there is a floor for a mixture of experts only with adapters and in bf16"
    if spec.recurrent and not re.search(floor.DELTA_CARD, torch.cuda.get_device_name(parts.runtime.device)):
        return "delta nets", "there is no floor for delta nets on this card: the delta rule's is known for an H200 only"
    if recompute != "none":
        return "recompute", f"there is no floor for recompute {recompute}: what is made again is not in it"
    return None


def key_of(parts: SessionParts, shape: Capacities, forwards: int) -> str:
    """Digest of everything that a floor depends on. It leaves out the lengths of single documents, because attention is
    a small share and a run has other documents in every batch, and, for the same reason, the rows of each expert."""
    card = torch.cuda.get_device_name(parts.runtime.device)
    packed = [round(packed_bytes(parts, experts=experts), 4) for experts in (False, True)]
    held = [parts.placement.base_dtype, packed, parts.runtime.compute_name]
    facts: list[Any] = [card, torch.__version__, repr(parts.base.spec), held, parts.config.train.method, list(shape)]
    facts += [forwards] if forwards else []
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def known(parts: SessionParts, shape: Capacities | None, forwards: int) -> float | None:
    """Milliseconds of a micro-batch, if they were measured. `forwards`: see step/floor.py."""
    if shape is None or lacks(parts):
        return None
    return _stored(key_of(parts, shape, forwards))


def _stored(key: str) -> float | None:
    found = user_cache.recall(KIND).get(key)
    return float(found) if isinstance(found, int | float) and 0 < found < math.inf else None


def work_of(
    parts: SessionParts,
    shape: Capacities,
    lengths: tuple[int, ...],
    forwards: int,
    routing: Sequence[LayerRouting] = (),
) -> floor.Work:
    """The work of a micro-batch. `lengths`: of its documents, adding up to its tokens. `routing`: of a step."""
    spec = parts.base.spec
    return floor.Work(
        floor.layers_of(spec, routing),
        floor.Size(spec.vocab, spec.width),
        shape.capacity,
        shape.max_rows,
        lengths,
        forwards,
        full=parts.config.train.method != "lora",
        packed_bytes=packed_bytes(parts),
        packed_experts=packed_bytes(parts, experts=True),
        fp8=parts.placement.base_dtype == "fp8",
        dtype=parts.runtime.compute,
    )


def measured(key: str, work: floor.Work, device: torch.device, console: Console) -> float | None:
    """Milliseconds of a micro-batch at the floor, from the cache, or measured now and cached. This process must hold
    nothing else on the card. None where the measurement does not fit."""
    if (found := _stored(key)) is not None:
        console.note("floor: as it was measured earlier for this card, model and shape")
        return found
    try:
        with console.working("measuring the floor"):
            ms, note = floor.measured(work, device, say=console.note)
    except torch.OutOfMemoryError:
        console.warn("the floor was not measured: its weights and buffers do not fit into the memory that is free")
        return None
    console.note(f"floor: {ms:.3f} ms a micro-batch ({note})")
    user_cache.remember(KIND, key, ms, MOST)
    return ms


def packed_bytes(parts: SessionParts, *, experts: bool = False) -> float:
    """Stored bytes per value of weights that each product dequantises (projections, or a mixture's experts); 0:
    products read the stored values directly."""
    form = parts.placement.format
    if form is not None:
        return form.value_bytes if form.dequantised else 0.0
    matrices = [
        tensor
        for name, tensor in parts.base.tensors.items()
        if name.startswith("layers.") and len(tensor.shape) > 1 and (".experts." in name) == experts
    ]
    size = sum(tensor.nbytes for tensor in matrices) / max(1, sum(math.prod(tensor.shape) for tensor in matrices))
    return size if size < parts.runtime.compute.itemsize else 0.0
