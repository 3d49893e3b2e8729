"""Machines that fail, made inside a process: a disk that is full from the n-th write on, a clock that is set back."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


class FullDisk:
    """The `at`-th call that needs room under `folder` fails with ENOSPC, and all after it, or it alone (`once`).

    Counted are: a file opened to be written, a line of the log, a file of tensors, mkdir, fsync, rename, the exchange
    of two folders and what is written into the lock. `kinds` has the name of each call."""

    def __init__(self, folder: Path, at: int = 0, once: bool = False):
        self.folder, self.at, self.once, self.kinds = str(folder), at, once, list[str]()

    def install(self, put: Callable[[Any, str, Any], None]) -> FullDisk:
        from graftune.io import files
        from graftune.observe.events import EventLog
        from graftune.weights import safetensors_io

        for owner, name in (
            (os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (os, "pwrite"), (os, "open"), (io, "open"),
            (builtins, "open"), (files, "_exchange"), (EventLog, "_append"), (safetensors_io, "save_file"),
        ):  # fmt: skip
            put(owner, name, self._counted(getattr(owner, name), name))
        return self

    def _counted(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            place = self._place(name, args, named)
            if place is not None and place.startswith(self.folder):
                self.kinds.append(f"{name} {Path(place).name}")
                late = len(self.kinds) == self.at if self.once else len(self.kinds) >= self.at
                if self.at and late:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
            return real(*args, **named)

        return call

    def _place(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> str | None:
        """What the call writes to; None if it only reads."""
        if name in ("fsync", "pwrite"):
            return os.readlink(f"/proc/self/fd/{args[0]}")
        if name == "_append":
            return str(args[0].path)
        if name == "save_file":
            return str(args[1])
        if name == "open":
            how = args[1] if len(args) > 1 else named.get("mode", "r")
            if isinstance(args[0], int):
                return None
            writes = how & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) if isinstance(how, int) else set(how) & set("wax+")
            return os.fspath(args[0]) if writes else None
        return os.fspath(args[0])
