"""What an export says of a type that is coarser than what was learned."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from graftune.api import export
from graftune.exporting.write import Exported
from graftune.observe.console import Console
from tests.exporting import models
from tests.exporting.judges import opened


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_wide(tmp_path_factory.mktemp("base") / "base", layers=2, width=256)


def adapter(base: Path, folder: Path, size: float) -> Path:
    run = opened(base, rank=4, alpha=8.0)
    arena = run.parts.arena
    for name in arena.slots:
        if "lora_B" in name:
            arena.view(name, arena.weights).normal_(0, size)
    arena.publish()
    return run.save(folder)


def exported(target: Path, kind: str, out: Path) -> tuple[Exported, str]:
    """And what was said."""
    console = Console(quiet=True, stdout=io.StringIO(), stderr=io.StringIO())
    done = export(str(target), "gguf", kind=kind, out=str(out / f"{kind}.gguf"), console=console)
    assert isinstance(console._err, io.StringIO)
    return done, console._err.getvalue()


def test_a_type_coarser_than_what_was_learned_is_a_warning(base: Path, tmp_path: Path) -> None:
    small, large = (adapter(base, tmp_path / f"{size}", size) for size in (1e-4, 0.5))
    warning = "this may undo your fine-tuning; use the type Q8_0"
    for kind in ("IQ4_XS", "Q5_K_M"):
        done, said = exported(small, kind, tmp_path / "small")
        assert done.facts["noise_over_change"] > 1
        assert f"warning: rounding to {kind} moves the adapted weights" in said and warning in said
    done, said = exported(small, "Q8_0", tmp_path / "small")
    assert done.facts["noise_over_change"] > 1 and not said
    assert any("as far as your fine-tuning did; the type F16 keeps more of it" in note for note in done.notes)
    done, said = exported(large, "Q4_K_M", tmp_path / "large")
    assert 0 < done.facts["noise_over_change"] < 1 and not said
    assert any(note.endswith("times as far as your fine-tuning did") for note in done.notes)
