"""The memory plan against torch's allocator: each case planned as `graftune train` plans it, then run in a process of
its own.

    python benchmarks/plan.py [CASE ...] [--json FILE] [--jobs N] [--memory 24GiB]
    python benchmarks/plan.py 70b-nf4-host-1x2048-full --memory 22GiB     (what a card of 24 GB has to give)

Cases are those of cases.py, with random weights. A process evaluates one batch, answers a few prompts and takes a few
captured steps, as a run does, and its peak is torch.cuda.max_memory_allocated since its start. The CUDA context is not
in it. No time is reported, so several may run at once (--jobs) as long as the card holds them together (any three of
the default ones: 106 GiB); what they choose by timing is forgotten with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import LARGE, Case, documents, parse
from benchmarks.random_bases import base_of
from benchmarks.step import opened

from benchmarks import measure
from graftune.data.pack import Capacities
from graftune.observe.memory import peak_resident_bytes

if TYPE_CHECKING:
    from graftune.plan import Job, Plan
    from graftune.session import Session

WITHIN, AT_LEAST = 0.03, 12
HOLDS, SLACK = 1.02, 256 << 20  # of what is needed, and beside it: the margin of a plan on CUDA
STEPS = 3
DEFAULT = (
    "1b-1x512",
    "1b-4x2048",
    "1b-4x2048-selective",
    "1b-4x2048-full",
    "1b-4x2048-offload",
    "8b-1x2048",
    "8b-4x2048",
    "8b-4x2048-full",
    "8b-nf4-4x2048",
    "8b-nf4-4x2048-full",
    "8b-nf4-4x2048-offload",
    "1.5b-nf4-qv-4x512-selective",
    "1b-q4_k-1x2048",
    "8b-q4_k-4x2048-full",
    "8b-fp8-4x2048",
    "1b-fp8-4x2048-full",
    "1b-fp8-4x2048",
    "350m-full-4x512",
    "1b-r128-1x2048",
)


def shape_of(case: Case) -> Capacities:
    return Capacities(case.micro_tokens, len(case.lengths), case.responses, case.length)


def job_of(case: Case, device: torch.device, memory: int = 0) -> Job:
    """As prepare.py makes it of a run's settings and data; `memory`: of a card that is not here."""
    from graftune.losses import choose
    from graftune.plan import Job, runtime_for

    # A token of an answer takes a whole pass over the weights: 0.7 s where 35 GB of them come from host memory.
    large = case.shape.parameters > LARGE
    config = case.config(device, **({"sample_tokens": 4} if large else {}))
    runtime, card = runtime_for(config, memory)
    base = base_of(case, runtime.device)
    shapes, asked = (lambda capacity: shape_of(case)), (case.prompt,) * config.run.samples
    layout = choose(config.train).layout(documents(case)[0][0])
    return Job(config, base, runtime, case.length, shapes, card, memory, asked=asked, layout=layout)


def planned(case: Case, job: Job) -> Plan:
    return job.plan(case.recompute, case.micro_tokens)


def run(case: Case, job: Job, plan: Plan) -> dict[str, Any]:
    """What was planned: a batch evaluated, prompts answered, a few captured steps; then torch's own peak (on a CPU, for
    the tests, the process's)."""
    from graftune.data.pack import pack

    session = opened(case, job.runtime.device, recompute=plan.recompute, tokens_per_micro_batch=plan.capacity)
    arena, device = session.parts.arena, session.runtime.device
    grown = {"load": reserved(device)}
    examples = documents(case)[0][0]
    loop = session.parts.pipeline
    session.parts.evaluated(examples)
    answer(session, job, examples[0].tokens)
    grown["evaluate"] = reserved(device)
    loop.bound_documents(case.length)
    batch = pack(examples, layout=session.parts.loss.layout(examples), shape=shape_of(case))
    before = fingerprint(arena.weights)
    for _ in range(STEPS):
        loop.step([loop.stage(batch)], case.hyper | {"divisor": batch.divisor}, [0])
    figures = loop.finished(wait=True)
    answer(session, job, examples[0].tokens)
    return memory_of(device) | {
        "reserved_after": grown,
        "loss": figures[-1].loss,
        "grad_norm": figures[-1].grad_norm,
        "moved": fingerprint(arena.weights) != before,
        "attention": session.parts.step.backend,
        "captures": loop.captures,
    }


def answer(session: Session, job: Job, row: list[int]) -> None:
    """As a run answers its samples."""
    from graftune.infer.sample import Sampling
    from graftune.session import text

    prompts = [row[:length] for length in job.asked]
    text.sampled(session.parts, prompts, Sampling(max_new_tokens=job.config.run.sample_tokens))


