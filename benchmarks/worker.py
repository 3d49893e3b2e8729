"""A worker of step.py: one participant of one or more cases, in a process of its own."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, measure, peers, report

HELD = 256 << 20  # bytes that a case may leave on the card: libraries keep some


def work(options: argparse.Namespace) -> None:
    """What it has goes to disk after each case."""
    out = Path(options.out)
    started = measure.process_start()
    left: dict[str, Any] = {"facts": {}, "cases": {}}
    for name in options.cases:
        found = one_case(options, cases.parse(name), started)
        left["facts"] = versions()
        left["cases"][name] = found
        report.write(out, left)
        gc.collect()
        started = time.time()
        held = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        if held > HELD and name != options.cases[-1]:
            raise RuntimeError(f"{held / 2**30:.1f} GiB of {name} are held still: the next case's peak would be wrong")


def one_case(options: argparse.Namespace, case: cases.Case, started: float) -> dict[str, Any]:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if options.worker == "floor":
        from benchmarks.floor import measure_floor

        own = not (options.swept or options.plain_floor)
        return measure_floor(case, device, options.steps, options.sustain, own=own)
    folder, imported_s = Path(options.folder) if options.folder else None, time.time() - started
    if options.worker == "folder":
        assert folder is not None
        peers.write_folder(case.shape, folder, device)
        return {}
    if options.worker == "ours":
        from benchmarks.ours import ours

        runner = ours(case, device)
    else:
        runner = peers.build(options.worker, case, peers.Place(device, folder))
    sustain = options.sustain if options.swept else 0.0
    figures = measure.measure(runner, case.tokens, device, options.steps, started, options.worker == "ours", sustain)
    return {options.worker: figures | {"imports_s": round(imported_s, 1)}}


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "peers": peers.versions()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cudnn": str(torch.backends.cudnn.version())}
    if importlib.util.find_spec("triton") is not None:
        import triton

        found["triton"] = triton.__version__
    return found
