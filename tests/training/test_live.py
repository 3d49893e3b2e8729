"""What a run is watched by: profiled steps, live speed, trackers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.floor import flops

from graftune import spans
from graftune.api import train
from graftune.data.pack import Capacities
from graftune.errors import GraftuneError
from graftune.losses import choose
from graftune.model.families import from_config
from graftune.observe import trackers
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.observe.progress import WorkProgress
from graftune.observe.speed import Amounts
from graftune.observe.trackers import Tracking, epochs_done, metrics_of
from graftune.settings.config import Config
from graftune.settings.sections import TrainConfig
from graftune.spans import StampTurn
from graftune.step import floor
from graftune.step.flops import StepFlops
from graftune.step.pipeline import HostPipeline
from graftune.training import floors, profiler, reporter
from tests.observe.test_profile import Ticks
from tests.training.runs import write_data


def run_of(folder: Path, out: Path, **more: Any) -> list[dict[str, Any]]:
    data = write_data(out.parent / "data.jsonl")
    values = {
        "base": str(folder), "data": str(data), "out": str(out), "device": "cpu", "compute_dtype": "fp32",
        "tokens_per_step": 64, "max_seq_len": 64, "samples": 0,
    }  # fmt: skip
    train(Config.of(values | more), console=Console(quiet=True))
    return list(read_events(out / "metrics.jsonl"))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A module with wandb's calls, which notes them down."""
    said: list[tuple[Any, ...]] = []
    module: Any = ModuleType("wandb")
    module.__spec__ = object()

    def init(**given: Any) -> Any:
        said.append(("init", given))
        print("view your run")
        return SimpleNamespace(id=given.get("id", "made up"), name=given["name"])

    module.init = init
    module.log = lambda metrics, step: said.append(("log", metrics, step))
    module.finish = lambda: said.append(("finish",))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return said


def test_a_run_with_profiled_steps_live_speed_and_a_tracker(
    tiny_folder, tmp_path: Path, wandb, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation in the middle belongs to no step."""
    out = tmp_path / "run"
    events = run_of(
        tiny_folder("llama-shallow"), out, profile_every=4, track="wandb", max_steps=14, eval_every=8, epochs=20
    )
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 14 and all(event["tflops"] > 0 for event in steps)
    assert not any("floor_share" in event or "host_idle" in event for event in steps), "both are a GPU's"

    profiles = [event for event in events if event["event"] == "profile"]
    assert [event["step"] for event in profiles] == [8, 12]
    assert all(event["owned"] > 0.95 and event["bottleneck"].endswith(".") for event in profiles)
    document = json.loads((out / "profile.json").read_text())
    assert document["steps"] == 2 and document["step_ms"] == profiles[-1]["step_ms"] and document["plain_ms"] > 0
    assert {row["name"] for row in document["beside"]} == {"evaluation", "checkpoint"}
    assert json.loads((out / "profile-trace.json").read_text())["traceEvents"]

    said = capsys.readouterr()
    assert "view your run" in said.err and not said.out, "stdout is for what the command was asked for"
    assert wandb[0][0] == "init" and wandb[-1] == ("finish",)
    assert wandb[0][1]["project"] == "graftune" and wandb[0][1]["config"]["profile_every"] == 4
    assert json.loads((out / "tracker.json").read_text()) == {"wandb": "made up"}
    logged = {step: metrics for _, metrics, step in wandb[1:-1] if "train/loss" in metrics}
    assert sorted(logged) == list(range(1, 15))
    epochs = [logged[step]["train/epoch"] for step in sorted(logged)]
    assert 0 < epochs[0] < epochs[1] < epochs[-1] and any(event["epoch"] + 1 in epochs for event in steps)
    assert logged[3]["train/learning_rate"] == steps[2]["lr"] and logged[3]["train/grad_norm"] == steps[2]["grad_norm"]
    assert [step for _, metrics, step in wandb[1:-1] if "eval/loss" in metrics] == [
        event["step"] for event in events if event["event"] == "eval"
    ]


class Profiling:
    """The hook in a made-up run of steps, each of which is one product a layer."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, every: int, layers: int = 1, total: int = 40):
        monkeypatch.setattr(profiler, "facts_of", lambda session, shape: {"shape": {}})
        self.layers, self.documents, self.warned = layers, dict[int, Any](), list[str]()
        session: Any = SimpleNamespace(
            runtime=SimpleNamespace(device=torch.device("cpu")), pipeline=HostPipeline(Any),  # type: ignore[arg-type]
            base=SimpleNamespace(spec=SimpleNamespace(layers=range(layers))),
        )  # fmt: skip
        report = SimpleNamespace(
            profiled=lambda document, step: self.documents.update({step: document}),
            console=SimpleNamespace(warn=self.warned.append),
        )
        self.state: Any = SimpleNamespace(
            folder=folder, total=total, report=report, progress=SimpleNamespace(step=0),
            config=Config.of({"profile_every": every}),
        )  # fmt: skip
        self.hook = profiler.ProfiledSteps(session, None)
        self.hook.recorder.clock = Ticks()
        self.hook.start(self.state)

    def send(self, step: int, micro_batches: int = 1) -> None:
        with self.hook.around_step():
            for layer in range(self.layers):
                spans.phase("forward", layer)
                spans.operation("product")
        self.state.progress.step = step
        self.hook.step_sent(self.state, micro_batches)

    def pause(self) -> None:
        """Other work, which takes long."""
        for _ in range(1000):
            self.hook.recorder.clock.stamp()
        self.hook.paused(self.state, "samples", 1.0)


@pytest.fixture
def no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "known", lambda session, shape, forwards: None)


