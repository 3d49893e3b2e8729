"""How a step is timed, the same for everyone, when a time is refused, and how a record is kept.

Wall clock with a synchronisation around each step, median of `steps`; the peak is the allocator's over all steps, the
first included. Then as many steps again without a synchronisation between them, timed by events. Ours is timed once
more after two seconds of steps (`ms_sustained`): the floor is timed so, and in that time the clocks fall. A loss, a
gradient norm and a proof that every trained tensor moved go with every time: without them there is no time.

All benchmarks of one GPU share a JSON (benchmarks/results/GPU.json): each writes a part of its own, with the commit,
the date and the versions it was measured with, and leaves the other parts as they are.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from graftune.io.files import write_file

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WARM_UP, WARM_UP_MOST = 3, 10
SUSTAIN_S = 2.0
STILL_WARMING = 1.2  # a step this much faster than the one before it: compilers and caches are not done yet
STARTED = "STEP_STARTED"  # environment variable: the moment at which the parent started this process
PACKAGES = (
    "transformers", "peft", "liger-kernel", "unsloth", "unsloth_zoo", "bitsandbytes", "trl", "nvidia-cudnn-frontend"
)  # fmt: skip


@dataclass
class Runner:
    """One participant, ready to step."""

    step: Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # batch number -> loss, gradient norm; both on the device
    trained: Callable[[], Iterable[torch.Tensor]]
    note: Callable[[], str] = lambda: ""


def measure(
    runner: Runner, tokens: int, device: torch.device, steps: int, *, ours: bool = False, sustain: float = SUSTAIN_S
) -> dict[str, Any]:
    """Figures of one participant. Of ours, synchronisations within the steps are counted too, and the time after
    `sustain` seconds of load is taken."""
    started = float(os.environ.get(STARTED, 0) or time.time())
    before = fingerprints(runner.trained())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    reports: list[tuple[torch.Tensor, torch.Tensor]] = []
    walls: list[float] = []
    hosts: list[float] = []

    def timed() -> float:
        synchronise(device)
        begin = time.perf_counter()
        reports.append(runner.step(len(reports)))
        hosts.append(time.perf_counter() - begin)
        synchronise(device)
        walls.append(time.perf_counter() - begin)
        return walls[-1]

    last = timed()
    start_s = time.time() - started
    for index in range(1, WARM_UP_MOST):
        seconds = timed()
        settled, last = seconds * STILL_WARMING > last, seconds
        if index + 1 >= WARM_UP and settled:
            break
    warm = len(walls)
    for _ in range(steps):
        timed()
    stop, more = len(walls), dict[str, Any]()
    if device.type == "cuda":
        more = _back_to_back(runner, reports, steps, ours)
        if ours:
            end = time.perf_counter() + sustain
            while time.perf_counter() < end:
                timed()
            more["ms_sustained"] = round(1e3 * statistics.median(timed() for _ in range(steps)), 3)
        more["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    after = fingerprints(runner.trained())
    losses, norms = ([float(report[i]) for report in reports] for i in (0, 1))
    moved = sum(a != b for a, b in zip(before, after, strict=True)) / max(1, len(before))
    seconds = statistics.median(walls[warm:stop])
    figures = {
        "ms": round(1e3 * seconds, 3),
        "ms_least": round(1e3 * min(walls[warm:stop]), 3),
        "ms_most": round(1e3 * max(walls[warm:stop]), 3),
        "host_ms": round(1e3 * statistics.median(hosts[warm:stop]), 3),
        "tok_s": round(tokens / seconds, 1),
        "start_s": round(start_s, 1),
        "steps": steps,
        "losses": {str(step): round(losses[step - 1], 5) for step in (1, 5, 10) if step <= len(losses)},
    }
    return judged(figures | more, losses, norms, moved) | ({"note": note} if (note := runner.note()) else {})


def judged(figures: dict[str, Any], losses: Sequence[float], norms: Sequence[float], moved: float) -> dict[str, Any]:
    """The figures with their proof, or, where nothing was trained, the reason why there are none."""
    proof: dict[str, float | None] = {
        "loss_first": round(losses[0], 5),
        "loss_last": round(losses[-1], 5),
        "grad_norm": round(norms[-1], 6),
        "moved": round(moved, 4),
    }
    reasons = []
    if not all(map(math.isfinite, [*losses, *norms])):
        reasons.append("a loss or gradient norm is not finite")
        proof = {k: v if v is not None and math.isfinite(v) else None for k, v in proof.items()}
    elif not all(norm > 0 for norm in norms):
        reasons.append("a gradient norm is 0")
    if moved < 1:
        reasons.append("the trained weights did not move" if moved == 0 else "some trained weights did not move")
    return {"refused": "no gradient: " + " and ".join(reasons)} | proof if reasons else figures | proof


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[tuple[float, float]]:
    """Sum and norm of each tensor in double precision; no copy of a weight is kept."""
    with torch.no_grad():
        pairs = [
            torch.stack((t.sum(dtype=torch.float64), torch.linalg.vector_norm(t, dtype=torch.float64))) for t in tensors
        ]
        return [(a, b) for a, b in torch.stack(pairs).tolist()] if pairs else []


def _back_to_back(
    runner: Runner, reports: list[tuple[torch.Tensor, torch.Tensor]], steps: int, watched: bool
) -> dict[str, Any]:
    """Milliseconds of a step by the device's clock and, where they are watched, synchronisations of all steps."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def all_steps() -> None:
        begin.record()
        for _ in range(steps):
            reports.append(runner.step(len(reports)))
        end.record()

    found: dict[str, Any] = {"syncs": counted_syncs(all_steps)} if watched else {}
    if not watched:
        all_steps()
    torch.cuda.synchronize()
    return found | {"device_ms": round(begin.elapsed_time(end) / steps, 3)}


