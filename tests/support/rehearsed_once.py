"""What the same step would take is rehearsed once a process: rehearsing is the longest part of a run of a few steps.

Plans for cards are made each time; tests of plans take `rehearse` as it is.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

from graftune.plan import job

_rehearse = job.rehearse
_rehearsed: dict[str, Any] = {}


def key_of(setup: Any) -> str | None:
    """Everything that a rehearsal depends on; None if a value has no unique text."""
    tensors = [
        [name, type(source).__name__, source.dtype_name, list(source.shape), source.nbytes]
        for name, source in setup.base.tensors.items()
    ]
    rest = {field.name: getattr(setup, field.name) for field in dataclasses.fields(setup) if field.name != "base"}
    rest |= {"loss": [type(setup.loss).__qualname__, vars(setup.loss)]}
    rest |= {"placement": dataclasses.replace(setup.placement, reason="")}  # the reason mentions the free memory
    rest |= {"card": setup.card and setup.card.device}  # a step does not depend on the free memory
    text = json.dumps([setup.base.spec, tensors, rest], default=_text)
    return None if " at 0x" in text else text


def _text(value: Any) -> str:
    """Functions by their names; those that hold values of their own have none that is unique."""
    if inspect.isfunction(value) and value.__closure__ is None:
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return json.dumps({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, default=_text)
    return repr(value)


def rehearse(setup: Any, launched: Any = None) -> Any:
    if setup.card is not None:
        return _rehearse(setup, launched=launched)
    key = key_of(setup)
    if key is None:
        return _rehearse(setup)
    if key not in _rehearsed:
        _rehearsed[key] = _rehearse(setup)
    return _rehearsed[key]


def install(once: bool = True) -> None:
    job.rehearse = rehearse if once else _rehearse
