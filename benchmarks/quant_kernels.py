"""Dequantisation on a GPU: right to the bit, and how near to the memory's speed.

    python -m benchmarks.quant_kernels [--json FILE]

Every kind is first compared with the CPU's reference, all values of a [1024, 4096] weight, in bf16, fp16 and fp32, flat
and in rows that lie apart; a kind that differs is reported as such and the exit code is 1. Then it is timed at the
shapes of an 8B model into bf16 with room for adapters beside it, as a step has it, ten launches to a graph. A plain
copy of as many bf16 values is the measure: a dequantisation reads less and writes as much, so `of copy`, bytes a second
against the copy's, is at most about 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graftune.kernels import gguf_dequant, nf4, room
from graftune.kernels.gguf_dequant import KINDS, row_bytes
from graftune.kernels.gguf_dequant import reference as blocks_reference
from graftune.kernels.nf4 import reference as nf4_reference
from graftune.kernels.room import Adapters

CHECKED = (1024, 4096)
SHAPES = [(28672, 4096), (4096, 14336)]
ROOM, LAUNCHES, ROUNDS = 32, 10, 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDE = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
Unpack = Callable[[torch.Tensor], None]


def weight(kind: str, rows: int, width: int) -> tuple[Unpack, Callable[[], torch.Tensor], int]:
    """(dequantise into a matrix on the GPU, the reference's fp32 values, bytes it reads) of a random weight."""
    drawn = torch.Generator().manual_seed(rows + width)
    if kind.startswith("nf4"):
        values = torch.randn(rows * width, generator=drawn).mul_(0.02)
        quantised = nf4.quantise(values.view(rows, width).cuda(), double=kind == "nf4")
        host = quantised.to("cpu")
        return (
            lambda out: void(nf4.dequantise(quantised, out=out)),
            lambda: nf4_reference.values(host, 0, host.numel).view(rows, width),
            quantised.nbytes,
        )
    raw = torch.randint(256, (rows, row_bytes(kind, width)), generator=drawn, dtype=torch.uint8)
    there = raw.cuda()

    def reference() -> torch.Tensor:
        out = torch.empty(rows, width)
        blocks_reference.dequantise(raw, kind, out)
        return out

    return lambda out: gguf_dequant.dequantise(there, kind, out), reference, raw.nbytes


def void(_: object) -> None:
    """A call's result is not wanted."""


def differing(kind: str) -> int:
    """Values that are not the reference's to the bit, of all checks. (Random scales may be infinite: such are left out;
    beyond fp16's largest all are infinite alike.)"""
    unpack, reference, _ = weight(kind, *CHECKED)
    exact, wrong = reference(), 0
    finite = exact.isfinite()
    for dtype in DTYPES:
        want = exact.to(dtype).view(WIDE[dtype])
        for apart in (0, 3, ROOM):
            out = torch.full((CHECKED[0], CHECKED[1] + apart), float("nan"), dtype=dtype, device="cuda")
            unpack(out[:, : CHECKED[1]])
            got = out[:, : CHECKED[1]].contiguous().view(WIDE[dtype]).cpu()
            wrong += int(((got != want) & finite).sum()) + int((~out[:, CHECKED[1] :].isnan()).sum())
    return wrong


def microseconds(work: Callable[[], object]) -> float:
    """Of one launch, from a graph of ten; the least of a few rounds."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return min(times)


def timed(kind: str, rows: int, width: int) -> tuple[float, int]:
    """(microseconds, bytes read and written)"""
    unpack, _, read = weight(kind, rows, width)
    out = torch.empty(rows, width + ROOM, dtype=torch.bfloat16, device="cuda")[:, :width]
    return microseconds(lambda: unpack(out)), read + rows * width * 2


def copied(rows: int, width: int) -> tuple[float, int]:
    source = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(source)
    return microseconds(lambda: out.copy_(source)), 2 * source.nbytes


def placed(rows: int, width: int) -> dict[str, float]:
    """What placing the adapters of two members of rank 16 takes, behind a dequantisation."""
    storage = torch.empty(rows + ROOM, width + ROOM, dtype=torch.bfloat16, device="cuda")
    down, up = (torch.ones(n, dtype=torch.bfloat16, device="cuda") for n in (32 * width, rows * 16))
    half = rows // 2
    adapters = Adapters(down.view(32, width), up.view(rows, 16), ((0, half), (half, rows)), 2.0)
    return {
        "beside": round(microseconds(lambda: room.beside(storage[:rows, width:], adapters)), 2),
        "below": round(microseconds(lambda: room.below(storage[rows:, :width], adapters)), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="", help="write the figures to a file; - for stdout")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device: this measures its memory")
    name = torch.cuda.get_device_name()
    result: dict[str, Any] = {"gpu": name, "torch": torch.__version__, "kinds": {}, "copy_us": {}, "room_us": {}}
    log = sys.stderr if asked.json == "-" else sys.stdout
    measures = {}
    for shape in SHAPES:
        us, size = copied(*shape)
        measures[shape] = size / us
        result["copy_us"][str(list(shape))] = round(us, 1)
        result["room_us"][str(list(shape))] = placed(*shape)
        print(f"copy {list(shape)}: {us:.1f} us, {size / us / 1e6:.2f} TB/s; placing {placed(*shape)} us", file=log)
    print(
        f"\n{name}\n{'kind':8} {'differ':>7}" + "".join(f"{list(s)!s:>16} us  TB/s  of copy" for s in SHAPES), file=log
    )
    for kind in ("nf4", "nf4-plain", *KINDS):
        row: dict[str, Any] = {"differing": differing(kind)}
        line = f"{kind:9} {row['differing']:>6}"
        for shape in SHAPES:
            us, size = timed(kind, *shape)
            share = size / us / measures[shape]
            row[str(list(shape))] = {"us": round(us, 1), "tb_s": round(size / us / 1e6, 3), "of_copy": round(share, 3)}
            line += f"{us:>16.1f} {size / us / 1e6:>8.2f} {share:>8.2f}"
        result["kinds"][kind] = row
        print(line, file=log)
    text = json.dumps(result, indent=1)
    if asked.json == "-":
        print(text)
    elif asked.json:
        Path(asked.json).write_text(text + "\n")
    return int(any(row["differing"] for row in result["kinds"].values()))


if __name__ == "__main__":
    sys.exit(main())
