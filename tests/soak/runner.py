"""Starts a soak script: flags from the function's keywords, a temporary folder, one thread, and an exit code."""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def run(soak: Callable[..., bool | None]) -> None:
    """Calls `soak(folder, **flags)` and exits: with 1 if it returns False, with a traceback if an assertion fails."""
    parser = argparse.ArgumentParser(
        description=inspect.getmodule(soak).__doc__,  # type: ignore[union-attr]
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, parameter in list(inspect.signature(soak).parameters.items())[1:]:
        flag, default = f"--{name.replace('_', '-')}", parameter.default
        if default is False:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"default: {default!r}")
    flags = vars(parser.parse_args())
    folder = Path(tempfile.mkdtemp(prefix="graftune-soak-"))
    os.environ |= {"GRAFTUNE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        sys.exit(1 if soak(folder, **flags) is False else 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
