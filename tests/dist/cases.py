"""Runs that several ranks and one rank have to agree on, and what agreeing means: fp32, the same global batch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.dist.launcher import Launcher, apart, losses, validation

FIRST, LATER, WEIGHTS = 1e-6, 1e-5, 1e-4  # relative: loss of the first step, of every step, what was trained

COMMON = [
    *("--device", "cpu", "--threads", "1", "--compute-dtype", "fp32", "--deterministic", "--seed", "7"),
    *("--tokens-per-step", "256", "--tokens-per-micro-batch", "64", "--warmup", "0.02", "--schedule", "constant"),
    *("--samples", "0", "--patience", "0", "--save-minutes", "0"),
]
LORA, FULL = ["--rank", "4", "--lr", "1e-3"], ["--method", "full", "--lr", "1e-4"]
CASES = {
    "lora, clipped as a whole": [*LORA, "--clip-mode", "global", "--clip", "0.5"],
    "lora, dropout, clipped by layer": [*LORA, "--dropout", "0.2", "--clip-mode", "layer", "--clip", "0.2"],
    "lora, one micro-batch a step": [*LORA, "--tokens-per-step", "64"],
    "lora, norms, weighted as anchored": [*LORA, "--train-norms", "--loss", "anchored"],
    "lora, kto": [*LORA, "--loss", "kto", "--beta", "0.5"],
    "full, clipped as a whole": [*FULL, "--clip-mode", "global"],
    "full, clipped by layer": [*FULL, "--clip-mode", "layer", "--clip", "0.2"],
}


def write_data(path: Path, rows: int, seed: int = 2) -> Path:
    """Rows of very unequal lengths, some of which fill a micro-batch: steps have from one to four of them."""
    draw = random.Random(seed)

    def text(longest: int) -> str:
        return "".join(draw.choices("abcdefgh", k=draw.randint(1, longest)))

    records = [{"prompt": text(8), "response": text(draw.choice([3, 12, 28]))} for _ in range(rows)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def suited(case: str, data: Path) -> Path:
    """The data as the case's loss takes it: with a rating of every row."""
    if "kto" not in case:
        return data
    records = [json.loads(row) for row in data.read_text().splitlines()]
    rated = data.with_name("rated.jsonl")
    rated.write_text("".join(json.dumps(r | {"label": "a" in r["response"]}) + "\n" for r in records))
    return rated


def line(base: Path, data: Path, out: Path, *more: str) -> list[str]:
    common = list(COMMON)
    for flag in set(common) & {word for word in more if word.startswith("--")}:
        del common[common.index(flag) : common.index(flag) + 2]  # the case's own value
    return ["train", str(base), str(data), *common, *more, "--out", str(out)]


def compare(one: Path, several: Path, steps: int) -> tuple[float, float, float]:
    """(first loss, all losses, weights): how far two runs are apart; asserted to be within bounds."""
    left, right = losses(one), losses(several)
    assert len(left) == len(right) == steps and left[-1] < left[0]
    off = [abs(a - b) / abs(a) for a, b in zip(left, right, strict=True)]
    weights = apart(one, several)
    assert off[0] <= FIRST and max(off) <= LATER and weights <= WEIGHTS, (off[0], max(off), weights)
    assert validation(one) == pytest.approx(validation(several), rel=LATER)
    assert validation(one)[0] == validation(several)[0], "before the first step the sums are exact"
    return off[0], max(off), weights


def run(launcher: Launcher, size: int, *arguments: str) -> None:
    """0: one process without a launcher, which is the launcher's server itself."""
    ended = launcher.run(size, *arguments, here=not size)
    assert ended.codes == [0] * max(1, size), ended.said
    assert all(not text for text in ended.said[1:]), "only rank 0 speaks"
