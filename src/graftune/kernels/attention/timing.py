"""Measures which attention backend is the fastest for a shape, since no simple rule predicts it.

cuDNN is the fastest from a few thousand tokens on. On a few hundred tokens in short documents its helper kernels cost
more than the attention itself, and our kernels take half the time. The forward and the backward of each candidate are
captured and replayed, as in a run: launched one by one, they would show the host's time. The buffers have the run's
row strides: cuDNN builds a plan for each set of strides, in half a second, and the run uses the plans built here. The
result is cached on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NamedTuple

import torch

from graftune.graph import capture, stream
from graftune.io import user_cache
from graftune.kernels import attention
from graftune.kernels.attention import Documents

REMEMBERED, KEPT = "attention", 1000
FORMAT = 2  # raise it when our own kernels become faster
LARGE = 4096  # tokens from which cuDNN, if available, is taken without a comparison
CALLS, ROUNDS = 4, 5


class Case(NamedTuple):
    """The shapes and strides to time. Rows with adapter columns have a larger stride; qkv and the output's gradient
    have no such columns. Rows of qkv with gates have a larger stride too."""

    tokens: int
    longest: int  # upper bound on the tokens of a document
    heads: tuple[int, int, int]  # N, K, H
    dtype: torch.dtype
    scale: float
    qkv_row_stride: int
    out_row_stride: int
    grad_row_stride: int  # of qkv's gradient, where the backend has no buffers of its own


def fastest(names: Sequence[str], cu_seqlens: torch.Tensor, case: Case) -> str:
    """The name of the fastest backend on random values in these documents. Waits for the device."""
    if len(names) == 1 or (case.tokens >= LARGE and "cudnn" in names):
        return names[0]
    if cu_seqlens.is_meta:
        for name in names:
            _pass(name, cu_seqlens, case)()
        return names[0]
    key = _key(names, cu_seqlens, case)
    known = user_cache.recall(REMEMBERED).get(key)
    if known in names:
        return str(known)
    times = {name: _time(_pass(name, cu_seqlens, case)) for name in names}
    best = min(times, key=times.__getitem__)
    user_cache.remember(REMEMBERED, key, best, KEPT)
    return best


def _key(names: Sequence[str], cu_seqlens: torch.Tensor, case: Case) -> str:
    """The cache key: everything that the choice depends on."""
    device, slots = cu_seqlens.device, len(cu_seqlens) - 1
    card = torch.cuda.get_device_name(device), torch.__version__, torch.backends.cudnn.version()
    packages = [_version(name) for name in ("graftune", "triton", "nvidia-cudnn-frontend")]
    shape = case._replace(scale=0.0)  # the scale does not affect the time
    return "|".join(map(str, (FORMAT, *card, *packages, *names, *shape, slots)))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _pass(name: str, cu_seqlens: torch.Tensor, case: Case) -> Callable[[], None]:
    """A function that runs the forward and the backward of a backend on random values."""
    tokens, longest, (n, k, h), dtype, scale, qkv_row_stride, out_row_stride, grad_row_stride = case
    device = cu_seqlens.device

    def random(count: int, row_stride: int) -> torch.Tensor:
        rows = torch.randn(tokens, row_stride, device=device, dtype=dtype)
        return rows[:, : count * h].unflatten(1, (count, h))

    q, keys, values = random(n + 2 * k, qkv_row_stride).split([n, k, k], 1)
    place, grad = random(n, out_row_stride), random(n, n * h)
    first, second, third = random(n + 2 * k, grad_row_stride).split([n, k, k], 1)
    spare = first, second, third

    def run() -> None:
        docs = Documents(cu_seqlens, None, longest)
        out, stats = attention.forward(q, keys, values, docs, scale, 0, name, place)
        grads = attention.grad_buffers(q, keys, name) or spare
        attention.backward(grad, q, keys, values, out, stats, docs, scale, 0, grads, name)

    return run


def _time(work: Callable[[], None]) -> float:
    """Milliseconds of one call, the median of a few replays."""
    side = stream("attention timed")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()

    def several() -> None:
        for _ in range(CALLS):
            work()

    graph, rounds = torch.cuda.CUDAGraph(), []
    capture(several, graph, side)
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / CALLS)
    return sorted(rounds)[ROUNDS // 2]
