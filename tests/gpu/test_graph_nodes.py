"""A captured graph's memory-setting nodes become kernels, and it does what it did."""

from __future__ import annotations

import pytest
import torch

from graftune import graph_nodes
from graftune.graph import Captured

pytestmark = pytest.mark.gpu


def captured(work) -> tuple[torch.cuda.CUDAGraph, int]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    count = graph_nodes.without_memsets(graph.raw_cuda_graph())
    graph.instantiate()
    return graph, count


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 100_003, 1 << 22])
def test_words_are_set_between_what_came_before_and_after(size):
    x, total = torch.ones(size, device="cuda"), torch.zeros(size, device="cuda")
    beyond = torch.full((size + 8,), 7.0, device="cuda")

    def work() -> None:
        x.mul_(3)
        total.add_(x)
        x.zero_()
        beyond[4:-4].zero_()
        x.add_(1)
        beyond[4:-4].add_(x)

    graph, count = captured(work)
    assert count == 2
    for _ in range(3):
        graph.replay()
    # The first run and three replays; captured once, which runs nothing.
    assert bool((x == 1).all()) and bool((total == 4 * 3).all())
    assert bool((beyond[4:-4] == 1).all()) and bool((beyond[:4] == 7).all()) and bool((beyond[-4:] == 7).all())


def test_bytes_and_halves():
    words, odd = torch.ones(64, dtype=torch.uint8, device="cuda"), torch.ones(63, dtype=torch.uint8, device="cuda")

    def work() -> None:
        words.add_(1)
        words.zero_()
        odd.add_(1)
        odd.zero_()
        words.add_(2)
        odd.add_(3)

    graph, count = captured(work)
    assert count == 1, "63 bytes are no whole words: they stay as they are"
    graph.replay()
    assert bool((words == 2).all()) and bool((odd == 3).all())


def test_branches_wait_for_what_they_waited_for():
    """A memset on a forked stream between two kernels of the main one."""
    x, side = torch.ones(1 << 20, device="cuda"), torch.cuda.Stream()
    y = torch.ones(1 << 20, device="cuda")

    def work() -> None:
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y.copy_(x)
            x.zero_()
            x.add_(5)
        torch.cuda.current_stream().wait_stream(side)
        x.add_(y)

    graph, count = captured(work)
    assert count == 1
    graph.replay()
    # 1 -> 2 -> 0 -> 5 -> 7; again: 8 -> 0 -> 5 -> 13
    assert bool((y == 8).all()) and bool((x == 13).all())


def test_products_that_clear_their_workspace(monkeypatch):
    """Whatever the library does before a product, replays give what the first run gave."""
    from graftune.kernels import matmul

    a, b = (torch.randn(2048, 2048, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty(2048, 2048, dtype=torch.bfloat16, device="cuda")

    def work() -> None:
        with matmul.tuned():
            matmul.mm(a, b, out)

    run = Captured(work)
    run()
    first = out.clone()
    for _ in range(3):
        out.zero_()
        run()
        assert torch.equal(out, first)
