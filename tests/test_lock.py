"""A folder has one writer, and others can ask who it is without taking its lock."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graftune.errors import GraftuneError
from graftune.io import lock as lock_module
from graftune.io.lock import FolderLock, LockOwner


def test_a_lock_names_its_owner_and_dies_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from graftune.io.lock import FolderLock\n"
        "lock = FolderLock(sys.argv[1]).acquire(); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            with pytest.raises(GraftuneError, match=f"process {other.pid} is training in this folder; wait until"):
                FolderLock(tmp_path).acquire()
            holder = LockOwner.read((tmp_path / ".lock").read_bytes())
            assert holder is not None and (holder.pid, holder.is_here, holder.lives) == (other.pid, True, True)
            assert not replace(holder, began="1").lives, "another process of the same number"
        finally:
            other.kill()
        other.wait()
        assert not holder.lives
    with FolderLock(tmp_path) as lock, pytest.raises(GraftuneError, match=f"process {os.getpid()} "):
        FolderLock(tmp_path).acquire()
    assert not lock.unsupported
    assert LockOwner.read((tmp_path / ".lock").read_bytes()) is None, "released"


def test_a_lock_beats_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "BEAT", 0.01)
    with FolderLock(tmp_path) as lock:
        os.utime(lock.path, (0, 0))
        limit = time.monotonic() + 20
        while lock.path.stat().st_mtime == 0 and time.monotonic() < limit:
            time.sleep(0.01)
        assert lock.path.stat().st_mtime > 0


def test_a_file_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(lock_module.fcntl, "flock", none)
    with FolderLock(tmp_path) as lock:
        assert "locks" in lock.unsupported.lower()
