"""A rehearsal replaces nothing of torch, Triton or cuDNN, and imports no compiler."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from graftune.plan import Setup, rehearse
from tests.plan.test_plan import gpu, setup

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op")  # torch.distributed has it, and warns of being asked
ROOTS = ("torch", "triton", "cudnn")
Seen = dict[tuple[str, str], Any]


def everything() -> Seen:
    """Every module by its name, and of those packages every function, class and module, and what classes are made
    of."""
    found: Seen = {("sys.modules", name): module for name, module in sys.modules.items()}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ROOTS and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if callable(value) or isinstance(value, ModuleType):
                    found[name, attribute] = value
                if isinstance(value, type) and value.__module__.split(".")[0] in ROOTS:
                    for inner, part in list(vars(value).items()):
                        if callable(part) or isinstance(part, (property, staticmethod, classmethod)):
                            found[f"{value.__module__}.{value.__qualname__}", inner] = part
    return found


def changed(before: Seen) -> list[tuple[str, str]]:
    now = everything()
    return [place for place, value in before.items() if now.get(place) is not value]


class Watched(dict[str, Any]):
    """A base's tensors: `watch` is called while they are asked for, within the rehearsal."""

    watch: Callable[[], None]

    def items(self) -> Any:
        self.watch()
        return super().items()


def watched(of: Setup, watch: Callable[[], None]) -> Setup:
    tensors = Watched(of.base.tensors)
    tensors.watch = watch
    return dataclasses.replace(of, base=dataclasses.replace(of.base, tensors=tensors))


@pytest.mark.parametrize("of", [gpu, setup])
def test_everything_of_torch_and_triton_stays_what_it_is(of: Callable[..., Setup]) -> None:
    rehearse(of())  # what is imported on the way is there
    before = everything()
    within: list[list[tuple[str, str]]] = []
    launches = 0

    def launched(*_: Any) -> None:
        nonlocal launches
        launches += 1
        if launches in (5, 50):  # while the step runs
            within.append(changed(before))

    rehearse(watched(of(), lambda: within.append(changed(before))), launched=launched)
    assert len(within) == (3 if of is gpu else 1) and not any(within)
    assert not changed(before)
    assert len(before) > 10_000


def test_the_check_itself_sees_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    before = everything()
    assert not changed(before)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "json", ModuleType("json"))
    places = {("torch.cuda", "current_stream"), ("triton.runtime.jit.JITFunction", "run"), ("sys.modules", "json")}
    assert places <= set(changed(before))


ALONE = """
import sys
import torch
from tests.plan.test_shapes import SETUPS
from graftune.plan import rehearse

compilers = ("torch._dynamo", "torch._inductor", "sympy")
before = set(sys.modules)
for of in list(SETUPS.values())[::3]:
    rehearse(of())
found = sorted(name for name in set(sys.modules) - before if name.startswith(compilers))
sys.exit(", ".join(found[:5]) or 0)
"""


def test_a_rehearsal_imports_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
