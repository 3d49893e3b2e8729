"""Kernels compiled ahead: each kind of launch once, and under the key that the launch itself looks for."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftune import private
from graftune.kernels.warm import Pointer, Warming

CUDA = torch.device("cuda", 0)


class Kernel:
    """Of three parameters, the last a constexpr."""

    params = tuple(SimpleNamespace(name=name, is_constexpr=name == "TILE") for name in ("x", "count", "TILE"))

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        self.compiled.append((*args, grid, options))
        return SimpleNamespace(run=None)


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def test_each_kind_of_launch_is_compiled_once() -> None:
    kernel, x = Kernel(), torch.empty(64, device="meta")
    launches = [
        (x, 32, 16), (x[16:], 48, 16),  # one kind: an address and a number that 16 divides
        (x, 33, 16), (x, 32, 8), (x, 1, 16), (x[1:], 32, 16), (x.bfloat16(), 32, 16),
    ]  # fmt: skip
    with Warming(CUDA, threads=2) as warming:
        for args in launches:
            warming(kernel, (1,), args, {"num_warps": 4})
        warming(kernel, (1,), launches[0], {"num_warps": 8})
    assert len(kernel.compiled) == 7
    assert all(isinstance(args[0], Pointer) and args[0].dtype in (x.dtype, torch.bfloat16) for args in kernel.compiled)


def test_launchers_are_loaded_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton gives every launcher's module the same name: of two that load at once, one gets the other's function."""
    from triton.runtime import build

    at_once: list[int] = []

    def load(name: str, path: str) -> str:
        at_once.append(0)
        time.sleep(0.02)
        assert len(at_once) == 1
        at_once.clear()
        return path

    monkeypatch.setattr(build, "_load_module_from_path", load)
    for _ in range(2):  # the second call finds the lock of the first
        private.load_launchers_one_by_one()
    with ThreadPoolExecutor(4) as pool:
        paths = [str(number) for number in range(4)]
        assert list(pool.map(lambda path: build._load_module_from_path("launcher", path), paths)) == paths


def test_what_does_not_compile_stops_nothing_and_a_refused_run_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, x = Kernel(), torch.empty(64, device="meta")
    monkeypatch.setattr(kernel, "warmup", lambda *args, **named: 1 / 0)
    with Warming(CUDA, threads=1) as warming:
        warming(kernel, (1,), (x, 32, 16), {})
    assert warming.failures == ["ZeroDivisionError: division by zero"]
    with pytest.raises(KeyError), Warming(CUDA, threads=1):
        raise KeyError


@pytest.mark.parametrize("at", [0, 1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn])
def test_triton_takes_it_for_the_tensor(at: int, dtype: torch.dtype) -> None:
    """The very function that makes a launch's key."""
    jit = pytest.importorskip("triton.runtime.jit")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    real, meta = (torch.empty(64, dtype=dtype, device=device)[at:] for device in ("cpu", "meta"))
    assert real.data_ptr() % 16 == at * dtype.itemsize % 16
    wanted = jit.native_specialize_impl(backend, real, False, True, True)
    assert jit.native_specialize_impl(backend, Pointer(meta), False, True, True) == wanted
