"""Batches of a session: their size, records of one's own, what is planned for them, and what is left on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tools.api_docs import RESULTS, members

import graftune
from graftune.batch import PackedBatch
from graftune.data.pack import pack

ROWS = [{"prompt": f"Say {i}", "response": f"It is {i}."} for i in range(12)]


def files_in(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def sizes_of(session, batch):
    """Tokens of the micro-batches that are run."""
    session.feed.resolve_auto(None, session.loss.layout(()))
    found, real = [], session.parts.step.micro_step
    session.parts.step.micro_step = lambda one, **how: found.append(len(one.tokens)) or real(one, **how)
    session.forward_backward(batch)
    session.parts.step.micro_step = real
    return found


@pytest.mark.parametrize("recompute", ["auto", "none"])
def test_own_records_are_divided_as_asked(opened, recompute):
    """Micro-batches of the session's size; the gradient is that of one."""
    one, several = opened(tokens_per_micro_batch=4096), opened(tokens_per_micro_batch=64, recompute=recompute)
    (all_of_it,) = sizes_of(one, ROWS)
    sizes = sizes_of(several, ROWS)
    assert max(sizes) <= 64 < all_of_it == sum(sizes) and len(sizes) > 3
    assert (several.parts.arena.grads - one.parts.arena.grads).norm() < 1e-5 * one.parts.arena.grads.norm() > 0
    stats = several.optim_step()
    assert stats.loss == pytest.approx(one.optim_step().loss, rel=1e-5) and stats.tokens == all_of_it


def test_a_longer_example_is_said(opened):
    said = []
    session = opened(tokens_per_micro_batch=16, tokens_per_step=4096, recompute="none")
    session.parts.say = said.append
    data = session.prepare(ROWS)
    sizes = [len(micro.tokens) for batch in session.batches(data) for micro in batch.packed]
    assert max(sizes) == data.longest > 16
    assert said == [f"micro-batches have {data.longest} tokens, as the longest example, where 16 were asked for"]
    assert session.config.train.tokens_per_micro_batch == 16


def test_records_leave_nothing_behind(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / "cache"))
    session = opened()
    session.forward_backward(ROWS)
    before = files_in(tmp_path)
    for count in range(1, 6):
        session.forward_backward(ROWS[:count])
        session.optim_step()
        session.evaluate(ROWS[:count])
        session.logprobs(ROWS[:count])
    assert files_in(tmp_path) == before and not [path for path in before if b"It is 3" in path.read_bytes()]
    kept = session.prepare(ROWS)
    assert {path.suffix for path in files_in(tmp_path) - before} == {".tokens"}, "found again, in no file of rows"
    assert session.prepare(ROWS).digest == kept.digest and kept.path == ""


def test_stored_records_are_pruned(tmp_path, monkeypatch):
    """Of runs, which have to find them again: within a limit, those used longest ago first."""
    from graftune.data import memory

    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(memory, "LIMIT", 130)
    first, second = (Path(str(memory.as_value([{"text": letter * 40}]))) for letter in "ab")
    os.utime(first, (1, 1))
    third = Path(str(memory.as_value([{"text": "c" * 40}])))
    assert not first.exists() and second.exists() and third.exists()


def test_records_that_are_left_out_are_said(opened):
    said = []
    session = opened(recompute="none", tokens_per_micro_batch=512)
    session.parts.say = said.append
    session.forward_backward([*ROWS, {"prompt": "", "response": "x"}])
    assert said == ["forward_backward: 1 record left out: blank prompt"]


def test_a_packed_batch_is_divided_by_its_response_tokens(opened):
    session, other = opened(), opened()
    packed = pack(session.prepare(ROWS).examples)
    names = ("tokens", "positions", "cu_seqlens", "rows", "labels", "lengths", "response_tokens")
    session.forward_backward(PackedBatch(**{name: getattr(packed, name) for name in names}))
    other.forward_backward(ROWS)
    ours, theirs = session.optim_step(), other.optim_step()
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6) and ours.grad_norm == pytest.approx(
        theirs.grad_norm, rel=1e-5
    )
    assert torch.allclose(session.parts.arena.weights, other.parts.arena.weights)


def test_completion_shows_what_is_documented(opened):
    """Of a session what docs/api.md lists, and not its parts for the rest of the package; of results their fields."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
    session = opened()
    shown = [name for name in dir(session) if not name.startswith("_")]
    assert all(hasattr(session, name) for name in shown) and not {"evaluated", "write", "fix_shape"} & set(shown)
    assert all(f"### `session.{name}`" in page or f"| `{name}` |" in page for name in shown)
    for name in RESULTS:
        fields = members(getattr(graftune, name))
        public = {one for one in dir(getattr(graftune, name)) if not one.startswith("_")}
        assert fields and all(f"| `{field}` |" in page for field in fields), name
        assert {one for one in public if isinstance(getattr(getattr(graftune, name), one), property)} <= set(fields)
    assert graftune.losses.CrossEntropy and graftune.Config and set(dir(graftune)) >= {"losses", "Config", "Dataset"}
