"""graftune as a participant of step.py: the one place that knows its engine's interface."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from benchmarks.bases import base_of
from benchmarks.cases import BATCHES, BLOCKS, HYPER, SEVEN, Case, tokens
from benchmarks.measure import Runner


def ours(
    case: Case,
    device: torch.device,
    *,
    graph: bool = True,
    deterministic: bool = False,
    without_update: bool = False,
) -> Runner:
    """Random weights of the case's shape, no file, placed tensor by tensor as a run places them; the hot loop of a run,
    batches staged as its loader would."""
    from graftune.batch import Example
    from graftune.config import LoraConfig
    from graftune.data.pack import pack
    from graftune.kernels import attention, fp8
    from graftune.model.lora import build_arena, initialise
    from graftune.runtime import resolve
    from graftune.step.pipeline import hot_loop
    from graftune.step.step import Step
    from graftune.weights.load import build_decoder
    from graftune.weights.placement import Placement, both_ways

    targets = ("all_linear",) if case.targets == SEVEN else case.targets
    lora = LoraConfig(rank=case.rank, alpha=case.alpha, targets=targets, init="kaiming")  # as the peers start
    runtime = resolve(str(device), "bf16" if device.type == "cuda" else "auto", deterministic=deterministic)
    if case.base == "fp8" and device.type == "cuda":
        fp8.require(runtime.device, runtime.compute)
    base = base_of(case, runtime.device)
    spec = base.spec
    arena = build_arena(spec, lora, runtime.device, runtime.compute, full=case.method == "full")
    held = {"bf16": runtime.compute_name} | dict.fromkeys(BLOCKS, "keep")
    free = torch.cuda.mem_get_info(runtime.device)[0] if device.type == "cuda" else 0
    both = case.base == "fp8" and both_ways(spec, free)
    placement = Placement(held.get(case.base, case.base), "the benchmark's", both)
    decoder = build_decoder(base, arena, lora, runtime, placement)
    if case.method == "full":
        arena.publish()
    else:
        initialise(arena, lora, seed=1)
    choice = attention.choose(runtime.device, runtime.compute, spec.head_width, deterministic, False)
    tuned = not deterministic
    supervised = [i >= case.prompt for i in range(case.length)]
    batches = [
        [pack([Example(row, supervised) for row in micro]) for micro in batch] for batch in tokens(case).tolist()
    ]
    step = Step(
        decoder,
        arena,
        recompute=case.recompute,
        attention_backend=choice.backend,
        longest=case.length,
        tuned=tuned,
        other_backends=choice.others,
    )
    if without_update:
        step.update_step = lambda: step.report  # type: ignore[method-assign]
    loop = hot_loop(step, graph=graph)
    hyper = HYPER | {"divisor": float(sum(micro.response_tokens for micro in batches[0]))}

    def staged(index: int) -> list[Any]:
        return [loop.stage(micro) for micro in batches[index % BATCHES]]

    loader = ThreadPoolExecutor(1)  # batches are staged a step ahead by a thread, as in a run
    coming = loader.submit(staged, 0)

    def one(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal coming
        now = coming.result()
        loop.step(now, hyper, [0] * len(now))
        runner.note = note()  # by now attention was timed
        loss, norm, _ = step.report.clone().unbind()
        loop.finished()
        coming = loader.submit(staged, index + 1)  # last: a thread that wakes takes the interpreter from us
        return loss, norm

    mode = "captured" if graph and device.type == "cuda" else "eager"

    def note() -> str:
        how = f"{mode}; base {case.base}; recompute {case.recompute}"
        return f"{runtime.describe()}; attention {step.backend}; {how}"

    runner = Runner(one, lambda: [arena.view(name, arena.weights) for name in arena.slots], note())
    return runner
