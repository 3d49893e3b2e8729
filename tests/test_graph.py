"""Capturing without a GPU: in which order things happen, and what a capture that breaks leaves behind."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from graftune import graph


class Fake:
    """A CUDAGraph and the streams around it, which write down what is asked of them."""

    def __init__(self, broken: bool = False):
        self.said: list[str] = []
        self.broken = broken

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert pool and capture_error_mode == "thread_local"
        self.said.append("begin")

    def capture_end(self) -> None:
        self.said.append("end")
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def stream(self, on: str) -> Any:
        self.said.append(f"on {on}")
        yield
        self.said.append(f"off {on}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: made.said.append(name))
    monkeypatch.setattr(torch.cuda, "stream", lambda on: made.stream(on))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(graph, "_unfinished", [])
    return made


def capture(work: Any, made: Fake) -> None:
    graph.capture(work, made, "a stream")  # type: ignore[arg-type]


def test_nothing_is_collected_while_a_graph_is_captured(fake: Fake) -> None:
    seen = []
    capture(lambda: seen.append(gc.isenabled()), fake)
    assert seen == [False] and gc.isenabled() and not graph._unfinished
    assert fake.said == ["synchronize", "empty_cache", "on a stream", "begin", "end", "off a stream"]


def test_who_collects_by_hand_goes_on_doing_so(fake: Fake) -> None:
    gc.disable()
    try:
        capture(lambda: None, fake)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("broken", [False, True])
def test_what_broke_a_capture_is_raised_and_the_capture_is_left(fake: Fake, broken: bool) -> None:
    fake.broken = broken

    def work() -> None:
        try:
            raise KeyError("of its own, and got over")
        except KeyError:
            raise ValueError("not while capturing") from None

    with pytest.raises(ValueError, match="not while capturing"):
        capture(work, fake)
    assert fake.said[-2:] == ["begin", "end"] and gc.isenabled()
    assert graph._unfinished == [fake], "torch's allocator may still ask it"


def test_a_capture_that_breaks_without_a_word_says_so_at_its_end(fake: Fake) -> None:
    fake.broken = True
    with pytest.raises(RuntimeError, match="previous error"):
        capture(lambda: None, fake)
    assert gc.isenabled() and graph._unfinished == [fake]
