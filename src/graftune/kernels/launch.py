"""Where our Triton kernels run, and the one way they are launched.

They run on CUDA; elsewhere the references beside them compute the same. `fused` and `augments` decide that for every
operation alike; the tests replace them to run the kernels through Triton's interpreter on a CPU. `kernel.py` files are
imported only where they run: Triton is not on every machine.

A kernel is launched as Triton has it, `kernel[grid](...)`. For meta tensors nothing is launched, so that the functions
around the kernels can be rehearsed (rehearsal.py): they allocate their results by their own code. For the same reason
questions about the device are asked here, and not of torch.cuda.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, overload

import torch

from graftune import spans
from graftune.kernels import rehearsal
from graftune.private import storage_id

ALIGNMENT = 256  # of what an allocator gives out

P = ParamSpec("P")
T = TypeVar("T")


def operation(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for the functions that compute: a profile counts their time under this name. `spans.PRODUCT` is for
    matrix products, which the projections name."""

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


@overload
def kernel(function: Callable[..., None]) -> Kernel: ...
@overload
def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]: ...
def kernel(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """A decorator in the place of triton.jit, with its options, for functions that are launched from the host."""
    return functools.partial(Kernel, **options) if function is None else Kernel(function)


def on_gpu(place: torch.Tensor | torch.device) -> bool:
    """Whether a tensor lies, or would lie, on a GPU; or whether a device is one."""
    if isinstance(place, torch.Tensor):
        return place.is_cuda or (place.is_meta and kind_of(place) == "cuda")
    about = _about(place)
    return place.type == "cuda" or (about is not None and about.kind == "cuda")


def kind_of(x: torch.Tensor) -> str:
    """The kind of device that a tensor lies on, or would lie on."""
    now = _rehearsal(x)
    return x.device.type if now is None else now.kind_of(x)


def device_of(x: torch.Tensor) -> torch.device:
    """The device to send others to that should lie with x. A meta tensor's own does not say which memory it stands
    for."""
    return x.device if not x.is_meta else rehearsal.META if on_gpu(x) else torch.device("cpu")


def fused(x: torch.Tensor) -> bool:
    """Whether a Triton kernel computes it. An empty input launches no kernel."""
    return on_gpu(x) and x.numel() > 0


def best(reference: ModuleType, x: torch.Tensor) -> Any:
    """The module that computes x: the kernel.py beside the reference where a Triton kernel does, else the reference."""
    if not fused(x):
        return reference
    return importlib.import_module(reference.__name__.removesuffix("reference") + "kernel")


def augments(device: torch.device) -> bool:
    """Whether weights get adapter columns beside them (model/projection.py)."""
    return on_gpu(device)


def address(x: torch.Tensor) -> int:
    """Where a tensor begins. A meta tensor gets a number that is as distinct and as aligned as an address."""
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
    """Whether a device is planned for that is not here: its libraries are taken to be installed."""
    about = _about(device)
    return about is not None and not about.here


def _rehearsal(x: torch.Tensor) -> rehearsal.Rehearsal | None:
    return rehearsal.current() if x.is_meta else None


def _about(device: torch.device) -> rehearsal.Device | None:
    return rehearsal.device() if device.type == "meta" else None


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that holds n: Triton's tiles have such sides."""
    return max(least, 1 << (n - 1).bit_length())
