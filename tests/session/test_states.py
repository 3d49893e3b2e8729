"""States of a session: a loop goes on where it was, and its position in the data is used once."""

from __future__ import annotations

import pytest
import torch

from graftune.errors import GraftuneError

ROWS = [{"prompt": f"Say {i}", "response": f"It is {i}."} for i in range(12)]
HOW = {"dropout": 0.2, "tokens_per_step": 64, "lr": 1e-2}


def trained(session, data, epoch=0, stop=None):
    """Steps of one pass, at most up to step `stop`."""
    count = 0
    for batch in session.batches(data, epoch):
        session.forward_backward(batch)
        session.optim_step()
        count += 1
        if session.steps == stop:
            break
    return count


@pytest.fixture
def begun(opened):
    """A session, from a state if one is given, and its data."""

    def get(state=None, **how):
        session = opened(**HOW)
        if state is not None:
            session.load_state(state, **how)
        return session, session.prepare(ROWS)

    return get


def test_a_state_goes_on_bit_for_bit(begun, tmp_path):
    """Killed in the middle of the second epoch: the same loop over the same data does what was left."""
    straight, data = begun()
    whole = straight.steps_per_epoch(data)
    killed, same = begun()
    for epoch in range(2):
        trained(straight, data, epoch)
        trained(killed, same, epoch, stop=whole + 1)
    killed.save_state(tmp_path / "state")
    resumed, data = begun(tmp_path / "state")
    assert resumed.steps == whole + 1
    assert [trained(resumed, data, epoch) for epoch in range(2)] == [0, straight.steps - whole - 1]
    assert resumed.steps == straight.steps and torch.equal(resumed.parts.arena.weights, straight.parts.arena.weights)
    assert (
        torch.equal(resumed.parts.arena.m, straight.parts.arena.m) and int(resumed.parts.step.count) == straight.steps
    )
    other, _ = begun(tmp_path / "state")
    with pytest.raises(GraftuneError, match="other data"):
        next(other.batches(other.prepare(ROWS[:7])))
    with pytest.raises(GraftuneError, match="not a saved state"):
        other.load_state(tmp_path)


def test_passes_are_whole_again_behind_a_loaded_state(begun, tmp_path):
    first, data = begun()
    total = first.steps_per_epoch(data)
    assert total > 3 and trained(first, data, stop=3) == 3
    first.save_state(tmp_path / "state")
    said = []
    resumed, data = begun(tmp_path / "state")
    resumed.parts.say = said.append
    assert [trained(resumed, data) for _ in range(3)] == [total - 3, total, total]
    assert [note for note in said if "leaves out 3 of" in note] and resumed.steps == 3 * total
    other = resumed.prepare(ROWS[:7])
    assert trained(resumed, other) == resumed.steps_per_epoch(other), "other data, once the position was used"


def test_a_state_without_its_position(begun, tmp_path):
    """For other data, or to begin again: weights, moments and counts alone. A state of own records has no position."""
    first, data = begun()
    trained(first, data, stop=3)
    first.save_state(tmp_path / "state")
    resumed, _ = begun(tmp_path / "state", position=False)
    other = resumed.prepare(ROWS[:7])
    assert resumed.steps == 3 and torch.equal(resumed.parts.arena.m, first.parts.arena.m)
    assert trained(resumed, other) == resumed.steps_per_epoch(other)
    own, _ = begun()
    own.forward_backward(ROWS)
    own.optim_step()
    own.save_state(tmp_path / "own")
    again, data = begun(tmp_path / "own")
    assert trained(again, data) == again.steps_per_epoch(data)


def test_a_batch_that_was_not_applied_is_not_behind_the_position(begun, tmp_path):
    first, data = begun()
    batches = first.batches(data)
    first.forward_backward(next(batches))
    first.optim_step()
    first.forward_backward(next(batches))
    first.save_state(tmp_path / "state")
    resumed, data = begun(tmp_path / "state")
    assert trained(resumed, data) == resumed.steps_per_epoch(data) - 1
