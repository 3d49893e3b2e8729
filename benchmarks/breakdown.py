"""Where a step's time goes, beside its floor: device time by kind of kernel, the gaps, and what ran beside.

    python -m benchmarks.breakdown CASE[,CASE...] [--json FILE] [--device cuda]

Our step and the floor's graph, one after the other in this process, are each repeated until the clocks settle, timed,
and profiled for a few steps; the step with the median span is shown. `ms` is the time without the profiler, which slows
small steps down: shares are to be taken from the profile, times from `ms`.

Times of kernels add up to more than the span where kernels overlap. A profiler numbers the branches of a graph as it
likes, and a chain may change its number half-way: `busy` (some kernel ran) and `overlapped` (all kernels' time less
that) hold whatever the numbers are; `main` is the stream with the most time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import Case, parse, participants
from benchmarks.floor import Floor, packed_bytes, plan
from benchmarks.graph import forget
from benchmarks.measure import synchronise
from benchmarks.ours import ours
from benchmarks.replay import captured

from benchmarks import report

STEPS, SUSTAIN_S = 5, 2.0
# The first that matches. Flash kernels have CUTLASS in their names too, so attention comes before products.
RULES = (
    ("attention", r"cudnn.*sdpa|cudnn::fusion|flash|fmha|^_(delta|grads)$"),
    ("products", r"nvjet|cublas|cutlass|gemm|gemv|splitk|^_(multiply|add_products)$"),
    ("adapters", r"^_(columns|both|add|rows)$"),
    ("norms", r"^_(norm|norm_backward|apply)$"),
    ("rope", r"^_(finish|finish_backward|rope_backward)$"),
    ("swiglu", r"^_(act|act_backward)$"),
    ("loss", r"a^"),  # has no name of its own
    (
        "codes",
        r"^_(dequantise|dequantise_odd|encode|floats|legacy|i?q\d_\w+|quantise|lay|transpose|measure|figures|settle)$",
    ),
    ("codes", r"^_(beside|below)$|neg_kernel"),
    ("update", r"^_(adamw|square_sums|decide|spread)$"),
    ("copies", r"memcpy|memset|^set_words$|gather|scatter|copy|fill|index"),
)
KINDS = (*dict.fromkeys(kind for kind, _ in RULES), "other")
SAID = {
    "products": "products (base, head)",
    "adapters": "adapters' thin products",
    "loss": "cross entropy",
    "codes": "dequantisation, codes",
    "copies": "copies, fills",
}
HOST = re.compile(r"HtoD|DtoH", re.I)
GATED = ("_forward", "_backward")  # names that SwiGLU's kernels share with the norms', and one with attention's
ROWS_TILE = 64  # tokens of a program of the adapters' `_rows`


Figures = dict[str, Any]


class Kernel(NamedTuple):
    """Something that ran on the device; times in microseconds."""

    name: str
    start: float
    us: float
    stream: int = 0
    grid: tuple[int, int, int] = (1, 1, 1)
    threads: int = 0

    @property
    def end(self) -> float:
        return self.start + self.us


def kind_of(kernel: Kernel, case: Case, *, floor: bool = False) -> str:
    """By name; several of ours are called alike and are told apart by how they are launched for this case."""
    name, grid = kernel.name, kernel.grid
    if name in GATED:
        from graftune.kernels.swiglu.kernel import COLUMNS, WARPS

        if name == "_forward" and grid[1] == case.shape.heads:
            return "attention"
        gated = (grid[1], kernel.threads) == (-(-case.shape.ffn // COLUMNS), 32 * WARPS)
        return "swiglu" if gated else "norms"
    if name == "_rows" and grid[1:] == (1, 1) and grid[0] > -(-case.micro_tokens // ROWS_TILE):
        return "loss"  # a program a row of logits
    kind = next((kind for kind, rule in RULES if re.search(rule, name, re.I)), "other")
    if kind == "adapters" and case.method == "full":
        return "norms"  # whose weights' gradients are summed by the same kernel
    if kind == "copies" and floor and packed_bytes(case):
        return "codes"  # stands for them
    return kind


def read(trace: dict[str, Any]) -> list[Kernel]:
    """The device's events of a profile."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            args = event["args"]
            x, y, z = args.get("grid", (1, 1, 1))
            threads = args.get("block", (0, 0, 0))[0]
            found.append(
                Kernel(event["name"], event["ts"], event["dur"], int(args.get("stream", 0)), (x, y, z), threads)
            )
    return found


