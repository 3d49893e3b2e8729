"""Writes support.jsonl, the bundled sample data: a customer's message in, one line of JSON out.

    python tools/sample_data.py [FILE]

The rules are plain enough for a 135M model to learn from a few hundred records seen once: the topic follows from the
wording, the order number is copied, and the message is urgent if it says so. Records are short (about 55 tokens with
SmolLM2's chat template, of which about 20 are trained), since the first run people make is on a CPU. The system turn is
there to keep the template from writing its own, longer one. Every message has a number and a wording of its own, so
held-out records are unseen text. Choices are drawn by `random()` alone, whose sequence Python keeps across versions.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from graftune.data.sample import TOPICS, sample_for
from graftune.io.files import write_file

T = TypeVar("T")

COUNT, SEED = 600, 20
SYSTEM = "To JSON."

BODIES: dict[str, tuple[str, ...]] = {
    "refund": (
        "I want my money back for the {item}, order {n}.",
        "Please refund order {n}, the {item}.",
        "I sent back the {item} of order {n} and want a refund.",
        "Order {n}: I want my money back for the {item}.",
        "Could I get a refund for the {item}? Order {n}.",
        "I returned the {item}, so refund order {n}.",
        "Money back for the {item} please, order {n}.",
    ),
    "delivery": (
        "Order {n} has not arrived, where is my {item}?",
        "I am still waiting for the {item} of order {n}.",
        "When will the {item} be delivered? Order {n}.",
        "The courier never came with my {item}, order {n}.",
        "Order {n} is late, the {item} is not here yet.",
        "My {item} has not been delivered, order {n}.",
        "Where is order {n}? The {item} never came.",
    ),
    "damage": (
        "The {item} of order {n} came broken.",
        "My {item} arrived cracked, order {n}.",
        "Order {n}: the {item} is scratched and bent.",
        "I opened order {n} and the {item} was smashed.",
        "The {item} has a big dent. Order {n}.",
        "There is a crack in the {item}, order {n}.",
        "Order {n} came with a torn {item}.",
    ),
    "cancel": (
        "Please cancel order {n}, I do not need the {item}.",
        "Cancel the {item}, order {n}.",
        "I changed my mind about the {item}, stop order {n}.",
        "Do not ship the {item}, cancel order {n}.",
        "I bought the {item} by mistake, cancel order {n}.",
        "Could you cancel my {item}? Order {n}.",
        "Please stop order {n}, cancel the {item}.",
    ),
}
ITEMS = (
    "lamp", "kettle", "chair", "mirror", "jacket", "clock", "vase", "desk", "tent", "drill", "mug", "rug", "scarf",
    "guitar", "camera", "helmet", "backpack", "pillow", "shelf", "toaster", "bike", "phone", "radio", "sofa", "watch",
    "table", "printer", "blender", "skirt", "piano", "ladder", "monitor", "blanket", "wallet", "umbrella",
)  # fmt: skip
GREETINGS = (
    "", "", "", "", "Hi.", "Hello.", "Hi, Mara here.", "Tom here.", "Good day.", "Hey.", "I am Ines.", "Ravi here.",
    "Hi again.", "Olga here.", "Good morning.",
)  # fmt: skip
URGENT = (
    "Urgent!",
    "This is urgent!",
    "I need an answer today.",
    "Please hurry!",
    "Very urgent.",
    "Hurry, please.",
    "Today!",
)
CALM = ("", "", "", "", "Thanks.", "No rush.", "Thank you.", "Take your time.", "Best wishes.")


def wording(topic: str, urgent: bool, rng: random.Random) -> str:
    """A customer's message, with {n} where the order number goes."""
    body = one_of(BODIES[topic], rng).replace("{item}", one_of(ITEMS, rng))
    parts = (one_of(GREETINGS, rng), body, one_of(URGENT if urgent else CALM, rng))
    return " ".join(part for part in parts if part)


def record(words: str, topic: str, order: int, urgent: bool) -> dict[str, object]:
    answer = json.dumps({"topic": topic, "order": order, "urgent": urgent}, separators=(",", ":"))
    turns = (("system", SYSTEM), ("user", words.format(n=order)), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def records(count: int = COUNT, seed: int = SEED) -> list[dict[str, object]]:
    """`count` records, topics in equal parts, four in ten urgent, in mixed order.

    No order number and no wording (greeting, phrase, item, closing) occurs twice."""
    rng = random.Random(seed)
    numbers = mixed(range(1000, 10000), rng)
    facts = [(TOPICS[i % len(TOPICS)], numbers[i], i // len(TOPICS) % 5 < 2) for i in range(count)]
    made, seen = [], set()
    for topic, order, urgent in mixed(facts, rng):
        while (words := wording(topic, urgent, rng)) in seen:
            continue
        seen.add(words)
        made.append(record(words, topic, order, urgent))
    return made


def one_of(options: Sequence[str], rng: random.Random) -> str:
    return options[int(rng.random() * len(options))]


def mixed(items: Sequence[T], rng: random.Random) -> list[T]:
    return [item for _, item in sorted(((rng.random(), item) for item in items), key=lambda pair: pair[0])]


def rendered() -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records()).encode()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else sample_for("answers")
    write_file(target, rendered())
    print(f"{target}: {COUNT} records")