def memory_of(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return dict.fromkeys(("measured", "reserved"), peak_resident_bytes())
    torch.cuda.synchronize(device)
    return {"measured": torch.cuda.max_memory_allocated(device), "reserved": reserved(device)}


def reserved(device: torch.device) -> int:
    """The most that torch's allocator has taken so far."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident_bytes()


def fingerprint(weights: torch.Tensor) -> float:
    """By parts: the whole in double precision would be in the peak."""
    return sum(float(part.double().sum()) for part in weights.split(1 << 20))


def one(name: str, device: torch.device, memory: str = "") -> dict[str, Any]:
    """In this process, which has allocated nothing yet."""
    case = parse(name)
    measure.cap(memory, device)
    job = job_of(case, device)
    plan = planned(case, job)
    assert device.type != "cuda" or torch.cuda.max_memory_allocated(device) == 0, "a plan takes no memory"
    return record(name, plan, run(case, job, plan))


def record(name: str, plan: Plan, figures: dict[str, Any]) -> dict[str, Any]:
    """`needed` is without the margin by which a run is refused; what others hold of the card is in none of it."""
    found = plan.bytes
    return {
        "name": name,
        "planned": plan.expected,
        "needed": found.peak + found.pools,
        "owners": found.owners,
        "host": found.host,
        "transfer": plan.transfer,
        "off": plan.expected / figures["measured"] - 1,
    } | figures


def apart(name: str, device: str = "cuda", memory: str = "") -> dict[str, Any]:
    """In a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        # One thread: several at once would wait for each other's. A cache of its own: the first step times algorithms,
        # which takes memory, and a choice that was made beside others must not be remembered.
        paths = [str(measure.ROOT), str(measure.ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        own = {"OMP_NUM_THREADS": "1"} | os.environ | {"GRAFTUNE_CACHE": cache, "PYTHONPATH": os.pathsep.join(paths)}
        words = [sys.executable, str(Path(__file__).resolve()), name, "--here", "--device", device, "--memory", memory]
        done = subprocess.run(words, capture_output=True, text=True, env=own)
    if done.returncode:
        return {"name": name, "error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def line(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{found['name']:34}  {found['error']}"
    sizes = "".join(f"{found[key] / 2**30:10.2f}" for key in ("planned", "measured", "reserved"))
    return f"{found['name']:34}{sizes}{found['off']:+8.2%}{'' if found['moved'] else '  nothing moved'}"


def goals(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ran = [found for found in results if "off" in found]
    within = sum(abs(found["off"]) <= WITHIN for found in ran)
    most = max((abs(found["off"]) for found in ran), default=None)
    held = max(((found["reserved"] - SLACK) / found["needed"] for found in ran), default=None)
    return [
        measure.goal(f"combinations within {WITHIN:.0%}", "at least", AT_LEAST, within),
        measure.goal("furthest off", "at most", WITHIN, None if most is None else round(most, 4)),
        measure.goal("(reserved - 256 MiB) / needed", "at most", HOLDS, None if held is None else round(held, 4)),
    ]


def holds(found: dict[str, Any]) -> bool:
    """Whether what a run is refused by is as much as torch's allocator takes."""
    return bool(found["reserved"] - SLACK <= HOLDS * found["needed"])


def good(found: dict[str, Any]) -> bool:
    return abs(found.get("off", 1.0)) <= WITHIN and holds(found)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(DEFAULT))
    parser.add_argument("--json", default="", help="a GPU's record, or - to print")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu (for the tests)")
    parser.add_argument("--memory", default="", help="what torch may allocate, as in 24GiB, on a card that has more")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    try:
        for name in options.cases:
            parse(name)
    except ValueError as error:
        parser.error(str(error))
    if options.here:
        print(json.dumps(one(options.cases[0], torch.device(options.device), options.memory)))
        return 0
    results: list[dict[str, Any]] = []
    print(f"{'case':34}{'planned':>10}{'measured':>10}{'reserved':>10}{'off':>8}")
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(lambda name: apart(name, options.device, options.memory), options.cases):
            results.append(found)
            print(line(found), flush=True)
    reached = goals(results)
    print("\n".join(map(measure.said, reached)))
    rows = {found.pop("name"): found for found in [dict(each) for each in results]}
    measure.keep(options.json, "plan", measure.facts(options.commit) | {"cases": rows, "goals": reached})
    return 0 if all(map(good, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
