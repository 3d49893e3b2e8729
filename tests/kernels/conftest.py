"""Kernels run on the GPU where there is one, and through Triton's interpreter elsewhere: the same tests either way."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernels_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from graftune.kernels import launch

    monkeypatch.setattr(launch, "fused", lambda x: True)
