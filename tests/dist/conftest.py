"""One launcher for all tests of ranks: it imports torch once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist import cases
from tests.dist.launcher import Launcher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    made = Launcher(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def base(tiny_folder) -> Path:
    return tiny_folder("llama-shallow")


@pytest.fixture(scope="session")
def data(launcher: Launcher) -> Path:
    return cases.write_data(launcher.root / "data.jsonl", rows=40)
