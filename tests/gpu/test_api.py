"""A loop written with the Python API on CUDA: captured once, equal to a run, and nothing in it waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import graftune
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


def test_other_shapes_run_eagerly_and_say_so_once(tiny_folder, tmp_path: Path, capsys):
    session = graftune.open(tiny_folder("llama"), **SETTINGS)
    data = session.prepare(write_data(tmp_path / "data.jsonl", rows=40))
    session.forward_backward(next(session.batches(data)))
    for count in (1, 3):
        session.forward_backward([{"prompt": "abc", "response": "defg"}] * count)
    stats = session.optim_step()
    assert stats.loss > 0 and session.parts.pipeline.captures == 1
    assert capsys.readouterr().err.count("run eagerly") == 1
