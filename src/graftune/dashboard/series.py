"""Curves cut to what a screen can show, without losing a spike.

Where a view has more steps than points, steps are put into buckets and each bucket gives its least and its greatest
value, in the order in which they occur. Averaging would hide the one step that went wrong, and taking every n-th step
would find it by luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from graftune.dashboard.log import Log

MOST_POINTS = 20_000


def series(log: Log, names: Sequence[str], points: int, first: int | None, last: int | None) -> dict[str, Any]:
    """The named figures of the steps from `first` to `last`, in at most `points` places."""
    steps = np.frombuffer(log.steps, np.int64) if len(log.steps) else np.empty(0, np.int64)
    start = 0 if first is None else int(np.searchsorted(steps, first, "left"))
    end = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
    chosen = [name for name in (names or log.values) if name in log.values]
    columns = {name: np.frombuffer(log.values[name], np.float64)[start:end] for name in chosen} if len(steps) else {}
    shown, cut = steps[start:end], max(2, min(points, MOST_POINTS))
    if len(shown) > cut:
        edges = np.linspace(0, len(shown), cut // 2 + 1).astype(np.int64)
        values = {name: _extremes(column, edges) for name, column in columns.items()}
        # A bucket's two values stand at its first step and halfway to the next bucket.
        shown = np.stack([shown[edges[:-1]], shown[(edges[:-1] + edges[1:]) // 2]], axis=1).reshape(-1)
    else:
        values = columns
    result = {
        "names": chosen,
        "available": list(log.values),
        "steps": shown.tolist(),
        "values": {name: _json(column) for name, column in values.items()},
        "last": log.steps[-1] if len(log.steps) else 0,
        "count": max(0, end - start),
        "offset": log.offset,
    }
    return result


def _extremes(column: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Least and greatest value of each bucket, in the order in which they occur; NaN where a bucket has none."""
    low, high = np.where(np.isfinite(column), column, np.inf), np.where(np.isfinite(column), column, -np.inf)
    least, greatest = np.minimum.reduceat(low, edges[:-1]), np.maximum.reduceat(high, edges[:-1])
    rising = np.empty(len(least), np.bool_)
    for i, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        rising[i] = low[begin:end].argmin() <= high[begin:end].argmax()
    pairs = np.where(rising[:, None], np.stack([least, greatest], 1), np.stack([greatest, least], 1)).reshape(-1)
    pairs[np.isinf(pairs)] = np.nan
    return pairs


def _json(column: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in column.tolist()]
