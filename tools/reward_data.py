"""Writes fields.jsonl, the bundled prompts for reinforcement learning: a note about an order, and a question about one
of its four fields.

    python -m tools.reward_data [FILE]

The best answer is that field alone (data/sample/fields.py). It differs by prompt: the best constant answer earns less
than 0.1 on average. SmolLM2-135M answers in whole sentences, in which the field is one word of many or missing.
Prompts and answers are short, about 35 and 3 tokens with its template, since the first run people make is on a CPU.
Choices are drawn by `random()` alone, whose sequence Python keeps across versions.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tools.preference_data import DAYS, NAMES, SYSTEM
from tools.sample_data import ITEMS, mixed, one_of

from graftune.data.sample.fields import fields_path
from graftune.io.files import write_file

COUNT, SEED = 400, 37  # of which a run holds out a fifth
FACTS = {"name": NAMES, "item": ITEMS, "price": [str(price) for price in range(10, 100)], "day": DAYS}
NOTES = (
    "{name} ordered a {item} for {price} euros, to be delivered on {day}.",
    "Order of {name}: {item}, {price} euros, delivery on {day}.",
    "On {day} {name} gets a {item} for {price} euros.",
)
QUESTIONS = {
    "name": "Who ordered?",
    "item": "What was ordered?",
    "price": "How many euros?",
    "day": "Which day?",
}


def record(number: int, rng: random.Random) -> dict[str, object]:
    facts = {name: one_of(options, rng) for name, options in FACTS.items()}
    asked = list(QUESTIONS)[number % len(QUESTIONS)]
    question = f"{one_of(NOTES, rng).format(**facts)} {QUESTIONS[asked]}"
    turns = (("system", SYSTEM), ("user", question))
    return {"prompt": [{"role": role, "content": content} for role, content in turns], "answer": facts[asked]}


def records(count: int = COUNT, seed: int = SEED) -> list[dict[str, object]]:
    """`count` prompts in mixed order. No prompt occurs twice."""
    rng = random.Random(seed)
    made: dict[str, dict[str, object]] = {}
    while len(made) < count:
        one = record(len(made), rng)
        made.setdefault(json.dumps(one["prompt"]), one)
    return mixed(list(made.values()), rng)


def rendered() -> bytes:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records()).encode()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else fields_path()
    write_file(target, rendered())
    print(f"{target}: {COUNT} prompts")
