"""Losses given to a session: by name or as objects, to open, batches or forward_backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graftune
from graftune.errors import GraftuneError
from graftune.losses import Anchored, BatchLayout, CrossEntropy
from tests.losses.pairs import Dpo

ROWS = [{"prompt": f"Say {i}", "response": f"It is {i}."} for i in range(12)]


class Twice(CrossEntropy):
    def __call__(self, *args, **named):
        found = super().__call__(*args, **named)
        return found._replace(total=2 * found.total)


def loss_of(session, batch=ROWS, **how):
    session.forward_backward(batch, **how)
    return session.optim_step(lr=0.0).loss


def test_a_loss_goes_with_batches(opened):
    """Given with the batch or before it: the same figures, and the batches of a pass that has begun are used."""
    plain = opened(tokens_per_step=96)
    expected = [loss_of(plain, batch) for batch in plain.batches(plain.prepare(ROWS))]
    for how in ("forward_backward", "batches", "open"):
        loss = Twice()
        session = opened(tokens_per_step=96, **({"loss": loss} if how == "open" else {}))
        batches = session.batches(session.prepare(ROWS), **({"loss": loss} if how == "batches" else {}))
        given = {"loss": loss} if how == "forward_backward" else {}
        assert [loss_of(session, batch, **given) for batch in batches] == pytest.approx([2 * x for x in expected])
        assert session.loss is loss and session.steps == len(expected) > 1


def test_a_loss_by_name(opened):
    session, asked = opened(), opened(loss="anchored")
    torch.nn.init.normal_(session.parts.arena.weights, std=0.05)
    asked.parts.arena.weights.copy_(session.parts.arena.weights)
    for one in (session, asked):
        one.parts.arena.publish()
    data = session.prepare(ROWS)
    found = []
    for batch in session.batches(data):
        session.forward_backward(batch, loss="anchored")
        found.append(session.loss)
    stats = session.optim_step(lr=0.0)
    assert isinstance(session.loss, Anchored) and set(map(id, found)) == {id(session.loss)}, "made once"
    assert session.config.train.loss == "anchored" and set(stats.figures) == set(Anchored.figures)
    assert stats.loss == pytest.approx(asked.evaluate(data).loss, rel=1e-5) and stats.figures["cross_entropy"] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", ["simpo", "dpo", "kto"])
def test_preferences_in_a_session(opened, loss):
    """Records given to forward_backward, and batches of a data set: the loss and the figures of an evaluation."""
    rows = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "No."} for row in ROWS]
    if loss == "kto":
        rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2} for i, r in enumerate(rows)]
    session = opened(loss=loss, tokens_per_step=4096, tokens_per_micro_batch=64)
    torch.nn.init.normal_(session.parts.arena.weights, std=0.2)
    session.parts.arena.publish()
    data = session.prepare(rows)
    expected = session.evaluate(data)
    (batch,) = session.batches(data)
    for given in (rows, batch):
        session.forward_backward(given)
        stats = session.optim_step(lr=0.0, weight_decay=0.0)
        assert stats.loss == pytest.approx(expected.loss, rel=1e-5)
        assert stats.figures == pytest.approx(expected.figures, rel=1e-4, abs=1e-5)
    assert loss != "kto" or expected.figures["kl"] > 0


def test_a_loss_may_change_between_steps(opened):
    """What was counted and what was fetched stays; gradients of two losses are not mixed."""
    session = opened(lr=1e-2, tokens_per_step=4096)
    (batch,) = session.batches(session.prepare(ROWS))
    session.forward_backward(batch)
    first = session.optim_step()
    session.forward_backward(batch, loss="anchored")
    with pytest.raises(GraftuneError, match="gradients of another one"):
        session.forward_backward(batch, loss="cross_entropy")
    second = session.optim_step()
    assert (
        first.loss > 0 and not first.figures and second.figures and int(session.parts.step.count) == session.steps == 2
    )
    straight = opened(lr=1e-2)
    for _ in range(2):
        straight.forward_backward(batch)
        last = straight.optim_step()
    assert second.figures["cross_entropy"] == pytest.approx(last.loss, rel=1e-5)


PAIRS = [{"prompt": f"Say {i}", "chosen": f"It is {i}.", "rejected": f"No: {i + 1}"} for i in range(6)]


@pytest.mark.few(1)
@pytest.mark.parametrize("reference", ["base", "start"])
def test_pairs_on_own_records(opened, reference):
    """A loss with fields and groups, planned for as it is: DPO starts at log 2, over micro-batches of whole pairs."""
    for how in ({}, {"recompute": "none", "tokens_per_micro_batch": 64}, {"tokens_per_micro_batch": 64}):
        session = opened(loss=Dpo(reference), lr=1e-2, **how)
        for _ in range(2):
            session.forward_backward(PAIRS)
            stats = session.optim_step()
            assert set(stats.figures) == {"accuracy"}
            assert (stats.loss == pytest.approx(0.693147, rel=1e-5)) == (stats.step == 1)
        assert session.evaluate(PAIRS).loss < stats.loss < 0.6931


def test_a_loss_that_compares_with_the_start_comes_before_it_is_left(opened):
    session = opened()
    loss_of(session)
    with pytest.raises(GraftuneError, match="as it was at the start, which was not kept"):
        session.forward_backward(PAIRS, loss=Dpo("start"))
    assert isinstance(session.loss, CrossEntropy)


def test_a_batch_of_another_layout_is_refused(opened):
    """By its kind of data, or by the fields that were packed."""

    class Counted(CrossEntropy):
        def fields_of(self, examples):
            return BatchLayout(shares=lambda held: np.ones(len(held)))

    session = opened()
    batch = next(session.batches(session.prepare(ROWS)))
    with pytest.raises(GraftuneError, match=r"packed for another loss than Counted.*batches\(data, loss=...\)"):
        session.forward_backward(batch, loss=Counted())
    with pytest.raises(GraftuneError, match="takes pairs of answers, and this data holds answers"):
        session.forward_backward(batch, loss=Dpo())
    assert type(session.loss) is CrossEntropy and loss_of(session, batch) > 0


@pytest.mark.parametrize(
    "loss, said",
    [
        ("nonsense", "one of cross_entropy, anchored"),
        (Dpo, r"the class Dpo; give an object, as Dpo\(\)"),
        (torch.nn.functional.cross_entropy, "loss is a function"),
        (3, "loss is an int"),
    ],
)
def test_what_is_no_loss_is_refused(opened, tiny_folder, loss, said):
    session = opened()
    for verb in (
        lambda: graftune.open(tiny_folder("llama"), quiet=True, loss=loss),
        lambda: session.batches(session.prepare(ROWS), loss=loss),
        lambda: session.forward_backward(ROWS, loss=loss),
    ):
        with pytest.raises(GraftuneError, match=said):
            verb()


def test_a_loss_that_compares_with_the_base_wants_one(opened):
    with pytest.raises(GraftuneError, match="Dpo compares with the base and method is full"):
        graftune.open(opened().base.path, quiet=True, method="full", compute_dtype="fp32", loss=Dpo())
