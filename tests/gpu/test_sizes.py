"""Runs of several sizes one after the other in one process, as a notebook has them: each is captured, by whichever
backend of attention, and gives what it gives uncaptured."""

from __future__ import annotations

import gc

import pytest
import torch
from benchmarks.synthetic import random_base

from graftune.batch import Example
from graftune.data.pack import pack
from graftune.graph import Captured
from graftune.infer import cache as caches
from graftune.infer.generate import requests_of, sampler_for
from graftune.infer.sample import Sampling
from graftune.kernels import attention, lora_linear, rms_norm, swiglu
from graftune.model.lora import initialise
from graftune.settings.sections import LoraConfig
from graftune.step.pipeline import pipeline_for
from graftune.step.step import Step
from tests.support import oracle, specs

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SPEC = specs.made(
    layers=2, width=512, ffn=1024, heads=8, kv_heads=2, head_width=64, vocab=1000, norm_eps=1e-5,
    rope_theta=10000.0, max_positions=4096, tied=True,
)  # fmt: skip
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "clip": 1.0}


def losses(length: int, backend: str, others: tuple[str, ...], graph: bool) -> list[float]:
    """Of three steps over one document; the same weights whenever it is called."""
    torch.manual_seed(3)
    ours = oracle.place(random_base(SPEC, CUDA), LoraConfig(rank=16), "bf16", "cuda", torch.bfloat16)
    initialise(ours.arena, ours.lora, seed=1)
    step = Step(
        ours.decoder, ours.arena, attention_backend=backend, other_backends=others, longest=length, tuned=True
    )  # fmt: skip
    loop = pipeline_for(step, graph=graph)
    drawn = torch.Generator().manual_seed(length)
    row = torch.randint(0, SPEC.vocab, (length,), generator=drawn).tolist()
    batch = pack([Example(row, [i >= length // 2 for i in range(length)])])
    for _ in range(3):
        loop.step([loop.stage(batch)], HYPER | {"divisor": float(batch.response_tokens)}, [0])
    assert loop.captures == int(graph)
    return [figures.loss for figures in loop.finished(wait=True)]


@pytest.mark.parametrize("backend", ["timed", "cudnn", "mixed", "triton"])
def test_a_long_document_after_a_short_one(backend: str) -> None:
    choice = attention.choose(CUDA, torch.bfloat16, SPEC.attention[0].head_width, False, False)
    if backend != "timed" and backend not in (choice.backend, *choice.others):
        pytest.skip(f"{backend} does not serve here: {choice.why}")
    name, others = (choice.backend, choice.others) if backend == "timed" else (backend, ())
    for length in (512, 2048, 3000, 512):
        found, eager = (losses(length, name, others, graph) for graph in (True, False))
        assert found == pytest.approx(eager, rel=0.02), length
        assert found[-1] < found[0]


def test_runs_leave_nothing_behind_but_what_libraries_keep() -> None:
    """A second run of a process finds the streams, and with them the libraries' memory, of the first."""
    held = []
    for _ in range(4):
        losses(512, "triton", (), graph=True)
        gc.collect()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_allocated())
    assert held[3] == held[1], held


def test_a_long_prompt_is_read_without_all_of_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels that train, which keep no [heads, tokens, tokens]; the same answers as by the textbook."""
    torch.manual_seed(4)
    ours = oracle.place(random_base(SPEC, CUDA), LoraConfig(rank=16), "bf16", "cuda", torch.bfloat16)
    initialise(ours.arena, ours.lora, seed=1)
    choice = attention.choose(CUDA, torch.bfloat16, SPEC.attention[0].head_width, False, False)
    backend = attention.for_any_shape(choice.backend, CUDA, torch.bfloat16, SPEC.attention[0].head_width)
    drawn = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, SPEC.vocab, (n,), generator=drawn).tolist() for n in (3000, 17)]
    monkeypatch.setattr(caches, "CHUNK", 4096)
    found, peaks = [], []
    for name in (backend, "cpu"):
        sampler = sampler_for(ours.decoder, requests_of(ours.decoder, prompts, 1), 1 << 40, name)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (fresh,) = sampler.rounds(prompts, Sampling(1), ())
        found.append([fresh[index][0].logprob for index in range(2)])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    scores = SPEC.attention[0].heads * 3000 * 3000 * 4
    assert peaks[0] < scores < peaks[1], peaks
    assert found[0] == pytest.approx(found[1], abs=0.02)


def test_no_rows_at_all() -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, device="cuda", dtype=torch.bfloat16)

    weight, total = torch.ones(32, device="cuda"), torch.zeros(16, 32, device="cuda")
    out, rstd = empty(0, 32), torch.zeros(0, device="cuda")
    rms_norm.add_forward(empty(0, 32), None, weight, 1e-5, out)
    assert rms_norm.add_backward(empty(0, 32), empty(0, 32), rstd, weight).shape == (0, 32)
    assert lora_linear.down(empty(0, 32), empty(16, 32)).shape == (0, 16)
    lora_linear.down_backward(empty(0, 16), empty(0, 32), total, rstd=rstd, weight=weight)
    swiglu.forward(empty(0, 64), out)
    assert not total.any()


def test_a_run_that_is_let_go_while_another_is_captured_does_not_break_it() -> None:
    """Destroying a graph is forbidden inside a capture, and runs are the collector's: they refer to themselves."""
    x = torch.zeros(8, device="cuda")

    def more() -> None:
        x.add_(1)

    old: dict[str, object] = {"run": Captured(more)}
    old["run"]()  # type: ignore[operator]
    old["itself"] = old
    left = [old]
    del old
    calls = []

    def work() -> None:
        x.add_(1)
        calls.append(len(calls))
        if len(calls) == 2:  # now it is captured
            left.clear()
            kept = [[] for _ in range(200_000)]  # the collector's turn, several times over
            del kept

    run = Captured(work)
    for _ in range(3):
        run()
    assert float(x.sum()) == 8 * 4 and len(calls) == 2


def test_what_broke_a_capture_is_what_is_raised() -> None:
    x = torch.ones(8, device="cuda")
    calls = []

    def work() -> None:
        calls.append(float(x.sum()) if calls else 0.0)  # waits for the device, which a capture may not

    run = Captured(work)
    with pytest.raises(RuntimeError, match=r"captur") as told:
        run()
    assert "previous error" not in str(told.value) and run.graph is None
    torch.cuda.synchronize()

    def more() -> None:
        x.add_(1)

    again = Captured(more)
    for _ in range(3):
        again()
    assert bool((x == 4).all()) and gc.isenabled()