def divided(kernels: Iterable[Kernel], steps: int) -> list[list[Kernel]]:
    """One list a step. All steps launch the same kernels; copies from and to the host come when they like, and go with
    the step they began in. What is left over at the beginning, before the first whole step, is dropped."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    own = [kernel.start for kernel in ordered if not HOST.search(kernel.name)]
    each = len(own) // steps
    if not each:
        return []
    firsts = own[len(own) - each * steps :: each]
    groups: list[list[Kernel]] = [[] for _ in firsts]
    for kernel in ordered:
        if (at := bisect_right(firsts, kernel.start) - 1) >= 0:
            groups[at].append(kernel)
    return groups


def span(kernels: Sequence[Kernel]) -> tuple[float, float]:
    own = [kernel for kernel in kernels if not HOST.search(kernel.name)]
    return min(kernel.start for kernel in own), max(kernel.end for kernel in own)


def busy(kernels: Sequence[Kernel], begin: float, end: float) -> float:
    """Microseconds between the two in which something ran."""
    total, until = 0.0, begin
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        stop = min(kernel.end, end)
        total += max(0.0, stop - max(kernel.start, until))
        until = max(until, stop)
    return total


def figures(kernels: Sequence[Kernel], case: Case, *, floor: bool = False) -> dict[str, Any]:
    """Of one step."""
    begin, end = span(kernels)
    kinds = [kind_of(kernel, case, floor=floor) for kernel in kernels]
    by_stream: defaultdict[int, float] = defaultdict(float)
    unknown: defaultdict[str, float] = defaultdict(float)
    for kernel, kind in zip(kernels, kinds, strict=True):
        by_stream[kernel.stream] += kernel.us
        if kind == "other":
            unknown[kernel.name] += kernel.us
    main = max(by_stream, key=lambda stream: by_stream[stream])
    beside = [(kernel, kind) for kernel, kind in zip(kernels, kinds, strict=True) if kernel.stream != main]
    total, worked = sum(kernel.us for kernel in kernels), busy(kernels, begin, end)
    longest = sorted(unknown, key=lambda name: -unknown[name])[:8]
    return {
        "span_ms": _ms(end - begin),
        "busy_ms": _ms(worked),
        "idle_share": round(1 - worked / (end - begin), 4),
        "overlapped_ms": _ms(total - worked),
        "main_ms": _ms(by_stream[main]),
        "beside_ms": _ms(total - by_stream[main]),
        "streams": len(by_stream),
        "kinds": _summed(zip(kernels, kinds, strict=True)),
        "beside": _summed(beside),
        "other": {name[:120]: _ms(unknown[name]) for name in longest},
    }


def _summed(pairs: Iterable[tuple[Kernel, str]]) -> dict[str, dict[str, Any]]:
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kernel, kind in pairs:
        times[kind].append(kernel.us)
    return {kind: {"ms": _ms(sum(each)), "launches": len(each)} for kind, each in times.items() if each}


def _ms(us: float) -> float:
    return round(us / 1e3, 4)


def profiled(step: Callable[[], Any], steps: int) -> list[Kernel]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):  # the first profile of a process may miss kernels
        step()
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as kept:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="breakdown-") as folder:
        path = Path(folder) / "trace.json"
        kept.export_chrome_trace(str(path))
        return read(json.loads(path.read_text()))


def observed(step: Callable[[], Any], case: Case, device: torch.device, *, floor: bool, sustain: float) -> Figures:
    """Figures of the median step; on a CPU there are no kernels, and the time is all."""
    until = time.perf_counter() + sustain
    for index in itertools.count():
        step()
        synchronise(device)
        if index >= 2 and time.perf_counter() > until:
            break
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronise(device)
    found: dict[str, Any] = {"ms": round(1e3 * (time.perf_counter() - begin) / STEPS, 3)}
    groups = divided(profiled(step, STEPS), STEPS) if device.type == "cuda" else []
    if groups:
        widths = sorted(groups, key=lambda group: span(group)[1] - span(group)[0])
        found |= figures(widths[len(widths) // 2], case, floor=floor)
    return found


def our_step(case: Case, device: torch.device, sustain: float) -> dict[str, Any]:
    runner, index = ours(case, device), itertools.count()
    return observed(lambda: runner.step(next(index)), case, device, floor=False, sustain=sustain) | {
        "note": runner.note
    }


def the_floor(case: Case, device: torch.device, sustain: float) -> dict[str, Any]:
    floor = Floor(case, device)
    work = partial(floor.run, plan(case, own=False) * case.micro)
    step = captured(work).replay if device.type == "cuda" else work
    note = {"note": f"attention: {floor.attention.name}"}
    return observed(step, case, device, floor=True, sustain=sustain) | note


def broken_down(name: str, device: torch.device, sustain: float = SUSTAIN_S) -> dict[str, Any]:
    """The case's record; without a floor where it has none."""
    case = parse(name)
    found = {"ours": our_step(case, device, sustain)}
    forget()
    if "floor" in participants(case):
        found["floor"] = the_floor(case, device, sustain)
        forget()
    return {"table": table(found)} | found


