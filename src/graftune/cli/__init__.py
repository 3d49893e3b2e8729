"""The command line: one small file a command, every setting's flag made from the config tree.

Nothing here imports torch before a command runs, so that `--help`, `--version` and a mistyped flag answer at once.
"""

from graftune.cli.app import main

__all__ = ["main"]
