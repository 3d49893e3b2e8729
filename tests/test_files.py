"""Files and folders are old or new at whatever call a process dies."""

from __future__ import annotations

import ast
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graftune.io import files
from graftune.io.files import new_file, new_folder, whole, write_file
from tests.support.dying import Deaths
from tests.support.parsed import nodes_of


class Disk:
    """What reaches the disk below a folder, in order: `flush NAME`, `rename` and `remove`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.root, self.calls = root, list[str]()
        for owner, name in ((os, "rename"), (os, "replace"), (files, "_exchange"), (shutil, "rmtree")):
            word = "remove" if name == "rmtree" else "rename"
            monkeypatch.setattr(owner, name, self._noted(word, getattr(owner, name)))
        monkeypatch.setattr(os, "fsync", self._flushed)

    def _noted(self, word: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.calls.append(word)
            return real(*args, **named)

        return call

    def _flushed(self, handle: int) -> None:
        paths = (self.root, *self.root.rglob("*"))
        self.calls.append(f"flush {next(p.name for p in paths if p.stat().st_ino == os.fstat(handle).st_ino)}")


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, monkeypatch)
    write_file(tmp_path / "x", "new")
    assert disk.calls == ["flush x.part", "rename", f"flush {tmp_path.name}"]


@pytest.mark.parametrize(("there_is_one", "can_exchange"), [(False, True), (True, True), (True, False)])
def test_a_folder_is_on_the_disk_before_it_takes_its_place(
    there_is_one: bool, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that is in it; and the old one goes only when its successor's name is on the disk, too."""
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    if there_is_one:
        (tmp_path / "x").mkdir()
    disk = Disk(tmp_path, monkeypatch)
    with new_folder(tmp_path / "x") as aside:
        (aside / "deep").mkdir()
        for name in ("a", "deep/b"):
            (aside / name).touch()
    before = disk.calls.index("rename")
    assert set(disk.calls[:before]) == {"flush a", "flush b", "flush deep", "flush x.part"}
    assert disk.calls.index("flush x.part") == before - 1
    after = [call for call in disk.calls[before:] if call != "rename"]
    assert after == [f"flush {tmp_path.name}", *(["remove"] if there_is_one else [])]
    assert disk.calls[-len(after) :] == after


def test_what_a_kill_left_under_its_old_name_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays until a new one is there, and without one it gets its own name back."""
    place, old = tmp_path / "adapter", tmp_path / "adapter.old"

    def leave() -> None:
        files.remove(place)
        old.mkdir(exist_ok=True)
        (old / "x").write_text("old")

    def put() -> None:
        with new_folder(place) as aside:
            (aside / "x").write_text("new")

    leave()
    for done in Deaths(monkeypatch).each(put):
        assert (whole(place) / "x").read_text() in (("new",) if done else ("old", "new"))
        leave()
    (tmp_path / "adapter.part").mkdir()
    files.recover_folder(place)
    assert (place / "x").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, tried = tmp_path / "config.yaml", 0
    write_file(place, "old")
    for done in Deaths(monkeypatch).each(lambda: write_file(place, b"new")):
        tried += 1
        assert place.read_text() in ("old", "new") and (not done or place.read_text() == "new")
        write_file(place, "old")
        assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert tried > 3


@pytest.mark.parametrize("there_is_one", [True, False])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_the_old_or_the_new_one(
    can_exchange: bool, there_is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    place, tried = tmp_path / "adapter", 0

    def put(content: str) -> None:
        with new_folder(place) as aside:
            for name in ("a", "b"):
                (aside / name).write_text(content)

    def read() -> set[str]:
        return {path.read_text() for path in whole(place).iterdir()}

    if there_is_one:
        put("old")
    for done in Deaths(monkeypatch).each(lambda: put("new")):
        tried += 1
        if there_is_one or whole(place).exists():
            assert read() in ({"old"}, {"new"}) and (not done or read() == {"new"})
        if can_exchange and there_is_one:
            assert place.exists(), "there was a moment with neither"
        put("old")
        assert read() == {"old"} and [path.name for path in tmp_path.iterdir()] == ["adapter"]
        if not there_is_one:
            files.remove(place)
    assert tried > 5


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    for way in (new_file, new_folder):
        with pytest.raises(ZeroDivisionError), way(tmp_path / "x") as aside:
            aside.write_text("half") if way is new_file else (aside / "half").touch()
            raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_take_its_place_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when what was written is flushed, after the body of `new_folder` went well."""

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "x").mkdir()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"), new_folder(tmp_path / "x") as aside:
        (aside / "whole").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["x"]


def test_a_folder_goes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in Deaths(monkeypatch).each(lambda: files.remove_at_once(tmp_path / "x")):
        there = tmp_path / "x"
        assert not there.exists() or len(list(there.iterdir())) == 2
        files.recover_folder(there)
        assert [path.name for path in tmp_path.iterdir()] == (["x"] if there.exists() else [])
        there.mkdir(exist_ok=True)
        for name in ("a", "b"):
            (there / name).touch()


# Who else writes: into a file or folder that `new_file` or `new_folder` gave, to the end of a log, or nothing to keep.
WRITERS = {
    "cli/app.py": "the null device",
    "data/cached.py": "new_file",
    "data/memory.py": "a temporary file of this process",
    "exporting/gguf_file.py": "new_file of its caller",
    "ledger/ledger.py": "a file aside, renamed under a lock; not flushed, since no reservation survives a crash",
    "observe/console.py": "the null device",
    "observe/memory.py": "a switch of the kernel",
    "session/references.py": "new_file",
    "weights/adapter.py": "new_folder",
    "weights/apr.py": "new_file",
    "weights/checkpoint.py": "new_folder",
    "weights/model.py": "new_folder",
    "weights/safetensors_io.py": "new_file",
    "weights/streamed.py": "new_folder of its caller",
}


def writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "open":
        texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        return any(set(text) <= set("wxb+t") and set(text) & set("wx") for text in texts)
    of_os = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") in ("os", "shutil")
    moved = of_os and name in ("replace", "rename", "copy", "copy2", "copyfile", "move", "copytree")
    return moved or name in ("write_text", "write_bytes", "save_file")


def test_nobody_writes_a_file_another_way():
    root = Path(files.__file__).parents[1]
    assert [writes(ast.parse(text).body[0].value) for text in ("open(p, 'wb')", "os.replace(a, b)", "open(p)")] == [
        True, True, False,
    ]  # fmt: skip
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(isinstance(node, ast.Call) and writes(node) for node in nodes_of(path))
    }
    assert found - {"io/files.py"} == set(WRITERS)
