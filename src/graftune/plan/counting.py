"""Counts what operations on meta tensors would allocate, by owner.

torch's meta tensors have a shape, a dtype and strides, but no memory. The rehearsed device is `meta:0`; host memory is
the CPU, whose tensors are made as meta tensors too. The `Tally` knows which of the two a meta tensor stands for, since
every new storage is entered in it; a weak reference on the storage says when it is freed. Live bytes are counted by
owner, so that the peak can be split by owner. torch's allocator cannot be used: it needs the device, and its peak has
no owners. `Counting` is a dispatch mode that sees every operation of torch, runs it on the meta tensors and enters each
result that has a new storage.

Small tables that are made from Python numbers on the host are real tensors, because shapes may depend on them. (A
tensor subclass that claims to be on the GPU was used before; it needed torch.cuda's functions replaced. torch's
FakeTensor imports the compiler, and its CUDA tensors cannot be sliced by a torch built without CUDA.)
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from graftune.arithmetic import ceil_div
from graftune.plan.shapes import META, RULES
from graftune.private import find, makes_new, storage_id, writes_to

_TorchDispatchMode: Any = find("torch.utils._python_dispatch.TorchDispatchMode")
_READ_VALUE = find("torch.ops.aten._local_scalar_dense.default")
_TO_COPY = find("torch.ops.aten._to_copy.default")
TABLES = {torch.ops.aten.arange, torch.ops.aten.linspace}
# Operations that make a new tensor whose shape torch computes without its compiler's references.
WITHOUT_REFERENCES = {torch.ops.aten.empty, find("torch.ops.aten._to_copy")}
RESHAPING = {"resize_", "resize_as_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}
MIB = 1 << 20
SCRATCH, MAPPED = "scratch", "mapped"  # mapped tensors are pages of a file and take no memory


def block_bytes(size: int) -> int:
    """The bytes that CUDA's caching allocator counts for a tensor: whole units of 512 bytes. It requests 10 MiB and
    more from the driver in units of 2 MiB, and gives the remainder to other tensors only if it exceeds 1 MiB."""
    rounded = ceil_div(size, 512) * 512
    whole = ceil_div(rounded, 2 * MIB) * 2 * MIB
    return whole if rounded >= 10 * MIB and whole - rounded <= MIB else rounded


class LiveBytes:
    """The live bytes of one type of device by owner, and their peak in each phase. `unit` rounds an allocation."""

    def __init__(self, unit: Any = int):
        self.unit = unit
        self.live: Counter[str] = Counter()
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.phases: dict[str, dict[str, int]] = {}  # each phase's owners at its peak

    def add(self, owner: str, size: int) -> None:
        self.live[owner] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, {name: held for name, held in self.live.items() if held}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the owners at the peak of what runs inside."""
        self.peak, self.at_peak = self.total, {name: held for name, held in self.live.items() if held}
        yield
        self.phases[name] = self.at_peak

    def peak_of(self, name: str, default: int = 0) -> int:
        """The peak of a phase; `default` if it did not run."""
        return sum(self.phases[name].values()) if name in self.phases else default


class Tally:
    """Every storage that was made while counting, with its device and its owner."""

    def __init__(self) -> None:
        self.devices: dict[str, LiveBytes] = {}
        self.known: dict[int, tuple[Any, str, str, int]] = {}  # storage -> weak reference, device type, owner, bytes
        self.owners = [SCRATCH]

    def of(self, kind: str) -> LiveBytes:
        """The live bytes of a type of device."""
        if kind not in self.devices:
            self.devices[kind] = LiveBytes(block_bytes if kind == "cuda" else int)
        return self.devices[kind]

    @contextmanager
    def owner(self, name: str) -> Iterator[None]:
        """Storages made inside belong to this owner."""
        self.owners.append(name)
        try:
            yield
        finally:
            self.owners.pop()

    def see(self, tensor: torch.Tensor, kind: str) -> None:
        """Enter a tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key not in self.known:
            device, owner = self.of(kind), self.owners[-1]
            size = device.unit(storage.nbytes()) if owner != MAPPED else 0
            freed = weakref.ref(storage, lambda _: self._freed(key))
            self.known[key] = (freed, kind, owner, size)
            device.add(owner, size)

    def kind_of(self, tensor: torch.Tensor) -> str | None:
        """The type of device that a tensor's storage was entered for; None if it was not entered."""
        known = self.known.get(storage_id(tensor.untyped_storage()))
        return None if known is None else known[1]

    def assign(self, owner: str, *tensors: torch.Tensor | None) -> None:
        """Change the owner of these tensors; those that were not made while counting are ignored."""
        for tensor in tensors:
            key = -1 if tensor is None else storage_id(tensor.untyped_storage())
            if key in self.known:
                reference, kind, before, size = self.known[key]
                self.known[key] = (reference, kind, owner, size)
                live = self.of(kind).live
                live[before] -= size
                live[owner] += size

    def _freed(self, key: int) -> None:
        _, kind, owner, size = self.known.pop(key)
        self.of(kind).add(owner, -size)


