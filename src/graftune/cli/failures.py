"""Turns every mistake of a user into one sentence.

`sentence(error)` returns the sentence for an error that a user can fix, and None for any other: an unknown exception is
a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from cyclopts.exceptions import CycloptsError

from graftune.errors import GraftuneError, one_line

_DISK = {
    errno.ENOSPC: ("no space left", "free some, or give another folder with --out"),
    errno.EDQUOT: ("the disk quota is used up", "free some, or give another folder with --out"),
    errno.EROFS: ("the file system is read-only", "give another folder"),
    errno.EACCES: ("permission denied", "change its permissions, or give another path"),
    errno.EPERM: ("not permitted", "change its permissions, or give another path"),
    errno.ENOENT: ("no such file or folder", "check the path"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "check the path"),
    errno.EISDIR: ("is a folder, where a file was expected", "check the path"),
    errno.EEXIST: ("exists already", "remove it, or give another path"),
    errno.ENAMETOOLONG: ("the name is too long", "give a shorter path"),
    errno.EMFILE: ("too many open files", "raise the limit with ulimit -n"),
    errno.ENFILE: ("too many files are open on this machine", "close some programs"),
    errno.EFBIG: ("the file would be larger than allowed", "raise the limit with ulimit -f, or use another disk"),
    errno.EIO: ("the disk cannot be read or written (input/output error)", "check the disk"),
    errno.ESTALE: ("the network file system has lost this file", "mount it again"),
}

_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EIO, errno.ESTALE)


def sentence(error: BaseException) -> str | None:
    """The message, without the program's name: on one line unless it has a list; None if this is not a user's
    mistake."""
    if isinstance(error, GraftuneError):
        head, *lines = str(error).split("\n")
        return "\n".join([one_line(head, longest=2000), *lines])
    torch = sys.modules.get("torch")  # not imported: help and mistakes on the command line do not need it
    if isinstance(error, CycloptsError):
        command = " ".join(["graftune", *(error.command_chain or [])])
        text = f"{error} (see {command} --help)"  # cyclopts' own sentence
    elif torch is not None and isinstance(error, torch.OutOfMemoryError):
        text = "the device's memory is used up; lower --tokens-per-micro-batch, or set --recompute to full or offload"
    elif isinstance(error, OSError) and error.errno in _DISK:
        what, fix = _DISK[error.errno]
        text = f"{error.filename}: {what}; {fix}" if error.filename else f"{what}; {fix}"
    elif code := next((code for code in _MACHINE if os.strerror(code) in str(error)), 0):  # a library's own error
        text = f"{_DISK[code][0]} ({one_line(str(error), longest=300)}); {_DISK[code][1]}"
    else:
        return None
    return one_line(text, longest=2000)


def explained(error: BaseException) -> dict[str, Any] | None:
    """The message for a program: the sentence, and its parts where the error has them."""
    text = sentence(error)
    if text is None:
        return None
    parts = ("what", "where", "fix", "lines") if isinstance(error, GraftuneError) else ()
    return {"message": text} | {name: value for name in parts if (value := getattr(error, name))}
