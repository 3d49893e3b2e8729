"""The memory plan against torch's allocator: each combination planned as `graftune train` plans it, then run in a
process of its own.

    python -m benchmarks.plan [--json FILE] [--jobs N] [NAME ...]

    SIZE-KIND-POLICY-ROWSxLENGTH[-qv][-full][-rN]
    8b-nf4-offload-4x2048    1b-q4_k-none-1x2048    350m-bf16-none-4x512-full

KIND is how the base is held: bf16, nf4, fp8, or the blocks of a GGUF (q4_k, q8_0, ...). Weights are random. A process
evaluates one batch, answers a few prompts and takes a few captured steps, as a run does, and its peak is
torch.cuda.max_memory_allocated since its start. The CUDA context is not in it. No time is reported, so that several may
run at once (--jobs), as long as the card holds them together (any three of the default ones: 106 GiB); what they choose
by timing is forgotten with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.bases import in_blocks, model_spec
from benchmarks.cases import HYPER, SHAPES

from benchmarks import report
from graftune.config import BaseConfig, Config
from graftune.data.pack import Capacities
from graftune.observe.memory import peak_resident_bytes
from graftune.weights.base import Base

if TYPE_CHECKING:
    from graftune.plan import Job, Plan
    from graftune.session import Engine

WITHIN, AT_LEAST = 0.03, 12
HOLDS, SLACK = 1.02, 256 << 20  # of what is needed, and beside it: the margin of a plan on CUDA
STEPS = 3
DEFAULT = (
    "1b-bf16-none-1x512",
    "1b-bf16-none-4x2048",
    "1b-bf16-selective-4x2048",
    "1b-bf16-full-4x2048",
    "1b-bf16-offload-4x2048",
    "8b-bf16-none-1x2048",
    "8b-bf16-none-4x2048",
    "8b-bf16-full-4x2048",
    "8b-nf4-none-4x2048",
    "8b-nf4-full-4x2048",
    "8b-nf4-offload-4x2048",
    "1.5b-nf4-selective-4x512-qv",
    "1b-q4_k-none-1x2048",
    "8b-q4_k-full-4x2048",
    "8b-fp8-none-4x2048",
    "1b-fp8-full-4x2048",
    "1b-fp8-none-4x2048",
    "350m-bf16-none-4x512-full",
    "1b-bf16-none-1x2048-r128",
)


@dataclass(frozen=True)
class Combination:
    name: str
    size: str
    kind: str
    policy: str
    rows: int
    length: int
    rank: int = 16
    qv: bool = False
    full: bool = False

    @property
    def shape(self) -> Capacities:
        """The first half of each row is prompt."""
        tokens = self.rows * self.length
        return Capacities(tokens, self.rows, self.rows * (self.length - self.length // 2), self.length)

    def config(self, device: torch.device) -> Config:
        """What a user would write."""
        return Config.of(
            {
                "device": str(device),
                "base_dtype": self.kind if self.kind in known_kinds() else "keep",
                "compute_dtype": "bf16" if device.type == "cuda" else "auto",
                "method": "full" if self.full else "lora",
                "rank": self.rank,
                "alpha": 2.0 * self.rank,
                "targets": "qv" if self.qv else "all_linear",
                "max_seq_len": self.length,
                "tokens_per_step": self.shape.capacity,
                "tokens_per_micro_batch": self.shape.capacity,
                "recompute": self.policy,
            }
        )


def known_kinds() -> tuple[str, ...]:
    return typing.get_args(typing.get_type_hints(BaseConfig)["base_dtype"])


def parse(name: str) -> Combination:
    options = r"((?:-(?:qv|full|r\d+))*)"
    found = re.fullmatch(r"([\w.]+)-(\w+)-(none|selective|full|offload)-(\d+)x(\d+)" + options, name)
    if found is None or found[1] not in SHAPES:
        raise SystemExit(f"{name!r} is no combination; see the head of benchmarks/plan.py")
    asked = found[6].split("-")
    rank = next((int(option[1:]) for option in asked if option.startswith("r")), 16)
    kind, rows, length = found[2], int(found[4]), int(found[5])
    return Combination(name, found[1], kind, found[3], rows, length, rank, "qv" in asked, "full" in asked)


def base_of(combination: Combination, device: torch.device) -> Base:
    from graftune.kernels.gguf_dequant import KINDS
    from graftune.weights.synthetic import random_base

    kind = combination.kind
    if kind not in known_kinds() and kind.upper() not in KINDS:
        raise SystemExit(f"{combination.name}: graftune has no base kind {kind} here")
    base = random_base(model_spec(SHAPES[combination.size]), device)
    if kind in known_kinds():
        return base
    return in_blocks(base, kind, device)


def job_of(combination: Combination, device: torch.device, memory: int = 0) -> Job:
    """As prepare.py makes it of a run's settings and data; `memory`: of a card that is not here."""
    from graftune.plan import Job, runtime_for

    config = combination.config(device)
    runtime, card = runtime_for(config, memory)
    base = base_of(combination, runtime.device)
    shapes, asked = (lambda capacity: combination.shape), (combination.length // 2,) * config.run.samples
    return Job(config, base, runtime, combination.length, shapes, card, memory, asked=asked)


def planned(combination: Combination, job: Job) -> Plan:
    return job.plan(combination.policy, combination.shape.capacity)


def run(combination: Combination, job: Job, plan: Plan) -> dict[str, Any]:
    """What was planned: a batch evaluated, a few captured steps; then torch's
    own peak (of a CPU, for the tests, the process's)."""
    from graftune.batch import Example
    from graftune.data.pack import pack
    from graftune.session import open_engine
    from graftune.step.evaluate import evaluate
    from graftune.step.pipeline import hot_loop
    from graftune.step.step import Step

    with tempfile.TemporaryDirectory() as folder:  # a run that trains every weight looks for a configuration to save
        (Path(folder) / "config.json").write_text("{}")
        base = dataclasses.replace(job.base, path=Path(folder))
        engine = open_engine(job.config.replace(recompute=plan.recompute), base=base, placement=job.placement)
    arena, shape, spec = engine.arena, combination.shape, job.base.spec
    grown = {"load": reserved(engine.runtime.device)}
    drawn = torch.Generator().manual_seed(7)
    rows = torch.randint(0, spec.vocab, (combination.rows, combination.length), generator=drawn).tolist()
    supervised = [i >= combination.length // 2 for i in range(combination.length)]
    examples = [Example(row, supervised) for row in rows]
    step = Step(
        engine.decoder,
        arena,
        recompute=plan.recompute,
        attention_backend=engine.attention.backend,
        other_backends=engine.attention.others,
        longest=shape.longest,
        tuned=engine.runtime.device.type == "cuda",
    )
    evaluate(engine.decoder, examples, capacity=plan.capacity, backend=engine.attention.backend)
    answer(engine, job, plan, rows[0])
    grown["evaluate"] = reserved(engine.runtime.device)
    loop, batch = hot_loop(step), pack(examples, **shape._asdict())
    before = fingerprint(arena.weights)
    for _ in range(STEPS):
        loop.step([loop.stage(batch)], HYPER | {"divisor": float(batch.response_tokens)}, [0])
    figures = loop.finished(wait=True)
    answer(engine, job, plan, rows[0])
    return memory_of(engine.runtime.device) | {
        "reserved_after": grown,
        "loss": figures[-1].loss,
        "grad_norm": figures[-1].grad_norm,
        "moved": fingerprint(arena.weights) != before,
        "attention": step.backend,
        "captures": loop.captures,
    }


def answer(engine: Engine, job: Job, plan: Plan, row: list[int]) -> None:
    """As a run answers its samples."""
    from graftune.infer.generate import cache_room, generate, in_groups, reaches_of
    from graftune.infer.sample import Sampling

    new = job.config.run.sample_tokens
    reaches = reaches_of(job.asked, new, job.base.spec.max_positions)
    for group in in_groups(reaches, cache_room(plan.capacity, plan.recompute)):
        prompts = [row[: job.asked[i]] for i in group]
        generate(engine.decoder, prompts, Sampling(max_new_tokens=new), (), backend=engine.eager_attention)


def memory_of(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return dict.fromkeys(("measured", "reserved", "held"), peak_resident_bytes())
    torch.cuda.synchronize(device)
    return {
        "measured": torch.cuda.max_memory_allocated(device),
        "reserved": reserved(device),
        "held": torch.cuda.memory_reserved(device),  # from the capture on
    }


def reserved(device: torch.device) -> int:
    """The most that torch's allocator has taken so far."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident_bytes()


def fingerprint(weights: torch.Tensor) -> float:
    """By parts: the whole in double precision would be in the peak."""
    return sum(float(part.double().sum()) for part in weights.split(1 << 20))


def one(name: str) -> dict[str, Any]:
    """In this process, which has allocated nothing yet."""
    combination, device = parse(name), torch.device("cuda", 0)
    job = job_of(combination, device)
    plan = planned(combination, job)
    assert torch.cuda.max_memory_allocated(device) == 0, "a plan takes no memory"
    return record(name, plan, run(combination, job, plan))


def record(name: str, plan: Plan, figures: dict[str, Any]) -> dict[str, Any]:
    """`needed` is without the margin by which a run is refused; what others hold of the card is in none of it."""
    found = plan.bytes
    return {
        "name": name,
        "planned": plan.expected,
        "needed": found.peak + found.pools,
        "owners": found.owners,
        "phases": {phase: sum(owners.values()) for phase, owners in found.phases.items()},
        "settings": plan.settings,
        "off": plan.expected / figures["measured"] - 1,
    } | figures


def apart(name: str) -> dict[str, Any]:
    """In a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        # One thread: several at once would wait for each other's. A cache of its own: the first step times algorithms,
        # which takes memory, and a choice that was made beside others should stay nobody's.
        own = {"OMP_NUM_THREADS": "1"} | os.environ | {"GRAFTUNE_CACHE": cache}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.plan", "--one", name],
            capture_output=True,
            text=True,
            cwd=report.ROOT,
            env=own,
        )
    if done.returncode:
        return {"name": name, "error": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'combination':34}{'planned':>10}{'measured':>10}{'reserved':>10}{'off':>8}"]
    for found in results:
        if "error" in found:
            lines.append(f"{found['name']:34}  {found['error']}")
            continue
        sizes = "".join(f"{found[key] / 2**30:10.2f}" for key in ("planned", "measured", "reserved"))
        lines.append(f"{found['name']:34}{sizes}{found['off']:+8.2%}{'' if found['moved'] else '  nothing moved'}")
    return "\n".join(lines)


def goals(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ran = [found for found in results if "off" in found]
    within = sum(abs(found["off"]) <= WITHIN for found in ran)
    most = max((abs(found["off"]) for found in ran), default=None)
    held = max(((found["reserved"] - SLACK) / found["needed"] for found in ran), default=None)
    return [
        report.goal(f"combinations within {WITHIN:.0%}", "at least", AT_LEAST, within),
        report.goal("furthest off", "at most", WITHIN, None if most is None else round(most, 4)),
        report.goal("(reserved - 256 MiB) / needed", "at most", HOLDS, None if held is None else round(held, 4)),
    ]


def holds(found: dict[str, Any]) -> bool:
    """Whether what a run is refused by is as much as torch's allocator takes."""
    return bool(found["reserved"] - SLACK <= HOLDS * found["needed"])


def good(found: dict[str, Any]) -> bool:
    return abs(found.get("off", 1.0)) <= WITHIN and holds(found)


def main() -> int:
    parser = argparse.ArgumentParser(description="the memory plan against torch's allocator")
    parser.add_argument("names", nargs="*", default=list(DEFAULT))
    parser.add_argument("--json", default="")
    parser.add_argument("--one", default="")
    parser.add_argument("--commit", default="", help="of the code that runs, where there is no repository")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a CUDA device, and there is none here")
    if arguments.one:
        print(json.dumps(one(arguments.one)))
        return 0
    for name in arguments.names:
        parse(name)

    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": arguments.commit or report.commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    results: list[dict[str, Any]] = []

    def document() -> dict[str, Any]:
        return facts | {"within": WITHIN, "results": results, "goals": goals(results)}

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for found in pool.map(apart, arguments.names):
            results.append(found)
            print(table([found]).splitlines()[-1], file=sys.stderr, flush=True)
            if arguments.json not in ("", "-"):
                report.write(Path(arguments.json), document())  # as it stands: a run that is cut short keeps it
    print(table(results))
    print("\n".join(map(report.said, document()["goals"])))
    if arguments.json == "-":
        print(json.dumps(document()))
    return 0 if all(map(good, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
