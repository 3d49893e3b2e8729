"""What a rehearsal tells the code that it runs.

The memory plan runs a step on torch's meta tensors, which have a shape and no memory. The code is the run's own, and
nothing of it, or of torch, is replaced. What such a tensor cannot tell is asked here: which device it stands for, what
that device is like, and what a library would take there. Outside a rehearsal there is no `current` one, every question
is answered by torch, and the hooks below do nothing.

    device    the facts of the device that is rehearsed, which may be elsewhere
    owned     names the owner of what is allocated inside
    give      names another owner for tensors that exist
    few       of many equal pieces of work the first two and the last, which show the same peak
    cached    tables that are kept per device: a rehearsal begins without them, and leaves none of its own behind
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
WORKSPACES, SAVED, LOGITS = "workspaces", "saved activations", "logits"  # owners that code below the plan names
META = torch.device("meta", 0)  # with a number, so that a copy to it is seen even where the tensor is a meta tensor

P = ParamSpec("P")
T = TypeVar("T")
Launched = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]  # kernel, grid, arguments, options


@dataclass(frozen=True)
class Device:
    """What meta tensors stand for."""

    kind: str  # cuda | cpu
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    processors: int = 0
    cache: int = 0  # bytes
    here: bool = True  # else its libraries are taken to be installed


class Rehearsal:
    """The answers. The plan's own kind follows allocations by owner; this one only describes a device."""

    def __init__(
        self,
        device: Device,
        libraries: Mapping[str, Callable[..., int]] | None = None,
        launched: Launched | None = None,
    ):
        self.device = device
        self.launched = launched  # called for every Triton kernel that would have been launched
        self.libraries = libraries or {}  # what a library allocates by itself, by the name of the call

    def kind_of(self, tensor: torch.Tensor) -> str:
        """The kind of device that a meta tensor stands for memory of."""
        return self.device.kind

    def owned(self, owner: str) -> AbstractContextManager[None]:
        return nullcontext()

    def give(self, owner: str, tensors: Sequence[torch.Tensor]) -> None: ...

    def uncounted(self) -> AbstractContextManager[None]:
        return nullcontext()

    reads_all = False  # every row of a weight is read, as a quantiser wants it, in fewer and larger pieces


@dataclass
class _State:
    current: Rehearsal | None = None
    caches: list[dict[Any, Any]] = field(default_factory=list)


_state = _State()


def current() -> Rehearsal | None:
    return _state.current


def device() -> Device | None:
    """What meta tensors stand for; None outside a rehearsal."""
    return None if _state.current is None else _state.current.device


@contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """Tables that were kept so far are put aside meanwhile: what is made is seen, whoever ran before."""
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
        for cache, had in zip(_state.caches, kept, strict=False):  # one that came later has nothing to get back
            cache.update(had)


def owned(owner: str) -> AbstractContextManager[None]:
    return nullcontext() if _state.current is None else _state.current.owned(owner)


def workspace(size: int, device: torch.device) -> torch.Tensor:
    """So many bytes for a library to work in."""
    with owned(WORKSPACES):
        return torch.empty(size, dtype=torch.uint8, device=device)


def give(owner: str, *held: Any) -> None:
    """`held`: tensors, or sequences of them at any depth; other things are passed over."""
    if _state.current is not None:
        _state.current.give(owner, list(_tensors(held)))


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, Sequence) and not isinstance(held, str):
        for one in held:
            yield from _tensors(one)


def library_bytes(call: str, *about: Any) -> int:
    """What a library's call would allocate, by the rehearsal's table."""
    assert _state.current is not None, f"{call} on meta tensors outside a rehearsal"
    return _state.current.libraries[call](*about)


def few(pieces: list[T]) -> list[T]:
    return pieces if _state.current is None or len(pieces) <= 3 else [*pieces[:2], pieces[-1]]


def few_runs(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`few`, or, where all rows are to be read, at most eight runs of them."""
    if _state.current is None or not _state.current.reads_all:
        return few(runs)
    rows = runs[-1][1] if runs else 0
    size = max(runs[0][1], ceil_div(rows, MOST_RUNS)) if runs else 1
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def kept() -> dict[Any, Any]:
    """A cache of what was made for devices: empty when a rehearsal begins, and as it was when it ends."""
    cache: dict[Any, Any] = {}
    _state.caches.append(cache)
    return cache


def cached(make: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` for tables on a device. One without arguments, a constant of the host, is made once for good
    and uncounted."""
    constant = not inspect.signature(make).parameters
    made: dict[Any, T] = {} if constant else kept()

    @functools.wraps(make)
    def of(*args: P.args, **named: P.kwargs) -> T:
        key = (*args, *named.items())
        if key not in made:
            now = _state.current if constant else None
            with nullcontext() if now is None else now.uncounted():
                made[key] = make(*args, **named)
        return made[key]

    return of
