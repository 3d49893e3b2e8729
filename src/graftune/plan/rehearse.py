"""Finds what a step allocates: runs the real loading, forward, backward and update on tensors without memory.

So the plan cannot drift from the code: a change that saves one more tensor, or frees one earlier, changes both. A
formula from shapes, as other programs have it, is right only on the day it is written.

Phases, as a run has them: load; evaluate, and answer prompts (eager); the first micro-step
(eager, on the stream that captures it, algorithms are timed); on CUDA the same once more, as it is captured; the
update. The peak is that of the worst phase. What a captured step holds for a moment stays in its graph's pool for good,
so eager work after that needs memory of its own.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from graftune import graph
from graftune.batch import PLAIN, BatchLayout, PackedBatch
from graftune.data.pack import Capacities
from graftune.dist.shard import Shards
from graftune.errors import GraftuneError
from graftune.infer.cache import Cache, CacheSize
from graftune.infer.generate import TokenStep, final_lengths_of, in_groups, prefill
from graftune.kernels import attention, launch, rehearsal
from graftune.kernels.rehearsal import LOGITS, META, SAVED, WORKSPACES, Device, Launched, Rehearsal, rehearsing
from graftune.losses import CrossEntropy, Loss
from graftune.model.bundles import Bundles, Home, HostMemory
from graftune.model.frozen import Augmented, RowSource
from graftune.plan.cards import Card
from graftune.plan.counting import Counting
from graftune.plan.libraries import TAKEN, OnCpu, OnGpu
from graftune.plan.tally import SCRATCH, LiveBytes, Tally
from graftune.plan.unread_sources import unread
from graftune.runtime import Runtime
from graftune.session.parts import Parts
from graftune.settings.config import Config, LoraConfig
from graftune.step.evaluate import evaluate_batch
from graftune.weights.base import Base
from graftune.weights.placement import Placement

POOLS, BUFFERS = "graph pools", "buffers of fetched blocks"
OWNERS = ("base", BUFFERS, "adapters", "gradients", "moments", SAVED, SCRATCH, LOGITS, WORKSPACES)


@dataclass(frozen=True)
class Setup:
    """Everything that the memory of a step depends on."""

    base: Base
    lora: LoraConfig
    runtime: Runtime
    placement: Placement
    shape: Capacities
    recompute: str = "none"
    method: str = "lora"
    loss: Loss = field(default_factory=CrossEntropy)
    layout: BatchLayout = PLAIN  # what the loss adds to the batches
    clip_mode: str = "global"
    backend: str = "cpu"
    others: tuple[str, ...] = ()  # backends that the first step times beside it
    graph: bool = True
    evaluates: bool = True
    evaluated: Capacities | None = None  # the validation data's shape; None: that of a step
    asked: tuple[int, ...] = ()  # tokens of the prompts that are answered before and after
    new_tokens: int = 0  # of an answer
    cache_capacity: int = 0  # tokens of the cache that they are answered in
    copies: bool = False  # whether the CPU's products copy weights (libraries.copies_operand)
    card: Card | None = None

    def with_layers(self, layers: Sequence[int]) -> Setup:
        """The same for a model that is made of these layers; one may occur several times."""
        stored: dict[int, dict[str, RowSource]] = {}
        tensors: dict[str, RowSource] = {}
        for name, source in self.base.tensors.items():
            first, _, rest = name.partition(".")
            number, _, rest = rest.partition(".")
            if first == "layers":
                stored.setdefault(int(number), {})[rest] = source
            else:
                tensors[name] = source
        for place, index in enumerate(layers):
            tensors |= {f"layers.{place}.{name}": source for name, source in stored.get(index, {}).items()}
        base = dataclasses.replace(self.base, spec=self.base.spec.only(layers), tensors=tensors)
        return dataclasses.replace(self, base=base)


@dataclass(frozen=True)
class Bytes:
    """Of the device, by phase and owner; a phase's are those of its worst moment. Of the host, where the device is a
    GPU, the largest. Every figure grows by the same with every further layer."""

    phases: dict[str, dict[str, int]]
    after: int = 0  # what stays when a step is done
    captured: int = 0  # what a captured step holds beside that, and its graph's pool for good
    eager: int = 0  # what an evaluation or the answering of prompts holds, from other memory
    host: int = 0
    without_rule: frozenset[str] = frozenset()  # operations whose shapes were left to torch's references

    @property
    def owners(self) -> dict[str, int]:
        """At the worst moment of all."""
        found = max(self.phases.values(), key=lambda owners: sum(owners.values()))
        return {name: found[name] for name in (*OWNERS, *(n for n in found if n not in OWNERS)) if found.get(name)}

    @property
    def peak(self) -> int:
        return max(sum(owners.values()) for owners in self.phases.values())

    @property
    def pools(self) -> int:
        """What is needed beyond the peak because only its graph can use a graph's pool."""
        return max(0, self.after + self.captured + self.eager - self.peak) if self.captured else 0

    def extended(self, few: Bytes, more: Bytes, step: int, by: int) -> Bytes:
        """What it comes to with `by` further layers of a kind, which takes `few` to `more` by `step` of them."""

        def far(now: int, few: int, more: int) -> int:
            return max(0, now + (more - few) * by // step)

        phases = {
            phase: {
                name: far(now.get(name, 0), few.phases[phase].get(name, 0), more.phases[phase].get(name, 0))
                for name in {**now, **few.phases[phase], **more.phases[phase]}
            }
            for phase, now in self.phases.items()
        }
        rest = ("after", "captured", "eager", "host")
        named = self.without_rule | few.without_rule | more.without_rule
        figures = {name: far(*(getattr(one, name) for one in (self, few, more))) for name in rest}
        return Bytes(phases, **figures, without_rule=named)


def rehearse(setup: Setup, *, launched: Launched | None = None) -> Bytes:
    """What the setup takes. `launched` is called for every Triton kernel that would have been launched."""
    tally, kind = Tally(), setup.runtime.device.type
    if kind != "cuda":
        mode = Counting(tally, kind, OnCpu(tally, setup.copies).before)
        with rehearsing(CountingRehearsal(Device(kind), tally, mode)), mode:
            found = run_phases(setup, tally)
        return dataclasses.replace(found, without_rule=frozenset(mode.without_rule))
    assert setup.card is not None, "a plan for CUDA wants a card"
    try:
        importlib.import_module("triton.runtime")
    except ImportError:
        raise GraftuneError(
            "a plan for a GPU runs the code of its kernels, and the package triton is not installed",
            fix="pip install triton, or set device to cpu",
        ) from None
    mode = Counting(tally, kind, OnGpu(tally).before)
    with rehearsing(CountingRehearsal(setup.card.device, tally, mode, launched)), mode:
        found = run_phases(dataclasses.replace(setup, runtime=dataclasses.replace(setup.runtime, device=META)), tally)
    return dataclasses.replace(found, without_rule=frozenset(mode.without_rule))


class CountingRehearsal(Rehearsal):
    """Answers the rehearsed code, and enters the owners that it names in the tally. `mode` counts allocations."""

    def __init__(self, device: Device, tally: Tally, mode: Any, launched: Launched | None = None):
        super().__init__(device, TAKEN, launched)
        self.tally, self.mode = tally, mode

    def owned(self, owner: str) -> AbstractContextManager[None]:
        return self.tally.owner(owner)

    def uncounted(self) -> AbstractContextManager[None]:
        return self.mode.paused()

    def kind_of(self, tensor: torch.Tensor) -> str:
        return self.tally.kind_of(tensor) or self.device.kind

    def give(self, owner: str, tensors: Sequence[torch.Tensor]) -> None:
        self.tally.give(owner, *tensors)


@contextmanager
def _reading_all() -> Iterator[None]:
    """While a base is loaded every row is read: a quantiser counts them."""
    now = rehearsal.current()
    assert now is not None
    now.reads_all = True
    try:
        yield
    finally:
        now.reads_all = False


def run_phases(setup: Setup, tally: Tally) -> Bytes:
    """Run the phases of a training run, of which the tally counts what they allocate."""
    device, on_gpu = setup.runtime.device, launch.on_gpu(setup.runtime.device)
    holder = tally.of("cuda" if on_gpu else device.type)
    phases = _Phases(holder)
    stream = graph.stream("capture", device) if on_gpu else None  # on which the step first runs, and is captured
    with phases.phase("load"), _reading_all():
        parts = _load(setup, tally)
    step = parts.step
    step.longest = setup.shape.longest
    batch = _batch(setup.shape, device, setup.layout)
    kept, captured = holder.total, 0
    evaluated = setup.evaluated or setup.shape
    larger = any(mine > theirs for mine, theirs in zip(evaluated, setup.shape, strict=True))
    if setup.evaluates and (on_gpu or larger):  # else it takes what a step takes, from the same memory
        with phases.phase("evaluate"):
            _evaluate(parts, _batch(evaluated, device, setup.layout), setup)
    if setup.asked:
        with phases.phase("answer"):
            _answer(parts, setup)
    eager = max(phases.peak(name, kept) for name in ("evaluate", "answer")) - kept
    with phases.phase("step"), nullcontext() if stream is None else graph.on(stream):
        step.micro_step(batch)
        step.update_step()
    if stream is not None and setup.graph:
        before = holder.total
        with phases.phase("capture"), graph.null_capture(stream):
            step.micro_step(batch)
        captured = phases.peak("capture") - before
    return Bytes(phases.owners, holder.total, captured, eager, tally.of("cpu").peak if on_gpu else 0)


def _load(setup: Setup, tally: Tally) -> Parts:
    """The parts of a session, wired as every session's are."""
    runtime = setup.runtime
    base = dataclasses.replace(setup.base, tensors=unread(setup.base.tensors, runtime.device, tally))
    config = Config().replace(
        recompute=setup.recompute,
        method=setup.method,
        clip_mode=setup.clip_mode,
        deterministic=runtime.deterministic,
        graph=setup.graph,
    )
    choice = attention.Choice(setup.backend, "rehearsed", setup.others)
    parts = Parts.wired(config, base, runtime, setup.placement, setup.lora, choice, setup.loss, home=_home(setup))
    weights = [projection.frozen for block in parts.decoder.blocks for projection in block.projections]
    tally.give(SCRATCH, *(held for weight in weights if isinstance(weight, Augmented) for held in weight.shared))
    if isinstance(parts.decoder.bundles, Bundles):
        tally.give(BUFFERS, *(buffer.flat for buffer in parts.decoder.bundles.buffers.values()))
    with tally.owner("adapters"):
        parts.arena.publish()
    return parts


def _home(setup: Setup) -> Home | None:
    """Where fetched weights are kept, as in session/opening.py, with ranks that send nothing."""
    placement, device = setup.placement, setup.runtime.device
    if placement.ranks:
        return Shards(0, placement.ranks, lambda into, own: None, device, on_host=placement.on_host)
    return HostMemory(device) if placement.on_host else None


def _batch(shape: Capacities, device: torch.device, layout: BatchLayout = PLAIN) -> PackedBatch:
    """Documents as long as they may be, one behind the other: long ones are attention's worst case."""
    lengths = [shape.longest] * (shape.capacity // shape.longest)
    rest = shape.capacity - sum(lengths)
    lengths += [rest] if rest else []
    lengths += [0] * (shape.max_docs - len(lengths))

    def numbers(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    return PackedBatch(
        tokens=numbers(shape.capacity),
        positions=numbers(shape.capacity),
        cu_seqlens=numbers(len(lengths) + 1, torch.int32),
        rows=numbers(shape.max_rows),
        labels=numbers(shape.max_rows),
        lengths=tuple(lengths),
        response_tokens=shape.max_rows,
        extra={f.name: numbers(f.length(shape.max_docs, shape.max_rows), f.dtype) for f in layout.fields},
    )


def _evaluate(parts: Parts, batch: PackedBatch, setup: Setup) -> None:
    evaluate_batch(parts.decoder, batch, setup.loss, max(batch.lengths), backend=setup.backend, start=parts.start)


def _answer(parts: Parts, setup: Setup) -> None:
    """The groups of prompts with the largest cache and with the most tokens to read: read, and a token more of each."""
    runtime, decoder, spec = parts.runtime, parts.decoder, parts.decoder.spec
    final_lengths = final_lengths_of(setup.asked, setup.new_tokens, spec.max_positions)
    size = CacheSize.of(spec, decoder.compute)
    groups = in_groups(final_lengths, setup.cache_capacity, size)
    largest = max(groups, key=lambda group: size.bytes(len(group), max(final_lengths[i] for i in group)))
    fullest = max(groups, key=lambda group: sum(setup.asked[i] for i in group))
    for group in (largest, fullest) if fullest is not largest else (largest,):
        lengths, longest = [setup.asked[i] for i in group], max(final_lengths[i] for i in group)
        cache = Cache(spec, lengths, longest, runtime.device, decoder.compute)
        with torch.no_grad():
            tokens = torch.zeros(sum(lengths), dtype=torch.int64, device=runtime.device)
            decoder.logits(prefill(decoder, tokens, lengths, cache, parts.eager_attention))
            TokenStep(decoder, cache, fixed=launch.on_gpu(runtime.device))(tokens[: len(lengths)])
        del cache, tokens


class _Phases:
    """The owners at the worst moment of each phase."""

    def __init__(self, holder: LiveBytes):
        self.holder = holder
        self.owners: dict[str, dict[str, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.holder.begin_phase()
        yield
        self.owners[name] = self.holder.at_peak

    def peak(self, name: str, otherwise: int = 0) -> int:
        return sum(self.owners[name].values()) if name in self.owners else otherwise
