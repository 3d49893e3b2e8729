from __future__ import annotations

import pytest

import graftune


@pytest.fixture
def opened(tiny_folder):
    """Settings -> a session on a tiny model."""

    def get(**settings):
        return graftune.open(tiny_folder("llama"), **{"rank": 4, "compute_dtype": "fp32", "quiet": True} | settings)

    return get
