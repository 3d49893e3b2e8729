"""The spans of a step: who owns its time, that they add up, and that there are no spans without a profiler.

Times are those of a clock that ticks at every stamp: nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import ast
import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graftune import graph, spans
from graftune.model.context import SideStreams
from graftune.observe.profile import Profile, Span, StepSample, bottleneck, read
from graftune.settings.sections import LoraConfig
from graftune.spans import Name, StampTurn, Timeline
from graftune.step.pipeline import HostPipeline
from graftune.step.step import Step
from graftune.training import profiler
from graftune.training.profiler import Recorder
from tests.kernels.harness import HYPER, batch
from tests.support import oracle


class Ticks:
    """A clock whose stamps are 1 ms apart."""

    def __init__(self) -> None:
        self.count = itertools.count()

    def stamp(self) -> int:
        return next(self.count)

    def ms(self, begin: int, end: int) -> float:
        return float(end - begin)

    def wait(self) -> None: ...


def loop_of(folder: Path, **options: Any) -> HostPipeline:
    side = oracle.ours(folder, LoraConfig(rank=2, alpha=4.0))
    return HostPipeline(Step(side.decoder, side.arena, **options))


def sent(loop: HostPipeline, micro_batches: int = 1) -> None:
    packed = batch()
    hyper = HYPER | {"divisor": float(micro_batches * packed.response_tokens)}
    loop.step([packed] * micro_batches, hyper, [0] * micro_batches)


def sampled(loop: HostPipeline, turn: StampTurn = spans.EVERY_LAYER, micro_batches: int = 1) -> StepSample:
    recorder = Recorder(Ticks())
    with recorder.step(turn):
        sent(loop, micro_batches)
    return recorder.profile.samples[0]


EXPECTED = {
    "load": {"waiting for a batch"},
    "host to device": {"batch", "hyperparameters"},
    "forward": {"rotary tables", "embedding", "norm", "qkv", "rope", "attention", "o", "gate_up", "gated unit", "down",
                "adapters", "response rows"},
    "loss": {"final norm", "head", "cross-entropy"},
    "backward": {"down", "gated unit", "gate_up", "norm", "o", "attention", "rope", "qkv", "adapters",
                 "weight gradients", "response rows"},
    "update": {"gradient norm", "AdamW", "adapters to their weights", "figures"},
}  # fmt: skip


def test_every_part_of_a_step_has_an_owner_and_the_owners_add_up(tiny_folder) -> None:
    loop = loop_of(tiny_folder("llama"))
    found = Profile([sampled(loop, micro_batches=2), sampled(loop)], facts={"gpu": "none", "model": "tiny"})
    document = found.document()
    assert document["owned"] == pytest.approx(1.0)
    named: dict[str, set[str]] = {}
    for row in document["operations"]:
        named.setdefault(row["phase"], set()).add(row["name"])
    assert named == EXPECTED
    check_sums(document)
    assert [row["layer"] for row in document["layers"]] == list(range(len(loop.work.decoder.blocks)))
    assert document["bottleneck"].endswith(".")


def check_sums(document: dict[str, Any]) -> None:
    """Operations add up to their phase, in the rows and in the tree, and children to their parents."""
    for phase in document["phases"]:
        parts = [row["ms"] for row in document["operations"] if row["phase"] == phase["name"]]
        assert sum(parts) == pytest.approx(phase["ms"])

    def down(node: dict[str, Any]) -> None:
        if node["children"]:
            assert sum(child["ms"] for child in node["children"]) == pytest.approx(node["ms"])
        for child in node["children"]:
            down(child)

    for child in document["tree"]["children"]:
        down(child)
    shares = sum(phase["share"] for phase in document["phases"])
    assert shares == pytest.approx(document["owned"])
    both = {row["layer"]: row["forward_ms"] + row["backward_ms"] for row in document["layers"]}
    inside = {"reference", "forward", "recompute", "backward"}
    for layer, ms in both.items():
        nodes = [n for p in document["tree"]["children"] if p["name"] in inside for n in p["children"]]
        assert sum(n["ms"] for n in nodes if n["name"] == f"layer {layer}") == pytest.approx(ms)


def test_turns_see_all_operations_with_fewer_stamps(tiny_folder) -> None:
    loop = loop_of(tiny_folder("llama"))
    layers = len(loop.work.decoder.blocks)
    assert layers > 1
    whole = sampled(loop)
    turns = [sampled(loop, StampTurn(number, layers)) for number in range(layers)]
    of_layers = [sum(span.name.layer is not None for span in one.spans) for one in (whole, *turns)]
    outside = 2 * 2 * 2  # what lies ahead of a layer and behind it, forward and backward, where another turn stamps
    assert sum(of_layers[1:]) <= of_layers[0] + outside * layers, "the stamps of a layer are in one turn"
    document = Profile(turns).document()
    check_sums(document)
    keys = {(row["phase"], row["name"], row["calls"]) for row in document["operations"]}
    expected = Profile([whole]).document()["operations"]
    assert keys == {(row["phase"], row["name"], row["calls"]) for row in expected}, "an operation was lost or doubled"


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_is_computed_again_is_a_phase_of_its_own(tiny_folder, recompute: str) -> None:
    document = Profile([sampled(loop_of(tiny_folder("llama"), recompute=recompute))]).document()
    again = {row["name"] for row in document["operations"] if row["phase"] == "recompute"}
    assert {"norm", "gate_up"} <= again and ("qkv" in again) == (recompute == "full")
    check_sums(document)


@pytest.mark.parametrize("variant", ["lfm2-short", "gemma3-short"])
def test_other_kinds_of_layers_have_owners_too(tiny_folder, variant: str) -> None:
    document = Profile([sampled(loop_of(tiny_folder(variant)))]).document()
    names = {row["name"] for row in document["operations"]}
    assert "product" not in names, "every projection is built with its name"
    assert ("convolution" in names) == (variant == "lfm2-short")


def test_other_streams_are_listed_apart(tiny_folder) -> None:
    loop = loop_of(tiny_folder("llama"))
    loop.work.side_streams = SideStreams(torch.device("cpu"))
    document = Profile([sampled(loop)]).document()
    (row,) = document["apart"]
    assert row["name"] == "weight gradients" and row["ms"] > 0
    waits = [row for row in document["operations"] if row["name"] == "wait for weight gradients"]
    assert waits and not any(row["name"] == "weight gradients" for row in document["operations"])
    check_sums(document)


class Ops(TorchDispatchMode):
    """Writes down every operation that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_without_a_timeline_nothing_is_stamped_and_with_one_the_same_is_computed(
    tiny_folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations of a step are what a capture would make nodes of."""
    loop = loop_of(tiny_folder("llama-shallow"))
    with Ops() as timed:
        sampled(loop)
    called: list[str] = []
    for name in ("operation", "phase", "layer", "end", "product", "covering", "aside"):
        monkeypatch.setattr(Timeline, name, lambda *args, name=name: called.append(name))
    monkeypatch.setattr(torch.cuda, "Event", lambda *_, **__: called.append("event"))
    with Ops() as plain:
        sent(loop)
    assert plain.seen == timed.seen and len(plain.seen) > 100 and not called


def test_a_captured_callable_is_captured_again_with_its_spans_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Any] = []

    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    def capture(work: Any, made: Any, *_: Any) -> None:
        captures.append((made, spans.current()))
        work()

    main = SimpleNamespace(wait_stream=lambda stream: None)
    monkeypatch.setattr(graph, "capture", capture)
    monkeypatch.setattr(graph, "stream", lambda *_, **__: main)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def work() -> None:
        spans.phase("forward")
        spans.operation("product")

    captured = graph.Captured(work)
    timeline = Timeline(Ticks())
    timeline.operation("load")
    with spans.recording(timeline):
        captured()  # the first call of all, while a profile is on
        assert captures[0][1] is None, "the plain graph was captured with stamps in it"
        timeline.operation("batch")
        for _ in range(3):
            captured()
        assert timeline.stamps[-1][0] is None, "the span before a replay ends there"
        before = len(timeline.stamps)
        captured()
        assert len(timeline.stamps) == before, "stamps of a captured pass are the pass's own"
        timeline.end()
    captured()
    (plain, _), (timed, inner) = captures
    assert plain.replays == 1 and timed.replays == 4 and captured.graph is plain
    sample = read(timeline)
    assert [(s.name.operation, s.times) for s in sample.spans] == [("load", 1), ("batch", 1), ("product", 4)]
    assert inner is timeline.inner[0]


def test_stamps_take_a_small_share_of_a_short_step() -> None:
    assert profiler.turns_for(layers=32, plain_ms=400.0) == [StampTurn(0, 1)]
    short = profiler.turns_for(layers=16, plain_ms=14.0)
    stamps = profiler.OUTSIDE + (profiler.OF_A_LAYER + 2) * 16 / len(short)
    assert 1 < len(short) < 16 and stamps * profiler.STAMP_MS <= profiler.STAMPS_SHARE * 14.0
    assert len(profiler.turns_for(layers=16, plain_ms=0.1)) == 16


def test_hotspots_percentiles_and_the_sentence() -> None:
    def step(slow: float) -> StepSample:
        made = [Span(Name("forward", layer, "attention"), 0.0, slow if layer == 2 else 1.0) for layer in range(4)]
        return StepSample(sum(span.ms for span in made) + 0.1, made)

    document = Profile([step(4.0)] * 98 + [step(40.0)] * 2, plain=[8.0], facts={"floor_ms": 6.0}).document()
    (hot,) = document["hotspots"]
    assert hot["name"] == "layer 2, forward, attention" and hot["times_the_mean"] == pytest.approx(4 / 1.75)
    assert document["hotspots_note"] == ""
    few = Profile([step(4.0)] * 2).document()
    assert few["hotspots"] == [] and "5 profiled steps" in few["hotspots_note"], "two steps are noise"
    (phase,) = document["phases"]
    assert (phase["p50"], phase["p95"], phase["p99"]) == (7.0, 7.0, 43.0)
    assert document["floor_share"] == 0.75 and "attention" in document["bottleneck"] and "75%" in document["bottleneck"]
    slow = {"phases": [{"name": "load", "share": 0.3}], "operations": [], "owned": 1.0}
    assert "waits for its data: 30%" in bottleneck(slow)


def test_a_trace_has_every_span_in_its_place(tiny_folder) -> None:
    found = Profile([sampled(loop_of(tiny_folder("llama-shallow")))])
    events = [event for event in found.trace()["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(found.samples[0].spans)
    ends = [event["ts"] + event["dur"] for event in events]
    gaps = [event["ts"] - end for end, event in zip(ends, events[1:], strict=False)]
    assert set(gaps) == {0.0}


def test_steps_are_profiled_in_turn_with_plain_ones(tiny_folder) -> None:
    loop = loop_of(tiny_folder("llama-shallow"))
    found = profiler.profiled(loop, lambda: sent(loop), torch.device("cpu"), steps=3)
    assert len(found.samples) == len(found.plain) == 3 and found.facts["captured"] is False
    assert found.document()["owned"] > 0.95


def test_the_hot_path_has_few_calls_of_spans_and_rehearsal() -> None:
    """Kernels name their own operation, so a step need not."""
    package = Path(spans.__file__).parent
    files = [file for folder in ("step", "model", "losses", "kernels") for file in (package / folder).rglob("*.py")]
    calls = [
        node
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id in ("spans", "rehearsal")
    ]
    assert 40 < len(calls) <= 60
