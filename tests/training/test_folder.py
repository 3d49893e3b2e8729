"""What a killed run left half done goes, and nothing else: files of users, and of runs that train or began, stay."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from graftune.errors import GraftuneError
from graftune.settings.config import Config
from graftune.training import folder as run_folders


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


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    taken, left = tmp_path / "taken", tmp_path / "left"
    for folder, names in ((taken, ["notes.txt"]), (left, [".lock", "metrics.jsonl", "config.yaml.part"])):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    with ExitStack() as held:
        with pytest.raises(GraftuneError, match=r"taken: the folder holds other files \(notes.txt\)"):
            run_folders.new_folder(Config.of({"out": str(taken)}), "", ExitStack(), held)
        assert run_folders.new_folder(Config.of({"out": str(left)}), "", ExitStack(), held) == left
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]
