"""One tuned adapter a family, made once: what every format is exported from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.exporting import judges, models


@dataclass(frozen=True)
class Tuned:
    base: Path
    adapter: Path
    want: torch.Tensor  # our own log-probabilities with the adapter


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tuned]:
    made: dict[str, Tuned] = {}

    def get(variant: str) -> Tuned:
        if variant not in made:
            folder = tmp_path_factory.mktemp("tuned")
            base = models.make_folder(variant, folder / variant)
            run = judges.shaken(judges.opened(base, rank=4, alpha=10.0))
            made[variant] = Tuned(base, run.save(folder / "adapter"), judges.ours(run))
        return made[variant]

    return get
