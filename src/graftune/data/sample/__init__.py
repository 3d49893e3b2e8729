"""The bundled sample data: a small task that an untuned model fails and a tuned one does, and pairs of replies of which
one is preferred; each with its own scorer. (parcels.py has the prompts for reinforcement learning and their reward.)

An answer to the task is right only if it is one line of JSON with just the three keys, in their order, with values of
the right kind, and all of them equal to the reference's. Nothing is repaired: code fences, a sentence before the object
or a number in quotes count as wrong, because a program reading the answers would stumble over them.

A reply has three sentences: thanks, the price, and the day of delivery, and this order is what chosen replies have and
rejected ones have not. A reply is in order only if its sentences are those three, each once. Whether the facts are
right is counted apart, since the preference does not teach them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.io import digest

FILES = {"answers": "support.jsonl", "pairs": "replies.jsonl"}  # by the kind of their records (DataKind.name)
TOPICS = ("refund", "delivery", "damage", "cancel")
KEYS = ("topic", "order", "urgent")
ORDER = ("thanks", "price", "day")
_SIGNS = {"price": re.compile(r"\beuros\b"), "day": re.compile(r"day\b"), "thanks": re.compile(r"\b[Tt]hank")}
_FACTS = re.compile(r"\d+|[A-Z][a-z]+day")


def sample_for(kind: str) -> Path:
    """The bundled data of this kind."""
    if kind not in FILES:
        raise GraftuneError(f"there is no bundled sample of {kind}", fix="name the data to train on")
    return Path(__file__).with_name(FILES[kind])


def is_sample_hash(sha256: str) -> bool:
    """Whether data of this digest is the bundled task, under whatever name."""
    return sha256 == digest.sha256([sample_for("answers")])


def score_all(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The share of answers to the task that are right and of those that have each field right, and how many have the
    right shape. `pairs` are (reference, answer)."""
    scores = [score_answer(answer, reference) for reference, answer in pairs]
    sums = {name: sum(score[name] for score in scores) for name in ("exact", "valid_json", *KEYS)}
    total = max(1, len(scores))
    return {
        "exact": sums["exact"] / total,
        "valid_json": int(sums["valid_json"]),
        "total": len(scores),
        "fields": {key: sums[key] / total for key in KEYS},
    }


def score_sample(answer: str, reference: str) -> dict[str, float]:
    """A metric that uses the scorer of the sample (task or replies) that the reference is from."""
    is_reply = score_reply(reference, reference)["in_order"]
    return score_reply(answer, reference) if is_reply else score_answer(answer, reference)


def score_answer(answer: str, reference: str) -> dict[str, float]:
    """1 or 0 for the whole answer, for its shape and for each field."""
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


def score_reply(answer: str, reference: str) -> dict[str, float]:
    """Whether the reply has the three sentences in their order, has all of them, and has the reference's price and
    day."""
    parts = [_part(sentence) for sentence in re.findall(r"[^.!?]+[.!?]?", answer.strip()) if sentence.strip()]
    return {
        "in_order": float(tuple(parts) == ORDER),
        "complete": float(sorted(parts) == sorted(ORDER)),
        "facts": float(set(_FACTS.findall(reference)) <= set(_FACTS.findall(answer))),
    }


def _part(sentence: str) -> str:
    """Which of the three a sentence is; empty if it is none, or more than one."""
    found = [part for part, sign in _SIGNS.items() if sign.search(sentence)]
    return found[0] if len(found) == 1 else ""