def table(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a kind that either has."""
    rows = []
    for kind in KINDS:
        row: dict[str, Any] = {"kind": kind}
        for who, its in found.items():
            cell = its.get("kinds", {}).get(kind, {"ms": 0.0, "launches": 0})
            row |= {f"{who}_ms": cell["ms"], f"{who}_launches": cell["launches"]}
        if any(value for key, value in row.items() if key != "kind"):
            rows.append(row)
    return rows


def said(name: str, record: dict[str, Any]) -> str:
    """The record in lines."""
    who = [one for one in ("ours", "floor") if one in record]
    lines = [f"{name}: " + ", ".join(f"{one} {record[one]['ms']:.2f} ms ({record[one]['note']})" for one in who)]
    lines.append(f"{'':26}" + "".join(f"{one + ' ms':>12}{'launches':>10}" for one in who))
    for row in record["table"]:
        cells = "".join(f"{row[f'{one}_ms']:12.3f}{row[f'{one}_launches']:10}" for one in who)
        lines.append(f"{SAID.get(row['kind'], row['kind']):26}{cells}")
    for one in who:
        its = record[one]
        if "span_ms" not in its:
            lines.append(f"{one}: nothing ran on a GPU")
            continue
        lines.append(
            f"{one}: span {its['span_ms']:.3f} ms, main stream {its['main_ms']:.3f} ms, idle "
            f"{100 * its['idle_share']:.1f}%, beside on {its['streams'] - 1} other streams {its['beside_ms']:.3f} ms, "
            f"overlapped {its['overlapped_ms']:.3f} ms"
        )
        if its["beside"]:
            lines.append("  beside: " + ", ".join(f"{SAID.get(k, k)} {v['ms']:.3f}" for k, v in its["beside"].items()))
        if its["other"]:
            lines.append("  other: " + ", ".join(f"{n} {ms:.3f}" for n, ms in its["other"].items()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", help="case names with commas between them; see benchmarks/cases.py")
    parser.add_argument("--json", default="", help="where the record goes")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu (for the tests)")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    parser.add_argument("--sustain", type=float, default=SUSTAIN_S, help="seconds of steps before anything is timed")
    asked = parser.parse_args()
    names = [name for name in asked.cases.split(",") if name]
    try:
        for name in names:
            parse(name)
    except ValueError as error:
        parser.error(str(error))
    device = torch.device(asked.device)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "",
        "torch": torch.__version__,
        "commit": asked.commit or report.commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "breakdown": {},
    }
    for name in names:
        result["breakdown"][name] = broken_down(name, device, asked.sustain)
        print(said(name, result["breakdown"][name]) + "\n", flush=True)
        if asked.json:
            report.write(Path(asked.json), result)  # after every case: one that fails takes none with it
    return 0


if __name__ == "__main__":
    sys.exit(main())
