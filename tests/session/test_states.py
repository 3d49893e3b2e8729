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


def test_a_state_goes_on_bit_for_bit(opened, tmp_path):
    """Killed in the middle of the second epoch: the same loop over the same data does what was left."""
    how = {"dropout": 0.2, "tokens_per_step": 96, "lr": 1e-2}

    def loop(session, stop=None):
        data = session.prepare(ROWS)
        for epoch in range(2):
            for batch in session.batches(data, epoch):
                session.forward_backward(batch)
                session.optim_step()
                if session.steps == stop:
                    return session
        return session

    straight = loop(opened(**how))
    stop = straight.steps_per_epoch(straight.prepare(ROWS)) + 1
    loop(opened(**how), stop).save_state(tmp_path / "state")
    resumed = opened(**how)
    resumed.load_state(tmp_path / "state")
    assert resumed.steps == stop
    loop(resumed)
    assert resumed.steps == straight.steps and torch.equal(resumed.parts.arena.weights, straight.parts.arena.weights)
    assert (
        torch.equal(resumed.parts.arena.m, straight.parts.arena.m) and int(resumed.parts.step.count) == straight.steps
    )
    other = opened(**how)
    other.load_state(tmp_path / "state")
    with pytest.raises(GraftuneError, match="other data"):
        next(other.batches(other.prepare(ROWS[:7])))
    with pytest.raises(GraftuneError, match="not a saved state"):
        other.load_state(tmp_path)


def test_passes_are_whole_again_behind_a_loaded_state(opened, tmp_path):
    first = opened(**HOW)
    data = first.prepare(ROWS)
    total = first.steps_per_epoch(data)
    assert total > 3 and trained(first, data, stop=3) == 3
    first.save_state(tmp_path / "state")
    said = []
    resumed = opened(**HOW)
    resumed.parts.say = said.append
    resumed.load_state(tmp_path / "state")
    data = resumed.prepare(ROWS)
    assert [trained(resumed, data) for _ in range(3)] == [total - 3, total, total]
    assert [note for note in said if "leaves out 3 of" in note] and resumed.steps == 3 * total
    other = resumed.prepare(ROWS[:7])
    assert trained(resumed, other) == resumed.steps_per_epoch(other), "other data, once the position was used"


@pytest.mark.thorough
def test_epochs_before_the_saved_one_are_left_out_once(opened, tmp_path):
    first = opened(**HOW)
    data = first.prepare(ROWS)
    whole = trained(first, data, 0)
    trained(first, data, 1, stop=whole + 1)
    first.save_state(tmp_path / "state")
    resumed = opened(**HOW)
    resumed.load_state(tmp_path / "state")
    data = resumed.prepare(ROWS)
    later = resumed.steps_per_epoch(data, 1)
    assert [trained(resumed, data, epoch) for epoch in (0, 0, 1, 1)] == [0, whole, later - 1, later]


def test_a_state_without_its_position(opened, tmp_path):
    """For other data, or to begin again: weights, moments and counts alone. A state of own records has no position."""
    first = opened(**HOW)
    data = first.prepare(ROWS)
    trained(first, data, stop=3)
    first.save_state(tmp_path / "state")
    resumed = opened(**HOW)
    resumed.load_state(tmp_path / "state", position=False)
    other = resumed.prepare(ROWS[:7])
    assert resumed.steps == 3 and torch.equal(resumed.parts.arena.m, first.parts.arena.m)
    assert trained(resumed, other) == resumed.steps_per_epoch(other)
    own = opened(**HOW)
    own.forward_backward(ROWS)
    own.optim_step()
    own.save_state(tmp_path / "own")
    again = opened(**HOW)
    again.load_state(tmp_path / "own")
    assert trained(again, data) == again.steps_per_epoch(data)


def test_a_batch_that_was_not_applied_is_not_behind_the_position(opened, tmp_path):
    first = opened(**HOW)
    data = first.prepare(ROWS)
    batches = first.batches(data)
    first.forward_backward(next(batches))
    first.optim_step()
    first.forward_backward(next(batches))
    first.save_state(tmp_path / "state")
    resumed = opened(**HOW)
    resumed.load_state(tmp_path / "state")
    data = resumed.prepare(ROWS)
    assert trained(resumed, data) == resumed.steps_per_epoch(data) - 1
