"""A captured graph's memory-setting nodes become kernels, and it does what it did. torch's own zero_() is a kernel, so
what is set here is set by the driver, as cuBLAS and cuDNN do."""

from __future__ import annotations

from ctypes import c_size_t, c_ubyte, c_uint32, c_uint64, c_void_p

import pytest
import torch

from graftune import graph_nodes
from graftune.graph import Captured

pytestmark = pytest.mark.gpu


def clear(x: torch.Tensor) -> None:
    """A memory-setting node on the current stream: words where it can."""
    lib, stream = graph_nodes._driver(), c_void_p(torch.cuda.current_stream().cuda_stream)
    if x.element_size() == 4:
        status = lib.cuMemsetD32Async(c_uint64(x.data_ptr()), c_uint32(0), c_size_t(x.numel()), stream)
    else:
        status = lib.cuMemsetD8Async(c_uint64(x.data_ptr()), c_ubyte(0), c_size_t(x.nbytes), stream)
    assert status == 0


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
        clear(x)
        clear(beyond[4:-4])
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
        clear(words)
        odd.add_(1)
        clear(odd)
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
            clear(x)
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
