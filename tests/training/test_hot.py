"""The loop around a captured step, without a GPU: what its streams wait for, and what a failed pass leaves behind."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftune import graph
from graftune.kernels import attention
from graftune.model import projection
from graftune.model.context import SideStreams
from graftune.step.pipeline import BatchBuffer, BatchShape, DevicePipeline
from graftune.step.step import Step
from tests.kernels.harness import batch
from tests.support import oracle


class Mark:
    """An event or a stream that writes down what is asked of it."""

    said: list[tuple[str, Any]]

    def __init__(self, *_: Any):
        self.said = []

    def synchronize(self) -> None:
        self.said.append(("synchronize", None))

    def wait_event(self, event: Any) -> None:
        self.said.append(("wait", event))

    def wait_stream(self, stream: Any) -> None:
        self.said.append(("wait", stream))


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Mark:
    """torch.cuda as far as it is used here; its main stream."""
    main, zeros = Mark(), torch.zeros
    monkeypatch.setattr(torch.cuda, "Stream", Mark)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(graph, "_stream", functools.cache(lambda *_: Mark()))
    monkeypatch.setattr(graph, "_in_order", lambda device: False)
    return main


def test_a_slot_is_used_again_for_batches_of_its_size(no_cuda: Mark) -> None:
    """Micro-batches and the batches ahead of a step have slots of two sizes in turn."""
    loop: Any = SimpleNamespace(free={}, copies=Mark(), device="cpu")
    loop._free_slots = lambda size: DevicePipeline._free_slots(loop, size)

    def slot(tokens: int) -> Any:
        shape = BatchShape(tokens, 2, 4)
        return DevicePipeline._slot(loop, shape, BatchBuffer(shape).size)

    first = slot(64)
    loop.free[len(first.host)].put(first)
    other = slot(32)
    assert other is not first and len(other.host) == BatchBuffer(BatchShape(32, 2, 4)).size
    assert not first.arrived.said and slot(64) is first
    assert first.arrived.said == [("synchronize", None)], "its pinned memory was read until then"


@pytest.mark.parametrize("long", [1, 1 << 20])
def test_sums_made_later_are_the_same_even_after_a_pass_that_failed(
    tiny_folder: Any, no_cuda: Mark, monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    """What is queued runs when attention's way back begins, so what it reads must still be there."""
    monkeypatch.setattr(projection, "LONG", long)
    folder = tiny_folder("llama")

    def gradients(aside: bool) -> torch.Tensor:
        torch.manual_seed(5)
        ours = oracle.ours(folder)
        step = Step(ours.decoder, ours.arena)
        if aside:
            step.side_streams = SideStreams(torch.device("cpu"))
            with monkeypatch.context() as failing, pytest.raises(MemoryError):
                failing.setattr(attention, "backward", fail)
                step.micro_step(batch())
            assert step.side_streams.in_use
            step.side_streams.queue(lambda: pytest.fail("the failed pass's"), ours.arena.weights)
            step.discard()
        step.micro_step(batch())
        return ours.arena.grads

    assert torch.equal(gradients(aside=True), gradients(aside=False))


def fail(*_: Any) -> None:
    raise MemoryError
