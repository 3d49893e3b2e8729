"""The reward of the bundled prompts (parcels.jsonl): whether an answer begins with the name of the person who gets the
parcel.

This file is also an example of a reward file: `graftune rl BASE DATA --reward parcels.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def parcels_path() -> Path:
    return Path(__file__).with_name("parcels.jsonl")


def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 if the first word is the right name, 0 otherwise."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    words = [re.findall(r"\w+", text) for text in texts]
    return [float(some[:1] == [right]) for some, right in zip(words, answer, strict=True)]
