"""The command line: one small file per command, every setting's flag made from the config tree.

Nothing here imports torch before a command runs, so that `--help`, `--version`, a mistyped flag and a wrong path answer
at once. The command line itself is imported by `main`, not with this package, so that a Ctrl-C during the imports of
the first tenths of a second ends the program without a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        from graftune.cli import app
    except KeyboardInterrupt:
        return 130
    return app.main(arguments)
