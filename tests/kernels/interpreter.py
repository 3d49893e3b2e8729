"""Triton's interpreter, made quicker: it runs the kernels here, and most of its time goes into describing values.

For every value it works out anew what a block of that shape is called and how many elements it has. Both follow from a
few small keys, so the answers are kept. What a kernel computes is untouched. Parts that another version of Triton
spells differently stay as they are, and are slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def remembering() -> Iterator[None]:
    from triton.language import core
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(core, "block_type") and hasattr(core, "constexpr"):
            patch.setattr(core.block_type, "__init__", _block_type(core))
        if hasattr(interpreter, "_patch_attr") and hasattr(interpreter, "interpreter_semantic"):
            patch.setattr(interpreter, "_patch_attr", _called_directly(interpreter.interpreter_semantic))
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


def _called_directly(semantic: Any) -> Any:
    """What the language's functions are replaced by: without two functions between that look at every argument."""

    def replace(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        real = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return real(*args, **kwargs)

        scope.set_attr(obj, name, call)

    return replace
