"""The application: its commands, and what becomes of their exit codes and errors.

Exit codes: 0 only on success, 2 for a user's mistake (one sentence on stderr), 130 after Ctrl-C and 143 after SIGTERM,
141 when whoever read our output has gone. Anything else raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from cyclopts import App

from graftune import __version__
from graftune.cli.chat import chat
from graftune.cli.data import data
from graftune.cli.doctor import doctor
from graftune.cli.eval import evaluate
from graftune.cli.export import export
from graftune.cli.failures import sentence
from graftune.cli.plan import plan
from graftune.cli.train import train

app = App(
    name="graftune",
    version=__version__,
    help="Fine-tune language models with LoRA adapters: train, look at the data, evaluate, chat, export.",
    help_format="plaintext",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # main answers it
)
app.command(train)
app.command(chat)
app.command(evaluate, name="eval")
app.command(data)
app.command(plan)
app.command(export)
app.command(doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what the terminal's encoding lacks is escaped, not fatal
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(
                list(sys.argv[1:] if arguments is None else arguments),
                exit_on_error=False,
                print_error=False,
                result_action="return_value",
            )
            sys.stdout.flush()  # here, where a full disk or a closed pipe can still be answered
        return int(code or 0)
    except KeyboardInterrupt:
        print("graftune: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard(sys.stdout)
        return 141
    except SystemExit:  # nothing of ours exits by itself: this is rich's answer to a closed pipe
        return 141
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        if isinstance(error, OSError) and error.filename is None:
            _discard(sys.stdout)  # it may be stdout itself that is full: do not fail again at exit
        print(f"graftune: {text}", file=sys.stderr)
        return 2


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Python warnings in the console's words; the source line they usually quote is of no use to a user."""
    print(f"warning: {message}", file=file or sys.stderr)


def _discard(stream: TextIO) -> None:
    """Send what is still buffered nowhere: Python's own flush at exit would complain once more."""
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a captured stream has none, and nothing to flush to
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
