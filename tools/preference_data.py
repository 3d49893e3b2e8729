"""Writes replies.jsonl, the bundled preference data: two replies of a shop, of which one is preferred.

    python -m tools.preference_data [FILE]

Each reply has three sentences: thanks, the price, and the day of delivery. The shop's style is that order, and a
rejected reply has the same sentences in one of the five others. So both replies have the same words and the same
length, and only the order tells them apart. SmolLM2-135M prefers this order to the others about half of the time
(to price, day, thanks: hardly ever), so that training has something to change. The facts are in the prompt, so a tuned
model's own replies can be scored (data/sample). Records are short, about 48 tokens with SmolLM2's
template, since the first run people make is on a CPU. Choices are drawn by `random()` alone, whose sequence Python
keeps across versions.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

from tools.sample_data import ITEMS, mixed, one_of

from graftune.data.sample import ORDER, sample_for
from graftune.io.files import write_file

COUNT, SEED = 500, 35  # of which a run holds out a fifth
SYSTEM = "Shop."
NAMES = (
    "Mara", "Tom", "Ines", "Ravi", "Olga", "Ben", "Lena", "Omar", "Nina", "Paul", "Sara", "Jon", "Mia", "Karl", "Ada",
    "Leo", "Eva", "Max", "Zoe", "Ian",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
FACTS = {"name": NAMES, "item": ITEMS, "price": [str(price) for price in range(10, 100)], "day": DAYS}
QUESTIONS = (
    "{name}: {item}, {price} euros, {day}.",
    "{name} wants the {item}. {price} euros, {day}.",
    "Tell {name}: {item}, {day}, {price} euros.",
    "{item}, {price} euros, {day}. Ask: {name}.",
)
SENTENCES = {
    "price": ("The {item} is {price} euros.", "The {item} costs {price} euros.", "You pay {price} euros."),
    "day": ("It comes on {day}.", "It arrives on {day}.", "We deliver on {day}."),
    "thanks": ("Thanks, {name}!", "Thank you, {name}!", "Many thanks, {name}!"),
}
OTHER_ORDERS = [order for order in itertools.permutations(ORDER) if order != ORDER]


def record(number: int, rng: random.Random) -> dict[str, object]:
    """A pair; every other order of the sentences is rejected equally often."""
    facts = {name: one_of(options, rng) for name, options in FACTS.items()}
    said = {part: one_of(SENTENCES[part], rng).format(**facts) for part in ORDER}
    turns = (("system", SYSTEM), ("user", one_of(QUESTIONS, rng).format(**facts)))
    orders = {"chosen": ORDER, "rejected": OTHER_ORDERS[number % len(OTHER_ORDERS)]}
    return {"prompt": [{"role": role, "content": content} for role, content in turns]} | {
        side: [{"role": "assistant", "content": " ".join(said[part] for part in order)}]
        for side, order in orders.items()
    }


def records(count: int = COUNT, seed: int = SEED) -> list[dict[str, object]]:
    """`count` pairs in mixed order. No prompt occurs twice."""
    rng = random.Random(seed)
    made: dict[str, dict[str, object]] = {}
    while len(made) < count:
        one = record(len(made), rng)
        made.setdefault(json.dumps(one["prompt"]), one)
    return mixed(list(made.values()), rng)


def rendered() -> bytes:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records()).encode()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else sample_for("pairs")
    write_file(target, rendered())
    print(f"{target}: {COUNT} pairs")
