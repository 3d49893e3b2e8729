"""Reduces curves to as many points as a screen can show, without losing a spike or the last value.

The first and the last step keep their values. The steps between them are divided into buckets, and each bucket gives
its lowest and its highest value, in the order in which they occur. An average would hide the one step that went wrong,
and taking every n-th step would find it only by luck. The smoothed curve has to follow the average of all steps, which
the extremes do not show, so it gets the mean of each bucket.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


def downsampled(
    steps: np.ndarray, columns: Mapping[str, np.ndarray], points: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps and values at `points` places or fewer, at least four; unchanged if there are no more. The loss also
    gives the means of its buckets, as loss_mean."""
    if len(steps) <= points:
        return steps, dict(columns)
    inner = slice(1, len(steps) - 1)
    edges = np.linspace(0, len(steps) - 2, max(1, points // 2 - 1) + 1).astype(np.int64)
    values = {name: _between(column, _extremes(column[inner], edges)) for name, column in columns.items()}
    if "loss" in columns:
        values["loss_mean"] = _between(columns["loss"], _means(columns["loss"][inner], edges))
    # A bucket's two values are placed at its first step and halfway to the next bucket.
    places = steps[inner][np.stack([edges[:-1], (edges[:-1] + edges[1:]) // 2], axis=1).reshape(-1)]
    return _between(steps, places), values


def numbers(column: np.ndarray) -> list[float | None]:
    """The values for JSON: None for NaN and infinity."""
    return [value if math.isfinite(value) else None for value in column.tolist()]


def _between(whole: np.ndarray, inner: np.ndarray) -> np.ndarray:
    return np.concatenate([whole[:1], inner, whole[-1:]])


def _means(column: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The mean of the numbers in each bucket, at both of its places; NaN where it has none."""
    known = np.isfinite(column)
    sums, counts = (np.add.reduceat(each, edges[:-1]) for each in (np.where(known, column, 0.0), known.astype(float)))
    with np.errstate(invalid="ignore"):
        return np.repeat(sums / counts, 2)


def _extremes(column: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The lowest and highest value of each bucket in the order in which they occur; NaN where it has none."""
    starts, sizes, places = edges[:-1], np.diff(edges), np.arange(len(column))
    low, high = np.where(np.isfinite(column), column, np.inf), np.where(np.isfinite(column), column, -np.inf)
    lowest, highest = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
    lowest_at = np.minimum.reduceat(np.where(low == np.repeat(lowest, sizes), places, len(column)), starts)
    highest_at = np.minimum.reduceat(np.where(high == np.repeat(highest, sizes), places, len(column)), starts)
    rising = (lowest_at <= highest_at)[:, None]
    pairs = np.where(rising, np.stack([lowest, highest], 1), np.stack([highest, lowest], 1)).reshape(-1)
    pairs[np.isinf(pairs)] = np.nan
    return pairs
