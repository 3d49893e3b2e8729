"""The benchmark of the plan without a GPU: its names, that each kind of base is planned as a run plans it, and that
what was planned can be run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import plan
from graftune.kernels import fp8
from graftune.plan import job

CPU, CUDA, MEMORY = torch.device("cpu"), torch.device("cuda", 0), 80 << 30


def test_there_are_twelve_and_more_that_differ() -> None:
    found = [plan.parse(name) for name in plan.DEFAULT]
    assert len(set(found)) >= 12
    assert {c.policy for c in found} == {"none", "selective", "full", "offload"}
    assert {"bf16", "nf4", "fp8", "q4_k"} <= {c.kind for c in found} and len({c.size for c in found}) >= 3
    assert len({c.shape.capacity for c in found}) >= 3


@pytest.mark.parametrize("kind", ["bf16", "nf4", "q8_0", "fp32", "fp8"])
def test_every_kind_is_planned(kind: str) -> None:
    combination = plan.parse(f"tiny-{kind}-full-2x64-r4")
    found = plan.planned(combination, plan.job_of(combination, CUDA, MEMORY)).bytes
    assert found.owners["base"] > 0 and found.phases["capture"]["saved activations"] > 0


def test_it_is_the_plan_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """From few layers, with the backends that the first step times."""
    seen: list[Any] = []
    rehearse = job.rehearse
    monkeypatch.setattr(job, "rehearse", lambda setup: seen.append(setup) or rehearse(setup))
    combination = plan.parse("1b-fp8-none-1x512")
    plan.planned(combination, plan.job_of(combination, CUDA, MEMORY))
    assert [setup.base.spec.layers for setup in seen] == [job.FEW_LAYERS, job.MORE_LAYERS]
    assert all(setup.others for setup in seen)


@pytest.mark.parametrize("name", ["tiny-bf16-full-2x64-r4", "tiny-fp8-none-2x64", "tiny-bf16-none-2x64-full"])
def test_what_was_planned_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "require", lambda device, compute: None)
    combination = plan.parse(name)
    made = plan.job_of(combination, CPU)
    planned = plan.planned(combination, made)
    found = plan.record(name, planned, plan.run(combination, made, planned))
    assert found["moved"] and found["grad_norm"] > 0 and found["measured"] > 0
    assert found["needed"] == planned.bytes.peak + planned.bytes.pools and name in plan.table([found])


def test_the_goals() -> None:
    """Twelve have to be within three percent, however few ran; an error is none of them; and torch may hold no more
    than a run is refused by."""
    one = {"name": "a", "off": 0.01, "measured": 100 << 30, "needed": 100 << 30, "reserved": 101 << 30}
    within, furthest, held = plan.goals([one, {"name": "b", "error": "no"}])
    assert (within["bound"], within["is"], within["met"]) == (12, 1, False) and furthest["met"] and held["met"]
    assert plan.goals([one] * 12)[0]["met"] and plan.good(one)
    wide = one | {"reserved": 103 << 30}
    assert plan.goals([one, wide])[2]["met"] is False and not plan.good(wide)
    assert not plan.good({"name": "b", "error": "no"})


@pytest.mark.parametrize("name", ["tiny-bf16-none", "huge-bf16-none-1x64", "tiny-bf16-some-1x64", "tiny-q9-none-1x64"])
def test_what_is_not_there_is_said(name: str) -> None:
    with pytest.raises(SystemExit, match=name.split("-")[0]):
        plan.base_of(plan.parse(name), CPU)
