"""Places that cannot be written to, and disks that fill up: one sentence, and nothing half-written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from graftune.cli import main
from graftune.weights import checkpoint
from tests.bad_input.conftest import Refuse
from tests.support.thorough import THOROUGH
from tests.training.runs import SETTINGS, adapter_bytes, write_data
from tests.training.troubles import FullDisk


def test_a_file_where_the_folder_should_be(base: Path, data: Path, tmp_path: Path, refuse: Refuse) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for out in (file, file / "run", file / "deeper" / "run"):
        assert f"{out}: cannot be written to" in refuse(base, data, out=out)
    assert file.read_text() == "precious"


def test_a_read_only_file_system(base: Path, data: Path, tmp_path: Path, refuse: Refuse, monkeypatch) -> None:
    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert "cannot be written to (Read-only file system)" in refuse(base, data)


def test_a_folder_that_holds_a_run(base: Path, data: Path, tmp_path: Path, refuse: Refuse, capsys) -> None:
    out = tmp_path / "run"
    line = ["train", str(base), str(data), *SETTINGS, "--max-steps", "1", "--quiet", "--out", str(out)]
    assert main(line) == 0
    capsys.readouterr()
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert "there is a run in this folder; resume it, or set out to another folder" in refuse(base, data, out=out)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_what_was_in_the_folder_stays(base: Path, data: Path, tmp_path: Path, refuse: Refuse) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("precious")
    refuse(base, data, "--device", "abacus", out=out)
    assert [p.name for p in out.iterdir()] == ["notes.txt"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_folder) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("straight")
    data = write_data(root / "data.jsonl")
    line = ["train", str(tiny_folder("llama-shallow")), str(data), *SETTINGS, "--max-steps", "7", "--quiet"]
    assert main([*line, "--out", str(root / "run")]) == 0
    return data, root / "run"


@pytest.mark.parametrize("once", [False, True] if THOROUGH else [False])
def test_a_disk_that_is_full_from_the_nth_write_on(
    once: bool, base: Path, straight: tuple[Path, Path], tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or, `once`, at that write alone. GRAFTUNE_EXAMPLES=1000 tries every write of a run instead of every 36th."""
    data, want = straight
    run, tried = tmp_path / "run", 0
    line = ["train", str(base), str(data), *SETTINGS, "--max-steps", "7", "--quiet", "--out", str(run)]
    for at in range(1, 999) if THOROUGH else range(3, 999, 36):
        with monkeypatch.context() as patch:
            disk = FullDisk(run, at, once).install(patch.setattr)
            code = main(line)
        said = capsys.readouterr().err
        # A single failure may do no harm: a folder that is there need not be made.
        assert code == (2 if len(disk.kinds) >= at else 0) or once or "was not written" in said, (disk.kinds, said)
        assert "Traceback" not in said and said.count("graftune: ") == (code == 2), said
        assert code == 0 or "space" in said
        for path in checkpoint.steps(run / "checkpoints").values():
            checkpoint.check_whole(path)
        assert not list(run.rglob("*.part")), "nothing half-written"
        begun = (run / "config.yaml").exists()
        assert main(["train", "--resume", str(run), "--quiet"] if begun else line) == 0
        assert adapter_bytes(run) == adapter_bytes(want)
        names = {str(path.relative_to(run)) for path in run.rglob("*")}
        differ = {str(path.relative_to(want)) for path in want.rglob("*")} ^ names
        # A run that finished without its preview has said so; resuming it writes nothing.
        left_out = {"preview.jsonl"} - names if code == 0 and "was not written" in said else set()
        assert differ == left_out, differ
        shutil.rmtree(run)
        tried += 1
        if len(disk.kinds) < at:
            break
    assert tried > 4
