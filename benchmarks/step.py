"""One optimizer step on a GPU: ours, beside the floor and the peers in the same run.

    python benchmarks/step.py [CASE ...] [--who floor,ours,eager,api,peft,liger,liger-bf16,unsloth,hf,hf-compiled]
    python benchmarks/step.py 8b-4x2048 1b-1x512 --who ours,ranked
    python benchmarks/step.py 1b-4x512 8b-4x2048 --who floor,ours,profile
    python benchmarks/step.py 8b-dpo-4x1024 8b-8x1024=ours --who floor,ours,trl,trl-none,trl-liger-bf16,unsloth
    python benchmarks/step.py 8b-4x2048 8b-nf4-4x2048-full --json benchmarks/results/h200.json
    python benchmarks/step.py 8b-nf4-4x2048 8b-nf4-host-4x2048 8b-4x2048 8b-shard-4x2048 --who ours
    python benchmarks/step.py --sweep tokens,rank,layers,documents --steps 3 --json FILE

Every participant of every case runs in a process of its own, one after another, under a time limit: one that crashes
or is not installed is reported with its last line, and the others go on. cases.py defines the cases, measure.py times
them and refuses times that cannot be right, floor.py measures the floor, and peers.py and pair_peers.py set up the
other tools. `eager` is ours without CUDA graphs, `ranked` ours as the one rank of a run under torchrun (its all-reduce
is in the graph), `api` a loop written with the Python API, and `profile` ours by operation
(src/graftune/training/profiler.py): how much of the step is attributed, what profiling adds to it, and its speed as a
run says it live, beside the floor.
Peers come from PYTHONPATH; for participants called trl, PYTHONPATH_TRL goes before it, so that peers which need
different versions of one package run in one call. Only ratios of one call count: machines of one kind differ by 2 to
3%. With --json the cases go into a GPU's record (measure.py), after every case; --json - prints them. The exit code is
1 where a case failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import BATCHES, Case
from benchmarks.random_bases import base_of
from benchmarks.synthetic import dataset_of

from benchmarks import cases, measure

if TYPE_CHECKING:
    from graftune.batch import PackedBatch
    from graftune.data.encoded import Examples
    from graftune.dist.world import World
    from graftune.session import Session, SessionParts
    from graftune.weights.base import Base

DEFAULT = ("1b-1x512", "1b-4x2048", "8b-1x512", "8b-4x2048", "350m-full-4x512x4")
Found = dict[str, dict[str, Any]]


def opened(case: Case, device: torch.device, *, ranked: bool = False, base: Base | None = None, **more: Any) -> Session:
    """The case's random base, or the one that is given, with adapters, placed as a run places it. `ranked`: as the one
    rank of a run."""
    from graftune.runtime import resolve, set_up
    from graftune.session import open_session
    from graftune.weights.placement import choose_placement

    set_up(device)
    torch.manual_seed(0)
    config, base, placement = case.config(device, **more), base or base_of(case, device), None
    world = alone() if ranked or case.where == "shard" else None
    if world is not None:
        world.attach(device)
    if case.method == "lora" and device.type == "cuda":
        runtime = resolve(str(device), config.base.compute_dtype)
        free, table = torch.cuda.mem_get_info(device)[0], config.base.embedding_on
        placement = choose_placement(base, config.base.base_dtype, runtime, free, table)
        placement = placement.placed_at(case.where == "host", 1 if case.where == "shard" else 0)
    return open_session(config, base=base, placement=placement, world=world)


def alone() -> World:
    """A world of one rank, as torchrun makes it of one process."""
    from graftune.dist.world import connect, join
    from graftune.ranks import Ranks

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = Ranks(0, 1, 0, 1, "127.0.0.1", port)
    return join(ranks, *connect(ranks))


def ours(case: Case, device: torch.device, *, graph: bool = True, ranked: bool = False) -> measure.Runner:
    return hot_loop(case, device, graph=graph, ranked=ranked)[1]


def hot_loop(
    case: Case, device: torch.device, *, graph: bool = True, ranked: bool = False
) -> tuple[Session, measure.Runner]:
    """The hot loop of a run, batches staged by a thread as its loader does."""
    session = opened(case, device, ranked=ranked, graph=graph)
    arena, loop, step = session.parts.arena, session.parts.pipeline, session.parts.step
    batches = packed(case, session.parts)
    loop.bound_documents(case.length)
    hyper = case.hyper | {"divisor": sum(micro.divisor for micro in batches[0])}

    def staged(index: int) -> list[Any]:
        return [loop.stage(micro) for micro in batches[index % BATCHES]]

    loader = ThreadPoolExecutor(1)
    coming = loader.submit(staged, 0)

    def one(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal coming
        now = coming.result()
        loop.step(now, hyper, [0] * len(now))
        loss, norm, _ = step.report[:3].clone().unbind()
        loop.finished()
        coming = loader.submit(staged, index + 1)  # last: a thread that wakes takes the interpreter from us
        return loss, norm

    def note() -> str:
        how = "captured" if graph and device.type == "cuda" else "eager"
        where = session.runtime.describe()
        return f"{where}; attention {step.backend}; {how}; base {case.base} on {case.where}; recompute {case.recompute}"

    return session, measure.Runner(one, lambda: [arena.view(name, arena.weights) for name in arena.slots], note)


def packed(case: Case, parts: SessionParts) -> list[list[PackedBatch]]:
    """[batch][micro]: exact shapes, or, where lengths are drawn, whole tiles as a run has them."""
    from graftune.data import pack

    examples, count = held(case, parts), len(case.lengths)
    layout = parts.loss.layout(examples)
    answers = [length - prompt for length, prompt in zip(case.lengths, case.prompts, strict=True)]
    fixed = pack.capacities([range(count)], case.lengths, answers) if case.drawn else None
    starts = range(0, len(examples), count)
    bins = [pack.pack(examples[start : start + count], layout=layout, shape=fixed) for start in starts]
    return [bins[start : start + case.micro] for start in range(0, len(bins), case.micro)]


def held(case: Case, parts: SessionParts) -> Examples:
    """All documents of a case, with the reference's log-probabilities if they are stored."""
    from graftune.session.references import with_references
    from graftune.step.evaluate import reference_pass

    documents = [one for batch in cases.documents(case) for micro in batch for one in micro]
    examples = dataset_of(documents, kind=parts.loss.data).examples
    if case.reference != "stored":
        return examples
    examples = with_references(examples, parts.loss, parts.config.train)
    column, backend = examples.store.reference, parts.attention.backend
    assert column is not None
    found = reference_pass(parts.decoder, examples, parts.loss, capacity=case.micro_tokens, backend=backend)
    column[examples.stored] = found.cpu().numpy()
    return examples


