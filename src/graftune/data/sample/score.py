"""How well answers to the bundled sample data do, counted strictly.

An answer is right only if it is one line of JSON with just the three keys, in their order, with values of the right
kind, and all of them equal to the reference's. Nothing is repaired: code fences, a sentence before the object or a
number in quotes count as wrong, because a program reading the answers would stumble over them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from graftune.io import digest

TOPICS = ("refund", "delivery", "damage", "cancel")
KEYS = ("topic", "order", "urgent")


@dataclass(frozen=True)
class ScoreReport:
    """Counts over `total` answers; `fields` is the share of answers that have each field right."""

    exact: int
    valid_json: int  # of the right shape, whether or not the values are right
    total: int
    fields: dict[str, float]

    @property
    def share(self) -> float:
        return self.exact / self.total if self.total else 0.0


def score_all(pairs: Iterable[tuple[str, str]]) -> ScoreReport:
    """`pairs` are (reference, answer)."""
    pairs = list(pairs)
    parsed = [(_parsed(reference), _parsed(answer)) for reference, answer in pairs]
    assert all(expected is not None for expected, _ in parsed), "not references of the sample data"
    total = len(pairs)
    right = {
        key: sum(
            given is not None and expected is not None and given[key] == expected[key] for expected, given in parsed
        )
        for key in KEYS
    }
    return ScoreReport(
        exact=sum(expected == given for expected, given in parsed),
        valid_json=sum(given is not None for _, given in parsed),
        total=total,
        fields={key: count / total if total else 0.0 for key, count in right.items()},
    )


def score_answer(answer: str, reference: str) -> dict[str, float]:
    """As a metric: 1 or 0 for the whole answer, for its shape and for each field."""
    expected, given = _parsed(reference), _parsed(answer)
    fields = {key: float(bool(given and expected and given[key] == expected[key])) for key in KEYS}
    exact = float(given is not None and given == expected)
    return {"exact": exact, "valid_json": float(given is not None), **fields}


def _parsed(answer: str) -> dict[str, Any] | None:
    """The object an answer spells, or None if it is not exactly of the task's shape."""
    text = answer.strip()
    if "\n" in text:
        return None
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        return None
    if tuple(key for key, _ in pairs) != KEYS:
        return None
    value = dict(pairs)
    if value["topic"] not in TOPICS or type(value["order"]) is not int or type(value["urgent"]) is not bool:
        return None
    return value


def sample_path() -> Path:
    path = Path(str(resources.files("graftune.data.sample") / "support.jsonl"))
    assert path.is_file(), f"the package is incomplete: {path} is missing"
    return path


def is_sample_hash(sha256: str) -> bool:
    """Whether data of this digest is the bundled one, under whatever name."""
    return sha256 == digest.sha256([sample_path()])
