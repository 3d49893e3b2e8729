"""What `auto` makes of lr and tokens_per_step: enough steps for small data, the model's own size for large, in the
numbers that docs/choosing.md prints, and kept by the run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from graftune.cli import main
from graftune.data.pack import plan_epoch
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.plan import cards
from graftune.settings import auto
from graftune.settings.config import Config
from graftune.training import expected, prepare
from graftune.training.launch import train
from tests.training.runs import write_data

QUIET = Console(quiet=True)
CHOOSING = Path(__file__).parents[2] / "docs" / "choosing.md"
LENGTH = 100  # tokens of each record in the table of docs/choosing.md


def chosen(records: int, parameters: int = 135_000_000, **settings: Any) -> tuple[int, int, float]:
    """Steps, tokens of a step and learning rate of a run on so many records."""
    config, examples = Config.of(settings), math.ceil(records * 0.8)
    config = auto.with_lr(auto.with_step_tokens(config, parameters, examples * LENGTH, examples), parameters)
    tokens = config.train.step_tokens
    sizes = {"tokens_per_step": tokens, "micro_capacity": max(LENGTH, tokens), "seed": 42}
    steps = sum(len(plan_epoch([LENGTH] * examples, epoch=epoch, **sizes)) for epoch in range(3))
    return steps, tokens, config.optim.peak_lr


def test_the_table_of_the_document_is_what_is_chosen() -> None:
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (\S+) \|$", CHOOSING.read_text(), re.MULTILINE)
    found = {int(records.replace(",", "")): (steps, tokens, lr) for records, steps, tokens, lr in rows}
    made = {count: chosen(count) for count in (10, 60, 600, 60_000)}
    assert found == {count: (f"{s:,}", f"{t:,}", f"{lr:g}") for count, (s, t, lr) in made.items()}
    assert all(steps >= auto.TOO_FEW for steps, _, _ in made.values())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("parameters", "method", "lr", "tokens"),
    [
        (135_000_000, "lora", 1e-3, 4096), (135_000_000, "full", 1e-4, 4096), (135_000_000, "scratch", 1e-3, 4096),
        (3_000_000_000, "lora", 3e-4, 8192), (8_000_000_000, "lora", 2e-4, 16384),
        (8_000_000_000, "full", 2e-5, 16384), (70_000_000_000, "lora", 1e-4, 32768),
    ],
)  # fmt: skip
def test_large_data_takes_what_suits_the_model(parameters: int, method: str, lr: float, tokens: int) -> None:
    assert chosen(60_000, parameters, method=method)[1:] == (tokens, lr)
    row = next(line for line in CHOOSING.read_text().splitlines() if f"| {tokens:,} |" in line)
    assert f"{lr * 10 if method == 'full' else lr:g}" in row, "the document's table has it too"


def test_numbers_stay() -> None:
    assert chosen(60, lr=3e-4, tokens_per_step=1000)[1:] == (1000, 3e-4)
    assert chosen(60, lr=0.0)[2] == 0.0


def test_a_run_keeps_and_says_what_was_chosen(tiny_folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, out = write_data(tmp_path / "data.jsonl", rows=10), tmp_path / "run"
    values = {"base": str(tiny_folder("llama-shallow")), "data": str(data), "device": "cpu", "rank": 2, "samples": 0}
    coming = expected.expected(job := prepare.job_of(Config.of(values), QUIET), job.plan("none", 64))
    assert coming is not None and coming.seconds is not None and coming.seconds > 0
    run = train(Config.of(values | {"out": str(out)}), console=Console())
    kept, said, events = Config.of_run(out), capfd.readouterr().err, read_events(out / "metrics.jsonl")
    assert (kept.optim.lr, kept.train.tokens_per_step) == (1e-3, coming.tokens_per_step)
    assert run.steps == coming.steps >= auto.TOO_FEW and "warning" not in {
        e["event"] for e in read_events(out / "metrics.jsonl")
    }
    assert f"auto: tokens_per_step {coming.tokens_per_step} because the data is small (aim: 100 steps), lr" in said
    assert f"{run.steps} steps of up to {coming.tokens_per_step} tokens" in said
    logged = next(e for e in events if e["event"] == "run_start")["settings"]
    assert (logged["lr"], logged["tokens_per_step"]) == (kept.optim.lr, kept.train.tokens_per_step)
    with pytest.raises(GraftuneError, match="tokens_per_step was "):
        train(Config(), console=QUIET, resume=str(out), overrides={"tokens_per_step": 4096})


@pytest.mark.parametrize(
    ("settings", "steps", "examples", "said"),
    [
        ({"tokens_per_step": 4096}, 3, 48, "only 3 steps.*set epochs to 20 or more, or tokens_per_step to 614 or less"),
        ({"tokens_per_step": 64}, 12, 4, "only 12 steps.*set epochs to 5 or more$"),
        ({"tokens_per_step": 64, "epochs": 1}, 1, 1, "only 1 step, .*set epochs to 20 or more$"),
        ({"tokens_per_step": 4096, "max_steps": 3}, 3, 48, "^$"),
        ({"tokens_per_step": 4096}, 20, 48, "^$"),
    ],
)
def test_too_few_steps_are_warned_of(settings: dict[str, Any], steps: int, examples: int, said: str) -> None:
    assert re.search(said, auto.warning(Config.of(settings), steps, examples))


def test_a_short_run_warns_and_the_plan_too(tiny_folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, base = write_data(tmp_path / "data.jsonl"), str(tiny_folder("llama-shallow"))
    values = {"base": base, "data": str(data), "device": "cpu", "samples": 0, "tokens_per_step": 4096}
    run = train(Config.of(values | {"out": str(tmp_path / "run")}), console=QUIET)
    warned = [e["text"] for e in read_events(run.folder / "metrics.jsonl") if e["event"] == "warning"]
    assert run.steps == 3 and len(warned) == 1 and "only 3 steps" in warned[0]
    capfd.readouterr()
    assert main(["plan", base, str(data), "--device", "cpu", "--tokens-per-step", "4096", "--json"]) == 0
    out, err = capfd.readouterr()
    coming = json.loads(out)["expected_run"]
    assert (coming["steps"], coming["tokens_per_step"], coming["lr"]) == (3, 4096, 1e-3) and "only 3 steps" in err


def test_the_time_of_a_card_and_where_none_is_known(tiny_folder, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl")
    config = Config.of({"base": str(tiny_folder("llama")), "data": str(data), "device": "cuda", "samples": 0})
    job = prepare.job_of(config, QUIET, named=cards.find("4090"))
    plan = job.plan("none", 64)
    card = expected.expected(job, plan)
    again = expected.expected(job, job.plan("full", 64))
    assert card is not None and again is not None and card.seconds and again.seconds and again.seconds > card.seconds
    assert "60% of the card's published 165 TFLOP/s" in card.how
    job.placement = job.placement.placed_at(True, 0)
    fetched = expected.expected(job, plan)
    assert fetched is not None and fetched.seconds is None and "no time is expected here" in fetched.lines()[1]


def test_where_no_time_is_known_the_reason_is_said(tiny_folder, tmp_path: Path) -> None:
    values = {"base": str(tiny_folder("llama")), "data": str(write_data(tmp_path / "data.jsonl")), "device": "cpu"}
    job = prepare.job_of(Config.of(values | {"base_dtype": "nf4"}), QUIET)
    packed = expected.expected(job, job.plan("none", 64))
    assert packed is not None and packed.seconds and "a product with NF4 weights reaches here" in packed.lines()[1]
    job.placement = dataclasses.replace(job.placement, base_dtype="keep")
    stored = expected.expected(job, job.plan("none", 64))
    assert stored is not None and stored.seconds is None
    assert "no time is expected here: the base is held as its file stores it" in stored.lines()[1]
    asked = values | {"metric": "exact", "metric_records": 2, "epochs": 2, "eval_every": 1000, "tokens_per_step": 256}
    job = prepare.job_of(Config.of(asked), QUIET)
    coming = expected.expected(job, job.plan("none", 64))
    assert coming is not None and coming.answers == 2 * 3, "before, and after each epoch"
    assert "the 6 answers generated for the metric are not included" in coming.lines()[1]