def test_a_pause_between_steps_is_no_part_of_a_steps_time(tmp_path: Path, monkeypatch, no_floor) -> None:
    run = Profiling(tmp_path, monkeypatch, every=4)
    for step in range(1, 8):
        run.send(step)
    assert not run.documents
    run.pause()  # before step 8, which is to be profiled
    run.send(8)
    document = run.documents[8]
    assert document["step_ms"] < 10 and document["plain_ms"] < 10
    for step in range(9, 11):
        run.send(step)
    run.pause()  # while a step is timed plain
    run.send(11)
    assert list(run.documents) == [8] and run.hook.profile.plain == [document["plain_ms"]]


def test_a_long_run_keeps_the_latest_profiled_steps(tmp_path: Path, monkeypatch, no_floor) -> None:
    monkeypatch.setattr(profiler, "MOST", 3)
    run = Profiling(tmp_path, monkeypatch, every=4)
    for step in range(1, run.state.total + 1):
        run.send(step)
    found = {step: document["steps"] for step, document in run.documents.items()}
    assert found == {8: 1, 12: 2, 16: 3, **dict.fromkeys(range(20, 41, 4), 3)} and not run.warned
    run.hook.start(run.state)
    assert run.warned == ["profile_every is 4: the run ends at step 40, before step 44 is profiled"]
    late = Profiling(tmp_path, monkeypatch, every=41)
    assert late.warned == ["profile_every is 41: the run ends at step 40, before step 41 is profiled"]


