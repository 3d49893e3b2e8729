"""The sustained floor of a case: its base products, attention and head alone, from one CUDA graph.

    python benchmarks/floor.py CASE ... [--json FILE]         `step.py --who floor`

src/graftune/step/floor.py says what is in it and how it is timed; `graftune profile` measures the same for a run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import BLOCKS, Case

from graftune.kernels.nf4 import VALUE_BYTES
from graftune.step.floor import SUSTAIN_S, Heads, Layer, Work, flops, measured, plan, unpacked_bytes


def work_of(case: Case) -> Work:
    """One micro-batch of a case."""
    shape = case.shape
    layer = Layer(
        (("qkv", (shape.qkv, shape.width)),),
        Heads(shape.heads, shape.kv_heads, shape.head_width),
        (
            ("o", (shape.width, shape.heads * shape.head_width)),
            ("gate_up", (2 * shape.ffn, shape.width)),
            ("down", (shape.width, shape.ffn)),
        ),
    )
    return Work(
        (layer,) * shape.layers,
        (shape.vocab, shape.width),
        case.micro_tokens,
        case.responses,
        (case.length,) * case.rows,
        full=case.method == "full",
        packed_bytes=packed_bytes(case),
        fp8=case.base == "fp8",
    )


def packed_bytes(case: Case) -> float:
    """Of a value of a projection, where it has to be unpacked before a product."""
    if case.base == "nf4":
        return VALUE_BYTES
    if case.base in BLOCKS:
        from graftune.kernels.gguf_dequant import KINDS

        block = KINDS[case.base.upper()]
        return block.bytes / block.values
    return 0.0


def measure_floor(case: Case, device: torch.device, steps: int, sustain: float = SUSTAIN_S) -> dict[str, Any]:
    work = work_of(case)
    ms, note = measured(work, device, steps, sustain, case.micro, lambda text: print(text, flush=True))
    done, moved = flops(work, plan(work)) * case.micro, unpacked_bytes(work, plan(work)) * case.micro
    if moved:
        note += f", {moved / 1e9:.1f} GB of codes and values moved"
    if case.base == "fp8":
        note += ", projections in fp8"
    return {
        "ms": round(ms, 3),
        "tok_s": round(case.tokens / ms * 1e3, 1),
        "flops": done,
        "tflops": round(done / ms / 1e9, 1),
        "note": note,
    }


if __name__ == "__main__":
    from benchmarks.step import main

    sys.exit(main([*sys.argv[1:], "--who", "floor"]))
