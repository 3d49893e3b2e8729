"""Scale on paper: what a step takes on 8 to 1,024 GPUs, worked out from one GPU's record and the rates of links.

    python benchmarks/scale.py [--json FILE]       FILE: benchmarks/results/scale.json is what the documents show

Nothing here runs on several GPUs: this is a model, and every figure of it is labelled so. Compute is measured (the
steps of h200.json; a shape that was not measured takes the 8B's time, in proportion to its FLOPs). Communication is
NCCL's own cost model, hops and bytes, with its latencies and with the rates that its maintainers name for H100 nodes:

    all-reduce    the adapters' flat fp32 gradients, once a step, after the last backward: nothing hides it
    all-gather    of a sharded base, each block's bytes twice a micro-batch, into two buffers (model/bundles.py): while
                  block i + 1 computes, block i + 2 arrives, so the slower of the two decides

Every rank computes one micro-batch of 4x2048 tokens per step, however many ranks there are: 1,024 ranks make steps of
8.4 million tokens. The model leaves out what was not measured: slow ranks, congestion, and what collectives and matrix
products take from each other on one GPU (except for the lower NVLink rate beside compute). It is an upper bound.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import SHAPES, Case, Shape, parse
from benchmarks.floor import flops, work_of

from benchmarks import measure
from graftune.dist.shard import PIECE
from graftune.kernels.nf4 import VALUE_BYTES
from graftune.step.floor import plan

RECORD = measure.RESULTS / "h200.json"
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
NODE = 8  # GPUs that NVLink joins
MEMORY = 141e9  # bytes of one H200
US = 1e-6
# Bytes a second, and the latencies of NCCL's Simple protocol; docs/scale.md has the sources.
NVLINK, NVLINK_BESIDE_COMPUTE = 370e9, 300e9
START, RING_NEAR, TREE_NEAR, FAR = 8.4 * US, 3.4 * US, 4.0 * US, 14.0 * US
TREE_SHARE = 0.9  # of a ring's rate
NETWORKS = {"InfiniBand": 8 * 47e9, "Ethernet": 0.94 * 12.5e9}  # into one node: 400 Gb/s a GPU; 100 Gb/s a node
WAYS = ("replicated", "sharded")


def ring(size: float, ranks: int, laps: int, network: float, nvlink: float = NVLINK) -> float:
    """One lap is an all-gather, two are an all-reduce. A ring enters and leaves each node once, so all network cards of
    a node together carry what one NVLink carries inside it."""
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / NODE)
    far = laps * (nodes - 1)
    rate = nvlink if nodes == 1 else min(nvlink, network)
    hops = (laps * (ranks - 1) - far) * RING_NEAR + far * FAR
    return START + hops + laps * (ranks - 1) / ranks * size / rate


def tree(size: float, ranks: int, network: float) -> float:
    """All-reduce up and down a tree of nodes, along a chain inside each."""
    nodes = math.ceil(ranks / NODE)
    rate = TREE_SHARE * (NVLINK if nodes == 1 else min(NVLINK, network))
    hops = 2 * ((min(ranks, NODE) - 1) * TREE_NEAR + math.ceil(math.log2(nodes)) * FAR)
    return START + hops + 2 * size / rate


def hierarchical(size: float, ranks: int, network: float) -> float:
    """All-reduce by a lap inside each node, a ring between nodes for each place in a node, and a lap inside again."""
    nodes = math.ceil(ranks / NODE)
    between = START + 2 * (nodes - 1) * FAR + 2 * (nodes - 1) / nodes * size / network
    return ring(size, min(ranks, NODE), 2, network) + (between if nodes > 1 else 0.0)


def all_reduce(size: float, ranks: int, network: float) -> float:
    """By the fastest way, as NCCL chooses one."""
    return min(ring(size, ranks, 2, network), tree(size, ranks, network), hierarchical(size, ranks, network))


def all_gather(size: float, ranks: int, network: float) -> float:
    """Beside compute, in the pieces in which dist/shard.py gathers: each is a ring of its own."""
    whole, rest = divmod(size, PIECE)
    pieces = [PIECE] * int(whole) + ([rest] if rest else [])
    return sum(ring(piece, ranks, 1, network, NVLINK_BESIDE_COMPUTE) for piece in pieces)


@dataclass(frozen=True)
class Model:
    """A shape over a base, and the recomputation with which it fits."""

    shape: Shape
    base: str  # bf16 | nf4
    recompute: str  # none | full

    def case(self, shape: Shape | None = None, recompute: str = "") -> Case:
        name = f"{(shape or self.shape).name}-{self.base}-4x2048-{recompute or self.recompute}"
        return parse(name.replace("-bf16", "").replace("-none", ""))

    @property
    def block_bytes(self) -> float:
        values = sum(size.values for _, size in work_of(self.case()).layers[0].products)
        return values * (VALUE_BYTES if self.base == "nf4" else 2)

    @property
    def table_bytes(self) -> int:
        return 2 * self.shape.vocab * self.shape.width  # of embedding or head: bf16 over every base

    @property
    def base_bytes(self) -> float:
        return self.shape.layers * self.block_bytes + (1 if self.shape.tied else 2) * self.table_bytes

    @property
    def adapter_values(self) -> int:
        """Of rank 16 on the seven projections."""
        shape, kv = self.shape, self.shape.kv_heads * self.shape.head_width
        sides = [(shape.width, shape.width)] * 2 + [(shape.width, kv)] * 2 + [(shape.width, shape.ffn)] * 3
        return shape.layers * self.case().rank * sum(map(sum, sides))


MODELS = {
    f"{name} {base}": Model(SHAPES[name], base, recompute)
    for name, recompute in (("1b", "none"), ("8b", "none"), ("70b", "full"), ("405b", "full"))
    for base in ("bf16", "nf4")
    if (name, base) != ("1b", "nf4")  # not measured
}


@functools.cache
def measured() -> dict[str, dict[str, float]]:
    """Our figures of the record, by case."""
    steps = measure.read(RECORD)["steps"]
    return {name: step["participants"]["ours"] for name, step in steps.items()}


def flops_of(case: Case) -> float:
    work = work_of(case)
    return flops(work, plan(work))


@functools.cache
def compute_seconds(model: Model, recompute: str = "") -> float:
    """Of one micro-batch of 4x2048 on one GPU: measured, or the 8B's over the same base in proportion to the FLOPs."""
    case = model.case(recompute=recompute)
    if case.name in measured():
        return measured()[case.name]["ms"] / 1e3
    known = model.case(SHAPES["8b"], "none")
    scaled = measured()[known.name]["ms"] / 1e3 * flops_of(case) / flops_of(known)
    recomputed = measured()["8b-nf4-4x2048-full"]["ms"] / measured()["8b-nf4-4x2048"]["ms"]
    return scaled * (recomputed if case.recompute == "full" else 1.0)


