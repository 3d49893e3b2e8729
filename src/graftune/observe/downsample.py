"""Reduces curves to as many points as a screen can show, without losing a spike.

Steps are divided into buckets, and each bucket gives its lowest and its highest value, in the order in which they
occur. An average would hide the one step that went wrong, and every n-th step would find it by luck only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


def downsampled(
    steps: np.ndarray, columns: Mapping[str, np.ndarray], points: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Steps and values at `points` places or fewer; unchanged if there are no more."""
    if len(steps) <= points:
        return steps, dict(columns)
    edges = np.linspace(0, len(steps), points // 2 + 1).astype(np.int64)
    values = {name: _extremes(column, edges) for name, column in columns.items()}
    # A bucket's two values are placed at its first step and halfway to the next bucket.
    return np.stack([steps[edges[:-1]], steps[(edges[:-1] + edges[1:]) // 2]], axis=1).reshape(-1), values


def numbers(column: np.ndarray) -> list[float | None]:
    """As JSON: null for NaN and infinity."""
    return [value if math.isfinite(value) else None for value in column.tolist()]


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
