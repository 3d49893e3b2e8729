"""Triton's interpreter, made quicker: it runs the kernels here, and most of its time goes into describing values.

For every value it works out anew what a block of that shape is called, how many elements it has, which numpy type holds
it and whether two blocks of the same shape have the same shape. Each of these follows from a few small keys, so the
answers are kept. What a kernel computes is untouched. Parts that another version of Triton spells differently stay as
they are, and are slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def remembering() -> Iterator[None]:
    from triton.language import core, semantic
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(core, "block_type") and hasattr(core, "constexpr"):
            patch.setattr(core.block_type, "__init__", _block_type(core))
        if hasattr(core, "tensor"):
            patch.setattr(core.tensor, "__init__", _tensor(core.tensor.__init__))
        if hasattr(interpreter, "_get_np_dtype"):
            patch.setattr(interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype))
        if hasattr(core, "_unwrap_if_constexpr"):
            patch.setattr(core, "_unwrap_if_constexpr", _unwrapped(core))
        if hasattr(interpreter, "_patch_attr") and hasattr(interpreter, "interpreter_semantic"):
            patch.setattr(interpreter, "_patch_attr", _called_directly(interpreter.interpreter_semantic))
        owner = getattr(semantic, "TritonSemantic", None)
        if hasattr(owner, "binary_op_type_checking_impl"):
            patch.setattr(owner, "binary_op_type_checking_impl", _of_one_type(owner.binary_op_type_checking_impl, core))
        if hasattr(owner, "computation_type_impl"):
            patch.setattr(owner, "computation_type_impl", _computed_in(owner.computation_type_impl))
        if hasattr(owner, "broadcast_impl_value"):
            patch.setattr(owner, "broadcast_impl_value", _broadcast(owner.broadcast_impl_value))
        yield


def _block_type(core: Any) -> Any:
    real, constant, known = core.block_type.__init__, core.constexpr, {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, constant) else size for size in shape])
        key = type(element_ty), element_ty.name, getattr(element_ty, "address_space", ""), sizes
        if key not in known:
            real(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return init


def _tensor(real: Any) -> Any:
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in known:
            real(self, handle, type)
            known[shape] = {k: v for k, v in self.__dict__.items() if k not in ("handle", "type", "dtype")}
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.__dict__.update(known[shape])

    return init


def _by_name(real: Any) -> Any:
    known: dict[str, Any] = {}

    def find(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = real(dtype)
        return known[dtype.name]

    return find


def _broadcast(real: Any) -> Any:
    def same_or_real(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and list(left.shape) == list(right.shape):
            return lhs, rhs
        return real(self, lhs, rhs)

    return same_or_real


def _unwrapped(core: Any) -> Any:
    """Most values that are asked about are tensors or numbers, and the real one looks for lists and tuples first."""
    real, plain, constant = core._unwrap_if_constexpr, {core.tensor, int, float, bool, str, type(None)}, core.constexpr

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constant else real(value)

    return unwrap


def _called_directly(semantic: Any) -> Any:
    """What the language's functions are replaced by: without two functions between that look at every argument."""

    def replace(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        real = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return real(*args, **kwargs)

        scope.set_attr(obj, name, call)

    return replace


def _of_one_type(real: Any, core: Any) -> Any:
    """Two tensors of one type of numbers are computed in that type; only a division may use another."""
    tensor = core.tensor

    def check(self: Any, lhs: Any, rhs: Any, *given: Any, **more: Any) -> Any:
        if type(lhs) is tensor and type(rhs) is tensor and len(given) < 4 and "div_or_mod" not in more:
            left, right = lhs.dtype, rhs.dtype
            if left.name == right.name and not left.is_ptr():
                return self.broadcast_impl_value(lhs, rhs)
        return real(self, lhs, rhs, *given, **more)

    return check


def _computed_in(real: Any) -> Any:
    known: dict[Any, Any] = {}

    def find(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = real(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return find
