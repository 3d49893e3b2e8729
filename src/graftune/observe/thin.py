"""Curves cut to what a screen can show, without losing a spike.

Steps are put into buckets and each bucket gives its least and its greatest value, in the order in which they occur.
Averaging would hide the one step that went wrong, and taking every n-th step would find it by luck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


def thinned(
    steps: np.ndarray, columns: Mapping[str, np.ndarray], points: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps and values in at most `points` places; as they are if there are no more."""
    if len(steps) <= points:
        return steps, dict(columns)
    edges = np.linspace(0, len(steps), points // 2 + 1).astype(np.int64)
    values = {name: _extremes(column, edges) for name, column in columns.items()}
    # A bucket's two values stand at its first step and halfway to the next bucket.
    return np.stack([steps[edges[:-1]], steps[(edges[:-1] + edges[1:]) // 2]], axis=1).reshape(-1), values


def numbers(column: np.ndarray) -> list[float | None]:
    """As JSON has them: what is not finite is null."""
    return [value if math.isfinite(value) else None for value in column.tolist()]


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
