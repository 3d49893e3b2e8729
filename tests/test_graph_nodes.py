"""Memory-setting nodes of a graph become kernels between the same neighbours; the driver is not there (tests/gpu has
it on a card)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest

from graftune import graph_nodes
from graftune.errors import GraftuneError

KERNEL, MEMCPY, MEMSET = 0, 1, 2


@dataclass
class Node:
    kind: int
    before: list[int] = field(default_factory=list)
    settings: tuple[int, ...] = ()  # of a memset
    wrote: tuple[int, int, int] | None = None  # of a kernel that we added
    priority: int = 0


class Driver:
    """A graph of numbered nodes behind the driver's functions."""

    def __init__(self, nodes: dict[int, Node], lossy: int = 0):
        self.nodes, self.lossy = nodes, lossy

    def _give(self, found: list[int], out: Any, count: Any) -> int:
        if out is not None:
            out[: len(found)] = found
        count._obj.value = len(found)
        return 0

    def cuGraphGetNodes(self, graph, out, count):
        return self._give(list(self.nodes), out, count)

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.nodes[node.value].kind
        return 0

    def cuGraphMemsetNodeGetParams(self, node, settings):
        for name, value in zip(
            ("to", "value", "element", "width", "height"), self.nodes[node.value].settings, strict=True
        ):
            setattr(settings._obj, name, value)
        return 0

    def cuGraphNodeGetDependencies(self, node, out, count):
        return 1 if node.value == self.lossy else self._give(self.nodes[node.value].before, out, count)

    def cuGraphNodeGetDependentNodes(self, node, out, count):
        return self._give([n for n, other in self.nodes.items() if node.value in other.before], out, count)

    def cuGraphAddKernelNode(self, made, graph, before, count, kernel):
        number, kernel = max(self.nodes) + 1, kernel._obj
        kinds = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32
        wrote = [ctypes.cast(kernel.arguments[i], ctypes.POINTER(kind))[0] for i, kind in enumerate(kinds)]
        assert kernel.grid[0] * kernel.block[0] >= wrote[2] > (kernel.grid[0] - 1) * kernel.block[0]
        assert [*kernel.grid][1:] == [*kernel.block][1:] == [1, 1]
        self.nodes[number] = Node(KERNEL, list(before[: count.value]), wrote=tuple(wrote))
        made._obj.value = number
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, which, value):
        value._obj[:4] = self.nodes[node.value].priority.to_bytes(4, "little", signed=True)
        return 0

    def cuGraphKernelNodeSetAttribute(self, node, which, value):
        self.nodes[node.value].priority = int.from_bytes(value._obj[:4], "little", signed=True)
        return 0

    def cuGraphAddDependencies(self, graph, first, second, count):
        for i in range(count.value):
            self.nodes[second[i]].before.append(first[i])
        return 0

    def cuGraphDestroyNode(self, node):
        del self.nodes[node.value]
        for other in self.nodes.values():
            other.before = [n for n in other.before if n != node.value]
        return 0


@pytest.fixture
def put(monkeypatch):
    def put(driver: Driver) -> int:
        monkeypatch.setattr(graph_nodes, "_driver", lambda: driver)
        monkeypatch.setattr(graph_nodes, "_function", lambda device: ctypes.c_void_p(1))
        monkeypatch.setattr(graph_nodes.torch.cuda, "current_device", lambda: 0)
        return graph_nodes.without_memsets(99)

    return put


def test_neighbours_stay(put):
    nodes = {
        1: Node(KERNEL),
        2: Node(MEMSET, [1], (0x1000, 0, 1, 8192, 1)),
        3: Node(KERNEL, [2], priority=-1),
        4: Node(KERNEL, [1, 2]),
        5: Node(MEMCPY, [3]),
    }
    assert put(Driver(nodes)) == 1
    assert set(nodes) == {1, 3, 4, 5, 6}
    assert nodes[6].before == [1] and nodes[6].wrote == (0x1000, 0, 2048) and nodes[6].priority == -1
    assert nodes[3].before == [6] and sorted(nodes[4].before) == [1, 6] and nodes[5].before == [3]


def test_what_is_set(put):
    """Values of one and two bytes, of which the driver may tell more, are repeated in a word; the first and the last
    node have neighbours on one side."""
    nodes = {
        1: Node(MEMSET, [], (0x10, 0xFFFFFFAB, 1, 4, 1)),
        2: Node(MEMSET, [1], (0x20, 0xABCD, 2, 6, 1)),
        3: Node(MEMSET, [2], (0x30, 0x12345678, 4, 1000, 1)),
    }
    assert put(Driver(nodes)) == 3
    assert [nodes[n].wrote for n in (4, 5, 6)] == [
        (0x10, 0xABABABAB, 1),
        (0x20, 0xABCDABCD, 3),
        (0x30, 0x12345678, 1000),
    ]
    assert [nodes[n].before for n in (4, 5, 6)] == [[], [4], [5]]


@pytest.mark.parametrize(
    "settings", [(0x10, 0, 1, 7, 1), (0x10, 0, 4, 8, 2), (0x11, 0, 1, 8, 1)], ids=["odd", "rows", "unaligned"]
)
def test_what_are_no_words_in_a_row_stays(put, settings):
    nodes = {1: Node(KERNEL), 2: Node(MEMSET, [1], settings)}
    assert put(Driver(nodes)) == 0 and nodes[2].kind == MEMSET


def test_edges_that_the_driver_keeps_to_itself(put):
    nodes = {1: Node(KERNEL), 2: Node(MEMSET, [1], (0x10, 0, 4, 8, 1))}
    assert put(Driver(nodes, lossy=2)) == 0 and nodes[2].kind == MEMSET


def test_an_error_is_told(put):
    driver = Driver({1: Node(MEMSET, [], (0x10, 0, 4, 8, 1))})
    driver.cuGraphAddKernelNode = lambda *_: 700
    with pytest.raises(GraftuneError, match="status 700"):
        put(driver)
