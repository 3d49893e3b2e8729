"""Every launch from the host goes through `launch.kernel`, which launches nothing for meta tensors."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune import kernels
from graftune.kernels import launch, rehearsal

FILES = sorted(Path(kernels.__path__[0]).glob("*/*.py"))


def launched(tree: ast.AST) -> set[str]:
    """Names x of calls x[...](...)."""
    return {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }


def test_every_kernel_is_launched_by_our_own_function() -> None:
    count = 0
    for file in FILES:
        tree = ast.parse(file.read_text())
        names = launched(tree)
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            decorators = [ast.unparse(one) for one in function.decorator_list]
            if function.name in names and decorators:
                assert all(one.startswith("launch.kernel") for one in decorators), f"{file}: {function.name}"
                count += 1
    assert count > 20


def test_meta_tensors_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    class Jitted:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: ran.append((grid, args, options))

    kernel = object.__new__(launch.Kernel)
    kernel.jitted = Jitted()
    real, meta = torch.ones(2), torch.empty(2, device="meta")
    kernel[(3,)](meta, 5, B=4)
    assert not ran
    told: list[Any] = []
    about = rehearsal.Rehearsal(rehearsal.Device("cuda"), launched=lambda *what: told.append(what[1:]))
    with rehearsal.rehearsing(about):
        kernel[(3,)](meta, 5, B=4)
    assert not ran and told == [((3,), (meta, 5), {"B": 4})]
    kernel[(3,)](real, 5, B=4)
    assert ran == [((3,), (real, 5), {"B": 4})]


def test_a_rehearsal_begins_without_tables_and_leaves_none() -> None:
    made: list[torch.device] = []

    @rehearsal.cached
    def table(device: torch.device) -> torch.Tensor:
        made.append(device)
        return torch.ones(3, device=device)

    cpu = torch.device("cpu")
    kept = table(cpu)
    assert table(cpu) is kept and made == [cpu]
    with rehearsal.rehearsing(rehearsal.Rehearsal(rehearsal.Device("cuda"))):
        assert table(cpu) is not kept and table(rehearsal.META).is_meta and launch.on_gpu(table(rehearsal.META))
    assert table(cpu) is kept and len(made) == 3
    assert not launch.on_gpu(table(rehearsal.META)) and len(made) == 4, "outside a rehearsal it stands for nothing"
