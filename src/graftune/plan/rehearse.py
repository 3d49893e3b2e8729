"""Computes the memory of a run: runs the real loading, forward, backward and update on tensors without memory.

So the plan cannot drift from the code: a change that saves one more tensor, or frees one earlier, changes both. A
formula over shapes, as in other programs, is only right until the code changes.

The phases are those of a run: load; the reference's log-probabilities, if they are stored; evaluate and answer prompts
(eager); in reinforcement learning sample, with a cache and graphs that stay; the first micro-step (eager, on the stream
that captures it, with algorithms timed) with the sums ahead of it, and the update; on CUDA the micro-step and these
sums once more, as they are captured. The run's peak is the largest of its phases. Temporaries of a captured step stay
in its graph's pool for good, so eager work after the capture needs other memory.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from graftune import graph
from graftune.batch import PLAIN, BatchLayout, Field, PackedBatch
from graftune.data.pack import Capacities
from graftune.dist.shard import Shards
from graftune.errors import GraftuneError
from graftune.infer import generate
from graftune.infer.cache import CACHE, CacheShape, CacheSize, Request
from graftune.kernels import attention, draw, launch, rehearsal
from graftune.kernels.rehearsal import LOGITS, META, SAVED, WORKSPACES, Device, Launched, Rehearsal, rehearsing
from graftune.losses import CrossEntropy, Loss, reference_log_probs, stores_reference
from graftune.model.bundles import Bundles, BundleStorage, HostMemory
from graftune.model.frozen import Augmented, RowSource
from graftune.model.spec import ModelSpec
from graftune.plan.cards import Card
from graftune.plan.counting import SCRATCH, Counting, Tally
from graftune.plan.libraries import TAKEN, OnGpu, copied_weight
from graftune.plan.unread_sources import unread
from graftune.runtime import Runtime
from graftune.session.parts import SessionParts
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.step.evaluate import evaluate_batch
from graftune.weights.base import Base
from graftune.weights.placement import Placement

POOLS, BUFFERS = "graph pools", "buffers of fetched blocks"
OWNERS = ("base", BUFFERS, "adapters", "gradients", "moments", SAVED, SCRATCH, LOGITS, CACHE, WORKSPACES)


@dataclass(frozen=True)
class Setup:
    """Everything that the memory of a step depends on."""

    base: Base
    lora: LoraConfig
    runtime: Runtime
    placement: Placement
    shape: Capacities
    config: Config  # how it recomputes, clips and captures, and what it trains; all other settings are defaults
    loss: Loss = field(default_factory=CrossEntropy)
    layout: BatchLayout = PLAIN  # the loss's fields of a batch
    ahead: Capacities | None = None  # shape of the batches ahead of a step, if the loss has such
    backend: str = "cpu"
    others: tuple[str, ...] = ()  # other backends that the first step times
    evaluates: bool = True
    evaluated: Capacities | None = None  # shape of the validation data; None: that of a step
    asked: tuple[Request, ...] = ()  # prompts that are answered before and after training
    cache_capacity: int = 0  # tokens of the cache for answers
    sampled: tuple[Request, ...] = ()  # samples of a round of reinforcement learning, whose cache stays
    at_once: int = 0  # how many of `sampled` are drawn at the same time
    copies: bool = False  # whether the CPU's products copy weights (libraries.copies_operand)
    card: Card | None = None

    def with_layers(self, layers: Sequence[int]) -> Setup:
        """The same setup for a model of these layers; a layer may occur several times."""
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
    """A rehearsal's result: bytes of the device by phase and owner, at the peak of each phase. Every number grows by
    the same amount with every further layer."""

    phases: dict[str, dict[str, int]]
    after: int = 0  # live after a step
    captured: int = 0  # temporaries of the captured step and sampling rounds, which stay in the pools of their graphs
    eager: int = 0  # temporaries of an evaluation, of answers or of prompts that are read, in other memory
    host: int = 0  # peak of host memory, if the device is a GPU
    without_rule: frozenset[str] = frozenset()  # operations whose shapes torch's references computed

    @property
    def owners(self) -> dict[str, int]:
        found = max(self.phases.values(), key=lambda owners: sum(owners.values()))
        return {name: found[name] for name in (*OWNERS, *(n for n in found if n not in OWNERS)) if found.get(name)}

    @property
    def peak(self) -> int:
        return max(sum(owners.values()) for owners in self.phases.values())

    @property
    def temporary(self) -> int:
        """What the largest peak holds beyond the loaded base and adapters."""
        return max(0, self.peak - sum(self.phases["load"].values()))

    @property
    def pools(self) -> int:
        """Bytes needed beyond the peak, because eager work cannot use a graph's pool."""
        return max(0, self.after + self.captured + self.eager - self.peak) if self.captured else 0

    def extended(self, few: Bytes, more: Bytes, step: int, by: int) -> Bytes:
        """Extrapolate to `by` further layers of a kind, given that `step` of them change `few` to `more`."""

        def extrapolate(now: int, few: int, more: int) -> int:
            return max(0, now + (more - few) * by // step)

        phases = {
            phase: {
                name: extrapolate(now.get(name, 0), few.phases[phase].get(name, 0), more.phases[phase].get(name, 0))
                for name in {**now, **few.phases[phase], **more.phases[phase]}
            }
            for phase, now in self.phases.items()
        }
        rest = ("after", "captured", "eager", "host")
        named = self.without_rule | few.without_rule | more.without_rule
        figures = {name: extrapolate(*(getattr(one, name) for one in (self, few, more))) for name in rest}
        return Bytes(phases, **figures, without_rule=named)


def rehearse(setup: Setup, *, launched: Launched | None = None) -> Bytes:
    """Rehearse a run with this setup. `launched` is called for every Triton kernel that the run would launch."""
    tally, kind = Tally(), setup.runtime.device.type
    if kind == "cuda":
        assert setup.card is not None, "a plan for CUDA needs a card"
        try:
            importlib.import_module("triton.runtime")
        except ImportError:
            raise GraftuneError(
                "a plan for a GPU runs the code of its kernels, and the package triton is not installed",
                fix="pip install triton, or set device to cpu",
            ) from None
        device, mode = setup.card.device, Counting(tally, kind, OnGpu(tally).before)
        setup = dataclasses.replace(setup, runtime=dataclasses.replace(setup.runtime, device=META))
    else:
        before = [functools.partial(copied_weight, tally)] if setup.copies else []
        device, mode = Device(kind), Counting(tally, kind, *before)
    with rehearsing(CountingRehearsal(device, tally, mode, launched)), mode:
        found = run_phases(setup, tally)
    return dataclasses.replace(found, without_rule=frozenset(mode.without_rule))


class CountingRehearsal(Rehearsal):
    """Describes the device to the rehearsed code, and passes the owners that it names to the tally. `mode` counts
    allocations."""

    def __init__(self, device: Device, tally: Tally, mode: Any, launched: Launched | None = None):
        super().__init__(device, TAKEN, launched)
        self.tally, self.mode = tally, mode

    def owned(self, owner: str) -> AbstractContextManager[None]:
        return self.tally.owner(owner)

    def uncounted(self) -> AbstractContextManager[None]:
        return self.mode.paused()

    def kind_of(self, tensor: torch.Tensor) -> str:
        return self.tally.kind_of(tensor) or self.device.kind

    def assign(self, owner: str, tensors: Sequence[torch.Tensor]) -> None:
        self.tally.assign(owner, *tensors)


def run_phases(setup: Setup, tally: Tally) -> Bytes:
    """Run the phases of a training run while the tally counts their allocations."""
    device, on_gpu = setup.runtime.device, launch.on_gpu(setup.runtime.device)
    memory = tally.of("cuda" if on_gpu else device.type)
    stream = graph.stream("capture", device) if on_gpu else None  # runs the first step and captures it
    now = rehearsal.current()
    assert now is not None
    now.reads_all = True  # a quantiser counts the rows of a weight
    with memory.phase("load"):
        parts = _load(setup, tally)
    now.reads_all = False
    step = parts.step
    step.longest = setup.shape.longest
    batch = _batch(setup.shape, device, setup.layout.fields)
    loaded, captured = memory.total, 0
    if on_gpu and stores_reference(setup.layout):  # else it needs no more than a step, in the same memory
        with memory.phase("reference"), torch.no_grad():
            ctx = parts.decoder.begin_batch(batch, setup.backend, setup.shape.longest)
            reference_log_probs(setup.loss, parts.decoder, batch, ctx, parts.start)
    evaluated = setup.evaluated or setup.shape
    larger = any(one > other for one, other in zip(evaluated, setup.shape, strict=True))
    if setup.evaluates and (on_gpu or larger):  # else it needs no more than a step, in the same memory
        with memory.phase("evaluate"):
            held_out, backend = _batch(evaluated, device, setup.layout.fields), setup.backend
            evaluate_batch(parts.decoder, held_out, setup.loss, evaluated.longest, backend=backend, start=parts.start)
    if setup.asked:
        with memory.phase("answer"):
            _answer(parts, setup)
    eager = max(memory.peak_of(name, loaded) for name in ("evaluate", "answer")) - loaded
    sampler: generate.Sampler | None = None
    if setup.sampled:
        with memory.phase("sample"):
            sampler = _sample(parts, setup, stream)
        eager = max(eager, memory.peak_of("sample") - memory.total)
        if stream is not None:
            before = memory.total
            with memory.phase("capture of sampling"), graph.null_capture(stream):
                sampler.batch.round(setup.at_once, draw.WHOLE, True)
            captured = memory.peak_of("capture of sampling") - before
    ahead: PackedBatch | None = None
    if setup.ahead is not None and setup.layout.ahead is not None:
        ahead, step.longest_ahead = _batch(setup.ahead, device, setup.layout.ahead.fields), setup.ahead.longest

    def micro_step() -> None:
        if ahead is not None:
            step.ahead_step(ahead)
        step.micro_step(batch)

    with memory.phase("step"), nullcontext() if stream is None else graph.on(stream):
        micro_step()
        step.update_step()
    if stream is not None and setup.config.train.graph:
        before = memory.total
        with memory.phase("capture"), graph.null_capture(stream):
            micro_step()
        captured += memory.peak_of("capture") - before
    return Bytes(memory.phases, memory.total, captured, eager, tally.of("cpu").peak if on_gpu else 0)


def _load(setup: Setup, tally: Tally) -> SessionParts:
    """Build the parts of a session, as every session does, on sources without contents."""
    config, runtime = setup.config, setup.runtime
    base = dataclasses.replace(setup.base, tensors=unread(setup.base.tensors, runtime.device, tally))
    choice = attention.Choice(setup.backend, "rehearsed", setup.others)
    parts = SessionParts(
        config, base, runtime, setup.placement, setup.lora, choice, setup.loss, storage=_storage(setup)
    )
    weights = [projection.frozen for block in parts.decoder.blocks for projection in block.projections]
    tally.assign(SCRATCH, *(held for weight in weights if isinstance(weight, Augmented) for held in weight.shared))
    if isinstance(parts.decoder.bundles, Bundles):
        tally.assign(BUFFERS, *(buffer.flat for buffer in parts.decoder.bundles.buffers.values()))
    with tally.owner("adapters"):
        parts.arena.publish()
    return parts


def _storage(setup: Setup) -> BundleStorage | None:
    """The store of fetched weights, as in session/opening.py, with ranks that send nothing."""
    placement, device = setup.placement, setup.runtime.device
    if placement.ranks:
        return Shards(0, placement.ranks, lambda into, own: None, device, on_host=placement.on_host)
    return HostMemory(device) if placement.on_host else None


def _batch(shape: Capacities, device: torch.device, fields: Sequence[Field]) -> PackedBatch:
    """A batch of documents of the largest length, which is the worst case for attention."""
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
        extra={f.name: numbers(f.length(shape.max_docs, shape.max_rows), f.dtype) for f in fields},
    )


def _answer(parts: SessionParts, setup: Setup) -> None:
    """Read the prompts and draw a token of each, with as many of them at once as fit the cache."""
    size = CacheSize.of(setup.base.spec, parts.decoder.compute)
    shape = CacheShape.of(size, setup.asked, setup.cache_capacity * size.most_per_token)
    generate.rehearse(parts.decoder, setup.asked, shape, parts.eager_attention)


def _sample(parts: SessionParts, setup: Setup, stream: Any) -> generate.Sampler:
    """Read the prompts of a round and draw a token of as many samples as are drawn at once."""
    shape = sampling_cache(setup.base.spec, parts.decoder.compute, setup.sampled, setup.at_once)
    return generate.rehearse(parts.decoder, setup.sampled, shape, parts.eager_attention, draw.WHOLE, stream)


def sampling_cache(spec: ModelSpec, dtype: torch.dtype, sampled: Sequence[Request], at_once: int) -> CacheShape:
    """The cache of a run that draws so many of these samples at once."""
    return CacheShape.of(CacheSize.of(spec, dtype), sampled, math.inf, at_once)
