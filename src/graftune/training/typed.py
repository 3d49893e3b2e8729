"""The command line by which this process was started, for whoever wants to run it again."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def typed_command() -> str:
    """As it was typed; empty where Python code called `train`."""
    program = Path(sys.argv[0] if sys.argv else "")
    ours = program.name == "graftune" or (program.name == "__main__.py" and program.parent.name == "graftune")
    return shlex.join(["graftune", *sys.argv[1:]]) if ours else ""