@functools.cache
def held_bytes(model: Model, ranks: int) -> float:
    """On each of so many GPUs that hold a base together: its share, three buffers, adapters with gradients and moments,
    and what the 8B was measured to hold beside those, in proportion to layers and width."""
    known = Model(SHAPES["8b"], "bf16" if model.recompute == "none" else "nf4", model.recompute)
    peak = measured()[known.case().name]["peak_gib"] * 2**30
    beside = peak - known.base_bytes - 16 * known.adapter_values
    grown = model.shape.layers * model.shape.width / (known.shape.layers * known.shape.width)
    buffers = 2 * model.block_bytes + model.table_bytes if ranks > 1 else 0
    return model.base_bytes / ranks + buffers + 16 * model.adapter_values + beside * grown


def overlapped(layers: int, forward: float, head: float, backward: float, gather: float) -> float:
    """Seconds of a micro-batch whose blocks are gathered into two buffers. A block's compute frees its buffer for the
    block after the next; the first two are there when the forward begins, the last two when the backward does."""
    clock = link = 0.0
    arrived = [0.0] * layers
    for direction, seconds in ((1, forward), (-1, backward)):
        for block in range(layers)[::direction]:
            clock = max(clock, arrived[block]) + seconds
            following = block + 2 * direction
            if 0 <= following < layers:
                link = arrived[following] = max(link, clock) + gather
        clock += head if direction == 1 else 0.0
    return clock


