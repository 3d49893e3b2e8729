"""How a step is timed, the same for everyone, and when a time is refused.

Wall clock with a synchronisation around each step, median of `steps`; the peak is the allocator's over all steps, the
first included. Then as many steps again without a synchronisation between them, timed by events. Ours is then timed
once more behind two seconds of steps (`ms_sustained`): the floor is timed so, and in that time the clocks fall. A loss,
a gradient norm and a proof that every trained tensor moved go with every time: without them there is no time. Losses of
two participants are to be compared at the same step (`losses`). Where workers run beside each other (turns.py) the
steps are timed when all others stand still; what the start took is then left out.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import turns

WARM_UP, WARM_UP_MOST = 3, 10
SUSTAIN_S = 2.0
WARM_AGAIN = 2  # steps between getting a turn and being timed: the card and its caches were somebody else's
STILL_WARMING = 1.2  # a step this much faster than the one before it: compilers and caches are not done yet
STARTED = "STEP_STARTED"  # the moment the parent started this process, in the environment


@dataclass
class Runner:
    """One participant, ready to step."""

    step: Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # batch number -> loss, gradient norm; both on the device
    trained: Callable[[], Iterable[torch.Tensor]]
    note: str = ""


def measure(
    runner: Runner,
    tokens: int,
    device: torch.device,
    steps: int,
    started: float,
    watch_syncs: bool = False,
    sustain: float = 0.0,
) -> dict[str, Any]:
    """`started` (time.time) is when the participant's process began, or, of several cases in one, its case. With
    `watch_syncs` the steps without a synchronisation between them are searched for some that they do themselves.
    `sustain`: seconds of steps before those that are timed, for clocks as low as the floor's (in sweeps)."""
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

    def load(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            timed()

    last = timed()
    start_s = time.time() - started
    for index in range(1, WARM_UP_MOST):
        seconds = timed()
        settled, last = seconds * STILL_WARMING > last, seconds
        if index + 1 >= WARM_UP and settled:
            break
    with turns.turn() as shared:
        for _ in range(WARM_AGAIN if shared else 0):
            timed()
        load(sustain)
        warm = len(walls)
        for _ in range(steps):
            timed()
        stop = len(walls)
        device_ms, syncs = _back_to_back(runner, reports, device, steps, watch_syncs)
        more = {"sustained_s": sustain} if sustain else {}
        if watch_syncs and not sustain and device.type == "cuda":
            load(SUSTAIN_S)
            more = {"ms_sustained": round(1e3 * statistics.median(timed() for _ in range(steps)), 3)}
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    after = fingerprints(runner.trained())
    losses, norms = ([float(report[i]) for report in reports] for i in (0, 1))
    moved = sum(a != b for a, b in zip(before, after, strict=True)) / max(1, len(before))
    seconds = statistics.median(walls[warm:stop])
    figures = {
        "ms": round(1e3 * seconds, 3),
        "ms_least": round(1e3 * min(walls[warm:stop]), 3),
        "ms_most": round(1e3 * max(walls[warm:stop]), 3),
        "device_ms": device_ms,
        "host_ms": round(1e3 * statistics.median(hosts[warm:stop]), 3),
        "syncs": syncs,
        "tok_s": round(tokens / seconds, 1),
        "peak_gib": None if peak is None else round(peak / 2**30, 2),
        "start_s": None if shared else round(start_s, 1),
        "first_step_s": None if shared else round(walls[0], 1),
        "steps": steps,
        "losses": {str(step): round(losses[step - 1], 5) for step in (1, 5, 10) if step <= len(losses)},
    } | more
    return judged(figures, losses, norms, moved) | ({"note": runner.note} if runner.note else {})


def judged(figures: dict[str, Any], losses: Sequence[float], norms: Sequence[float], moved: float) -> dict[str, Any]:
    """The figures with their proof, or, where nothing was trained, the reason why there are none."""
    proof: dict[str, float | None] = {
        "loss_first": round(losses[0], 5),
        "loss_last": round(losses[-1], 5),
        "grad_norm_first": round(norms[0], 6),
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
    runner: Runner,
    reports: list[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    steps: int,
    watch_syncs: bool,
) -> tuple[float | None, int | None]:
    """(ms per step by the device's clock, synchronisations of all steps where they are watched)"""
    if device.type != "cuda":
        return None, None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def all_steps() -> None:
        begin.record()
        for _ in range(steps):
            reports.append(runner.step(len(reports)))
        end.record()

    syncs = None
    if watch_syncs:
        syncs = counted_syncs(all_steps)
    else:
        all_steps()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) / steps, 3), syncs


def counted_syncs(call: Callable[[], None]) -> int:
    """How often torch waits for the device within the call, as far as torch says so: copies to the host, .item() and
    their like. A wait for an event is not among them."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # or a place is told once
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def process_start() -> float:
    return float(os.environ.get(STARTED, 0) or time.time())
