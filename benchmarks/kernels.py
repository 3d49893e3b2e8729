"""Dequantisation on a GPU: right to the bit, and how near to the memory's speed.

    python benchmarks/kernels.py [--json FILE]

Every kind is first compared with the CPU's reference, all values of a [1024, 4096] weight, in bf16, fp16 and fp32, flat
and in rows that lie apart; a kind that differs is reported as such and the exit code is 1. Then it is timed at the
shapes of an 8B model into the scratch that a step has, with adapter columns (rows of 4096 values lie 4160 apart:
the engine's own Scratch says so), ten launches to a graph. `of copy` is the bytes it reads and writes in a second
against those of a plain copy of as many bf16 values as the weight has, measured in the same call, which is what a
launch of that size can reach: every kind is to come to 0.8 of it at both shapes. The exit code knows nothing of speed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import goal, said

from benchmarks import measure as record
from graftune.kernels import augmented_weight, gguf_dequant, nf4
from graftune.kernels.augmented_weight import Adapters
from graftune.kernels.gguf_dequant import KINDS, row_bytes
from graftune.kernels.gguf_dequant import reference as blocks_reference
from graftune.kernels.nf4 import reference as nf4_reference
from graftune.model.frozen import Scratch

CHECKED = (1024, 4096)
SHAPES = [(28672, 4096), (4096, 14336)]
RANK, MEMBERS = 16, {(28672, 4096): 2, (4096, 14336): 1}
LAUNCHES, ROUNDS = 10, 5
OF_COPY = 0.8  # of the bytes in a second that a copy moves
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDE = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
Unpack = Callable[[torch.Tensor], None]
Shape = tuple[int, int]


class Bench:
    def __init__(self, device: torch.device):
        self.device = device

    def weight(self, kind: str, rows: int, width: int) -> tuple[Unpack, Callable[[], torch.Tensor], int]:
        """(dequantise into a matrix, the reference's fp32 values, bytes it reads) of a random weight."""
        drawn = torch.Generator(self.device).manual_seed(rows + width)
        if kind.startswith("nf4"):
            values = torch.randn(rows, width, generator=drawn, device=self.device).mul_(0.02)
            quantised = nf4.quantise(values, double=kind == "nf4")
            return (
                lambda out: void(nf4.dequantise(quantised, out=out)),
                lambda: nf4_reference.values(quantised.to("cpu"), 0, rows * width).view(rows, width),
                quantised.nbytes,
            )
        size = (rows, row_bytes(kind, width))
        raw = torch.randint(256, size, generator=drawn, dtype=torch.uint8, device=self.device)

        def reference() -> torch.Tensor:
            out = torch.empty(rows, width)
            blocks_reference.dequantise(raw.cpu(), kind, out)
            return out

        return lambda out: gguf_dequant.dequantise(raw, kind, out), reference, raw.nbytes

    def differing(self, kind: str, shape: Shape = CHECKED) -> int:
        """Values that are not the reference's to the bit, of all checks, and what was written beside them. (Random
        scales may be infinite: such are left out; beyond fp16's largest all are infinite alike.)"""
        unpack, reference, _ = self.weight(kind, *shape)
        exact, wrong, (rows, width) = reference(), 0, shape
        finite = exact.isfinite()
        for dtype in DTYPES:
            want = exact.to(dtype).view(WIDE[dtype])
            for apart in (0, 3, 64):
                out = torch.full((rows, width + apart), float("nan"), dtype=dtype, device=self.device)
                unpack(out[:, :width])
                got = out[:, :width].contiguous().view(WIDE[dtype]).cpu()
                wrong += int(((got != want) & finite).sum()) + int((~out[:, width:].isnan()).sum())
        return wrong

    def scratch(self, shape: Shape) -> torch.Tensor:
        """[out + adapter columns, in + adapter columns], as the engine lays it out."""
        columns = adapter_columns(shape)
        return Scratch(Scratch.size(*shape, columns), self.device, torch.bfloat16).matrix(*shape, columns)

    def timed(self, kind: str, shape: Shape) -> tuple[float, int]:
        """(microseconds, bytes read and written)"""
        unpack, _, read = self.weight(kind, *shape)
        out = self.scratch(shape)[: shape[0], : shape[1]]
        return self.microseconds(lambda: unpack(out)), read + 2 * shape[0] * shape[1]

    def copied(self, nbytes: int) -> float:
        """Bytes a microsecond that a copy of so many reads and writes."""
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        out = torch.empty_like(source)
        return 2 * nbytes / self.microseconds(lambda: out.copy_(source))

    def placed(self, shape: Shape) -> dict[str, float]:
        """What placing the adapters takes, behind a dequantisation."""
        (rows, width), members = shape, MEMBERS.get(shape, 1)
        storage, ranks = self.scratch(shape), RANK * members
        down = torch.ones(ranks, width, dtype=torch.bfloat16, device=self.device)
        up = torch.ones(rows, RANK, dtype=torch.bfloat16, device=self.device)
        step = rows // members
        adapters = Adapters(down, up, tuple((i * step, (i + 1) * step) for i in range(members)), 2.0)
        return {
            "beside": round(self.microseconds(lambda: augmented_weight.beside(storage[:rows, width:], adapters)), 2),
            "below": round(self.microseconds(lambda: augmented_weight.below(storage[rows:, :width], adapters)), 2),
        }

    def microseconds(self, work: Callable[[], object]) -> float:
        """Of one launch, from a graph of ten; the least of a few rounds."""
        work()
        if self.device.type != "cuda":
            begin = time.perf_counter()
            work()
            return 1e6 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                work()
        times = []
        for _ in range(ROUNDS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
        return min(times)


def adapter_columns(shape: Shape) -> int:
    return RANK * MEMBERS.get(shape, 1)


def void(_: object) -> None:
    """A call's result is not wanted."""


def measure(
    device: torch.device,
    kinds: tuple[str, ...] = ("nf4", "nf4-plain", *KINDS),
    shapes: list[Shape] = SHAPES,
    checked: Shape = CHECKED,
) -> dict[str, Any]:
    bench = Bench(device)
    copies = {}
    result: dict[str, Any] = {"shapes": {}, "kinds": {}}
    for shape in shapes:
        copies[shape] = bench.copied(2 * shape[0] * shape[1])
        facts = {"apart": bench.scratch(shape).stride(0), "copy_tb_s": round(copies[shape] / 1e6, 3)}
        facts["room_us"] = bench.placed(shape)
        result["shapes"][str(list(shape))] = facts
        print(f"{list(shape)}: copy {facts['copy_tb_s']} TB/s, placing adapters {facts['room_us']} us")
    heads = "".join(f"{list(s)!s:>16} us  TB/s  of copy" for s in shapes)
    print(f"\n{'kind':9} {'differ':>6}{heads}")
    for kind in kinds:
        row: dict[str, Any] = {"differing": bench.differing(kind, checked)}
        line = f"{kind:9} {row['differing']:>6}"
        for shape in shapes:
            us, size = bench.timed(kind, shape)
            share = size / us / copies[shape]
            row[str(list(shape))] = {
                "us": round(us, 1),
                "tb_s": round(size / us / 1e6, 3),
                "of_copy": round(share, 3),
            }
            line += f"{us:>16.1f} {size / us / 1e6:>8.2f} {share:>8.2f}"
        result["kinds"][kind] = row
        print(line, flush=True)
    return result


def goals(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Right to the bit, and near the speed of a copy at the shape where a kind is furthest from it."""
    found = []
    for kind, row in rows.items():
        least = min((each["of_copy"] for each in row.values() if isinstance(each, Mapping)), default=None)
        found.append(goal(f"{kind}: values that differ", "at most", 0, row["differing"]))
        found.append(goal(f"{kind}: of a copy's speed, least", "at least", OF_COPY, least))
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="", help="a GPU's record, or - to print")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device: this measures its memory")
    found = measure(torch.device("cuda"))
    reached = goals(found["kinds"])
    print("\n".join(map(said, reached)))
    record.keep(options.json, "kernels", record.facts(options.commit) | found | {"goals": reached})
    return int(any(row["differing"] for row in found["kinds"].values()))


if __name__ == "__main__":
    sys.exit(main())
