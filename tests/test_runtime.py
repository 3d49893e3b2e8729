"""What a run switches on it switches off again, and nothing that others switched on."""

from __future__ import annotations

import os

import pytest
import torch

from graftune.runtime import resolve


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    resolve("cpu")
    torch.use_deterministic_algorithms(before)


def test_deterministic_mode_ends_with_its_run():
    for _ in range(2):
        assert resolve("cpu", deterministic=True).deterministic and torch.are_deterministic_algorithms_enabled()
        resolve("cpu", deterministic=True)
        assert not resolve("cpu").deterministic and not torch.are_deterministic_algorithms_enabled()


def test_others_mode_stays():
    torch.use_deterministic_algorithms(True)
    resolve("cpu", deterministic=True)
    resolve("cpu")
    assert torch.are_deterministic_algorithms_enabled()


def test_the_workspace_is_set_before_any_product():
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"], "torch reads it once, at the first product"
