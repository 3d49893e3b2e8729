"""The command line: one small file per command, every setting's flag made from the config tree.

Nothing here imports torch before a command runs, so that `--help`, `--version`, a mistyped flag and a wrong path answer
at once. The command line itself is imported by `main`, not with this package: a Ctrl-C that falls into the imports of
the first tenths of a second then ends the program as it would end any other, without a traceback.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    with _interruptible():
        from graftune.cli import app
    return app.main(arguments)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process itself while modules are imported."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
