"""Compiles Triton kernels in parallel while a run is still being prepared.

Otherwise kernels are compiled one after the other, at their first launch: 12 seconds of a first run. The memory plan
rehearses the step before that and reports every kernel that will be launched, with its arguments (launch.py). Each is
passed to Triton's `warmup` in a thread as soon as it is reported; most of a compilation is in MLIR, LLVM and ptxas,
which release the interpreter lock. The launch finds the result in Triton's cache, because the same function with
arguments of the same types has the same key. A kernel that cannot be compiled here is compiled at its launch, and
`failures` says so.

A table of kernels for each kind of model was rejected: it would be wrong as soon as a kernel gains an argument.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch

from graftune.kernels import launch

MOST_THREADS = 16


class Pointer:
    """Stands for a tensor: Triton reads its dtype and whether its address is a multiple of 16."""

    def __init__(self, tensor: torch.Tensor):
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self._address, self._stride = launch.address(tensor), tensor.stride()

    def data_ptr(self) -> int:
        return self._address

    def stride(self, dim: int | None = None) -> Any:
        return self._stride if dim is None else self._stride[dim]


class Warming:
    """Compiles kernels in threads. It is called with every kernel that will be launched (`rehearsal.Launched`)."""

    def __init__(self, device: torch.device, threads: int = 0):
        self.device = device
        self.pool = ThreadPoolExecutor(threads or min(MOST_THREADS, os.cpu_count() or 1), "graftune-compile")
        self.work: dict[tuple[Any, ...], Future[None]] = {}
        self.lock, self.key_lock = threading.Lock(), threading.Lock()

    def __call__(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        key = (kernel, *_kinds(kernel, args, options))
        with self.lock:
            if key not in self.work:
                plain = tuple(_untensored(arg) for arg in args)
                named = {name: _untensored(value) for name, value in options.items()}
                self.work[key] = self.pool.submit(self._compile, kernel, grid, plain, named)

    def _compile(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        from triton.runtime.cache import triton_key

        with self.key_lock:
            triton_key()  # hashes Triton's libraries, once for all threads: without the lock each of them would
        with torch.cuda.device(self.device):
            kernel.warmup(*args, grid=grid, **options).run  # noqa: B018 (this loads the kernel and makes its launcher)

    @property
    def failures(self) -> list[str]:
        """The errors of kernels that were not compiled, once all are done."""
        done = [work for work in self.work.values() if work.done() and not work.cancelled()]
        return [f"{type(error).__name__}: {error}" for work in done if (error := work.exception()) is not None]

    def __enter__(self) -> Warming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all compilations: a launch would start an unfinished one again. After an error, cancel them."""
        self.pool.shutdown(wait=error is None, cancel_futures=error is not None)


def _untensored(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(value)
    return tuple(map(_untensored, value)) if isinstance(value, tuple) else value


def _kinds(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """Everything that a compilation depends on (possibly more)."""
    names = [parameter.name for parameter in kernel.params]
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    values = dict(zip(names, args, strict=False)) | options
    return [(name, value if name in fixed or name not in names else _kind(value)) for name, value in values.items()]


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, launch.address(value) % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % 16 == 0, abs(value) >= 2**31
    return value if value is None else type(value)
