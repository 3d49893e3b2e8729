"""Forks the ranks of a run for each request read from stdin; see launcher.py. Not a test, and not imported by one.

Importing torch takes seconds and would be most of a test's time, so it is imported once; and a run of one process may
take place in the server itself (`here`): what that imports and rehearses, every later rank has. With `restarts`,
torchrun's own agent starts and watches the ranks, in a process of its own, and its workers are forks of that.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from functools import partial
from typing import Any

from tests.support import fork_server


def misbehave(kind: str, number: int) -> None:
    """In a rank: its number-th update is where something happens to it; `absent`: it never begins that step."""
    from graftune.step.step import Step
    from graftune.training.ranks import Distributed

    if kind in ("reads", "late", "inf"):
        {"reads": read_slowly, "late": hand_out_late, "inf": overflow}[kind](number)
        return
    real, calls = Step.update_step, 0
    if kind == "absent":
        begin = Distributed.begin
        Distributed.begin = lambda self, step: time.sleep(3600) if step == number else begin(self, step)  # type: ignore
        return

    def counted(self: Any) -> Any:
        nonlocal calls
        if self.arena.grads.is_meta:  # rehearsed, for the memory plan
            return real(self)
        calls += 1
        if calls == number or (kind == "slow" and calls > number):
            if kind == "drift":
                self.arena.weights[5] += 1e-3
            elif kind == "raise":
                raise ArithmeticError("one rank computes nonsense")
            elif kind == "hang":
                time.sleep(3600)
            elif kind == "slow":
                time.sleep(0.5)
            else:
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        return real(self)

    Step.update_step = counted  # type: ignore[method-assign]


def overflow(number: int) -> None:
    """From the number-th update on a gradient of this rank is infinite."""
    from graftune.step.step import Step

    real, calls = Step.reduce_outside_graph, 0

    def counted(self: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= number:
            self.arena.grads[5] = float("inf")
        real(self)

    Step.reduce_outside_graph = counted  # type: ignore[method-assign]


def read_slowly(seconds: float) -> None:
    from graftune.training import prepare

    real = prepare._read
    prepare._read = lambda *given: (time.sleep(seconds), real(*given))[1]


def hand_out_late(kept: int) -> None:
    """Figures as a GPU's loop hands them out, `kept` of them back: how many depends on the rank's own device."""
    from graftune.step import pipeline

    class Late(pipeline.HostPipeline):
        steps_ahead = pipeline.AHEAD
        begun = False

        def micro(self, staged: Any, micro_batch_id: int) -> None:
            if not self.begun:  # the host is no more than AHEAD steps ahead
                self.ready, self.begun = len(self.done) - pipeline.AHEAD + 1, True
            super().micro(staged, micro_batch_id)

        def update(self, hyper: Any, tag: Any = None) -> None:
            super().update(hyper, tag)
            self.begun = False

        def finished(self, wait: bool = False) -> Any:
            count = len(self.done) if wait else max(self.ready, len(self.done) - kept)
            out, self.done = self.done[:count], self.done[count:]
            return out

    pipeline.HostPipeline = Late  # type: ignore[misc]


def patch(request: dict[str, Any], rank: int) -> None:
    for place, value in {**request.get("constants", {}), **request.get("own", {}).get(str(rank), {})}.items():
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(module), name, value)


def rank_main(request: dict[str, Any], rank: int) -> int:
    """`graftune ...`, or what `main` of a module does, as one rank, its output in a log of its own."""
    from graftune.cli import main

    fork_server.write_output_to(f"{request['log']}-{rank}", os.O_APPEND)
    patch(request, rank)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and str(rank) in request.get("misbehave", {}):
        misbehave(*request["misbehave"][str(rank)])
    if str(rank) in request.get("folders", {}):
        os.chdir(request["folders"][str(rank)])
    line = request.get("lines", {}).get(str(rank), request["line"])
    try:
        return importlib.import_module(request["module"]).main(*line) if "module" in request else main(line)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def forked(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        if request["size"]:
            size = str(request["size"])
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"])}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ |= where | request.get("environment", {}).get(str(rank), {})
        code = rank_main(request, rank)
    finally:
        os._exit(code)


def agent_worker(request: dict[str, Any]) -> None:
    sys.exit(rank_main(request, int(os.environ["RANK"])))


def agent(request: dict[str, Any]) -> int:
    """torchrun's agent over forked workers."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=request["size"],
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=request["restarts"],
            monitor_interval=0.1,
            start_method="fork",
        )
        try:
            elastic_launch(config, agent_worker)(request)
            code = 0
        except ChildFailedError:
            code = 1
    finally:
        os._exit(code)


def serve() -> None:
    fork_server.prepare("torch.distributed.launcher.api")
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("here"):
            print(json.dumps({"pids": [os.getpid()]}), flush=True)
            print(json.dumps({"ends": [[fork_server.here(partial(rank_main, request, 0)), 0.0]]}), flush=True)
            continue
        if "module" in request:
            importlib.import_module(request["module"])  # here, so that every rank has it
        if "restarts" in request:
            pids = [agent(request)]
        else:
            pids = [forked(request, rank) for rank in range(request["size"] or 1)]
        print(json.dumps({"pids": pids}), flush=True)
        left, ends, began = dict.fromkeys(pids), {}, time.monotonic()
        while left:
            pid, status = os.waitpid(-1, 0)
            if pid in left:
                del left[pid]
                ends[pid] = [os.waitstatus_to_exitcode(status), time.monotonic() - began]
        print(json.dumps({"ends": [ends[pid] for pid in pids]}), flush=True)


if __name__ == "__main__":
    serve()
