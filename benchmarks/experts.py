"""Grouped products of mixtures on a GPU: right, and how fast beside torch's grouped_mm.

    python benchmarks/experts.py [--tiles] [--json FILE]

8,192 tokens with random routing in bf16, adapters of rank 16 on the experts, at the shapes of Qwen3-30B-A3B,
gpt-oss-20b and Qwen3.5-35B-A3B. Each product is first compared with torch's over fp32; a difference of more than 1% is
reported, and the exit code is 1. The time of torch's product includes neither adapters nor the copy of the gathered
rows; ours includes both. `--tiles` tries other tiles. Times are of a CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernels import Bench
from benchmarks.measure import goal, said

from benchmarks import measure as record
from graftune.kernels import experts, swiglu
from graftune.kernels.experts import Starts, Terms, kernel

TOKENS, RANK, MOST_OFF = 8192, 16, 0.01
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "qwen3.5-35b-a3b": (256, 8, 2048, 512),
}
TILES = (
    *((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3)),
    *((64, 256, 64, 8, 3), (64, 256, 64, 4, 3), (128, 256, 32, 8, 5)),
)


class Mixture:
    """One layer's experts with tokens routed at random."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device):
        count, chosen, width, ffn = shape
        drawn = torch.Generator(device).manual_seed(count)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=drawn, device=device).to(torch.bfloat16)

        picked = torch.rand(TOKENS, count, generator=drawn, device=device).topk(chosen, 1).indices
        ordered, order = picked.flatten().sort(stable=True)
        at = torch.searchsorted(ordered, torch.arange(count + 1, device=device), out_int32=True)
        self.starts, self.rows = Starts(at, tuple(at.tolist())), order // chosen
        self.places = (
            torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device)).view(-1, chosen)
        )
        self.weights = torch.rand(TOKENS, chosen, generator=drawn, device=device)
        self.x, self.gate_up, self.down = (
            normal(TOKENS, width),
            normal(count, 2 * ffn, width),
            normal(count, width, ffn),
        )
        self.a, self.b = normal(count, RANK, width), normal(count, 2 * ffn, RANK)
        self.wide, self.act = normal(len(order), 2 * ffn), normal(len(order), ffn)
        self.low, self.out = normal(len(order), RANK), normal(len(order), width)
        self.flop = {"gate_up": 4 * len(order) * width * ffn, "down": 2 * len(order) * width * ffn}

    def products(self) -> dict[str, Callable[[], Any]]:
        """Ours, by name."""
        adapters, back = (
            Terms(self.rows, None, self.low, self.b, 2.0),
            Terms(None, None, self.low, self.a.transpose(1, 2)),
        )
        total_a, total_b = (torch.zeros_like(x, dtype=torch.float32) for x in (self.a, self.b))
        return {
            "gate_up": lambda: experts.multiply(self.x, self.gate_up, self.starts, adapters),
            "gate_up, backward": lambda: experts.multiply(self.wide, self.gate_up.transpose(1, 2), self.starts, back),
            "down": lambda: experts.multiply(self.act, self.down, self.starts),
            "down, backward": lambda: experts.multiply(
                self.x, self.down.transpose(1, 2), self.starts, Terms(self.rows)
            ),
            "x A'": lambda: experts.multiply(self.x, self.a, self.starts, Terms(self.rows)),
            "dY B": lambda: experts.multiply(self.wide, self.b.transpose(1, 2), self.starts),
            "dA": lambda: experts.add_products_(total_a, self.low, self.x, self.starts, b_rows=self.rows),
            "dB": lambda: experts.add_products_(total_b, self.wide, self.low, self.starts),
            "sum of experts": lambda: experts.combine(self.out, self.places, self.weights),
            "unit": lambda: swiglu.forward(self.wide, self.act),
            "unit, backward": lambda: swiglu.backward(
                self.act, self.wide, self.wide, self.act, "silu", self.weights.flatten()
            ),
        }  # fmt: skip

    def torchs(self) -> dict[str, Callable[[], torch.Tensor]]:
        rows, offsets = self.x.index_select(0, self.rows), self.starts.at[1:]
        product = torch.nn.functional.grouped_mm
        return {
            "gate_up": lambda: product(rows, self.gate_up.transpose(1, 2), offs=offsets),
            "gate_up, backward": lambda: product(self.wide, self.gate_up, offs=offsets),
            "down": lambda: product(self.act, self.down.transpose(1, 2), offs=offsets),
            "down, backward": lambda: product(rows, self.down, offs=offsets),
        }

    def off(self) -> float:
        """The largest relative difference of our products from those of one expert after the other."""
        ours, worst = self.products(), 0.0
        x, low = self.x.index_select(0, self.rows).float(), self.low.float()
        for name, (given, weight, up, scale) in {
            "gate_up": (x, self.gate_up, self.b, 2.0),
            "gate_up, backward": (self.wide.float(), self.gate_up.transpose(1, 2), self.a.transpose(1, 2), 1.0),
            "down": (self.act.float(), self.down, None, 0.0),
        }.items():
            got = ours[name]()
            for expert, rows in self.starts.groups():
                want = given[rows] @ weight[expert].float().t()
                if up is not None:
                    want += scale * low[rows] @ up[expert].float().t()
                worst = max(worst, float((got[rows].float() - want).norm() / want.norm()))
        return worst


def measured(bench: Bench, mixture: Mixture) -> dict[str, Any]:
    ours = {name: round(bench.microseconds(each), 1) for name, each in mixture.products().items()}
    theirs = {name: round(bench.microseconds(each), 1) for name, each in mixture.torchs().items()}
    rate = {name: round(mixture.flop[name.partition(",")[0]] / ours[name] / 1e6) for name in theirs}
    return {"ours_us": ours, "torch_us": theirs, "ours_tflops": rate}


def by_tile(bench: Bench, mixture: Mixture) -> dict[str, list[float]]:
    """Microseconds of the four products with each tile."""
    kept, found = kernel.WIDE, {}
    for tile in TILES:
        kernel.WIDE = tile
        products = mixture.products()
        try:
            found[str(tile)] = [round(bench.microseconds(products[name]), 1) for name in mixture.torchs()]
        except Exception as mistake:  # too much shared memory, as a rule
            print(tile, type(mistake).__name__, str(mistake)[:100])
    kernel.WIDE = kept
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--json", default="", help="a GPU's record, or - to print")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    bench, worst, found, reached = Bench(torch.device("cuda")), 0.0, {}, []
    for name, shape in SHAPES.items():
        mixture = Mixture(shape, bench.device)
        off = mixture.off()
        found[name] = {"off": round(off, 4)} | measured(bench, mixture)
        if options.tiles:
            found[name]["tiles_us"] = by_tile(bench, mixture)
        print(name, *(f"  {key}: {value}" for key, value in found[name].items()), sep="\n")
        ours, theirs = (sum(found[name][side][key] for key in mixture.torchs()) for side in ("ours_us", "torch_us"))
        reached.append(goal(f"{name}: four grouped products beside torch's", "at most", 1.0, ours / theirs))
        worst = max(worst, off)
        del mixture
    reached.append(goal("grouped products: difference from the reference", "at most", MOST_OFF, worst))
    print("\n".join(map(said, reached)))
    record.keep(options.json, "experts", record.facts(options.commit) | found | {"goals": reached})
    return int(worst > MOST_OFF)


if __name__ == "__main__":
    sys.exit(main())
