"""Sends optimizer steps to the device without waiting for them.

The loader's thread packs batches, puts them into pinned memory and copies them to the device on a separate stream
(`stage`). `micro` copies a staged batch into the inputs of the captured micro-step and replays it. `update` uploads the
hyperparameters, replays the update and copies the step's figures back. `step` does one whole optimizer step. Nothing
here reads a device value. `finished` returns the figures of steps that are done, usually one step late; the host is at
most `AHEAD` steps ahead of the device, so that a signal is noticed soon.

A loss that needs sums over the whole step before its micro-batches (`PackedBatch.ahead`) has a graph of its own for
them. A batch whose shape was not captured runs eagerly (`eager`), between replays if necessary. On a CPU, and with
`graph` off, the same functions run eagerly and in order.
"""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graftune import spans
from graftune.arithmetic import ceil_div
from graftune.batch import PackedBatch
from graftune.graph import Captured, stream
from graftune.model.feed_forward.routing import LayerRouting, figures_of
from graftune.spans import marked
from graftune.step.step import REPORTED, Step
from graftune.step.tail import RankSignals

AHEAD = 2
FINGERPRINT_EVERY = 50  # steps between two comparisons of the ranks' weights


class Figures(NamedTuple):
    """The figures of one optimizer step, fetched from the device. `tag` is what the caller passed to `update`."""

    tag: Any
    loss: float
    grad_norm: float
    skipped: bool
    response_tokens: float  # as the device counted them
    scale: float  # fp16's loss scale after this step; 0 in other dtypes
    more: dict[str, float]  # the loss's own figures, by name, and those of a mixture's routers
    signals: RankSignals = RankSignals()  # of all ranks, this one included
    routing: list[LayerRouting] | None = None  # what the routers of a mixture did

    @staticmethod
    def of(tag: Any, step: Step, report: Sequence[float]) -> Figures:
        """Names the numbers of `Step.report`."""
        (loss, norm, skipped, tokens, scale), more = report[:REPORTED], report[step.own_figures]
        named = dict(zip(step.loss.figures, more, strict=True))
        routing = None if step.routing is None else step.routing.read(report[step.routed])
        named |= {} if routing is None else figures_of(routing)
        return Figures(tag, loss, norm, bool(skipped), tokens, scale, named, step.signals(report), routing)


def pipeline_for(step: Step, *, graph: bool = True) -> Pipeline:
    return DevicePipeline(step, graph) if step.arena.device.type == "cuda" else HostPipeline(step)