def counted_syncs(call: Callable[[], None]) -> int:
    """How often torch says that it waits for the device within the call: copies to the host, .item() and their like. A
    wait for an event is not among them."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # otherwise each place warns once
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# Records


def facts(commit: str = "") -> dict[str, Any]:
    """What a figure was measured with."""
    found: dict[str, Any] = {
        "commit": commit or git_commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cudnn": str(torch.backends.cudnn.version())}
        found |= versions(("triton", "nvidia-cudnn-frontend"))
    return found


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Of the packages that are installed here."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str:
    """Of the code that is measured; empty where there is no repository."""
    try:
        asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return asked.stdout.strip()


def default_record() -> Path:
    """The JSON of this machine's GPU, or of its processor."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu-{platform.machine()}"
    return RESULTS / (re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-") + ".json")


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def keep(where: str, part: str, found: Mapping[str, Any]) -> None:
    """Put a part into the record at `where` (`-`: print it), beside what the record holds; entries of a part that
    holds several (cases, curves) are replaced one by one. Nothing is written where `where` is empty."""
    if not where:
        return
    if where == "-":
        print(json.dumps({part: found}))
        return
    path = Path(where)
    record = read(path)
    record[part] = record.get(part, {}) | dict(found)
    if torch.cuda.is_available():
        record = {"gpu": torch.cuda.get_device_name()} | record
    write(path, record)


def write(path: Path, record: Mapping[str, Any]) -> None:
    """A run that is cut off leaves the last whole record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1)
    flat = re.sub(r"\[[-\d.e,\s]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)  # numbers in one line
    write_file(path, flat + "\n")


def cap(memory: str, device: torch.device) -> None:
    """Have torch's allocator refuse what a card with so much memory would not have; empty: all there is."""
    from graftune.observe.memory import parse_bytes

    if memory and device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_bytes(memory) / total), device.index or 0)


def goal(what: str, rule: str, bound: float, value: Any) -> dict[str, Any]:
    """One thing to reach: what, the bound, what it is, and whether that will do (None: not measured)."""
    met = None if value is None else bool(value <= bound if rule == "at most" else value >= bound)
    return {"what": what, "rule": rule, "bound": bound, "is": value, "met": met}


def said(found: Mapping[str, Any]) -> str:
    """A goal in one line."""
    verdict = {True: "reached", False: "NOT reached", None: "not measured"}[found["met"]]
    shown = "-" if found["is"] is None else f"{found['is']:g}"
    return f"{found['what']:42}{shown:>9}  {found['rule']} {found['bound']:g}: {verdict}"
