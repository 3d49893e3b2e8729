"""The bundled preference data, and how well a model's own replies follow what it prefers.

A reply of the sample has three sentences: thanks, the price, and the day of delivery, and this order is what chosen
replies have and rejected ones have not. Counted strictly: a reply is in order only if its sentences are those three,
each once. Whether the facts are right is counted apart, since the preference does not teach them.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

ORDER = ("thanks", "price", "day")
_SIGNS = {"price": re.compile(r"\beuros\b"), "day": re.compile(r"day\b"), "thanks": re.compile(r"\b[Tt]hank")}
_FACTS = re.compile(r"\d+|[A-Z][a-z]+day")


def score_reply(answer: str, reference: str) -> dict[str, float]:
    """As a metric: whether the reply has the three sentences in their order, has all of them, and has the reference's
    price and day."""
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


def replies_path() -> Path:
    return Path(str(resources.files("graftune.data.sample") / "replies.jsonl"))