def profile(case: Case, device: torch.device, steps: int, sustain: float) -> dict[str, Any]:
    """The time of a step by phase, and the speed that a run would report. Refuses a profile that is not reliable."""
    from graftune.observe.speed import Meter
    from graftune.training.profiler import profiled

    session, runner = hot_loop(case, device)
    numbers = count()
    document = profiled(session.parts.pipeline, lambda: _drop(runner.step(next(numbers))), device, steps).document()
    meter, end = Meter(1 << 30), time.perf_counter() + sustain
    ends: list[torch.cuda.Event] = []
    done = 0
    while time.perf_counter() < end or done < 2 * steps:
        runner.step(next(numbers))
        if device.type == "cuda":
            ends.append(torch.cuda.Event())
            ends[-1].record()
            if len(ends) == 1:
                continue
            ends.pop(0).synchronize()  # as a run does: a step is heard of when it has ended, the next being sent
        done += 1
        meter.update(done, case.tokens)
    off = document["step_ms"] / document["plain_ms"] - 1
    figures = {name: round(document[name], 4) for name in ("owned", "step_ms", "plain_ms")}
    figures |= {"ms": round(document["plain_ms"], 3), "tok_s": round(case.tokens / document["plain_ms"] * 1e3, 1)}
    figures |= {"profile_adds": round(off, 4), "turns": document["turns"], "eager_ms": document["eager_ms"]}
    figures |= {"live_ms": round(case.tokens / meter.tok_s * 1e3, 3), "bottleneck": document["bottleneck"]}
    figures |= {"phases": {row["name"]: round(row["ms"], 3) for row in document["phases"]}}
    reasons = [f"{document['owned']:.1%} of the step has an owner"] if document["owned"] < 0.95 else []
    reasons += [f"profiling adds {off:.1%}"] if abs(off) > 0.05 and device.type == "cuda" else []
    return (
        figures
        if not reasons
        else {"refused": " and ".join(reasons), **{n: v for n, v in figures.items() if n != "ms"}}
    )


