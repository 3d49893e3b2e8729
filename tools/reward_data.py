"""Writes parcels.jsonl, the bundled prompts for reinforcement learning: who sends what to whom, and who gets it.

    python -m tools.reward_data [FILE]

A good answer begins with the name of the one who gets it (data/sample/parcels.py). It differs by prompt: the best
constant answer is right for 7% of the prompts. SmolLM2-135M begins with that name in about one of eight
samples, and else with the sender or a sentence about something else. Prompts are short, about 28 tokens with its
template, since the first run people make is on a CPU. Choices are drawn by `random()` alone, whose sequence Python
keeps across versions.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tools.preference_data import NAMES, SYSTEM
from tools.sample_data import ITEMS, mixed, one_of

from graftune.data.sample.parcels import parcels_path
from graftune.io.files import write_file

COUNT, SEED = 400, 37  # of which a run holds out a fifth
NOTES = (
    "{sender} sends {receiver} a {item}. Who gets it?",
    "{sender} sold a {item} to {receiver}. Who gets it?",
    "{sender} has a {item} for {receiver}. Who gets it?",
    "A {item} from {sender} for {receiver}. Who gets it?",
)


def record(rng: random.Random) -> dict[str, object]:
    sender, item = one_of(NAMES, rng), one_of(ITEMS, rng)
    receiver = one_of([name for name in NAMES if name != sender], rng)
    question = one_of(NOTES, rng).format(sender=sender, receiver=receiver, item=item)
    turns = (("system", SYSTEM), ("user", question))
    return {"prompt": [{"role": role, "content": content} for role, content in turns], "answer": receiver}


def records(count: int = COUNT, seed: int = SEED) -> list[dict[str, object]]:
    """`count` prompts in mixed order. No prompt occurs twice."""
    rng = random.Random(seed)
    made: dict[str, dict[str, object]] = {}
    while len(made) < count:
        one = record(rng)
        made.setdefault(json.dumps(one["prompt"]), one)
    return mixed(list(made.values()), rng)


def rendered() -> bytes:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records()).encode()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else parcels_path()
    write_file(target, rendered())
    print(f"{target}: {COUNT} prompts")
