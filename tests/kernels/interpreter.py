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
        owner = getattr(semantic, "TritonSemantic", None)
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
