"""Kernels run on the GPU where there is one, and through Triton's interpreter elsewhere: the same tests either way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels import interpreter
from tests.support import tiny


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernels_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from graftune.kernels import launch

    monkeypatch.setattr(launch, "fused", lambda x: True)


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """As tiny_folder, of two layers and fewer heads: the interpreter takes milliseconds for one program of a kernel."""
    made: dict[str, Path] = {}

    def get(variant: str, **options: Any) -> Path:
        key = f"{variant}{options}"
        if key not in made:
            fewer = {"num_hidden_layers": 2, "num_attention_heads": 4}
            if variant.startswith(("phi3", "olmo")):  # their heads' width follows from their number
                fewer["num_attention_heads"] = 6
            options = tiny.VARIANT_OPTIONS.get(variant, {}) | fewer | options
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(tiny.VARIANT_OPTIONS, variant, options)
                made[key] = tiny.make_folder(variant, tmp_path_factory.mktemp("shallow") / variant)
        return made[key]

    return get


@pytest.fixture(scope="package", autouse=True)
def _language_replaced_once() -> Iterator[None]:
    """Triton's interpreter puts its own functions in the language's place before every launch, and again at every call
    of a device function, as tl.sum and tl.zeros are: half of its time. What it replaces follows from the modules that
    a kernel's own module names and nothing else, so once a module is enough until the last of these tests."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter as theirs

    replace = getattr(theirs, "_patch_lang", None)
    if replace is None:  # another interpreter than those we know: as it is, and slower
        yield
        return
    scopes: dict[int, Any] = {}

    def once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module not in scopes:
            scopes[module] = replace(fn)
        return SimpleNamespace(restore=lambda: None)

    theirs._patch_lang = once
    yield
    theirs._patch_lang = replace
    for scope in reversed(scopes.values()):
        if hasattr(scope, "restore"):
            scope.restore()


@pytest.fixture(scope="package", autouse=True)
def _no_overflow_looked_for_in_vain() -> Iterator[None]:
    """At every sum and product of integers the interpreter works out in int64 whether it overflows, and then says so
    only with its option `debug`, which it leaves out and nothing sets: a quarter of its time, and no test sees it."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter as theirs

    builder = getattr(theirs, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    with pytest.MonkeyPatch.context() as patch:
        if getattr(options, "sanitize_overflow", False) and getattr(options, "debug", None) is False:
            patch.setattr(builder, "options", dataclasses.replace(options, sanitize_overflow=False))
        yield


@pytest.fixture(scope="package", autouse=True)
def _described_once() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with interpreter.remembering():
        yield


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels allocate for themselves is full of NaN until they write it."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*a: Any, **k: Any) -> torch.Tensor:
            made = make(*a, **k)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture
def honest_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter loses the carry when it rounds to e4m3, cuts bf16 off, and multiplies bf16 matrices as
    integers: torch's own rounding instead, and products of floats."""
    if torch.cuda.is_available():
        return
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter as theirs

    from graftune.kernels import fp8

    kinds = {
        tl.float8e4nv: fp8.E4M3, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32,
        tl.float64: torch.float64,
    }  # fmt: skip
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = {1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32, 8: numpy.uint64}

    def convert(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        x = torch.frombuffer(bytearray(values.tobytes()), dtype=whole[kinds[given].itemsize]).view(kinds[given])
        to = kinds[wanted]
        x = x.float().clamp(-fp8.LARGEST, fp8.LARGEST) if to == fp8.E4M3 else x
        raw = x.to(to).contiguous().view(whole[to.itemsize]).numpy()
        return raw.view(bits[to.itemsize]).reshape(values.shape)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        a, b = (
            convert(m.data, m.dtype, tl.float32, None).view(numpy.float32) if m.dtype == tl.bfloat16 else m.data
            for m in (a, b)
        )
        return theirs.TensorHandle(numpy.matmul(a, b, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(theirs, "_convert_float", convert)
    monkeypatch.setattr(theirs.InterpreterBuilder, "create_dot", dot)
