"""A loop written with the Python API on CUDA: captured once, equal to a run, and nothing in it waits for the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import graftune
from graftune.data.pack import pack
from graftune.step import pipeline
from tests.session.test_tokenised import answers
from tests.training.runs import adapter_bytes, write_data

pytestmark = pytest.mark.gpu
SETTINGS = {
    "rank": 4, "lr": 1e-2, "dropout": 0.1, "epochs": 2.0, "val_split": 0.0, "device": "cuda", "compute_dtype": "bf16",
    "tokens_per_step": 256, "tokens_per_micro_batch": 128,
}  # fmt: skip


def looped(session, data):
    total = sum(session.steps_per_epoch(data, epoch) for epoch in range(2))
    rates = iter(session.schedule(total))
    stats = []
    for epoch in range(2):
        for batch in session.batches(data, epoch):
            session.forward_backward(batch)
            stats.append(session.optim_step(lr=next(rates)))
    return stats


def test_a_loop_equals_a_run(tiny_folder, tmp_path: Path):
    data = write_data(tmp_path / "data.jsonl", rows=40)
    made = SETTINGS | {"deterministic": True}
    run = graftune.train(base=tiny_folder("llama"), data=data, out=tmp_path / "run", samples=0, **made)
    session = graftune.open(tiny_folder("llama"), quiet=True, **made)
    stats = looped(session, session.prepare(data))
    session.save_adapter(tmp_path / "looped" / "adapter")
    assert run.steps == len(stats) and session.parts.pipeline.captures == 1
    assert adapter_bytes(tmp_path / "looped") == adapter_bytes(tmp_path / "run")


def test_nothing_waits_but_the_reading(tiny_folder, tmp_path: Path):
    session = graftune.open(tiny_folder("llama"), quiet=True, **SETTINGS)
    data = session.prepare(write_data(tmp_path / "data.jsonl", rows=40))
    batches = session.batches(data)
    for _ in range(2):  # compiles, captures
        session.forward_backward(next(batches))
        session.optim_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        session.forward_backward(next(batches))
        stats = session.optim_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stats.loss > 0 and stats.grad_norm > 0


def test_a_loss_changes_between_captured_steps(tiny_folder, tmp_path: Path):
    """Batches that were sent ahead are used, the step is captured again, and nothing that was counted is lost."""
    session = graftune.open(tiny_folder("llama"), quiet=True, **SETTINGS)
    data = session.prepare(write_data(tmp_path / "data.jsonl", rows=40))
    stats = []
    for index, batch in enumerate(session.batches(data)):
        session.forward_backward(batch, loss="anchored" if index % 2 else "cross_entropy")
        stats.append(session.optim_step(lr=1e-3))
    assert len(stats) > 3 and int(session.parts.step.count) == session.steps == len(stats)
    for index, one in enumerate(stats):
        assert one.loss > 0 and bool(one.figures) == bool(index % 2)


def test_figures_can_be_read_when_a_session_is_closed(tiny_folder, tmp_path: Path):
    with graftune.open(tiny_folder("llama"), quiet=True, **SETTINGS) as session:
        data = session.prepare(write_data(tmp_path / "data.jsonl", rows=40))
        session.forward_backward(next(session.batches(data)))
        stats = session.optim_step()
    assert stats.loss > 0 and stats.grad_norm > 0


def test_packed_batches_run_eagerly_and_say_so_once(tiny_folder, tmp_path: Path, capsys):
    session = graftune.open(tiny_folder("llama"), **SETTINGS)
    data = session.prepare(write_data(tmp_path / "data.jsonl", rows=40))
    session.forward_backward(next(session.batches(data)))
    for count in (1, 3):
        session.forward_backward(pack(data.examples[:count]))
    stats = session.optim_step()
    assert stats.loss > 0 and session.parts.pipeline.captures == 1
    assert capsys.readouterr().err.count("run eagerly") == 1


def test_records_replay_beside_batches(tiny_folder, tmp_path: Path):
    """Of records that are given step by step, one graph; that of batches() stays."""
    session = graftune.open(tiny_folder("llama"), quiet=True, **SETTINGS)
    data = session.prepare(write_data(tmp_path / "data.jsonl", rows=40))
    for batch, count in zip(session.batches(data), (4, 1, 9), strict=False):
        session.forward_backward(batch)
        session.forward_backward([{"prompt": "abc", "response": "defg"}] * count)
        assert session.optim_step().loss > 0
    assert session.parts.pipeline.captures == 2


@pytest.mark.parametrize("graph", [True, False])
def test_own_examples_are_as_on_a_cpu(tiny_folder, graph: bool):
    """Exact shapes on a CPU; on the device one fixed shape, of which most batches overflow."""
    settings = {"rank": 4, "loss": "cispo", "quiet": True, "compute_dtype": "fp32", "max_seq_len": 128}
    ours = graftune.open(tiny_folder("llama"), device="cuda", graph=graph, recompute="none", **settings)
    other = graftune.open(tiny_folder("llama"), device="cpu", recompute="none", **settings)
    for seed, lengths in enumerate([(40, 5), (9, 30, 4, 17, 22, 40), (11,), (60, 60, 60)]):
        found = []
        for session in (ours, other):
            session.forward_backward(answers(seed, *lengths))
            found.append(session.optim_step(lr=1e-3))
        one, two = found
        assert one.loss == pytest.approx(two.loss, rel=1e-3) and one.figures == pytest.approx(two.figures, rel=1e-2)
    assert ours.parts.pipeline.captures == int(graph)


def test_twenty_rounds_of_other_lengths(tiny_folder, monkeypatch):
    """At most two captures, and memory is constant after them."""
    made = []
    real = pipeline.CapturedWork.__init__
    monkeypatch.setattr(pipeline.CapturedWork, "__init__", lambda *given: made.append(given[2]) or real(*given))
    session = graftune.open(tiny_folder("llama"), loss="ppo", quiet=True, **SETTINGS | {"tokens_per_micro_batch": 0})
    draw, taken = np.random.default_rng(4), []
    for round_ in range(20):
        session.forward_backward(answers(round_, *draw.integers(3, 30 if round_ < 5 else 120, draw.integers(1, 9))))
        assert session.optim_step(lr=1e-4).grad_norm >= 0
        torch.cuda.synchronize()
        taken.append((len(made), torch.cuda.memory_reserved()))
    assert len(made) <= 2 and session.parts.pipeline.captures == 1
    last = [memory for count, memory in taken if count == len(made)]
    assert len(set(last[1:])) == 1, taken
