"""Digests are remembered while a file is the same, never beyond that, and a cache that is broken costs time only."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from graftune.io import digest, user_cache


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is worth remembering and settled, with a cache of its own."""
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / "cache" / "deep"))
    monkeypatch.setattr(digest, "SMALLEST", 1000)
    monkeypatch.setattr(digest, "SETTLED", -1.0)
    file = tmp_path / "large.gguf"
    file.write_bytes(os.urandom(5000))
    return file


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often files were read, as the length of a list."""
    computed, found = digest._computed, list[int]()

    def counted(files: list[Path]) -> str:
        found.append(len(files))
        return computed(files)

    monkeypatch.setattr(digest, "_computed", counted)
    return found


def truth(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def test_read_once(large: Path, reads: list[int], tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"x" * 3000)
    for _ in range(3):
        assert digest.sha256([large]) == truth(large)
        assert digest.sha256([large, other]) == truth(large, other)
        assert digest.sha256([other, large]) == truth(other, large)
    assert reads == [1, 2, 2]
    link = tmp_path / "link.gguf"
    link.symlink_to(large)
    assert digest.sha256([link]) == truth(large) and len(reads) == 3, "the same file by another name"
    kept = [file.name for file in user_cache.cache_folder().iterdir()]
    assert kept == ["digests.json"], "nothing half written stays"


def test_what_changes_is_read_again(large: Path, reads: list[int]) -> None:
    told = large.stat()
    digest.sha256([large])
    with large.open("r+b") as file:  # in place, of the same size, under the old time
        file.write(b"changed")
    os.utime(large, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert large.stat().st_mtime_ns == told.st_mtime_ns and large.stat().st_size == told.st_size
    assert digest.sha256([large]) == truth(large) and len(reads) == 2
    aside = large.with_name("new")  # another file in its place, of the same size and time
    aside.write_bytes(os.urandom(5000))
    os.utime(aside, ns=(told.st_atime_ns, told.st_mtime_ns))
    os.replace(aside, large)
    assert digest.sha256([large]) == truth(large) and len(reads) == 3
    large.write_bytes(b"y" * 6000)
    assert digest.sha256([large]) == truth(large) and len(reads) == 4


def test_what_changed_just_now_is_not_remembered(
    large: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within a tick of the file system's clock would not show."""
    monkeypatch.setattr(digest, "SETTLED", 60.0)
    for _ in range(2):
        assert digest.sha256([large]) == truth(large)
    assert len(reads) == 2 and not user_cache.cache_folder().exists()
    monkeypatch.setattr(digest.time, "time", lambda now=time.time: now() + 100)
    for _ in range(2):
        assert digest.sha256([large]) == truth(large)
    assert len(reads) == 3


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": 3}', b"[" * 100_000, b"folder"])
def test_a_damaged_cache_does_no_harm(damage: bytes, large: Path, reads: list[int]) -> None:
    digest.sha256([large])
    file = user_cache.cache_folder() / "digests.json"
    if damage == b"folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(damage)
    for _ in range(2):
        assert digest.sha256([large]) == truth(large)
    assert len(reads) == (3 if damage == b"folder" else 2)


def test_a_place_that_cannot_be_written(large: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTUNE_CACHE", str(large / "below a file"))
    for _ in range(2):
        assert digest.sha256([large]) == truth(large)
    assert len(reads) == 2


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GRAFTUNE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache.cache_folder() == tmp_path / "xdg" / "graftune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache.cache_folder() == tmp_path / ".cache" / "graftune"
