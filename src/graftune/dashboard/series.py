"""The curves of a run, or of a part of it, with as many points as a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graftune.dashboard.log import Log
from graftune.observe.downsample import downsampled, numbers
from graftune.observe.events import NOT_CURVES

MOST_POINTS = 20_000


def series(log: Log, names: Sequence[str], points: int, first: int | None, last: int | None) -> dict[str, Any]:
    """The named numbers of the steps from `first` to `last`, at `points` places or fewer; without names all curves."""
    steps = np.frombuffer(log.steps, np.int64) if len(log.steps) else np.empty(0, np.int64)
    start = 0 if first is None else int(np.searchsorted(steps, first, "left"))
    end = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
    chosen = [name for name in names if name in log.values]
    chosen = chosen if names else [name for name in log.values if name not in NOT_CURVES]
    columns = {name: np.frombuffer(log.values[name], np.float64)[start:end] for name in chosen} if len(steps) else {}
    shown, values = downsampled(steps[start:end], columns, max(4, min(points, MOST_POINTS)), means=("loss",))
    return {
        "names": chosen,
        "available": list(log.values),
        "steps": shown.tolist(),
        "values": {name: numbers(column) for name, column in values.items()},
        "last": log.steps[-1] if len(log.steps) else 0,
        "count": max(0, end - start),
        "offset": log.offset,
    }
