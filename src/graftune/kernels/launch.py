"""Chooses between a Triton kernel and its reference, and launches our Triton kernels.

Our kernels run on CUDA; on other devices the references next to them compute the same results. `fused` chooses between
kernel and reference, and `augments` the layout of weights; tests replace both to run the kernels through Triton's
interpreter on a CPU. `on_gpu` is for questions about the device itself. `kernel.py` files are imported only where they
run, because Triton is not installed on every machine.

A kernel is launched with Triton's syntax, `kernel[grid](...)`. For meta tensors nothing is launched, so that the memory
plan can run the code around the kernels (rehearsal.py) and count what it allocates. For the same reason, code asks
this module about a device, not torch.cuda.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from graftune import spans
from graftune.kernels import rehearsal
from graftune.private import load_launchers_one_by_one, storage_id

ALIGNMENT = 256  # bytes, of an allocator's addresses

P = ParamSpec("P")
T = TypeVar("T")


def operation(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that computes: a profile counts its time under this name. With `spans.PRODUCT` it counts
    under the name that the projection gave (`spans.product`)."""

    def named(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **options: P.kwargs) -> T:
            spans.operation(name)
            return function(*args, **options)

        return run

    return named


class Kernel:
    """A Triton function that is launched from the host."""

    def __init__(self, function: Callable[..., None], **options: Any):
        import triton

        load_launchers_one_by_one()
        self.jitted: Any = triton.jit(**options)(function)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            first = next(x for x in args if isinstance(x, torch.Tensor))
            if first.is_meta:
                now = _rehearsal(first)
                if now is not None and now.launched is not None:
                    now.launched(self.jitted, grid, args, options)
            else:
                self.jitted[grid](*args, **options)

        return run


def kernel(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """Replaces triton.jit, with its options, for functions that are launched from the host."""
    return functools.partial(Kernel, **options) if function is None else Kernel(function)


def on_gpu(place: torch.Tensor | torch.device) -> bool:
    """Whether a tensor or a device is on a GPU; in a rehearsal, whether a meta tensor stands for GPU memory."""
    if isinstance(place, torch.Tensor):
        return place.is_cuda or (place.is_meta and kind_of(place) == "cuda")
    about = _about(place)
    return place.type == "cuda" or (about is not None and about.kind == "cuda")


def kind_of(x: torch.Tensor) -> str:
    """The type of a tensor's device ("cuda", "cpu"); in a rehearsal, of the device that a meta tensor stands for."""
    now = _rehearsal(x)
    return x.device.type if now is None else now.kind_of(x)


def device_of(x: torch.Tensor) -> torch.device:
    """The device on which to put tensors that belong with x. A meta tensor does not know which memory it stands for,
    so the rehearsal decides."""
    return x.device if not x.is_meta else rehearsal.META if on_gpu(x) else torch.device("cpu")


def fused(x: torch.Tensor) -> bool:
    """Whether a Triton kernel computes with x. An empty input launches no kernel."""
    return on_gpu(x) and x.numel() > 0


def implementation(reference: ModuleType, x: torch.Tensor, kernels: str = "kernel") -> Any:
    """The module to call for x: `kernels` next to the reference if a Triton kernel computes, else the reference."""
    if not fused(x):
        return reference
    return importlib.import_module(reference.__name__.removesuffix("reference") + kernels)


def augments(device: torch.device) -> bool:
    """Whether frozen weights are stored with columns for their adapters (model/projection.py)."""
    return on_gpu(device)


def address(x: torch.Tensor) -> int:
    """A tensor's address. A meta tensor gets a number that is as unique and as aligned as an address."""
    if not x.is_meta:
        return x.data_ptr()
    return storage_id(x.untyped_storage()) * ALIGNMENT + int(x.storage_offset()) * x.element_size()


def capability(device: torch.device) -> tuple[int, int]:
    about = _about(device)
    return about.capability if about else torch.cuda.get_device_capability(device)


def device_name(device: torch.device) -> str:
    about = _about(device)
    return about.name if about else torch.cuda.get_device_name(device)


def processors(device: torch.device) -> int:
    about = _about(device)
    return about.processors if about else int(torch.cuda.get_device_properties(device).multi_processor_count)


def cache_bytes(device: torch.device) -> int:
    about = _about(device)
    return about.cache if about else int(torch.cuda.get_device_properties(device).L2_cache_size)


def is_elsewhere(device: torch.device) -> bool:
    """Whether a plan is made for a device of another machine, whose libraries are assumed to be installed."""
    about = _about(device)
    return about is not None and not about.here


def _rehearsal(x: torch.Tensor) -> rehearsal.Rehearsal | None:
    return rehearsal.current() if x.is_meta else None


def _about(device: torch.device) -> rehearsal.Device | None:
    return rehearsal.device() if device.type == "meta" else None


def uploaded(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Copies integers to the device as int64, from pinned memory, so that the host does not wait."""
    made = torch.tensor(values, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n: Triton's tiles need such sizes."""
    return max(least, 1 << (n - 1).bit_length())
