"""Turns every mistake of a user into one sentence.

`sentence(error)` returns the sentence for an error that a user can fix, and None for any other: an unknown exception is
a bug of ours and keeps its traceback. cyclopts words its errors in several sentences and a panel, so only the fields of
its exceptions are used here.
"""

from __future__ import annotations

import errno
import os
import sys
import typing
from typing import Any, Literal

from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from graftune.errors import GraftuneError, one_line
from graftune.settings import other_tools

_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
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
    command = " ".join(["graftune", *(error.command_chain or [])])
    helped = f"see {command} --help"
    if isinstance(error, UnknownCommandError):
        typed = (error.unused_tokens or ["?"])[0]
        kind = "option" if typed.startswith("-") else "command"
        return f"unknown {kind} {typed!r}; {_near(typed, _commands(error)) or helped}"
    if isinstance(error, UnknownOptionError):
        typed = (error.token.keyword or error.token.value).split("=", 1)[0]
        known = [name for argument in error.argument_collection for name in argument.names if name[0] == "-"]
        return f"unknown option {typed!r}; {_meant(typed, known) or helped}"
    if isinstance(error, MissingArgumentError):
        assert error.argument is not None
        name = error.keyword or error.argument.name
        if name.startswith("-"):
            return f"{name} needs a value; {helped}"
        return f"{name} is missing; {helped}"
    if isinstance(error, CoercionError):
        return _wrong_type(error, helped)
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} is given twice; give it once"
    if isinstance(error, UnusedCliTokensError):
        return f"{(error.unused_tokens or ['?'])[0]!r} is one argument too many; {helped}"
    return f"{error}; {helped}"


def _wrong_type(error: CoercionError, helped: str) -> str:
    argument, token = error.argument, error.token
    if token is None and argument is not None and argument.tokens:
        token = argument.tokens[0]  # an error of a converter has no token
    if token is None or argument is None:
        return f"{error}; {helped}"
    return f"{token.keyword or argument.name} is {token.value!r}; it must be {_expected(argument.hint)}"


def _expected(hint: Any) -> str:
    """The type in words. None in `int | None` means "not given" and is left out."""
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    inner = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if inner and typing.get_origin(hint) is not tuple:
        return _expected(inner[0])
    return _TYPES.get(hint, "a list of names")


def _meant(typed: str, known: list[str]) -> str | None:
    """The name of another tool's option here, if this command has it; otherwise a similar option of ours."""
    ours = other_tools.same(typed)
    if ours and "--" + ours.replace("_", "-") not in known:
        return f"that is --{ours.replace('_', '-')} of graftune train"
    return other_tools.answer(typed, flags=True) or _near(typed, known)


def _near(typed: str, known: list[str]) -> str | None:
    near = other_tools.near(typed, known)
    return f"did you mean {near}?" if near else None


def _commands(error: CycloptsError) -> list[str]:
    return [name for name in error.app if not name.startswith("-")] if error.app is not None else []
