"""Routing can be observed: tokens per expert and the routers' entropy, of exactly the tokens of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graftune.api import train
from graftune.batch import Example
from graftune.data.pack import Capacities, pack
from graftune.model.feed_forward.experts import Experts
from graftune.model.feed_forward.routing import FIGURES
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.observe.report import document
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.step.pipeline import Figures, HostPipeline
from graftune.step.step import Step
from tests.support import moe, oracle, tiny
from tests.training.runs import write_data

HYPER = {"lr": 0.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "clip": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe.make_folder("glm4_moe", tmp_path_factory.mktemp("moe") / "glm4_moe")


def figures(ours: oracle.Ours, batches: list[list[Example]], recompute: str, padded: bool) -> Figures:
    pipeline = HostPipeline(Step(ours.decoder, ours.arena, recompute=recompute))
    shape = Capacities(60, 6, 40, 60) if padded else None
    for number, examples in enumerate(batches):
        pipeline.micro(pack(examples, shape=shape), number)
    pipeline.update(HYPER | {"divisor": 1.0}, {})
    return pipeline.next()


@pytest.mark.parametrize(("recompute", "padded"), [("none", False), ("full", True)])
def test_counts_are_those_of_the_tokens(recompute: str, padded: bool, folder: Path) -> None:
    torch.manual_seed(3)
    docs = [torch.randint(3, tiny.VOCAB, (n,)).tolist() for n in (11, 7, 20)]
    batches = [[Example(d, [i > 2 for i in range(len(d))]) for d in each] for each in (docs[:2], docs[2:])]
    ours = oracle.ours(folder, LoraConfig(rank=2, targets=("mlp",)))
    done = figures(ours, batches, recompute, padded)
    assert done.routing is not None and [one.layer for one in done.routing] == [1, 2]
    assert figures(ours, batches, recompute, padded).routing == done.routing, "each step begins at zero"
    chosen: dict[int, torch.Tensor] = {}
    parts = [part for block in ours.decoder.blocks for part in block.parts if isinstance(part, Experts)]
    for part in parts:
        forward = part.router.forward

        def seen(normed: torch.Tensor, part: Experts = part, forward=forward):
            routed = forward(normed)
            chosen[part.layer] = routed.chosen
            return routed

        part.router.forward = seen  # type: ignore[method-assign]
    want = {part.layer: torch.zeros(moe.EXPERTS, dtype=torch.long) for part in parts}
    for batch in batches:
        ours.logits([e.tokens for e in batch])
        rows = pack(batch).rows
        real = {1: chosen[1][: int(rows.max()) + 1], 2: chosen[2][rows]}  # the last layer has only rows that predict
        for layer, one in real.items():
            want[layer] += one.flatten().bincount(minlength=moe.EXPERTS)
    assert {one.layer: one.tokens for one in done.routing} == {layer: n.tolist() for layer, n in want.items()}
    assert all(0.3 < one.entropy < 1 for one in done.routing)
    busiest = max(max(one.tokens) * moe.EXPERTS / sum(one.tokens) for one in done.routing)
    assert done.more["busiest_expert"] == pytest.approx(busiest) and done.more.keys() == set(FIGURES)


def test_a_run_logs_them(folder: Path, tmp_path: Path) -> None:
    settings = {
        "base": str(folder), "data": str(write_data(tmp_path / "data.jsonl")), "out": str(tmp_path / "run"),
        "rank": 2, "max_steps": 3, "tokens_per_step": 128, "tokens_per_micro_batch": 64, "compute_dtype": "fp32",
        "device": "cpu", "samples": 0,
    }  # fmt: skip
    train(Config.of(settings), console=Console(quiet=True))
    events = read_events(tmp_path / "run" / "metrics.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    assert all(0 < event["router_entropy"] < 1 and event["busiest_expert"] >= 1 for event in steps)
    tables = [event for event in events if event["event"] == "routing"]
    assert [event["step"] for event in tables] == [1, 3]
    assert all(len(layer["tokens"]) == moe.EXPERTS and sum(layer["tokens"]) for layer in tables[0]["layers"])
    shown = document(tmp_path / "run")
    assert shown["routing"]["step"] == 3 and "router_entropy" in shown["curves"]["values"]
