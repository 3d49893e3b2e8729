"""The profile of a step: its time by phase, layer and operation, as one document and as a Chrome trace.

A sample is one profiled step, read from its timeline (spans.py) once the device is done with it. Samples may have been
taken in turns, each of which stamps the operations of different layers. The time of all layers together is the mean
over all samples; it is divided among the layers, and among their operations, as in the samples that stamped them.
Operations add up to their layer, layers to their phase, and phases to the part of the step that is attributed
(`owned`). Means are used because they add up; percentiles are given besides.

For a captured pass that was replayed several times in a step (micro-batches of one shape), the time of its last replay
counts once for every replay, because all replays record into the same events.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from graftune.spans import EVERY_LAYER, OTHERS, Name, StampTurn, Timeline

HOT = 1.5  # times the mean of the same operation in the other layers
LEAST_HOT = 0.002  # of the step: less is noise
ENOUGH = 5  # samples of an operation; the median of fewer is noise
PHASES = ("load", "host to device", "reference", "forward", "loss", "recompute", "backward", "update")


class Span(NamedTuple):
    name: Name
    start: float  # milliseconds since the step began
    ms: float
    times: int = 1  # replays that it stands for


class Times(NamedTuple):
    ms: float
    calls: float


LayerPhase = tuple[str, int | None]  # phase, and layer; None: outside of the layers


@dataclass(frozen=True)
class StepSample:
    total: float  # milliseconds
    spans: list[Span]
    apart: list[Span] = field(default_factory=list)  # on other streams
    turn: StampTurn = EVERY_LAYER

    # Added up once: a run that is profiled every so often makes a document of the same samples many times.

    @cached_property
    def operations(self) -> dict[LayerPhase, dict[Name, Times]]:
        found: dict[LayerPhase, dict[Name, Times]] = defaultdict(dict)
        for span in self.spans:
            inside = found[span.name[:2]]
            ms, calls = inside.get(span.name, (0.0, 0.0))
            inside[span.name] = Times(ms + span.ms * span.times, calls + span.times)
        return dict(found)

    @cached_property
    def places(self) -> dict[LayerPhase, float]:
        return {place: sum(times.ms for times in inside.values()) for place, inside in self.operations.items()}

    @cached_property
    def on_other_streams(self) -> dict[Name, float]:
        found: dict[Name, float] = defaultdict(float)
        for span in self.apart:
            found[span.name] += span.ms * span.times
        return dict(found)


def read(timeline: Timeline) -> StepSample:
    """A profiled step, whose first stamp is its beginning and whose last one is its end. The device must be done."""
    first, last = timeline.stamps[0][1], timeline.stamps[-1][1]
    replays: dict[int, tuple[Timeline, int]] = {}
    for inner in timeline.inner:
        replays[id(inner)] = inner, replays.get(id(inner), (inner, 0))[1] + 1
    passes, ms = [(timeline, 1), *replays.values()], timeline.clock.ms
    spans = [
        Span(name, ms(first, begin), ms(begin, end), count)
        for one, count in passes
        for (name, begin), (_, end) in itertools.pairwise(one.stamps)
        if name is not None
    ]
    apart = [
        Span(name, ms(first, begin), ms(begin, end), count) for one, count in passes for name, begin, end in one.apart
    ]
    return StepSample(ms(first, last), spans, apart, timeline.turn)


@dataclass
class Profile:
    """All samples of one shape of step. `facts` are the other fields of the document."""

    samples: list[StepSample] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)  # milliseconds of steps without stamps, taken in between
    eager: list[float] = field(default_factory=list)  # of steps without graphs, where there are graphs
    beside: dict[str, float] = field(default_factory=dict)  # other work, by name: an evaluation, a checkpoint
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        return statistics.fmean(sample.total for sample in self.samples)

    def by_layer(self) -> dict[LayerPhase, float]:
        """Milliseconds of a step, by phase and layer."""
        found: dict[LayerPhase, float] = {}
        whole: dict[tuple[str, bool], float] = defaultdict(float)
        for sample in self.samples:
            for (phase, layer), ms in sample.places.items():
                whole[phase, layer is not None] += ms / len(self.samples)
        places = {place for sample in self.samples for place in sample.places}
        for (phase, layered), ms in whole.items():
            layers = sorted({layer for p, layer in places if p == phase and layer not in (None, OTHERS)})
            if not layered:
                found[phase, None] = ms
                continue
            seen = {layer: self._seen(phase, layer) for layer in layers}
            total = sum(seen.values())
            found |= {(phase, layer): ms * part / total if total else 0.0 for layer, part in seen.items()}
        return found

    def _seen(self, phase: str, layer: int) -> float:
        """Milliseconds of a layer in the samples that stamped it."""
        samples = [sample for sample in self.samples if sample.turn.details(layer)]
        return statistics.fmean(sample.places.get((phase, layer), 0.0) for sample in samples)

    def by_operation(self) -> dict[Name, Times]:
        """Time and calls of each operation in a step. A layer's time is divided among its operations as in the samples
        that stamped them."""
        found: dict[Name, Times] = {}
        for (phase, layer), ms in self.by_layer().items():
            seen = [sample for sample in self.samples if sample.turn.details(layer)]
            parts: dict[Name, float] = defaultdict(float)
            calls: dict[Name, float] = defaultdict(float)
            for sample in seen:
                for name, times in sample.operations.get((phase, layer), {}).items():
                    parts[name] += times.ms
                    calls[name] += times.calls / len(seen)
            whole = sum(parts.values())
            for name, part in parts.items():
                found[name] = Times(ms * part / whole if whole else 0.0, calls[name])
        return found

    def document(self) -> dict[str, Any]:
        """The content of profile.json."""
        layers, operations, whole = self.by_layer(), self.by_operation(), self.step_ms
        phases = self._phases(layers)
        grouped: dict[tuple[str, str], list[Times]] = defaultdict(list)
        for name, times in operations.items():
            grouped[name.phase, name.operation].append(times)
        rows: list[dict[str, Any]] = [
            {
                "name": operation,
                "phase": phase,
                "ms": sum(t.ms for t in all_of),
                "calls": round(sum(t.calls for t in all_of)),
                "share": sum(t.ms for t in all_of) / whole,
            }
            for (phase, operation), all_of in grouped.items()
        ]
        rows.sort(key=lambda row: -row["ms"])
        plain = statistics.fmean(self.plain) if self.plain else None
        floor, eager = self.facts.get("floor_ms"), statistics.fmean(self.eager) if self.eager else None
        found = {
            "version": 1,
            **self.facts,
            "steps": len(self.samples),
            "step_ms": whole,
            "step": _percentiles([sample.total for sample in self.samples]),
            "plain_ms": plain,
            "eager_ms": eager,
            "floor_ms": floor,
            "floor_share": floor / (plain or whole) if floor else None,
            "owned": sum(row["ms"] for row in phases) / whole,
            "phases": phases,
            "layers": _layer_rows(layers),
            "operations": rows,
            "apart": self._apart_rows(),
            "beside": [{"name": name, "ms": ms} for name, ms in self.beside.items()],
            "hotspots": self._hotspots(),
            "hotspots_note": self._hotspots_note(),
            "tree": _tree(layers, operations, whole),
        }
        return found | {"bottleneck": bottleneck(found)}

    def _phases(self, layers: Mapping[LayerPhase, float]) -> list[dict[str, Any]]:
        names = sorted({phase for phase, _ in layers}, key=_order)
        rows = []
        for name in names:
            each = [sum(ms for (phase, _), ms in sample.places.items() if phase == name) for sample in self.samples]
            ms = statistics.fmean(each)
            rows.append({"name": name, "ms": ms, **_percentiles(each), "share": ms / self.step_ms})
        return rows

    def _hotspots(self) -> list[dict[str, Any]]:
        """By medians, so that other work on the machine during one step does not count as a hotspot."""
        times: dict[Name, list[float]] = {}
        for sample in self.samples:
            for inside in sample.operations.values():
                for name, each in inside.items():
                    times.setdefault(name, []).append(each.ms)
        enough = {name: ms for name, ms in times.items() if name.operation and len(ms) >= ENOUGH}
        return hotspots({name: statistics.median(ms) for name, ms in enough.items()}, self.step_ms)

    def _hotspots_note(self) -> str:
        """Why there are no hotspots, if too few steps were profiled for them."""
        turns = len({sample.turn for sample in self.samples})
        needed = ENOUGH * turns
        return "" if len(self.samples) >= needed else f"hotspots are looked for in {needed} profiled steps or more"

    def _apart_rows(self) -> list[dict[str, Any]]:
        """Time on other streams, which is not part of the step's sum."""
        totals: dict[tuple[str, str], float] = defaultdict(float)
        for name in {name for sample in self.samples for name in sample.on_other_streams}:
            seen = [sample for sample in self.samples if sample.turn.details(name.layer)]
            each = [sample.on_other_streams.get(name, 0.0) for sample in seen]
            totals[name.operation, name.phase] += statistics.fmean(each)
        rows: list[dict[str, Any]] = [{"name": name, "phase": phase, "ms": ms} for (name, phase), ms in totals.items()]
        return sorted(rows, key=lambda row: -row["ms"])

    def trace(self) -> dict[str, Any]:
        """A Chrome trace: the last profiled step of every turn, one process each, other streams as threads."""
        events: list[dict[str, Any]] = []
        last = {sample.turn: sample for sample in self.samples}
        for place, (turn, sample) in enumerate(sorted(last.items())):
            label = (
                "a step" if turn.of == 1 else f"a step, operations of layers {turn.number}, {turn.number + turn.of} ..."
            )
            events.append({"ph": "M", "pid": place, "name": "process_name", "args": {"name": label}})
            for thread, spans in (("main stream", sample.spans), ("other streams", sample.apart)):
                for span in spans:
                    name, layer = span.name, span.name.layer
                    shown = name.operation or "layers of other turns"
                    where = {"phase": name.phase} | ({} if layer in (None, OTHERS) else {"layer": layer})
                    times = {"ts": span.start * 1e3, "dur": span.ms * 1e3}
                    events.append({"ph": "X", "pid": place, "tid": thread, "cat": name.phase, "name": shown} | times)
                    events[-1]["args"] = where | ({"times": span.times} if span.times > 1 else {})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, -(-p * len(ordered) // 100) - 1)] for p in (50, 95, 99)}


def _order(phase: str) -> tuple[int, str]:
    return (PHASES.index(phase) if phase in PHASES else len(PHASES), phase)


def _layer_rows(layers: Mapping[LayerPhase, float]) -> list[dict[str, Any]]:
    """Milliseconds per layer, forward and backward. Recomputation counts as part of the backward pass that needs it."""
    ways = {"forward": ("reference", "forward"), "backward": ("recompute", "backward")}
    indices = sorted({layer for _, layer in layers if layer is not None})
    return [
        {"layer": index} | {f"{way}_ms": sum(layers.get((p, index), 0.0) for p in of) for way, of in ways.items()}
        for index in indices
    ]


def hotspots(operations: Mapping[Name, float], whole: float) -> list[dict[str, Any]]:
    """Operations that take much longer in one layer than in the others, the worst first."""
    alike: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for name, ms in operations.items():
        if name.layer is not None:
            alike[name.phase, name.operation][name.layer] = ms
    found: list[dict[str, Any]] = []
    for (phase, operation), times_of in alike.items():
        mean = statistics.fmean(times_of.values())
        for layer, ms in times_of.items():
            if ms > HOT * mean and ms > LEAST_HOT * whole:
                label = f"layer {layer}, {phase}, {operation}"
                found.append({"name": label, "ms": ms, "times_the_mean": ms / mean})
    return sorted(found, key=lambda row: -row["ms"])


def _tree(layers: Mapping[LayerPhase, float], operations: Mapping[Name, Times], whole: float) -> dict[str, Any]:
    def leaves(phase: str, layer: int | None) -> list[dict[str, Any]]:
        mine = {name: times for name, times in operations.items() if name[:2] == (phase, layer)}
        return [{"name": name.operation, "ms": times.ms, "children": []} for name, times in mine.items()]

    children = []
    for phase in sorted({phase for phase, _ in layers}, key=_order):
        of = sorted((layer for p, layer in layers if p == phase and layer is not None))
        inside: list[dict[str, Any]] = [
            {"name": f"layer {i}", "ms": layers[phase, i], "children": leaves(phase, i)} for i in of
        ]
        inside += leaves(phase, None)
        children.append({"name": phase, "ms": sum(child["ms"] for child in inside), "children": inside})
    return {"name": "step", "ms": whole, "children": children}


def bottleneck(found: Mapping[str, Any]) -> str:
    """What to look at first, in one sentence."""
    shares = {row["name"]: row["share"] for row in found["phases"]}
    waits = [row for row in found["operations"] if row["name"].startswith("wait for")]
    waited = sum(row["share"] for row in waits)
    unowned = 1 - found["owned"]
    if shares.get("load", 0.0) > 0.1:
        return f"The step waits for its data: {shares['load']:.0%} of its time passes before a batch is there."
    if unowned > 0.1:
        return f"The device waits for the host between passes for {unowned:.0%} of the step."
    if waited > 0.1:
        worst = max(waits, key=lambda row: row["share"])
        return f"Other streams hold the step up: {waited:.0%} of it is spent waiting, most in {worst['name']!r}."
    worst = found["operations"][0]
    text = (
        f"The largest part is {worst['name']} in the {worst['phase']} phase, {worst['share']:.0%} of the step"
        f" ({worst['calls']} {'call' if worst['calls'] == 1 else 'calls'})"
    )
    if found.get("floor_share"):
        text += f"; the whole step runs at {found['floor_share']:.0%} of the speed of the floor"
    return text + "."
