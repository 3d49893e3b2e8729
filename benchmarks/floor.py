"""The sustained floor of a case: its base products, attention and head alone, from one CUDA graph.

    python benchmarks/floor.py CASE ... [--json FILE]         `step.py --who floor`

src/graftune/step/floor.py says what is in it and how it is timed; `graftune profile` measures the same for a run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import BLOCKS, Case

from graftune.kernels.nf4 import VALUE_BYTES
from graftune.model.families import from_config
from graftune.step.floor import SUSTAIN_S, Op, Size, Work, layers_of, measured, plan, size_of
from graftune.step.flops import STATE_OPERATIONS


def work_of(case: Case) -> Work:
    """One micro-batch of a case."""
    spec = from_config(case.shape.settings, case.name)
    return Work(
        layers_of(spec),
        Size(spec.vocab, spec.width),
        case.micro_tokens,
        case.responses,
        case.lengths,
        full=case.method == "full",
        forwards=case.forwards,
        packed_bytes=packed_bytes(case),
        packed_experts=17 / 32 if case.base == "mxfp4" else packed_bytes(case),
        fp8=case.base == "fp8",
    )


def flops(work: Work, ops: Sequence[Op]) -> float:
    """Of one micro-batch. Causal attention counts half its square: two products forward, five backward."""
    pairs = sum(length**2 for length in work.lengths) / 2
    total = float(STATE_OPERATIONS * work.tokens * sum(layer.state_values for layer in work.layers))
    for op in ops:
        if op.name and op.kind != "unpack":
            total += 2.0 * op.rows * size_of(work, op).out * size_of(work, op).into
        elif heads := work.layers[op.layer].heads if not op.name else None:
            total += 2 * pairs * heads.width * heads.query * (2 if op.kind == "attend" else 5)
    return total


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
    done = flops(work, plan(work)) * case.micro
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