def _drop(figures: object) -> None:
    """A step's figures, which a profile does not read."""


def api(case: Case, device: torch.device) -> measure.Runner:
    """A loop written with the Python API over the same data: loader, staging and figures are the session's own."""

    session = opened(case, device, epochs=1.0)
    arena = session.parts.arena
    data = dataset_of([row for batch in cases.documents(case) for micro in batch for row in micro] * 64)
    batches = (batch for _ in count() for batch in session.batches(data))
    given = case.hyper

    def one(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        session.forward_backward(next(batches))
        session.optim_step(**given)
        loss, norm, _ = session.parts.step.report[:3].clone().unbind()
        return loss, norm

    def note() -> str:
        return f"{session.runtime.describe()}; attention {session.parts.step.backend}; the Python API; base {case.base}"

    return measure.Runner(one, lambda: [arena.view(name, arena.weights) for name in arena.slots], note)


def work(who: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One participant of one case, in this process."""
    case, device = cases.parse(name), torch.device(options.device)
    measure.cap(options.memory, device)
    if who == "floor":
        from benchmarks.floor import measure_floor

        return measure_floor(case, device, options.steps, options.sustain)
    if who in ("ours", "eager", "ranked"):
        runner = ours(case, device, graph=who != "eager", ranked=who == "ranked")
    elif who == "profile":
        return profile(case, device, options.steps, options.sustain)
    elif who == "api":
        runner = api(case, device)
    else:
        from benchmarks import peers

        runner = peers.build(who, case, device)
    return measure.measure(
        runner, case.tokens, device, options.steps, ours=who in ("ours", "ranked"), sustain=options.sustain
    )


def apart(who: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own; its error where it has no figures."""
    with tempfile.TemporaryDirectory(prefix="step-") as folder:  # Unsloth compiles into the folder where it stands
        words = [sys.executable, str(Path(__file__).resolve()), name, "--worker", who, "--out", f"{folder}/out.json"]
        words += ["--steps", str(options.steps), "--sustain", str(options.sustain), "--device", options.device]
        words += ["--memory", options.memory] if options.memory else []
        words += ["--limit", str(options.limit)]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, cwd=folder, env=environment(who), timeout=options.limit
            )
        except subprocess.TimeoutExpired as expired:
            return {"error": f"stopped after {options.limit:.0f} s{_place(expired.stderr)}"}
        if (Path(folder) / "out.json").is_file():
            return measure.read(Path(folder) / "out.json")
        lines = (done.stdout + done.stderr).strip().splitlines() or ["it said nothing"]
        return {"error": next((line for line in reversed(lines) if "Error" in line), lines[-1]).strip()[:300]}


def _place(stderr: bytes | str | None) -> str:
    """Where a worker was when its time ended, innermost call first, from the trace that it writes before that."""
    lines = (stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr or "").splitlines()
    start = max((i for i, line in enumerate(lines) if "most recent call first" in line), default=len(lines))
    calls = re.findall(r'File ".*?([^/"]+/[^/"]+)", line (\d+) in (\S+)', "\n".join(lines[start:]))
    return " in " + " < ".join(f"{name} ({file}:{at})" for file, at, name in calls[:12]) if calls else ""


def environment(who: str) -> dict[str, str]:
    """Offline, with absolute paths: a worker runs in a scratch folder."""
    paths = [str(measure.ROOT), str(measure.ROOT / "src")]
    names = ("PYTHONPATH_" + who.partition("-")[0].upper(), "PYTHONPATH")
    paths += [str(Path(p).resolve()) for name in names for p in os.environ.get(name, "").split(os.pathsep) if p]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        measure.STARTED: str(time.time()),
    }


def timed(name: str, options: argparse.Namespace) -> Found:
    """Everyone who is asked for, of one case."""
    found: Found = {}
    for who in cases.participants(cases.parse(name), options.own.get(name, options.who)):
        found[who] = apart(who, name, options)
        print(f"{name:26}{who:16}{line(found[who], found)}", flush=True)
    return found