class Pipeline(ABC):
    """Runs one optimizer step after the other: the part common to all devices."""

    steps_ahead = 0  # steps that may have been sent after the one whose figures the caller gets
    captures = 0  # micro-steps captured so far
    graph = False  # whether steps are captured and replayed
    waited = 0.0  # seconds that the host waited for the device
    count = 0  # updates sent
    in_micro = False  # a micro-batch is running, so the weights are those of the last update
    work: Step

    @property
    def layers(self) -> int:
        return len(self.work.decoder.blocks)

    def discard(self) -> None:
        """Drop the gradients since the last update."""
        self.work.discard()

    def uncaptured(self) -> AbstractContextManager[None]:
        """Inside, steps of captured shapes run eagerly, through the same functions."""
        return nullcontext()

    def bound_documents(self, longest: int, ahead: int = 0) -> None:  # noqa: B027 (only captured steps have a bound)
        """Promise that documents of later micro-batches have at most `longest` tokens, and those of batches ahead of a
        step at most `ahead`."""

    def free_graphs(self) -> None:  # noqa: B027 (only captured steps have graphs)
        """Free the captured steps and their memory; the next call of each captures it again."""

    @abstractmethod
    def stage(self, batch: PackedBatch) -> Any:
        """Send a batch to the device; `micro` takes the result."""

    @abstractmethod
    def eager(self, batch: PackedBatch, micro_batch_id: int) -> None:
        """`micro` for a batch on the host whose shape was not captured."""

    @abstractmethod
    def finished(self, wait: bool = False) -> list[Figures]:
        """Figures of the steps that are done; with `wait`, of all steps that were sent."""

    @abstractmethod
    def next(self) -> Figures:
        """Wait for the oldest step whose figures were not returned yet, and return them."""

    def micro(self, staged: Any, micro_batch_id: int) -> None:
        """Add the loss and the gradients of a staged batch."""
        self._begin()
        if staged.ahead is not None:
            for one in staged.ahead:
                spans.phase("host to device", operation="batch")
                self._ahead(one)
            self.work.share_ahead()
        spans.phase("host to device", operation="batch")
        self._micro(staged, micro_batch_id)

    def update(self, hyper: Mapping[str, float], tag: Any = None) -> None:
        """Apply the summed gradients; `tag` comes back with the figures of the step."""
        spans.phase("host to device", operation="hyperparameters")
        self._upload(hyper)
        self.work.reduce_outside_graph()
        self._update()
        spans.phase("update", operation="figures")
        self._fetch_report(tag)
        # Also after the first update, so that ranks that start with different weights are noticed.
        if self.work.reduce is not None and self.count % FINGERPRINT_EVERY == 0:
            self.work.tail.fingerprint(self.work.arena.weights)
        self.count += 1

    def _begin(self) -> None:  # noqa: B027 (a pipeline need not override it)
        """Called before every micro-batch."""

    @abstractmethod
    def _micro(self, staged: Any, micro_batch_id: int) -> None: ...
    @abstractmethod
    def _ahead(self, staged: Any) -> None: ...
    @abstractmethod
    def _upload(self, hyper: Mapping[str, float]) -> None: ...
    @abstractmethod
    def _update(self) -> None: ...
    @abstractmethod
    def _fetch_report(self, tag: Any) -> None: ...

    def step(
        self,
        staged: Sequence[Any],
        hyper: Mapping[str, float],
        micro_batch_ids: Sequence[int],
        tag: Any = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """One optimizer step over staged batches; `between` is called before each micro-batch."""
        for batch, micro_batch_id in zip(staged, micro_batch_ids, strict=True):
            between()
            self.in_micro = True
            self.micro(batch, micro_batch_id)
            self.in_micro = False
        self.update(hyper, tag)


class HostPipeline(Pipeline):
    """Runs eagerly and synchronously."""

    def __init__(self, step: Step):
        self.work, self.done = step, list[Figures]()

    def stage(self, batch: PackedBatch) -> PackedBatch:
        return batch.to(self.work.arena.device)

    def _micro(self, staged: PackedBatch, micro_batch_id: int) -> None:
        self.work.set_dropout_seed(micro_batch_id)
        self.work.micro_step(staged)

    def _ahead(self, staged: PackedBatch) -> None:
        self.work.ahead_step(staged.to(self.work.arena.device), any_shape=True)

    def eager(self, batch: PackedBatch, micro_batch_id: int) -> None:
        self.micro(self.stage(batch), micro_batch_id)

    def _upload(self, hyper: Mapping[str, float]) -> None:
        self.work.set_hyper(hyper)

    def _update(self) -> None:
        self.work.update_step()

    def _fetch_report(self, tag: Any) -> None:
        self.done.append(Figures.of(tag, self.work, self.work.report.tolist()))

    def finished(self, wait: bool = False) -> list[Figures]:
        done, self.done = self.done, []
        return done

    def next(self) -> Figures:
        return self.done.pop(0)


class BatchShape(NamedTuple):
    """The sizes of a batch's tensors: a captured micro-step serves one shape."""

    tokens: int
    documents: int
    rows: int
    extra: tuple[tuple[str, torch.dtype, int], ...] = ()  # name, dtype and length of the loss's fields

    @staticmethod
    def of(batch: PackedBatch) -> BatchShape:
        extra = tuple((name, value.dtype, len(value)) for name, value in batch.extra.items())
        return BatchShape(len(batch.tokens), len(batch.cu_seqlens) - 1, len(batch.rows), extra)


class BatchBuffer:
    """Lays out a batch's tensors in one flat int64 buffer, so that one copy transfers it: first the fields of every
    batch, then those of the loss."""

    def __init__(self, shape: BatchShape):
        numbers = {"tokens": shape.tokens, "positions": shape.tokens, "rows": shape.rows, "labels": shape.rows}
        self.fields = [(name, torch.int64, count) for name, count in numbers.items()]
        self.fields.append(("cu_seqlens", torch.int32, shape.documents + 1))
        self.own = len(self.fields)
        self.fields.extend(shape.extra)
        self.sizes = [ceil_div(count * dtype.itemsize, 8) for _, dtype, count in self.fields]  # in int64 numbers
        self.size = sum(self.sizes)

    def views(self, flat: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(fields of every batch, the loss's fields), by name."""
        parts = zip(self.fields, flat.split(self.sizes), strict=True)
        found = [(name, part.view(dtype)[:count]) for (name, dtype, count), part in parts]
        return dict(found[: self.own]), dict(found[self.own :])

    def fill(self, flat: torch.Tensor, batch: PackedBatch) -> None:
        """Copy a batch into the flat buffer."""
        own, extra = self.views(flat)
        for name, view in own.items():
            view.copy_(getattr(batch, name))
        for name, view in extra.items():
            view.copy_(batch.extra[name])


@dataclass
class TransferSlot:
    """Buffers for one batch in transfer: pinned memory, its copy on the device, and an event that guards each."""

    host: torch.Tensor
    device: torch.Tensor
    shape: BatchShape
    arrived: torch.cuda.Event
    taken: torch.cuda.Event
    ahead: tuple[TransferSlot, ...] | None = None  # the batches ahead of its step


class CapturedWork:
    """The fixed tensors that captured work reads, and the work: a micro-step, or the sums ahead of a step."""

    def __init__(
        self, work: Callable[[PackedBatch], None], shape: BatchShape, device: torch.device, graph: bool, pool: Any
    ):
        flat = BatchBuffer(shape)
        self.flat = torch.zeros(flat.size, dtype=torch.int64, device=device)
        own, extra = flat.views(self.flat)
        # Only the CPU's attention reads lengths on the host; the captured step reads cu_seqlens.
        batch = PackedBatch(**own, lengths=(shape.tokens,), response_tokens=0, extra=extra)  # type: ignore[arg-type]
        self.run = Captured(lambda: work(batch), enabled=graph, pool=pool)


class DevicePipeline(Pipeline):
    """Captures each micro-step and the update as CUDA graphs and replays them, or launches their kernels eagerly."""

    steps_ahead = AHEAD

    def __init__(self, step: Step, graph: bool):
        self.work, self.graph = step, graph
        self.device = step.arena.device
        self.pool = torch.cuda.graph_pool_handle() if graph else None
        self.copies = stream("copies", self.device)
        self.inputs: dict[BatchShape, CapturedWork] = {}  # of micro-steps
        self.ahead_inputs: dict[BatchShape, CapturedWork] = {}  # of batches ahead of a step
        self.update_step = Captured(step.update_step, enabled=graph, pool=self.pool)
        self.free: dict[int, queue.SimpleQueue[TransferSlot]] = {}  # by size
        self.hyper_rows = torch.empty(AHEAD + 2, len(step.uploaded), pin_memory=True)
        self.reports = torch.empty(AHEAD + 2, len(step.report), pin_memory=True)
        self.under_way: deque[tuple[int, Any, torch.cuda.Event]] = deque()
        self.ready: list[Figures] = []
        self.begun = False  # a micro-batch of the next update was sent

    @property
    def captures(self) -> int:  # type: ignore[override]
        """Captured micro-steps: one for each shape, and a run normally has one shape."""
        return sum(inputs.run.graph is not None for inputs in self.inputs.values())

    def stage(self, batch: PackedBatch) -> TransferSlot:
        """Copy a batch to the device. Called by the loader's thread, which may wait for a slot's earlier copy."""
        shape = BatchShape.of(batch)
        flat = BatchBuffer(shape)
        slot = self._slot(shape, flat.size)
        slot.ahead = None if batch.ahead is None else tuple(map(self.stage, batch.ahead))
        flat.fill(slot.host, batch)
        with torch.cuda.stream(self.copies):
            self.copies.wait_event(slot.taken)
            slot.device.copy_(slot.host, non_blocking=True)
            slot.arrived.record(self.copies)
        return slot

    def bound_documents(self, longest: int, ahead: int = 0) -> None:
        """Promise that documents of later batches exceed neither bound. The bounds are constants of captured work, so a
        larger one drops the captures."""
        work = self.work
        if work.longest is None or work.longest < longest:
            work.longest = longest
            self.free_graphs()
        if work.longest_ahead is None or work.longest_ahead < ahead:
            work.longest_ahead = ahead
            self.ahead_inputs.clear()

    def free_graphs(self) -> None:
        """Free the captured steps and their memory; the next call of each captures it again. The update is one of
        them: torch frees the memory of a pool only once no graph of the pool is left."""
        if self.inputs:
            torch.cuda.synchronize(self.device)
            self.inputs.clear()
            self.ahead_inputs.clear()
            self.pool = torch.cuda.graph_pool_handle() if self.graph else None
            self.update_step = Captured(self.work.update_step, enabled=self.graph, pool=self.pool)

    def _micro(self, staged: TransferSlot, micro_batch_id: int) -> None:
        if self.work.dropout:
            self.work.set_dropout_seed(micro_batch_id)
        self._run(self.inputs, self.work.micro_step, staged)

    def _ahead(self, staged: TransferSlot) -> None:
        self._run(self.ahead_inputs, self.work.ahead_step, staged)

    def _run(
        self, captured: dict[BatchShape, CapturedWork], work: Callable[[PackedBatch], None], staged: TransferSlot
    ) -> None:
        """Copy a staged batch into the inputs of captured work, and replay it."""
        assert self.work.longest is not None, "a captured step needs a bound: call bound_documents first"
        if staged.shape not in captured:
            captured[staged.shape] = CapturedWork(work, staged.shape, self.device, self.graph, self.pool)
        main, inputs = torch.cuda.current_stream(), captured[staged.shape]
        main.wait_event(staged.arrived)
        inputs.flat.copy_(staged.device)
        staged.taken.record(main)
        self._free_slots(len(staged.host)).put(staged)
        self.work.decoder.bundles.restore_first_blocks()  # an evaluation left other blocks in the buffers
        inputs.run()

    def eager(self, batch: PackedBatch, micro_batch_id: int) -> None:
        """Run a batch whose shape was not captured, kernel by kernel."""
        self._begin()
        if batch.ahead is not None:
            for one in batch.ahead:
                self.work.ahead_step(one.to(self.device), any_shape=True)
            self.work.share_ahead()
        if self.work.dropout:
            self.work.set_dropout_seed(micro_batch_id)
        self.work.micro_step(batch.to(self.device), any_shape=True)

    def _begin(self) -> None:
        """Before the first micro-batch of a step, wait until the host is less than `AHEAD` steps ahead."""
        if self.begun:
            return
        while len(self.under_way) >= AHEAD:
            began = time.perf_counter()
            with marked("wait for the device"):
                self._fetch_oldest()
            self.waited += time.perf_counter() - began
        self.begun = True

    def _upload(self, hyper: Mapping[str, float]) -> None:
        place = self.count % len(self.hyper_rows)
        self.hyper_rows[place] = torch.tensor(self.work.upload_of(hyper))
        self.work.uploaded.copy_(self.hyper_rows[place], non_blocking=True)

    def _update(self) -> None:
        self.update_step()

    def _fetch_report(self, tag: Any) -> None:
        place = self.count % len(self.hyper_rows)
        self.reports[place].copy_(self.work.report, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream())
        self.under_way.append((place, tag, done))
        self.begun = False

    def finished(self, wait: bool = False) -> list[Figures]:
        while self.under_way and (wait or self.under_way[0][2].query()):
            self._fetch_oldest()
        done, self.ready = self.ready, []
        return done

    def next(self) -> Figures:
        if not self.ready:
            self._fetch_oldest()
        return self.ready.pop(0)

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Inside, steps of captured shapes run eagerly, through the same functions."""
        inputs = (*self.inputs.values(), *self.ahead_inputs.values())
        captured = [*(one.run for one in inputs), self.update_step]
        for one in captured:
            one.enabled = False
        try:
            yield
        finally:
            for one in captured:
                one.enabled = self.graph

    def _free_slots(self, size: int) -> queue.SimpleQueue[TransferSlot]:
        """The free slots of this size. A slot may come from an earlier pipeline, if the loss was changed since."""
        return self.free.setdefault(size, queue.SimpleQueue())

    def _slot(self, shape: BatchShape, size: int) -> TransferSlot:
        try:
            slot = self._free_slots(size).get_nowait()
            slot.arrived.synchronize()  # the earlier copy reads the pinned memory until then
        except queue.Empty:
            with torch.cuda.stream(self.copies):  # allocate for this stream, in this device's context
                host = torch.zeros(size, dtype=torch.int64, pin_memory=True)
                device = torch.empty(size, dtype=torch.int64, device=self.device)
            slot = TransferSlot(host, device, shape, torch.cuda.Event(), torch.cuda.Event())
        slot.shape = shape
        return slot

    def _fetch_oldest(self) -> None:
        place, tag, done = self.under_way.popleft()
        done.synchronize()
        self.ready.append(Figures.of(tag, self.work, self.reports[place].tolist()))
