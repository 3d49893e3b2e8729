"""The memory plan against torch's allocator: each combination planned, then run in a process of its own.

    python -m benchmarks.plan [--json FILE] [--jobs N] [NAME ...]

    SIZE-KIND-POLICY-ROWSxLENGTH[-qv][-full][-rN]
    8b-nf4-offload-4x2048    1b-q4_k-none-1x2048    350m-bf16-none-4x512-full

KIND is how the base is held: bf16, nf4, fp8, or the blocks of a GGUF (q4_k, q8_0, ...). Weights are random (blocks are
zero: only their size matters). A process evaluates one batch and takes a few captured steps, as a run does, and its
peak is torch.cuda.max_memory_allocated since its start. The CUDA context is not in it. Nothing is timed, so that
several may run at once (--jobs), as long as the card holds them together (any four of the default ones: 115 GiB).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from benchmarks.cases import HYPER, SHAPES

from benchmarks import report
from graftune.config import BaseConfig, LoraConfig
from graftune.data.pack import Capacities
from graftune.model.spec import ModelSpec
from graftune.weights.base import Base
from graftune.weights.load import Placement

WITHIN, AT_LEAST = 0.03, 12
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

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(rank=self.rank, alpha=2.0 * self.rank, targets=("qv",) if self.qv else ("all_linear",))

    @property
    def base_dtype(self) -> str:
        return self.kind if self.kind in known_kinds() else "keep"


def known_kinds() -> tuple[str, ...]:
    return typing.get_args(typing.get_type_hints(BaseConfig)["base_dtype"])


def parse(name: str) -> Combination:
    found = re.fullmatch(r"([\w.]+)-(\w+)-(none|selective|full|offload)-(\d+)x(\d+)((?:-(?:qv|full|r\d+))*)", name)
    if found is None or found[1] not in SHAPES:
        raise SystemExit(f"{name!r} is no combination; see the head of benchmarks/plan.py")
    options = found[6].split("-")
    rank = next((int(option[1:]) for option in options if option.startswith("r")), 16)
    kind, rows, length = found[2], int(found[4]), int(found[5])
    return Combination(name, found[1], kind, found[3], rows, length, rank, "qv" in options, "full" in options)


@dataclass(frozen=True)
class ZeroBlocks:
    """A weight of GGUF blocks without values (a RowSource and a source of blocks)."""

    shape: tuple[int, ...]
    dtype_name: str

    @property
    def nbytes(self) -> int:
        from graftune.kernels import gguf_dequant

        return self.shape[0] * gguf_dequant.row_bytes(self.dtype_name, self.shape[1])

    def raw(self, start: int, stop: int) -> torch.Tensor:
        return torch.zeros(stop - start, self.nbytes // self.shape[0], dtype=torch.uint8)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.zeros(stop - start, self.shape[1])

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), self.shape[1])

    def values(self) -> torch.Tensor:
        return torch.zeros(self.shape)


def base_of(combination: Combination, device: torch.device) -> Base:
    from graftune.kernels.gguf_dequant import KINDS
    from graftune.weights.synthetic import random_base

    kind = combination.kind
    if kind not in known_kinds() and kind.upper() not in KINDS:
        raise SystemExit(f"{combination.name}: graftune has no base kind {kind} here")
    s = SHAPES[combination.size]
    spec = ModelSpec(
        family="llama", layers=s.layers, width=s.width, ffn=s.ffn, heads=s.heads, kv_heads=s.kv_heads, vocab=s.vocab,
        head_width=s.head_width, norm_eps=s.norm_eps, rope_theta=s.rope_theta, max_positions=s.max_positions,
        tied=s.tied,
    )  # fmt: skip
    base = random_base(spec, device)
    if kind in known_kinds():
        return base
    tensors = {
        name: ZeroBlocks(source.shape, kind.upper()) if len(source.shape) == 2 else source
        for name, source in base.tensors.items()
    }
    return dataclasses.replace(base, kind="gguf", tensors=cast(Any, tensors))


def plan(combination: Combination, device: torch.device, card: Any) -> Any:
    """What will be measured, planned."""
    from graftune.runtime import Runtime
    from graftune.train.engine import attention_for
    from graftune.train.plan import Setup, rehearse, standins

    base = base_of(combination, device)
    runtime = Runtime(device, torch.bfloat16, "the benchmark's")
    with standins.asked(card):
        backend = attention_for(base, runtime, combination.length).backend
    return rehearse(
        Setup(
            base,
            combination.lora,
            runtime,
            Placement(combination.base_dtype, "the benchmark's"),
            combination.shape,
            combination.policy,
            "full" if combination.full else "lora",
            backend=backend,
            card=card,
        )
    )


def run(combination: Combination, device: torch.device) -> dict[str, Any]:
    """A batch evaluated and a few captured steps; torch's own peak."""
    from graftune.batch import Example
    from graftune.data.pack import pack
    from graftune.model.lora import build_arena, initialise
    from graftune.runtime import resolve
    from graftune.train.engine import attention_for
    from graftune.train.evaluate import evaluate
    from graftune.train.hot import hot_loop
    from graftune.train.step import Step
    from graftune.weights.load import build_decoder

    base, lora, shape = base_of(combination, device), combination.lora, combination.shape
    runtime = resolve(str(device), "bf16")
    arena = build_arena(base.spec, lora, device, runtime.compute, full=combination.full)
    placement = Placement(combination.base_dtype, "the benchmark's")
    decoder = build_decoder(base, arena, lora, runtime, placement)
    arena.publish() if combination.full else initialise(arena, lora, seed=1)
    backend = attention_for(base, runtime, combination.length).backend
    step = Step(
        decoder, arena, recompute=combination.policy, attention_backend=backend, longest=shape.longest, tuned=True
    )
    drawn = torch.Generator().manual_seed(7)
    rows = torch.randint(0, base.spec.vocab, (combination.rows, combination.length), generator=drawn).tolist()
    supervised = [i >= combination.length // 2 for i in range(combination.length)]
    examples = [Example(row, supervised) for row in rows]
    evaluate(decoder, examples, capacity=shape.capacity, backend=backend)
    loop, batch = hot_loop(step), pack(examples, **shape._asdict())
    before = fingerprint(arena.weights)
    for _ in range(STEPS):
        loop.step([loop.stage(batch)], HYPER | {"divisor": float(batch.response_tokens)}, [0])
    figures = loop.finished(wait=True)
    torch.cuda.synchronize()
    moved = fingerprint(arena.weights) != before
    return {
        "measured": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "held": torch.cuda.memory_reserved(device),  # from the capture on
        "loss": figures[-1].loss,
        "grad_norm": figures[-1].grad_norm,
        "moved": moved,
        "attention": backend,
        "captures": loop.captures,
    }


def fingerprint(weights: torch.Tensor) -> float:
    """By parts: the whole in double precision would be in the peak."""
    return sum(float(part.double().sum()) for part in weights.split(1 << 20))


def one(name: str) -> dict[str, Any]:
    """In this process, which has allocated nothing yet."""
    from graftune.train.plan import card_here

    combination, device = parse(name), torch.device("cuda", 0)
    found = plan(combination, device, card_here(device))
    assert torch.cuda.max_memory_allocated(device) == 0, "a plan takes no memory"
    figures = run(combination, device)
    return {
        "name": name,
        "planned": found.peak,
        "needed": found.peak + found.pools,
        "owners": found.owners,
        "phases": {phase: sum(owners.values()) for phase, owners in found.phases.items()},
        "off": found.peak / figures["measured"] - 1,
    } | figures


def apart(name: str) -> dict[str, Any]:
    """In a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan", "--one", name],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={"OMP_NUM_THREADS": "1"} | os.environ,  # several at once would wait for each other's threads
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
    within = sum(abs(found.get("off", 1.0)) <= WITHIN for found in results)
    most = max((abs(found["off"]) for found in results if "off" in found), default=None)
    return [
        report.goal(f"combinations within {WITHIN:.0%}", "at least", min(AT_LEAST, len(results)), within),
        report.goal("furthest off", "at most", WITHIN, None if most is None else round(most, 4)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="the memory plan against torch's allocator")
    parser.add_argument("names", nargs="*", default=list(DEFAULT))
    parser.add_argument("--json", default="")
    parser.add_argument("--one", default="")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a CUDA device, and there is none here")
    if arguments.one:
        print(json.dumps(one(arguments.one)))
        return 0
    for name in arguments.names:
        parse(name)

    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
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
    return 0 if all(abs(found.get("off", 1.0)) <= WITHIN for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
