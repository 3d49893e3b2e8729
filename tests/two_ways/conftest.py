"""One server for all runs that are killed: it imports torch and rehearses once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.runs import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()
