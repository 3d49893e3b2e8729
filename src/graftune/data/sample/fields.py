"""The reward of the bundled prompts (fields.jsonl): how much of an answer is the field that was asked for.

This file is also an example of a reward file: `graftune rl BASE DATA --reward fields.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def fields_path() -> Path:
    return Path(__file__).with_name("fields.jsonl")


def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 for the field alone; if it is one of n words, 1/n; 0 without it."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    words = [re.findall(r"\w+", text.lower()) for text in texts]
    return [float(right.lower() in some) / max(len(some), 1) for some, right in zip(words, answer, strict=True)]