def line(figures: dict[str, Any], found: Found) -> str:
    """One participant in one line, with its multiple of the floor."""
    if "ms" not in figures:
        return f"failed: {figures.get('error', figures.get('refused', ''))}"
    parts = [f"{figures['ms']:9.2f} ms", f"{figures['tok_s'] / 1e3:7.1f}k tok/s"]
    if "peak_gib" in figures:
        parts.append(f"{figures['peak_gib']:6.2f} GiB")
    if "ms" in found.get("floor", {}) and figures is not found["floor"]:
        sustained = figures.get("ms_sustained", figures["ms"])
        parts.append(f"{figures['ms'] / found['floor']['ms']:.3f} of the floor")
        parts.append(f"({sustained / found['floor']['ms']:.3f} sustained)")
    if "loss_last" in figures:
        parts.append(f"loss {figures['loss_first']:.3f} to {figures['loss_last']:.3f}, norm {figures['grad_norm']:.3g}")
        parts.append(f"host {figures['host_ms']:.2f} ms, first step after {figures['start_s']:.1f} s")
    if "owned" in figures:
        live = found.get("floor", {}).get("ms", 0.0) / figures["live_ms"]
        parts.append(
            f"{figures['owned']:.1%} owned, profiling adds {figures['profile_adds']:+.1%} in {figures['turns']} turns"
        )
        parts.append(f"live: {figures['live_ms']:.2f} ms" + (f", {live:.1%} of the floor" if live else ""))
        parts.append(figures["bottleneck"])
    if "tflops" in figures:
        parts.append(f"{figures['tflops']:.0f} TFLOP/s")
    return "  ".join(parts)


def swept(axis: str, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Ours beside the floor as a size grows; `ours` is timed under the floor's load."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for curve, points in cases.sweep(axis).items():
        curves[curve] = []
        for x, name in points:
            found = timed(name, options)
            own = found["ours"]
            point = {"ours": own.get("ms_sustained", own.get("ms")), "floor": found["floor"].get("ms")}
            curves[curve].append({"x": x, "case": name} | point)
    return curves


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = "CASE=WHO,... has participants of its own; default: " + " ".join(DEFAULT)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=asked)
    parser.add_argument("--who", default="floor,ours", help="participants, of those a case has")
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after 3 or more that warm up")
    parser.add_argument("--sweep", default="", help=f"curves instead of cases: {', '.join(cases.SWEEPS)}")
    parser.add_argument("--json", default="", help="a GPU's record, or - to print")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for each participant")
    parser.add_argument("--memory", default="", help="what torch may allocate, as in 24GiB, on a card that has more")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sustain", type=float, default=measure.SUSTAIN_S, help="seconds of load before the floor")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    own = dict(name.split("=", 1) for name in options.cases if "=" in name)
    options.cases = [name.partition("=")[0] for name in options.cases]
    options.who = [name for name in options.who.split(",") if name]
    options.own = {name: who.split(",") for name, who in own.items()}
    options.sweep = [axis for axis in options.sweep.split(",") if axis]
    if not options.cases and not options.sweep:
        options.cases = list(DEFAULT)
    try:
        for name in [*options.cases, *(n for axis in options.sweep for c in cases.sweep(axis).values() for _, n in c)]:
            cases.parse(name)
    except ValueError as error:
        parser.error(str(error))
    asked_for = {*options.who, *(one for who in options.own.values() for one in who)}
    if unknown := asked_for - {"floor", "ours", "eager", "ranked", "api", "profile", *cases.PEERS}:
        parser.error(f"--who: unknown {', '.join(sorted(unknown))}")
    return options


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.worker:
        spent = time.time() - float(os.environ.get(measure.STARTED, 0) or time.time())
        faulthandler.dump_traceback_later(max(1.0, options.limit - spent - 5))  # says where it was, if it is stopped
        measure.write(Path(options.out), work(options.worker, options.cases[0], options))
        return 0
    failed, run = False, measure.facts(options.commit) | {"run": time.strftime("%Y%m%d-%H%M%S", time.gmtime())}
    for name in options.cases:
        found = timed(name, options)
        failed |= any("ms" not in figures for figures in found.values())
        if set(found) & set(cases.PEERS):
            run |= {"peers": measure.versions()}
        measure.keep(options.json, "steps", {name: run | {"tokens": cases.parse(name).tokens, "participants": found}})
    for axis in options.sweep:
        curves = swept(axis, options)
        failed |= any(None in point.values() for points in curves.values() for point in points)
        measure.keep(options.json, "sweeps", {axis: run | {"curves": curves}})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
