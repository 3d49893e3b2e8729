"""What a killed run left half done goes, and nothing else: files of users, and of runs that train or began, stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graftune.io.lock import FolderLock
from graftune.training import folder as run_folders

NAME = "data-20261117-184714"


def unstarted(parent: Path, *more: str, name: str = NAME) -> Path:
    """A run as a kill before its first step leaves it, an hour ago."""
    folder = parent / name
    folder.mkdir()
    for file in (".lock", "metrics.jsonl", "config.yaml.part", *more):
        (folder / file).touch()
    return made_long_ago(folder)


def made_long_ago(folder: Path) -> Path:
    os.utime(folder, (0, 0))
    return folder


def test_a_run_that_never_began_goes(tmp_path: Path) -> None:
    for name in (NAME, f"{NAME}-2"):
        unstarted(tmp_path, name=name)
    run_folders.sweep_unstarted(tmp_path)
    assert not list(tmp_path.iterdir())
    run_folders.sweep_unstarted(tmp_path / "nowhere")


def test_whatever_may_be_somebodys_stays(tmp_path: Path) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    runs.mkdir(), elsewhere.mkdir()
    unstarted(runs, name="my-run")
    unstarted(runs, name=f"{NAME}.bak")
    unstarted(runs, "config.yaml", name=f"a-{NAME}")
    unstarted(runs, "notes.txt", name=f"b-{NAME}")
    (unstarted(runs, name=f"c-{NAME}") / "checkpoints").mkdir()
    made_long_ago(runs / f"c-{NAME}")
    (unstarted(runs, name=f"d-{NAME}") / ".lock").unlink()  # no run of ours: we lock before we write
    made_long_ago(runs / f"d-{NAME}")
    os.utime(unstarted(runs, name=f"e-{NAME}"))  # made a moment ago, and not locked yet
    (runs / f"f-{NAME}").symlink_to(unstarted(elsewhere))
    trains = unstarted(runs, name=f"g-{NAME}")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with FolderLock(trains):
        run_folders.sweep_unstarted(made_long_ago(runs))
        assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_a_run_that_begins_at_that_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unstarted(tmp_path)

    class Late(FolderLock):
        def acquire(self) -> FolderLock:
            (folder / "config.yaml").touch()  # by whoever had the lock until now
            return super().acquire()

    monkeypatch.setattr(run_folders, "FolderLock", Late)
    run_folders.sweep_unstarted(tmp_path)
    assert (folder / "config.yaml").exists()


def test_what_is_half_written_goes_by_its_exact_name(tmp_path: Path) -> None:
    half = ["config.yaml.part", "plan.json.7.part", "adapter.part", "checkpoints/step-3.part", "checkpoints/step-5.old"]
    mine = ["notes.part", "my.config.yaml.part", "config.yaml.part.txt", "checkpoints/step-x.part", "adapter.old.part"]
    whole = ["config.yaml", "checkpoints/step-4", "checkpoints/step-5"]
    for name in (*half, *mine, *whole, "model.old", "checkpoints/step-6.old"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x").touch()
    run_folders.sweep(tmp_path)
    left = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("x")}
    assert left == {*mine, *whole, "model", "checkpoints/step-6"}, "the last two have their names back"
