"""Seeded damages to a tiny GGUF and to a tiny model folder: opening and loading either works or raises GraftuneError,
in a bounded number of calls and bytes. Half of them hit the headers, where the damage is interesting."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from graftune.errors import GraftuneError
from graftune.observe.memory import peak_resident_bytes
from tests.support import oracle
from tests.support.counting import Calls
from tests.support.thorough import THOROUGH
from tests.weights import tiny_gguf

CASES, CALLS, BYTES = 150 if THOROUGH else 60, 1_000_000, 500 << 20


def damaged(whole: bytes, draw: np.random.Generator, header: int) -> bytes:
    """One byte changed (any value, or one bit), or the end cut off."""
    kind = draw.integers(0, 5)
    if kind == 0:
        return whole[: draw.integers(0, len(whole))]
    at = int(draw.integers(0, header if kind < 4 else len(whole)))
    value = whole[at] ^ (1 << int(draw.integers(0, 8))) if kind == 1 else int(draw.integers(0, 256))
    return whole[:at] + bytes([value]) + whole[at + 1 :]


def survives(open_it: Callable[[], object], case: str) -> bool:
    before = peak_resident_bytes()
    try:
        with Calls(most=CALLS):
            open_it()
        works = True
    except GraftuneError as error:
        works = False
        assert str(error), case
    assert peak_resident_bytes() - before < BYTES, case
    return works


@pytest.fixture(autouse=True)
def _bounded():
    """An allocation far beyond the bound fails at once instead of taking the machine along."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_gguf(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "whole.gguf").read_bytes()
    header = whole.find(b"blk.2.ffn_down.weight") + 60
    draw, path, worked = np.random.default_rng(11), tmp_path / "m.gguf", 0
    oracle.ours(tmp_path / "whole.gguf")
    for number in range(CASES):
        path.unlink(missing_ok=True)  # a new file: the old one may still be mapped
        path.write_bytes(damaged(whole, draw, header))
        worked += survives(lambda: oracle.ours(path, base_dtype="keep" if number % 2 else "fp32"), f"case {number}")  # noqa: B023
    assert CASES // 15 < worked < CASES * 4 // 5, worked


def test_folder(tmp_path: Path, tiny_folder) -> None:
    source, folder, draw, worked = tiny_folder("llama"), tmp_path / "model", np.random.default_rng(12), 0
    names = ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
    for number in range(CASES):
        shutil.copytree(source, folder)
        name = names[number % len(names)]
        whole = (source / name).read_bytes()
        (folder / name).unlink()
        header = 8 + int.from_bytes(whole[:8], "little") if name.endswith(".safetensors") else len(whole)
        (folder / name).write_bytes(damaged(whole, draw, header))
        worked += survives(lambda: oracle.ours(folder, base_dtype="keep" if number % 3 else "fp32"), f"{name} {number}")  # noqa: B023
        shutil.rmtree(folder)
    assert CASES // 15 < worked < CASES * 4 // 5, worked
