"""Forks a child for each command line read from stdin; see runs.py. Not a test, and not imported by one.

A line may be run in the server itself: what that imports and rehearses, every later child has.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from functools import partial
from typing import Any

from tests.support import fork_server


def die_at(place: str, count: int) -> None:
    """Replace a function so that its count-th call is the process's last, before or half-way through its work."""

    from graftune.infer.decode_batch import DecodeBatch
    from graftune.io import files
    from graftune.observe.events import EventLog
    from graftune.rl import rounds
    from graftune.step import evaluate
    from graftune.step.step import Step
    from graftune.training.user_function import UserFunction

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
        "sampled token": (DecodeBatch, "round"),
        "reward": (UserFunction, "__call__"),
        "waiting for a reward": (UserFunction, "_line"),
        "round.json": (rounds, "write_file"),
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

    fork_server.write_output_to(request["log"], os.O_TRUNC)
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


def serve() -> None:
    fork_server.prepare(draws="draws" in sys.argv)
    for line in sys.stdin:
        request = json.loads(line)
        if request["here"]:
            print(json.dumps({"pid": os.getpid()}), flush=True)
            print(json.dumps({"code": fork_server.here(partial(run, request))}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            child(request)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