@dataclass(frozen=True)
class StepTime:
    """Seconds of one, and where they went."""

    compute: float
    waiting: float  # for blocks that have not arrived
    reduce: float

    @property
    def seconds(self) -> float:
        return self.compute + self.waiting + self.reduce

    @property
    def share(self) -> float:
        """Of compute in it: the speed of a GPU, beside one alone that holds the whole base."""
        return self.compute / self.seconds


@functools.cache
def parts_seconds(model: Model) -> tuple[float, float, float]:
    """Of a block's forward, of the head and of a block's backward, which recomputes."""
    work = work_of(model.case())
    ops = plan(work)
    of_block = [op for op in ops if op.layer == 0 and op.kind in ("forward", "attend")]
    of_head = [op for op in ops if op.layer == -1]
    a_flop = compute_seconds(model, "none") / flops(work, ops)
    forward, head = a_flop * flops(work, of_block), a_flop * flops(work, of_head)
    return forward, head, (compute_seconds(model) - head) / model.shape.layers - forward


def step(model: Model, way: str, ranks: int, network: float) -> StepTime:
    layers, compute = model.shape.layers, compute_seconds(model)
    reduce = all_reduce(4 * model.adapter_values, ranks, network)  # fp32
    if way == "replicated":
        return StepTime(compute, 0.0, reduce)
    # Head and embedding travel piece by piece between the blocks, one in the forward, one in the backward.
    gather = all_gather(model.block_bytes, ranks, network) + all_gather(model.table_bytes, ranks, network) / layers
    forward, head, backward = parts_seconds(model)
    waiting = max(0.0, overlapped(layers, forward, head, backward, gather) - compute)  # sums of 252 blocks round
    return StepTime(compute, waiting, reduce)


def curves() -> Iterator[dict[str, Any]]:
    """Of every model, way and network, at those numbers of ranks on which it fits."""
    for name, model in MODELS.items():
        for way in WAYS[:1] if name.startswith("1b") else WAYS:
            groups = {ranks: 1 if way == "replicated" else ranks for ranks in RANKS}
            fitting = [ranks for ranks in RANKS if held_bytes(model, groups[ranks]) <= MEMORY]
            for network, rate in NETWORKS.items() if fitting else ():
                steps = [step(model, way, ranks, rate) for ranks in fitting]
                yield {
                    "model": name,
                    "way": way,
                    "network": network,
                    "ranks": fitting,
                    "step_ms": [round(1e3 * one.seconds, 2) for one in steps],
                    "waiting_ms": [round(1e3 * one.waiting, 2) for one in steps],
                    "reduce_ms": [round(1e3 * one.reduce, 3) for one in steps],
                    "share": [round(one.share, 4) for one in steps],
                    "gb_a_gpu": [round(held_bytes(model, groups[ranks]) / 1e9, 1) for ranks in fitting],
                }


def checks() -> dict[str, dict[str, float]]:
    """Two measured steps beside what the model makes of them from the 8B alone."""
    one, eight = parse("1b-4x2048"), parse("8b-4x2048")
    small = measured()[eight.name]["ms"] * flops_of(one) / flops_of(eight)
    predicted = {"70b-nf4-1x2048-full": 1e3 * compute_seconds(MODELS["70b nf4"]) / 4, one.name: small}
    return {name: {"model_ms": round(ms, 1), "measured_ms": measured()[name]["ms"]} for name, ms in predicted.items()}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="", help="where the record is written, or - to print it")
    options = parser.parse_args(words)
    found = list(curves())
    record = {"scale": {"curves": found, "checks": checks()}}
    if options.json == "-":
        print(json.dumps(record))
        return 0
    print(f"{'A model, not a measurement. Share of compute:':46}" + "".join(f"{ranks:>7}" for ranks in RANKS))
    for curve in found:
        shares = dict(zip(curve["ranks"], curve["share"], strict=True))
        row = "".join(f"{shares[ranks]:>7.1%}" if ranks in shares else f"{'-':>7}" for ranks in RANKS)
        print(f"{curve['model']:10}{curve['way']:22}{curve['network']:14}{row}")
    for name, both in checks().items():
        print(f"{name}: {both['model_ms']:.0f} ms by the model, {both['measured_ms']:.0f} ms measured")
    if options.json:
        measure.write(Path(options.json), record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
