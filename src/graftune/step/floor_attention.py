"""The attention of the floor (floor.py): the fastest of torch's kernels and ours, by the time of a few layers; and how
work is timed as a CUDA graph."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from graftune.kernels import attention

LAYERS = 8  # layers of attention that are timed together


class Heads(NamedTuple):
    query: int
    key: int
    width: int
    window: int = 0

    @property
    def split(self) -> list[int]:
        return [self.query, self.key, self.key]


class TorchAttention:
    """torch's own attention, over rows of one length."""

    def __init__(self, heads: Heads, rows: int, length: int, qkv: torch.Tensor, name: str, backend: SDPBackend):
        self.name, self.backend = f"torch {name}", backend
        parts = qkv.view(rows, length, -1, heads.width)
        self.qkv = [part.transpose(1, 2).requires_grad_() for part in parts.split(heads.split, 2)]
        self.grad = torch.randn_like(self.qkv[0])

    def begin(self) -> None:
        """Called at the start of a pass."""

    def forward(self) -> torch.Tensor:
        with sdpa_kernel(self.backend):
            q, k, v = self.qkv
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def backward(self, kept: torch.Tensor) -> None:
        torch.autograd.grad(kept, self.qkv, self.grad)


class PackedAttention:
    """graftune's attention, over documents laid end to end."""

    def __init__(self, heads: Heads, lengths: Sequence[int], qkv: torch.Tensor, backend: str):
        device = qkv.device
        self.window = heads.window if heads.window < max(lengths) else 0
        self.scale = heads.width**-0.5
        self.backend, self.name = backend, f"graftune {backend}"
        self.lengths = tuple(lengths)
        edges = [0, *itertools.accumulate(lengths)]
        self.edges = torch.tensor(edges, dtype=torch.int32, device=device)
        q, k, v = qkv.split(heads.split, 1)
        self.qkv = q, k, v
        made = attention.grad_buffers(q, k, self.backend)
        self.grads: Any = made or torch.empty_like(qkv).split(heads.split, 1)
        self.grad = torch.randn(self.qkv[0].shape, dtype=qkv.dtype, device=device)

    def begin(self) -> None:
        self.documents = attention.Documents(self.edges, self.lengths, max(self.lengths))

    def forward(self) -> Any:
        return attention.forward(*self.qkv, self.documents, self.scale, self.window, self.backend)

    def backward(self, kept: Any) -> None:
        q, k, v = self.qkv
        out, stats = kept
        more = self.documents, self.scale, self.window, self.grads, self.backend
        attention.backward(self.grad, q, k, v, out, stats, *more)


FloorAttention = TorchAttention | PackedAttention


def fastest_attention(
    heads: Heads,
    lengths: Sequence[int],
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> FloorAttention:
    """The fastest attention over these documents, by the time of a few layers. torch's own kernels, which need
    documents of one length, are tried beside ours: the floor must not be higher than necessary."""
    assert sum(lengths) == tokens, (sum(lengths), tokens)
    even, windowed = len(set(lengths)) == 1, 0 < heads.window < max(lengths)

    def qkv() -> torch.Tensor:
        return torch.randn(tokens, sum(heads.split), heads.width, dtype=dtype, device=device)

    def ours(backend: str) -> FloorAttention:
        return PackedAttention(heads, lengths, qkv(), backend)

    def sdpa(name: str, backend: SDPBackend) -> Callable[[], FloorAttention]:
        return lambda: TorchAttention(heads, len(lengths), lengths[0], qkv(), name, backend)

    if device.type != "cuda":
        return sdpa("math", SDPBackend.MATH)() if even and not windowed else ours("cpu")
    choice = attention.choose(device, dtype, heads.width, False, windowed)
    backends = dict.fromkeys((choice.backend, *choice.others, "triton"))  # those that a step may take, and our own
    makers: list[Callable[[], FloorAttention]] = [partial(ours, backend) for backend in backends]
    if even and not windowed:
        makers += [sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION), sdpa("flash", SDPBackend.FLASH_ATTENTION)]
    times: list[tuple[float, FloorAttention]] = []
    for make in makers:
        try:
            candidate = make()
            ms = sustained(partial(_layers, candidate, LAYERS), device, 5, sustain=0.05)
        except (RuntimeError, ImportError, ValueError, AttributeError, TypeError, AssertionError) as error:
            # Not installed, or not for these sizes: try the others.
            say(f"floor: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            continue
        say(f"floor: {candidate.name}: {ms / LAYERS:.4f} ms a layer")
        times.append((ms, candidate))
    if not times:
        raise RuntimeError("no fused attention for these sizes")
    return min(times, key=lambda pair: pair[0])[1]


def _layers(candidate: FloorAttention, count: int) -> None:
    candidate.begin()
    for _ in range(count):
        candidate.backward(candidate.forward())


def sustained(work: Callable[[], Any], device: torch.device, steps: int, sustain: float) -> float:
    """Milliseconds of one replay of the work as a CUDA graph, median, after `sustain` seconds of replays."""
    if device.type != "cuda":
        work()
        return statistics.median(1e3 * _seconds(work) for _ in range(steps))
    graph = captured(work)
    until = time.perf_counter() + sustain
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * steps + 1)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Run the work until it is warm, then capture it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        begin = time.perf_counter()
        for _ in range(3):
            work()
            torch.cuda.synchronize()
            if time.perf_counter() - begin > 2:
                break
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
