"""SmolLM2 as we load it and as transformers holds the same values, each built once a session (half a gigabyte each)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftune.settings.sections import LoraConfig
from tests.support import oracle


@pytest.fixture(scope="session")
def smollm2_ours(smollm2: Path) -> oracle.Ours:
    """Resident in fp32, with adapters that change its answers without wrecking it."""
    return oracle.ours(smollm2, LoraConfig(rank=4, alpha=10.0), std_b=0.02)


@pytest.fixture(scope="session")
def smollm2_theirs(smollm2_ours: oracle.Ours) -> Any:
    return oracle.smollm2_in_transformers(smollm2_ours.base)
