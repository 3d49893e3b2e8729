"""The application: its commands, exit codes and errors.

Exit codes: 0 only on success, 2 for a user's mistake (one sentence on stderr, and with --json one object on stdout),
130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP, 141 when the reader of our output has gone.
Any other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from cyclopts import App

from graftune import __version__
from graftune.cli.command_line import CommandLine, read_line
from graftune.cli.failures import explained
from graftune.cli.help import SettingsPanel, help_of
from graftune.cli.schema import completion
from graftune.errors import GraftuneError, one_line
from graftune.observe.console import Console
from graftune.ranks import from_environment
from graftune.training.signals import Stopped

app = App(
    name="graftune",
    version=__version__,
    help="Fine-tune language models with LoRA and QLoRA adapters: train, look at the data, evaluate, chat, export.\n\n"
    "With --verbose, anywhere on the line, errors come with their traceback and libraries with their log.\n\n"
    "graftune COMMAND --help shows examples and the common settings, --help-all every setting.",
    help_format="plaintext",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # main handles it
)
COMMANDS = {  # where each function is: its module is imported when its command is called, or asked for help
    "init": "init:init",
    "train": "train:train",
    "rl": "rl:rl",
    "chat": "chat:chat",
    "eval": "eval:evaluate",
    "data": "data:data",
    "plan": "plan:plan",
    "profile": "profile:profile",
    "export": "export:export",
    "import": "import_file:import_file",
    "watch": "watch:watch",
    "runs": "runs:runs",
    "doctor": "doctor:doctor",
    "schema": "schema:schema",
}
for _name, _place in COMMANDS.items():
    app.command(f"graftune.cli.{_place}", name=_name, **help_of(_name))
app.command(functools.partial(completion, app), name="completion", **help_of("completion"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    _open_streams()
    line, documents = CommandLine(list(sys.argv[1:] if arguments is None else arguments)), Console.documents
    try:
        line = read_line(line.arguments, _flags)
        if _reject_multi_rank(line.arguments):
            return 2
        if not line.has("--quiet"):
            for note in line.notes:
                print(note, file=sys.stderr)
        if line.verbose:
            logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
        words = set(line.arguments)
        if not words & COMMANDS.keys() and (not words or words & {"--help", "-h"}):
            for name in COMMANDS:  # the list of commands has the first line of each one's text
                _ = app[name]
        SettingsPanel.everything = line.help_all
        with warnings.catch_warnings():
            if not line.verbose:
                warnings.showwarning = _show_warning
            code = app(line.arguments, exit_on_error=False, print_error=False, result_action="return_value")
            sys.stdout.flush()  # here, where a full disk or a closed pipe can still be reported
        return int(code or 0)
    except KeyboardInterrupt as interrupt:
        # A note says what was interrupted, such as a row of the data whose rendering does not end.
        print(" ".join(["graftune: interrupted", *getattr(interrupt, "__notes__", ())]), file=sys.stderr)
        return 130
    except Stopped as stopped:
        with suppress(OSError):  # the terminal may be gone
            print(f"graftune: stopped by {signal.Signals(stopped.number).name}", file=sys.stderr)
        return 128 + stopped.number
    except BrokenPipeError:
        _discard(sys.stdout)
        return 141
    except SystemExit:  # rich raises it for a closed pipe
        return 141
    except Exception as error:
        return _failed(error, line, silent=Console.documents > documents)


def _reject_multi_rank(arguments: Sequence[str]) -> bool:
    """Only `train` runs on several ranks. Rank 0 raises for the other commands."""
    if not arguments or arguments[0] in ("train", "--help", "--version") or not os.environ.get("LOCAL_RANK"):
        return False  # a cluster may set rank variables for a pod without launching ranks in it
    ranks = from_environment()
    if ranks is None or ranks.size == 1:
        return False
    if ranks.leads:
        raise GraftuneError(
            f"graftune {arguments[0]} runs in one process, and a launcher has started {ranks.size}",
            fix="start it without torchrun",
        )
    return True


def _failed(error: Exception, line: CommandLine, silent: bool) -> int:
    """`silent`: the command has printed its JSON document already, such as a plan that does not fit."""
    found = explained(error)
    if found is None:
        raise error
    if isinstance(error, OSError) and error.filename is None:
        _discard(sys.stdout)  # stdout itself may be full: do not fail again at exit
    if line.verbose:
        traceback.print_exception(error, file=sys.stderr)
    with suppress(OSError):  # stderr may be full
        print(f"graftune: {_from_rank(found['message'])}", file=sys.stderr, flush=True)
    if line.has("--json") and not silent:
        try:
            print(json.dumps({"error": found}), flush=True)
        except OSError:
            _discard(sys.stdout)
    return 2


def _from_rank(text: str) -> str:
    """The text, with the rank in front if a launcher has started several processes and this is not the first."""
    rank = os.environ.get("RANK", "0") if os.environ.get("LOCAL_RANK") else "0"
    return text if rank == "0" or text.startswith("rank ") else f"rank {rank}: {text}"


@functools.cache
def _flags(command: str) -> set[str]:
    """The flags of a command; none where there is no such command."""
    if command.startswith("-") or command not in list(app):
        return set()
    arguments = app[command].assemble_argument_collection()
    return {name for argument in arguments for name in argument.names if name.startswith("-")}


def _open_streams() -> None:
    """Characters that the terminal's encoding lacks are escaped. A stream that was closed before the start is replaced
    by the null device, so that no opened file gets its number."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the end)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Python warnings in the console's format, without the source line."""
    print(f"warning: {one_line(str(message))}", file=file or sys.stderr)


def _discard(stream: TextIO) -> None:
    """Discard buffered output: Python's flush at exit would fail again."""
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a captured stream has no file
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
