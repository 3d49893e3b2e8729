"""Counts what operations on meta tensors would allocate.

torch's meta tensors have a shape, a dtype and strides, and no memory. The rehearsed device is `meta:0`; host memory is
the CPU, whose tensors are made as meta tensors too. Which of the two a meta tensor stands for, the tally knows by its
storage, since every storage is entered in it when it is made. A dispatch mode sees every operation of torch: it runs on
the meta tensors as they are, and what comes out with a storage of its own is entered.

Small tables that are made from Python's numbers on the host are real tensors: shapes may follow from them. (A tensor
subclass that says it lies on the GPU was the way before; it needed torch.cuda's functions replaced. torch's FakeTensor
is its compiler's: it imports that, and its CUDA tensors cannot be sliced by a torch built without CUDA.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from graftune.plan.shapes import RULES
from graftune.plan.tally import Tally, bare
from graftune.private import find, makes_new, writes_to

_TorchDispatchMode: Any = find("torch.utils._python_dispatch.TorchDispatchMode")
_READ_VALUE = find("torch.ops.aten._local_scalar_dense.default")
_TO_COPY = find("torch.ops.aten._to_copy.default")
META = torch.device("meta")
TABLES = {torch.ops.aten.arange, torch.ops.aten.linspace}
# Of the operations that make a new tensor, those whose shape torch knows without its compiler's references.
WITHOUT_REFERENCES = {torch.ops.aten.empty, find("torch.ops.aten._to_copy")}
RESHAPING = {"resize_", "resize_as_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}


@bare
class Counting(_TorchDispatchMode):
    """While it is on, nothing has memory. `kind` is what the rehearsed device is, cuda or cpu. `before` is called with
    every operation, and may hold memory for it: what libraries take inside it. `without_rule` has the names of the
    operations whose shapes were left to torch's own references."""

    def __init__(self, tally: Tally, kind: str, before: Callable[[Any, Any], object] = lambda func, args: None):
        super().__init__()
        self.tally, self.kind, self.before, self.off = tally, kind, before, False
        self.without_rule: set[str] = set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what has to be computed after all."""
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
        # Where an operation writes to what it is given, that is its result: nothing is allocated, no shape changes.
        written = args[0] if operation.writes_first else named.get("out", named.get("grad_input"))
        if written is not None and written.is_meta:
            return written
        if wanted is None:  # with the tensors; scalars on the CPU go along with the rest
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
        """Whether a copy to a device is none, since the tensor lies there already."""
        same = named.get("dtype") in (None, tensor.dtype) and named.get("memory_format") is None
        return same and tensor.is_meta and self.kind_of(tensor) == wanted

    def _value(self, tensor: torch.Tensor) -> bool | int:
        """A check of values that are not there passes; a number from the host (a seed) is zero; one from a GPU is never
        asked for in a step, which would have to wait for it."""
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
    """With real tensors (from numpy, from a file's map, tables) without their memory."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, (list, tuple)):
        return type(value)(without_memory(one) for one in value)
    return value


class _Operation(NamedTuple):
    """What is the same whenever an operation is called."""

    packet: Any
    makes_view: bool
    makes_table: bool
    writes_first: bool  # to its first argument, whose shape stays
    wants_rule: bool  # else torch knows its shape without its compiler's references


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