@pytest.mark.parametrize(
    ("spec", "recompute", "says"),
    [
        ({}, "none", "not measured (graftune profile RUN)"),
        ({"experts": 8}, "none", "none (experts)"),
        ({}, "full", "none (recompute)"),
        ({"recurrent": True}, "none", "none (delta nets)"),
    ],
)
def test_the_line_says_why_there_is_no_floor(
    monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], recompute: str, says: str
) -> None:
    monkeypatch.setattr(reporter.StepFlops, "of", lambda *about, **more: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GH200 480GB")
    shape = SimpleNamespace(**{"experts": 0, "recurrent": False} | spec)
    session: Any = SimpleNamespace(
        config=Config.of({"recompute": recompute}), base=SimpleNamespace(spec=shape), pipeline=None,
        runtime=SimpleNamespace(device=SimpleNamespace(type="cuda"), compute=torch.float16), loss=choose(TrainConfig()),
    )  # fmt: skip
    assert reporter.live_speed(session, [], None).without_floor == f"floor: {says}"
    if spec.get("recurrent"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        assert not floors.lacks(session)


def test_a_short_captured_step_is_profiled_in_turns_with_steps_between(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(profiler, "turns_for", lambda *step: [StampTurn(0, 2), StampTurn(1, 2)])
    run = Profiling(tmp_path, monkeypatch, every=8, layers=2)
    run.hook.captured, run.hook.floor_ms = True, 2.0
    timed: dict[int, StampTurn] = {}
    captured: set[StampTurn] = set()
    for step in range(1, 28):
        timeline = run.hook.timeline
        if timeline is not None:
            timed[step] = timeline.turn
            timeline.captures, _ = timeline.turn not in captured, captured.add(timeline.turn)
        run.send(step, micro_batches=3)
    first, second = StampTurn(0, 2), StampTurn(1, 2)
    assert timed == {8: first, 10: first, 12: second, 14: second, 24: first, 26: second}
    assert list(run.documents) == [14, 26] and run.documents[26]["steps"] == 4
    assert run.documents[26]["floor_ms"] == 6.0 and len(run.hook.profile.plain) == 2


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_tracker_that_is_not_installed_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(GraftuneError, match=rf"{name} is not installed.*graftune\[{name}\]"):
        train(Config.of({"base": "nowhere", "track": name}), console=Console(quiet=True))


def test_a_tracker_that_fails_is_said_once_and_left(tmp_path: Path, wandb) -> None:
    said: list[str] = []
    tracking = Tracking("wandb", tmp_path, {}, said.append)
    tracking({"event": "run_start"})

    def gone(metrics: dict[str, float], step: int) -> None:
        raise ConnectionError("the network is gone")

    sys.modules["wandb"].log = gone  # type: ignore[attr-defined]
    for step in (1, 2):
        tracking({"event": "step", "step": step, "loss": 1.0})
    tracking.close()
    assert said == ["wandb gets no more events of this run: ConnectionError: the network is gone"]


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name"), ("mlflow", "run_id")])
def test_a_resumed_run_goes_on_in_its_trackers_run(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def began(**given: Any) -> Any:
        calls.append(given)
        made = given.get(key, "made-up") if key != "name" else f"{given['name']}-2" * ("resume" not in given)
        return SimpleNamespace(**{key: made}, info=SimpleNamespace(run_id=made))

    module: Any = SimpleNamespace(init=began, start_run=began, set_experiment=print, log_params=calls.append)
    monkeypatch.setitem(sys.modules, name, module)
    folder = tmp_path / "mine"
    folder.mkdir()
    for first in ({"event": "run_start"}, {"event": "resume", "step": 7}):
        tracking = Tracking(name, folder, {"rank": 8}, lambda text: pytest.fail(text))
        tracking(first)
    known = {"name": "mine-2"}.get(key, "made-up")
    if name == "mlflow":
        assert calls == [{"run_name": "mine"}, {"rank": "8"}, {"run_id": known}]
    else:
        (fresh, again) = calls
        assert "resume" not in fresh and "id" not in fresh and fresh["name"] == "mine"
        assert again[key] == known and again["resume"] == "allow"
    (folder / "tracker.json").write_text("[")
    Tracking(name, folder, {}, lambda text: pytest.fail(text))({"event": "resume", "step": 7})
    assert "resume" not in calls[-1] and "run_id" not in calls[-1], "it is not known which: a new one"


def test_tensorboard_hides_steps_that_were_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    purged: list[Any] = []
    module: Any = SimpleNamespace(
        SummaryWriter=lambda place, purge_step: purged.append(purge_step) or SimpleNamespace(add_text=print)
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    for first in ({"event": "run_start"}, {"event": "resume", "step": 7}):
        Tracking("tensorboard", tmp_path, {}, lambda text: pytest.fail(text))(first)
    assert purged == [None, 8] and not (tmp_path / "tracker.json").exists()


def test_epochs_are_counted_with_their_parts() -> None:
    assert [epochs_done(step, epoch, [4, 2]) for step, epoch in ((1, 0), (4, 0), (5, 1), (6, 1))] == [0.25, 1, 1.5, 2]


def test_what_is_sent_has_the_names_that_others_know() -> None:
    step = {"event": "step", "step": 3, "loss": 1.5, "grad_norm": 0.5, "lr": 1e-4, "epoch": 0, "tok_s": 9.0}
    wanted = {"loss": 1.5, "grad_norm": 0.5, "learning_rate": 1e-4, "epoch": 0.0, "tokens_per_second": 9.0}
    assert metrics_of(step) == {f"train/{name}": value for name, value in wanted.items()}
    more = {"time": 1.0, "tokens": 9, "margin": 0.5, "chosen": None, "reward_exact": 0.25, "longest_answer": 7}
    own = {"margin": 0.5, "reward_exact": 0.25, "longest_answer": 7.0}
    assert metrics_of(step | more) == metrics_of(step) | {f"train/{name}": value for name, value in own.items()}
    assert metrics_of({"event": "eval", "step": 3, "loss": None, "perplexity": 2.0}) == {"eval/perplexity": 2.0}
    assert metrics_of({"event": "sample", "step": 3}) == {}


def test_the_line_says_what_is_known_of_the_speed() -> None:
    now = [0.0]
    bar = WorkProgress(9, clock=lambda: now[0])
    bar.without_floor = "floor: not measured (graftune profile RUN)"
    for step, floor_seconds in ((1, 0.0), (2, 0.0), (3, 1.0)):
        now[0] += 2.0
        bar.update(step, loss=1.0, lr=1e-4, tokens=100, amounts=Amounts(3e12, floor_seconds, 1.8))
        known = "floor 25%" if step == 3 else "floor: not measured (graftune profile RUN)"
        line = bar.line()
        assert "50 tok/s" in line and "1.5 TFLOP/s" in line and known in line and "host idle 90%" in line


@pytest.mark.parametrize("full", [False, True])
def test_the_operations_of_a_step_are_those_of_its_floor(full: bool) -> None:
    """Two ways to count: by token, for live speed, and product by product, for the floor."""
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    spec = from_config(settings, "tiny")
    lengths = (8, 24)
    for forwards in (0, 2):
        work = floor.Work(
            floor.layers_of(spec), floor.Size(spec.vocab, spec.width), 32, 20, lengths, forwards, full=full
        )
        wanted = flops(work, floor.plan(work))
        found = StepFlops.of(spec, np.array(lengths), full=full, forwards=forwards)(32, 20)
        assert found == pytest.approx(wanted)


def test_a_floor_is_kept_for_its_card_model_and_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(floors, "lacks", lambda session: "")
    monkeypatch.setattr(floors, "key_of", lambda session, shape, forwards: f"{session}-{shape.capacity}")
    monkeypatch.setattr(floor, "measured", lambda work, device, say: (3.5, "measured"))
    shape = Capacities(64, 4, 32, 16)
    session: Any = "card and model"
    assert floors.known(session, shape, 0) is None
    key, console, nothing = floors.key_of(session, shape, 0), Console(quiet=True), Any
    assert floors.measured(key, nothing, nothing, console) == 3.5 == floors.known(session, shape, 0)  # type: ignore[arg-type]
    assert floors.known(session, shape._replace(capacity=128), 0) is None and floors.known(session, None, 0) is None
    (tmp_path / "floors.json").write_text('{"card and model-64": "fast"}')
    assert floors.known(session, shape, 0) is None, "a damaged file"
