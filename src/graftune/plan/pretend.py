"""Tensors that have a shape, a dtype, a device and an owner, but no memory: the step runs on them to be measured.

torch's meta device computes shapes and nothing else; but our code asks a tensor where it lies (`x.is_cuda`) and takes
another path for every answer. So a `Pretended` is a meta tensor that says it lies where it was asked to. Under the mode
every operation is made on the meta tensors inside, and what comes out is wrapped and entered in the ledger. torch's own
FakeTensor does the same for its compiler, but its CUDA tensors cannot be sliced by a torch built without CUDA, and a
plan for a GPU has to be made on a machine that has none.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graftune.plan.ledger import Ledger, bare

TABLES = {torch.ops.aten.arange, torch.ops.aten.linspace}
RESHAPING = {"resize_", "resize_as_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}
META, CPU = torch.device("meta"), torch.device("cpu")
ALIGNED = 256  # an address that every kernel likes; distinct storages need distinct ones


class Pretended(torch.Tensor):
    plain: torch.Tensor  # the meta tensor
    home: torch.device  # where it says it lies

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.home

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.home.type == "cuda"

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        """Distinct for distinct storages and offsets, and aligned as an allocator would have it."""
        place = self.plain.storage_offset() * self.plain.element_size()
        return self.plain.untyped_storage()._cdata * ALIGNED + place


@bare
class Pretend(TorchDispatchMode):
    """While it is on, nothing has memory. `before` is called with every operation, and may hold memory for it: what
    libraries take inside it."""

    def __init__(self, ledger: Ledger, before: Callable[[Any, Any], object] = lambda func, args: None):
        super().__init__()
        self.ledger, self.before, self.off = ledger, before, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For what has to be computed after all."""
        before, self.off = self.off, True
        try:
            yield
        finally:
            self.off = before

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.off:
            return func(*args, **(kwargs or {}))
        call = _Call(kwargs.get("device") if kwargs else None)
        plain = [call.plain(value) for value in args]
        named = {name: call.plain(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if call.real or (func.overloadpacket in TABLES and call.asked in (None, CPU)):
            return self._real(func(*args, **(kwargs or {})))
        if "device" in named or not call.known:
            named["device"] = META
        home = call.home or CPU
        if func is torch.ops.aten._local_scalar_dense.default:
            return _value(args[0])
        held = self.before(func, args)
        if func is torch.ops.aten._to_copy.default and call.unchanged(plain[0], named):
            return args[0]
        written = _written(func, args, kwargs)
        if written is not None:
            return written
        made = self._wrapped(func(*plain, **named), call, home)
        del held
        return made

    def _real(self, made: Any) -> Any:
        """Of small tables, made from Python's numbers on the host: they are computed, since shapes may follow."""
        for tensor in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.ledger.see(tensor, "cpu")
        return made

    def _wrapped(self, made: Any, call: _Call, home: torch.device) -> Any:
        if isinstance(made, torch.Tensor):
            if id(made) in call.known:  # in place
                return call.known[id(made)][1]
            return wrap(made, home, self.ledger)
        if isinstance(made, (list, tuple)):
            return type(made)(self._wrapped(one, call, home) for one in made)
        return made


@contextmanager
def without_compiler() -> Iterator[None]:
    """Shapes of some operations come from functions that torch marks as not to be compiled, and marking them imports
    the compiler: three seconds and 100 MiB at the start of every run. Here the mark is a module that does nothing, and
    is taken back."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    marked: list[Any] = []

    def disable(function: Any, *_: Any, **__: Any) -> Any:
        marked.append(function)
        return function

    standin = types.ModuleType("torch._dynamo")
    standin.disable = disable  # type: ignore[attr-defined]
    sys.modules["torch._dynamo"] = standin
    torch._dynamo = standin
    try:
        yield
    finally:
        del sys.modules["torch._dynamo"], torch._dynamo
        for function in marked:
            vars(function).pop("__dynamo_disable", None)


def wrap(plain: torch.Tensor, home: torch.device, ledger: Ledger) -> Pretended:
    tensor = plain.as_subclass(Pretended)
    tensor.plain, tensor.home = plain, home
    ledger.see(plain, home.type)
    return tensor


class _Call:
    """One operation's arguments: the meta tensors inside, and where the result lies (with the first of them, or where
    it was asked for)."""

    def __init__(self, asked: Any):
        self.asked = None if asked is None else _numbered(torch.device(asked))
        self.home: torch.device | None = self.asked
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def plain(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            inside = value.plain if isinstance(value, Pretended) else _like(value)
            if self.home is None or (self.asked is None and self.home.type == "cpu"):
                self.home = value.device if value.device != META else CPU  # scalars on the CPU go along with the rest
            self.known[id(inside)] = (inside, value)
            return inside
        if isinstance(value, (list, tuple)):
            return type(value)(self.plain(one) for one in value)
        return value

    @property
    def real(self) -> bool:
        """Whether it is about real tensors on the host only."""
        mixed = any(isinstance(value, Pretended) or value.device != CPU for _, value in self.known.values())
        return bool(self.known) and not mixed and self.asked in (None, CPU)

    def unchanged(self, inside: torch.Tensor, named: dict[str, Any]) -> bool:
        """Whether a copy to a device is none, since the tensor says it lies there already."""
        here = self.known[id(inside)][1].device
        dtype, layout = named.get("dtype"), named.get("memory_format")
        return self.asked is not None and here == self.asked and dtype in (None, inside.dtype) and layout is None


def _like(real: torch.Tensor) -> torch.Tensor:
    """A real tensor (from numpy, from a file's map) without its memory."""
    if real.device == META:
        return real
    return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=META)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Where an operation writes to what it is given, that is its result: nothing is allocated and no shape changes."""
    if kwargs and isinstance(kwargs.get("out"), Pretended):
        return kwargs["out"]
    name = func.overloadpacket.__name__
    return args[0] if name.endswith("_") and name not in RESHAPING and isinstance(args[0], Pretended) else None


def _value(tensor: torch.Tensor) -> bool | int:
    """A check of values that are not there passes; a number from the host (a seed) is zero; one from a GPU is never
    asked for in a step, which would have to wait for it."""
    if tensor.dtype == torch.bool:
        return True
    assert tensor.device == CPU, "a step reads no value of the device"
    return 0


def _numbered(device: torch.device) -> torch.device:
    """As real tensors say it: cuda is cuda:0."""
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device
