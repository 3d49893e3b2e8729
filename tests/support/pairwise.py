"""Fewer cases than all combinations: every two values of different axes still meet in one of them.

A fault shows at one value (an odd width), or at two together (an odd width beside padding). Where three or more axes
are crossed, what the other combinations add is time, and Triton's interpreter takes much of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairwise(*axes: tuple[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """`axes` as parametrize takes each: a name with its values, or several names with tuples of values."""
    values = [list(of) for _, of in axes]
    names = [name.strip() for names, _ in axes for name in names.split(",")]
    rows = []
    for case in covering([len(of) for of in values]):
        row: list[Any] = []
        for (name, _), of, index in zip(axes, values, case, strict=True):
            row += of[index] if "," in name else [of[index]]
        rows.append(tuple(row))
    return pytest.mark.parametrize(names, rows, ids=lambda value: str(value).removeprefix("torch."))


def covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Combinations of indices, each chosen for the most pairs that have not met before."""
    cases = [(case, set(pairs(case))) for case in itertools.product(*map(range, sizes))]
    missing = set().union(*(met for _, met in cases))
    chosen = []
    while missing:
        case, met = max(cases, key=lambda known: len(known[1] & missing))
        chosen.append(case)
        missing -= met
    return chosen


def pairs(case: Sequence[int]) -> itertools.combinations[tuple[int, int]]:
    return itertools.combinations(enumerate(case), 2)  # type: ignore[arg-type]
