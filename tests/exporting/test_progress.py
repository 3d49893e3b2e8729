"""What an export says while it works, and what it says of a type that is coarser than what was learned."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from graftune.api import export
from graftune.exporting.write import Exported
from graftune.observe.console import Console
from graftune.observe.progress import WorkProgress
from tests.exporting import models
from tests.exporting.judges import opened


class Watched(WorkProgress):
    def __init__(self, total: int, done: int, label: str, unit: str) -> None:
        super().__init__(total, done, label, unit)
        self.seen: list[tuple[str, int]] = []

    def update(self, done: int, **figures: object) -> None:
        self.done = done
        self.seen.append((self.label, done))


class Recorder(Console):
    """Keeps what was said, and every state of its bars."""

    def __init__(self) -> None:
        super().__init__(quiet=True, stdout=io.StringIO(), stderr=io.StringIO())
        self.bars: list[Watched] = []

    @contextmanager
    def progress(self, total: int, done: int = 0, label: str = "", unit: str = "") -> Iterator[WorkProgress]:
        self.bars.append(Watched(total, done, label, unit))
        yield self.bars[-1]

    @property
    def said(self) -> str:
        assert isinstance(self._err, io.StringIO)
        return self._err.getvalue()


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


def exported(target: Path, kind: str, out: Path) -> tuple[Exported, Recorder]:
    console = Recorder()
    return export(str(target), "gguf", kind=kind, out=str(out / f"{kind}.gguf"), console=console), console


def test_the_bar_names_the_tensor_that_is_quantised(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftune.exporting.write.MEGABYTE", 1000)
    monkeypatch.setattr("graftune.model.frozen.mapped.MAPPED_ROWS_BYTES", 1 << 16)
    tuned = adapter(base, tmp_path / "tuned", 0.03)
    done, console = exported(tuned, "Q4_K_M", tmp_path)
    (bar,) = console.bars
    assert bar.unit == "MB" and abs(bar.total - done.facts["bytes"] // 1000) < bar.total / 5
    labels = list(dict.fromkeys(label for label, _ in bar.seen))
    counts = [count for _, count in bar.seen]
    assert counts == sorted(counts) and counts[-1] == bar.total and len(set(counts)) > len(labels)
    *tensors, last = labels
    assert last == "reading back" and tensors[0] == f"quantising token_embd.weight (1 of {len(tensors)})"
    assert f"merging blk.0.attn_norm.weight (2 of {len(tensors)})" in tensors
    assert any(label.startswith("quantising blk.1.ffn_down.weight (") for label in tensors)
    _, console = exported(tuned, "BF16", tmp_path)
    assert {label.split()[0] for label, _ in console.bars[0].seen} == {"merging", "reading"}
    _, console = exported(base, "F16", tmp_path)
    assert {label.split()[0] for label, _ in console.bars[0].seen} == {"writing", "reading"}


def test_a_type_coarser_than_what_was_learned_is_a_warning(base: Path, tmp_path: Path) -> None:
    small, large = (adapter(base, tmp_path / f"{size}", size) for size in (1e-4, 0.5))
    warning = "this may undo your fine-tuning; use the type Q8_0"
    for kind in ("IQ4_XS", "Q5_K_M"):
        done, console = exported(small, kind, tmp_path / "small")
        assert done.facts["noise_over_change"] > 1
        assert f"warning: rounding to {kind} moves the adapted weights" in console.said and warning in console.said
    done, console = exported(small, "Q8_0", tmp_path / "small")
    assert done.facts["noise_over_change"] > 1 and not console.said
    assert any("as far as your fine-tuning did; the type F16 keeps more of it" in note for note in done.notes)
    done, console = exported(large, "Q4_K_M", tmp_path / "large")
    assert 0 < done.facts["noise_over_change"] < 1 and not console.said
    assert any(note.endswith("times as far as your fine-tuning did") for note in done.notes)
