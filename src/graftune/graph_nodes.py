"""Kernels in place of the memory-setting nodes of a captured graph.

cuBLAS clears a few bytes of its workspace before most products, cuDNN before attention: ten nodes a layer at 8192
tokens. Each breaks the run of kernels: on an H200 the product behind it begins 9 microseconds late, and the host sends
the graph in pieces, 3 microseconds apiece (1.2 ms at 8B and 8192 tokens, with 320 such nodes; 0.15 at 512, with 32). So
a captured graph is gone through once, before it is instantiated, and a kernel takes the place of every such node. The
driver is called by its C interface: torch hands out the graph and nothing to change it with.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import torch

from graftune.errors import GraftuneError

KERNEL, MEMSET = 0, 2  # kinds of nodes
PRIORITY = 8  # an attribute of a launch
THREADS = 256
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry set_words(.param .u64 to, .param .u32 word, .param .u32 count)
{
    .reg .pred %p;
    .reg .b32 %word, %count, %block, %wide, %at;
    .reg .b64 %to, %offset;
    ld.param.u64 %to, [to];
    ld.param.u32 %word, [word];
    ld.param.u32 %count, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %wide, %ntid.x;
    mov.u32 %at, %tid.x;
    mad.lo.u32 %at, %block, %wide, %at;
    setp.ge.u32 %p, %at, %count;
    @%p bra DONE;
    cvta.to.global.u64 %to, %to;
    mul.wide.u32 %offset, %at, 4;
    add.u64 %to, %to, %offset;
    st.global.u32 [%to], %word;
DONE:
    ret;
}
\0"""


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("to", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint32),
        ("element", c_uint32),
        ("width", c_size_t),
        ("height", c_size_t),
    )

    @property
    def words(self) -> int:
        """How many words it sets, or 0 where it does not set whole words in a row."""
        size = self.element * self.width
        return int(size // 4) if self.height == 1 and size % 4 == 0 and self.to % 4 == 0 and size < 1 << 33 else 0

    @property
    def word(self) -> int:
        times, most = {1: (0x01010101, 0xFF), 2: (0x00010001, 0xFFFF), 4: (1, 0xFFFFFFFF)}[self.element]
        return (int(self.value) & most) * times


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared", c_uint32),
        ("arguments", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
    )


def without_memsets(graph: int) -> int:
    """Replaces them in a cudaGraph_t that is not instantiated yet; how many there were. One that does not set whole
    words, or has neighbours that the driver does not tell of, stays."""
    lib, replaced = _driver(), 0
    for node in _listed(lambda *out: lib.cuGraphGetNodes(c_void_p(graph), *out)) or ():
        kind, settings = c_int(), _Memset()
        _check(lib.cuGraphNodeGetType(c_void_p(node), byref(kind)))
        if kind.value != MEMSET:
            continue
        _check(lib.cuGraphMemsetNodeGetParams(c_void_p(node), byref(settings)))
        before = _listed(lambda *out, node=node: lib.cuGraphNodeGetDependencies(c_void_p(node), *out))
        after = _listed(lambda *out, node=node: lib.cuGraphNodeGetDependentNodes(c_void_p(node), *out))
        if settings.words and before is not None and after is not None:
            _replace(lib, graph, node, settings, before, after)
            replaced += 1
    return replaced


def _replace(
    lib: ctypes.CDLL, graph: int, node: int, settings: _Memset, before: Sequence[int], after: Sequence[int]
) -> None:
    values = c_uint64(settings.to), c_uint32(settings.word), c_uint32(settings.words)
    arguments = (c_void_p * 3)(*(ctypes.cast(byref(value), c_void_p) for value in values))
    blocks = -(-settings.words // THREADS)
    kernel = _Kernel(_function(torch.cuda.current_device()), (blocks, 1, 1), (THREADS, 1, 1), 0, arguments, None)
    made = c_void_p()
    _check(
        lib.cuGraphAddKernelNode(
            byref(made), c_void_p(graph), _nodes(before), c_size_t(len(before)), byref(kernel)
        )
    )  # fmt: skip
    _same_priority(lib, made, after)
    if after:
        new = _nodes([made.value or 0] * len(after))
        _check(lib.cuGraphAddDependencies(c_void_p(graph), new, _nodes(after), c_size_t(len(after))))
    _check(lib.cuGraphDestroyNode(c_void_p(node)))


def _same_priority(lib: ctypes.CDLL, made: c_void_p, after: Sequence[int]) -> None:
    """As what waits for it: a step's own work goes before what it left to other streams."""
    for node in after:
        kind, value = c_int(), (ctypes.c_char * 64)()
        _check(lib.cuGraphNodeGetType(c_void_p(node), byref(kind)))
        if kind.value == KERNEL:
            _check(lib.cuGraphKernelNodeGetAttribute(c_void_p(node), PRIORITY, byref(value)))
            _check(lib.cuGraphKernelNodeSetAttribute(made, PRIORITY, byref(value)))
            return


def _listed(ask: Callable[..., int]) -> list[int] | None:
    """Asked for their number, then for the nodes; None where the driver refuses."""
    count = c_size_t()
    if ask(None, byref(count)):
        return None
    found = (c_void_p * max(1, count.value))()
    return None if ask(found, byref(count)) else [node or 0 for node in found[: count.value]]


def _nodes(nodes: Sequence[int]) -> Any:
    return (c_void_p * max(1, len(nodes)))(*nodes)


@functools.cache
def _function(device: int) -> c_void_p:
    """Compiled by the driver, for the context of this device."""
    module, function = c_void_p(), c_void_p()
    _check(_driver().cuModuleLoadData(byref(module), PTX))
    _check(_driver().cuModuleGetFunction(byref(function), module, b"set_words"))
    return function


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        raise GraftuneError(f"the CUDA driver answered with status {status}", mend="train with --no-graph")
