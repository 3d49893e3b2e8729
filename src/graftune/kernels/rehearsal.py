"""Describes the device to code that the memory plan rehearses, and reports the owners of allocations to the plan.

The memory plan runs a step on torch's meta tensors, which have a shape and no memory. It runs the code of a real step;
nothing in it, or in torch, is replaced. That code asks this module what a meta tensor lacks: which device it stands
for, the properties of that device, and what a library would allocate there. Outside a rehearsal `current()` is None,
launch.py asks torch instead, and the hooks below do nothing.

    device    the properties of the rehearsed device, which may be in another machine
    owned     names the owner of what is allocated inside
    assign    names another owner for tensors that exist
    few       of many equal pieces of work the first two and the last, which show the same peak
    cached    tables that are kept per device: a rehearsal begins without them, and drops its own when it ends
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from graftune.arithmetic import ceil_div

MOST_RUNS = 8
WORKSPACES, SAVED, LOGITS = "workspaces", "saved activations", "logits"  # owners that code outside the plan names
META = torch.device("meta", 0)  # with an index, so that the plan sees a copy to it even of a tensor on "meta"

P = ParamSpec("P")
T = TypeVar("T")
Launched = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]  # kernel, grid, arguments, options


@dataclass(frozen=True)
class Device:
    """The device that meta tensors stand for."""

    kind: str  # cuda | cpu
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    processors: int = 0
    cache: int = 0  # bytes
    here: bool = True  # False: in another machine, where libraries are assumed to be installed


class Rehearsal:
    """Describes a device. The plan's subclass also counts allocations by owner."""

    def __init__(
        self,
        device: Device,
        libraries: Mapping[str, Callable[..., int]] | None = None,
        launched: Launched | None = None,
    ):
        self.device = device
        self.launched = launched  # called for every Triton kernel that would have been launched
        self.libraries = libraries or {}  # functions that return the bytes a library allocates, by the call's name

    def kind_of(self, tensor: torch.Tensor) -> str:
        """The kind of device whose memory a meta tensor stands for."""
        return self.device.kind

    def owned(self, owner: str) -> AbstractContextManager[None]:
        return nullcontext()

    def assign(self, owner: str, tensors: Sequence[torch.Tensor]) -> None: ...

    def uncounted(self) -> AbstractContextManager[None]:
        return nullcontext()

    reads_all = False  # True: `few_runs` covers every row of a weight, as a quantiser reads it, in fewer, larger pieces


@dataclass
class _State:
    current: Rehearsal | None = None
    caches: list[dict[Any, Any]] = field(default_factory=list)


_state = _State()


def current() -> Rehearsal | None:
    return _state.current


def device() -> Device | None:
    """The device that meta tensors stand for; None outside a rehearsal."""
    return None if _state.current is None else _state.current.device


@contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """Makes `rehearsal` current. Cached tables are put aside meanwhile, so that it always counts the making of them."""
    before, _state.current = _state.current, rehearsal
    kept = [dict(cache) for cache in _state.caches]
    try:
        for cache in _state.caches:
            cache.clear()
        yield
    finally:
        _state.current = before
        for cache in _state.caches:
            cache.clear()
        for cache, had in zip(_state.caches, kept, strict=False):  # a cache that was added meanwhile stays empty
            cache.update(had)


def owned(owner: str) -> AbstractContextManager[None]:
    return nullcontext() if _state.current is None else _state.current.owned(owner)


def workspace(size: int, device: torch.device) -> torch.Tensor:
    """Allocates `size` bytes for a library to work in."""
    with owned(WORKSPACES):
        return torch.empty(size, dtype=torch.uint8, device=device)


def assign(owner: str, *held: Any) -> None:
    """Names another owner for `held`: tensors, or sequences of them at any depth; anything else is ignored."""
    if _state.current is not None:
        _state.current.assign(owner, list(_tensors(held)))


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, Sequence) and not isinstance(held, str):
        for one in held:
            yield from _tensors(one)


def library_bytes(call: str, *about: Any) -> int:
    """The bytes that a library's call would allocate, by the rehearsal's table."""
    assert _state.current is not None, f"{call} on meta tensors outside a rehearsal"
    return _state.current.libraries[call](*about)


def few(pieces: list[T]) -> list[T]:
    return pieces if _state.current is None or len(pieces) <= 3 else [*pieces[:2], pieces[-1]]


def few_runs(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`few`; or, with `reads_all`, at most MOST_RUNS runs that cover all rows."""
    if _state.current is None or not _state.current.reads_all:
        return few(runs)
    rows = runs[-1][1] if runs else 0
    size = max(runs[0][1], ceil_div(rows, MOST_RUNS)) if runs else 1
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def device_cache() -> dict[Any, Any]:
    """Makes a cache for objects on devices, which is emptied when a rehearsal begins and restored when it ends."""
    cache: dict[Any, Any] = {}
    _state.caches.append(cache)
    return cache


def cached(make: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` for tables on a device. A function without arguments makes a constant on the host, which is
    kept through rehearsals and not counted."""
    constant = not inspect.signature(make).parameters
    made: dict[Any, T] = {} if constant else device_cache()

    @functools.wraps(make)
    def of(*args: P.args, **named: P.kwargs) -> T:
        key = (*args, *named.items())
        if key not in made:
            now = _state.current if constant else None
            with nullcontext() if now is None else now.uncounted():
                made[key] = make(*args, **named)
        return made[key]

    return of
