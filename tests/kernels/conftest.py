"""Kernels run on the GPU where there is one, and through Triton's interpreter elsewhere: the same tests either way."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any kernel.py is imported


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernels_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from graftune.kernels import launch

    monkeypatch.setattr(launch, "fused", lambda x: True)
