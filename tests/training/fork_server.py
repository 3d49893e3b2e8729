"""Forks a child for each command line read from stdin; see runs.py. Not a test, and not imported by one."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from typing import Any


def die_at(place: str, count: int) -> None:
    """Replace a function so that its count-th call is the process's last, before or half-way through its work."""
    from graftune import files
    from graftune.observe.events import EventLog
    from graftune.plan.pretend import Pretended
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
        if owner is Step and isinstance(args[0].arena.grads, Pretended):  # rehearsed, for the memory plan
            return real(*args, **kwargs)
        calls += 1
        if calls == count:
            if place == "emit":  # half a line reaches the file
                args[0]._file.write(b'{"event": "st')
                args[0]._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, counted)


def child(request: dict[str, Any]) -> None:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 99
    try:
        from graftune.cli import main

        if request["die_at"]:
            die_at(*request["die_at"])
        code = main(request["line"])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def serve() -> None:
    import torch
    import torch.fx.experimental.symbolic_shapes  # the first backward of a process imports it; here it is shared

    from graftune.training import telling

    importlib.import_module("graftune.api")
    telling.loss_plot = lambda *_: None  # a second of every run, and nothing that these tests look at
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
