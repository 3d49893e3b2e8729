"""Forks a child for each command line read from stdin; see runs.py. Not a test, and not imported by one.

A line may be run in the server itself: what that imports and rehearses, every later child has.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


def die_at(place: str, count: int) -> None:
    """Replace a function so that its count-th call is the process's last, before or half-way through its work."""

    from graftune.io import files
    from graftune.observe.events import EventLog
    from graftune.step import evaluate
    from graftune.step.step import Step

    owner, name = {
        "fsync": (os, "fsync"),
        "rename": (os, "rename"),
        "replace": (os, "replace"),
        "exchange": (files, "_exchange"),
        "rmtree": (shutil, "rmtree"),
        "micro_step": (Step, "micro_step"),
        "update_step": (Step, "update_step"),
        "evaluation": (evaluate, "pack"),
        "emit": (EventLog, "emit"),
    }[place]
    real, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if owner is Step and args[0].arena.grads.is_meta:  # rehearsed, for the memory plan
            return real(*args, **kwargs)
        calls += 1
        if calls == count:
            if place == "emit":  # half a line reaches the file
                args[0]._file.write(b'{"event": "st')
                args[0]._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, counted)


def run(request: dict[str, Any]) -> int:
    """`graftune ...` with its output in the log; the exit code."""
    from graftune.cli import main
    from tests.training import troubles

    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if request["trouble"]:
        troubles.befall(request["trouble"])
    try:
        return main(request["line"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def child(request: dict[str, Any]) -> None:
    code = 99
    try:
        os.environ.update(request["environment"])
        tempfile.tempdir = None  # found again, from the environment
        if request["die_at"]:
            die_at(*request["die_at"])
        code = run(request)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def here(request: dict[str, Any]) -> int:
    kept = [os.dup(number) for number in (1, 2)]
    try:
        return run(request)
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        gc.collect()
        gc.freeze()  # a run begins by looking through all that is alive, and children need not look through this


def serve() -> None:
    import torch
    import torch.fx.experimental.symbolic_shapes  # the first backward of a process imports it; here it is shared

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from graftune.training import reporter
    from tests.support import rehearsed_once

    importlib.import_module("graftune.api")
    importlib.import_module("graftune.cli.app")
    rehearsed_once.install()
    if "draws" not in sys.argv:
        reporter.loss_plot = lambda *_: None  # a second of every run, and nothing that most tests look at
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if request["here"]:
            print(json.dumps({"pid": os.getpid()}), flush=True)
            print(json.dumps({"code": here(request)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            child(request)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
