"""Turns every mistake of a user into one sentence.

`sentence(error)` returns the sentence for an error that a user can fix, and None for any other: an unknown exception is
a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

from cyclopts.exceptions import CycloptsError, UnknownOptionError

from graftune.errors import GraftuneError, one_line
from graftune.settings import other_tools

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
    """The message on one line, without the program's name; None if this is not a user's mistake."""
    if isinstance(error, GraftuneError):
        text = str(error)
    elif isinstance(error, CycloptsError):
        text = _usage(error)
    elif _out_of_memory(error):
        text = "the device's memory is used up; lower --tokens-per-micro-batch, or set --recompute to full or offload"
    elif isinstance(error, OSError) and error.errno in _DISK:
        what, fix = _DISK[error.errno]
        text = f"{error.filename}: {what}; {fix}" if error.filename else f"{what}; {fix}"
    elif code := _in_words(error):
        text = f"{_DISK[code][0]} ({one_line(str(error), longest=300)}); {_DISK[code][1]}"
    else:
        return None
    return one_line(text, longest=2000)


def explained(error: BaseException) -> dict[str, Any] | None:
    """The message for a program: the sentence, and its parts where the error has them."""
    text = sentence(error)
    if text is None:
        return None
    parts = {"what": error.what, "where": error.where, "fix": error.fix} if isinstance(error, GraftuneError) else {}
    return {"message": text, **{name: value for name, value in parts.items() if value}}


def _in_words(error: BaseException) -> int:
    """The system's error number, if a library has it in its message only; otherwise 0."""
    return next((code for code in _MACHINE if os.strerror(code) in str(error)), 0)


def _out_of_memory(error: BaseException) -> bool:
    """Does not import torch, which help and mistakes on the command line do not need."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _usage(error: CycloptsError) -> str:
    """cyclopts' own sentence, unless the option is another tool's."""
    command = " ".join(["graftune", *(error.command_chain or [])])
    if isinstance(error, UnknownOptionError):
        typed = (error.token.keyword or error.token.value).split("=", 1)[0]
        known = [name for argument in error.argument_collection for name in argument.names]
        if instead := _instead(typed, known):
            return f"unknown option {typed}; {instead}"
    return f"{error} (see {command} --help)"


def _instead(typed: str, known: list[str]) -> str | None:
    """What to use instead of another tool's option."""
    ours = other_tools.same(typed)
    if ours and "--" + ours.replace("_", "-") not in known:
        return f"that is --{ours.replace('_', '-')} of graftune train"
    return other_tools.answer(typed, flags=True)
