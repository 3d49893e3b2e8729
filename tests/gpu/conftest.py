"""These need a CUDA device; elsewhere they say so and skip."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products want it before the first of them


@pytest.fixture(autouse=True, scope="session")  # before what a module makes on the device
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here: run `python -m pytest tests/gpu` on a machine with one")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Torch's own algorithms are deterministic during the test; a run of a test may set this for its process, too."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