def bare(mode: Any) -> Any:
    """Remove the wrapper that torch puts around a mode's method for its compiler: it would import the compiler, which
    takes three seconds and 100 MiB."""
    inner = vars(mode)["__torch_dispatch__"]
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    mode.__torch_dispatch__ = inner
    return mode


@bare
class Counting(_TorchDispatchMode):
    """While this mode is active, new tensors have no memory. `kind`: the type of the rehearsed device, cuda or cpu.
    `before` is called before every operation and may return a tensor that stands for what a library allocates during
    it. `without_rule` collects the names of operations whose shapes torch's references computed."""

    def __init__(self, tally: Tally, kind: str, before: Callable[[Any, Any], object] = lambda func, args: None):
        super().__init__()
        self.tally, self.kind, self.before, self.off = tally, kind, before, False
        self.without_rule: set[str] = set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.off = self.off, True
        try:
            yield
        finally:
            self.off = before

    def kind_of(self, tensor: torch.Tensor) -> str:
        return (self.tally.kind_of(tensor) or self.kind) if tensor.is_meta else "cpu"

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if self.off:
            return func(*args, **named)
        operation = _operation(func)
        if operation.makes_view and args[0].is_meta:
            return self._entered(func(*args, **named), self.kind_of(args[0]))
        tensors = _tensors(args)
        if named:
            tensors += _tensors(named.values())
        asked = named.get("device")
        if asked is None or asked.type == "cpu":
            if operation.makes_table or (tensors and not any(x.is_meta for x in tensors)):
                return self._entered(func(*args, **named), "cpu")
            wanted = None if asked is None else "cpu"
        else:
            wanted = self.kind
        if func is _READ_VALUE:
            return self._value(args[0])
        held = self.before(func, args)
        if func is _TO_COPY and self._unchanged(args[0], named, wanted):
            return args[0]
        # An operation that writes to its argument returns that: nothing is allocated, and no shape changes.
        written = args[0] if operation.writes_first else named.get("out", named.get("grad_input"))
        if written is not None and written.is_meta:
            return written
        if wanted is None:  # on the device of the arguments; CPU scalars may accompany GPU tensors
            on_device = self.kind != "cpu" and any(self.kind_of(x) == self.kind for x in tensors)
            wanted = self.kind if on_device else "cpu"
        if asked is not None or not tensors:
            named = {name: value for name, value in named.items() if name != "pin_memory"} | {"device": META}
        rule = RULES.get(operation.packet)
        if rule is None:
            if operation.wants_rule:
                self.without_rule.add(str(operation.packet))
            if not all(x.is_meta for x in tensors):
                args, named = without_memory(args), {name: without_memory(value) for name, value in named.items()}
        made = self._entered((rule or func)(*args, **named), wanted)
        del held
        return made

    def _entered(self, made: Any, kind: str) -> Any:
        if isinstance(made, torch.Tensor):
            self.tally.see(made, kind)
        elif isinstance(made, (list, tuple)):
            for tensor in _tensors(made):
                self.tally.see(tensor, kind)
        return made

    def _unchanged(self, tensor: torch.Tensor, named: dict[str, Any], wanted: str | None) -> bool:
        """Whether a copy to a device does nothing, because the tensor is there already."""
        same = named.get("dtype") in (None, tensor.dtype) and named.get("memory_format") is None
        return same and tensor.is_meta and self.kind_of(tensor) == wanted

    def _value(self, tensor: torch.Tensor) -> bool | int:
        """The value of a meta tensor: a check is true, a number on the host (a seed) is zero. A step never reads a
        number from a GPU, because it would have to wait for it."""
        if tensor.dtype == torch.bool:
            return True
        assert self.kind_of(tensor) == "cpu", "a step reads no value of the device"
        return 0


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def without_memory(value: Any) -> Any:
    """Replace real tensors (from numpy, from a mapped file, tables) by meta tensors."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, (list, tuple)):
        return type(value)(without_memory(one) for one in value)
    return value


class _Operation(NamedTuple):
    """Properties of an operation that do not depend on its arguments."""

    packet: Any
    makes_view: bool
    makes_table: bool
    writes_first: bool  # writes to its first argument without changing its shape
    wants_rule: bool  # without a rule in shapes.py, torch would need its compiler's references


@functools.cache
def _operation(func: Any) -> _Operation:
    packet, new, written = func.overloadpacket, makes_new(func), writes_to(func)
    return _Operation(
        packet,
        makes_view=not new and not written,
        makes_table=packet in TABLES,
        writes_first=written[:1] == [0] and packet.__name__ not in RESHAPING,
        wants_rule=new and packet not in WITHOUT_REFERENCES,
    )
