"""What is looked at while a run trains on CUDA: phases, its answers on the way, its live speed, and the chat box."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graftune.api import train
from graftune.cli.worker import open_chat
from graftune.observe.console import Console
from graftune.observe.events import read_events, steps
from tests.gpu.test_run import figures, settings
from tests.support.worker_answers import answers
from tests.training.runs import adapter_bytes

pytestmark = pytest.mark.gpu
QUIET = Console(quiet=True)


def test_answers_on_the_way_change_no_captured_step(tiny_folder, tmp_path: Path) -> None:
    """Generation has graphs and a cache of its own: the run's weights and figures are those of a run without them."""
    more = {"deterministic": True, "samples": 2, "sample_tokens": 4}
    plain = train(settings(tiny_folder("llama"), tmp_path / "plain", **more), console=QUIET).folder
    asked = train(settings(tiny_folder("llama"), tmp_path / "asked", sample_every=3, **more), console=QUIET).folder
    assert adapter_bytes(plain) == adapter_bytes(asked) and figures(plain) == figures(asked)
    events = read_events(asked / "metrics.jsonl")
    last = steps(events)[-1]["step"]
    on_the_way = {event["step"] for event in events if event["event"] == "sample" and event.get("step")}
    assert on_the_way >= set(range(3, last, 3))


def test_a_run_names_its_phases_and_its_speed(tiny_folder, tmp_path: Path) -> None:
    run = train(settings(tiny_folder("llama"), tmp_path / "run"), console=QUIET).folder
    events = read_events(run / "metrics.jsonl")
    phases = [event["phase"] for event in events if event["event"] == "phase"]
    first = {phase: phases.index(phase) for phase in ("compiling", "training", "finalising")}
    assert first["compiling"] < first["training"] < first["finalising"] and "evaluating" in phases, phases
    speeds = [event for event in steps(events) if event.get("tok_s")]
    assert speeds and all(event["tflops"] > 0 and 0 <= event["host_idle"] <= 1 for event in speeds[1:])


def test_the_chat_box_answers_on_the_gpu(tiny_folder, tmp_path: Path) -> None:
    run = train(settings(tiny_folder("llama"), tmp_path / "run"), console=QUIET).folder
    messages = [{"role": "user", "content": "abc"}]
    request = {"messages": messages, "temperature": 0.0, "max_new_tokens": 8}
    found = answers(lambda: open_chat({"run": str(run), "checkpoint": "adapter", "device": "cuda"}), request)
    assert not [one for one in found if "error" in one], json.dumps(found)
    assert {one["who"] for one in found if one.get("done")} == {"base", "tuned"}
    import graftune

    session = graftune.open(str(run), quiet=True, device="cuda")
    said = {who: "".join(one.get("text", "") for one in found if one.get("who") == who) for who in ("base", "tuned")}
    assert said["tuned"] == session.chat(messages, max_new_tokens=8)
    assert said["base"] == session.chat(messages, max_new_tokens=8, adapted=False)
