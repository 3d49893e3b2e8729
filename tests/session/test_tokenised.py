"""Examples that the caller has tokenised: checked, trained as records are, and packed in few fixed shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graftune.batch import Example
from graftune.data.pack import pack
from graftune.errors import GraftuneError
from graftune.session import parts
from graftune.session.parts import SessionParts
from graftune.step.pipeline import BatchShape, HostPipeline
from tests.session.test_batches import ROWS
from tests.support import tiny

SETTINGS = {"recompute": "none", "max_seq_len": 128}


def answers(seed, *lengths):
    """Sampled answers, the first third of each a prompt, as a loop of one's own has them."""
    draw, made = np.random.default_rng(seed), []
    for length in lengths:
        prompt = max(1, length // 3)
        made.append(
            {
                "tokens": draw.integers(3, tiny.VOCAB, length),
                "mask": [0] * prompt + [1] * (length - prompt),
                "advantages": float(draw.normal()),
                "logprobs": torch.from_numpy(draw.normal(-20.0, 3.0, length)),
            }
        )
    return made


def stepped(session, *batches):
    """Loss, figures and gradient of one step."""
    for batch in batches:
        session.forward_backward(batch)
    grads = session.parts.arena.grads.clone() / session._divisor
    stats = session.optim_step(lr=0.0)
    return stats.loss, stats.figures, grads


def alike(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5) and one[1] == pytest.approx(other[1], rel=1e-4, abs=1e-6)
    assert (one[2] - other[2]).norm() < 1e-5 * other[2].norm() > 0


class Counting(HostPipeline):
    """Counts the captures that a device's pipeline would make."""

    def __init__(self, step):
        super().__init__(step)
        self.shapes, self.captured, self.ahead_shapes = set(), 0, []

    def stage(self, batch):
        shape = BatchShape.of(batch)
        self.captured += shape not in self.shapes
        self.shapes.add(shape)
        self.ahead_shapes += map(BatchShape.of, batch.ahead or ())
        assert self.work.longest is None or max(batch.lengths) <= self.work.longest
        return super().stage(batch)

    def bound_documents(self, longest, ahead=0):
        self.work.longest_ahead = max(self.work.longest_ahead or 0, ahead)
        if self.work.longest is None or self.work.longest < longest:
            self.work.longest = longest
            self.free_graphs()

    def free_graphs(self):
        self.shapes.clear()


@pytest.fixture
def fixed(opened, monkeypatch):
    """Settings -> a session whose shapes are fixed, as on a GPU."""

    def get(**settings):
        session = opened(**SETTINGS | settings)
        monkeypatch.setattr(SessionParts, "fixed_shapes", property(lambda self: self is session.parts))
        return session

    monkeypatch.setattr(parts, "pipeline_for", lambda step, graph: Counting(step))
    return get


def test_they_train_as_records_do(opened):
    one, two, weighted = (opened(**SETTINGS, tokens_per_micro_batch=512) for _ in range(3))
    examples = list(one.prepare(ROWS).examples)
    given = [{"tokens": e.tokens, "mask": e.supervised} for e in examples]
    want = stepped(one, ROWS)
    for batch in (given, examples):
        alike(stepped(two, batch), want)
    assert torch.equal(torch.cat(two.logprobs(given)), torch.cat(one.logprobs(ROWS)))
    assert two.evaluate(given) == one.evaluate(ROWS)
    halves = [one | {"weights": np.where(one.pop("mask"), 0.5, 0)} for one in given]
    alike(stepped(weighted, halves), want)
    free = two.logprobs([{"tokens": examples[0].tokens}])[0]
    assert len(free) == len(examples[0].tokens) - 1, "all but the first are trained"


def test_a_temperature_of_logprobs(opened):
    session = opened(**SETTINGS)
    one, two = (session.logprobs(answers(1, 9), temperature=heat)[0] for heat in (1.0, 0.5))
    assert (one - two).abs().max() > 1e-3
    with pytest.raises(GraftuneError, match="temperature is 0; it must be a number above 0"):
        session.logprobs(ROWS, temperature=0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": []}, "example 2: tokens are not a list of whole numbers"),
        ({"tokens": [3, tiny.VOCAB]}, f"example 2 has a token outside the vocabulary of {tiny.VOCAB}"),
        ({"tokens": [1.5, 2]}, "example 2: tokens are not a list of whole numbers"),
        ({"tokens": ["a"]}, "example 2: tokens contains a value that is not a finite number"),
        ({"mask": [1, 1]}, "example 2: mask has 2 numbers and there are 6 tokens"),
        ({"mask": 1}, "example 2: mask has 1 numbers and there are 6 tokens"),
        ({"logprobs": [0.0] * 5 + [float("nan")]}, "example 2: logprobs contains a value that is not a finite"),
        ({"tokens": [5] * 129, "logprobs": 0.0, "mask": [1] * 129}, "example 2 has 129 tokens and max_seq_len is 128"),
        (None, "example 2 has no tokens"),
    ],
)  # fmt: skip
def test_mistakes_are_named(change, why, opened):
    good, other = answers(1, 6, 6)
    session = opened(loss="ppo", **SETTINGS)
    with pytest.raises(GraftuneError, match=why):
        session.forward_backward([good, "text" if change is None else other | change])
    with pytest.raises(GraftuneError, match="example 1 has no advantages, which Ppo reads"):
        session.forward_backward([{"tokens": [3, 4], "logprobs": [0.0, 0.0]}])


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
@pytest.mark.parametrize("more", [{}, {"ratios": "sequence", "divide": "answers", "kl": 0.1}], ids=["plain", "answers"])
def test_packed_divided_and_overflowing_are_one(loss, more, opened, fixed):
    """One batch of exact shape; one answer at a time; micro-batches of the session's size; and a fixed shape that a
    smaller batch has decided, so that most of this one goes into further micro-batches."""
    data = answers(2, 9, 30, 4, 17, 22, 40)
    want = stepped(opened(loss=loss, tokens_per_micro_batch=512, **SETTINGS, **more), data)
    alike(stepped(opened(loss=loss, tokens_per_micro_batch=512, **SETTINGS, **more), *([one] for one in data)), want)
    alike(stepped(opened(loss=loss, tokens_per_micro_batch=40, **SETTINGS, **more), data), want)
    session = fixed(loss=loss, **more)
    stepped(session, answers(3, 40, 5))
    alike(stepped(session, data), want)
    assert session.parts.pipeline.captured == 1


def test_twenty_rounds_of_other_lengths_are_captured_at_most_twice(fixed, opened):
    """The second time for an answer that is longer than the first batch."""
    session, draw = fixed(loss="cispo"), np.random.default_rng(4)
    plain = opened(loss="cispo", **SETTINGS)
    captures = []
    for round_ in range(20):
        data = answers(round_, *draw.integers(3, 30 if round_ < 5 else 120, draw.integers(1, 9)))
        alike(stepped(session, data), stepped(plain, data))
        captures.append(session.parts.pipeline.captured)
    (shape,) = session.parts.pipeline.shapes
    assert captures[4] == 1 and captures[-1] <= 2
    assert all(size.bit_count() == 1 for size in (shape.tokens, shape.documents, shape.rows)), "powers of two"


def test_a_saved_state_has_the_shape(fixed, tmp_path):
    """In another one, sums may be rounded differently."""
    first = fixed(loss="cispo")
    stepped(first, answers(1, 90, 40))
    shape = first.parts.own_shape
    first.save_state(tmp_path / "state")
    second = fixed(loss="cispo")
    second.load_state(tmp_path / "state")
    stepped(second, answers(2, 9))
    assert second.parts.own_shape == shape and second.parts.pipeline.captured == 1


@pytest.mark.thorough
def test_fresh_data_sets_are_captured_a_few_times(fixed):
    session, draw = fixed(tokens_per_step=256, tokens_per_micro_batch=128, val_split=0.0), np.random.default_rng(5)
    captures = []
    for _ in range(12):
        words = [" ".join("word" for _ in range(draw.integers(1, 6))) for _ in range(draw.integers(3, 20))]
        for batch in session.batches(session.prepare([{"prompt": "Say", "response": w} for w in words])):
            session.forward_backward(batch)
            session.optim_step(lr=0.0)
        captures.append(session.parts.pipeline.captured)
    assert captures[-1] <= 3 and captures[5] == captures[-1] and len(session.parts.pipeline.shapes) == 1


def test_capacities_are_settings(fixed):
    session = fixed(tokens_per_micro_batch=256, documents_per_micro_batch=3, rows_per_micro_batch=100)
    session.forward_backward(answers(6, 9, 9, 9, 9, 9, 9, 9))
    (shape,) = session.parts.pipeline.shapes
    assert (shape.tokens, shape.documents, shape.rows) == (256, 3 + 2, 128)  # two of padding; rows in whole tiles
    assert session._micro == 3, "three documents each"
    session.forward_backward(answers(7, 90, 90))
    assert session._micro == 4 and session.parts.pipeline.captured == 1
    session.forward_backward([one | {"mask": [1] * 120} for one in answers(8, 120, 120)])
    assert session._micro == 6 and session.parts.pipeline.captured == 1, "rows overflow"


def test_a_larger_shape_frees_the_graph(fixed):
    session = fixed(tokens_per_micro_batch=256, rows_per_micro_batch=64)
    for mask in ([1] * 60 + [0] * 40, [1] * 100):
        session.forward_backward([{"tokens": [7] * 100, "mask": mask}])
    assert session.parts.pipeline.captured == 2 and len(session.parts.pipeline.shapes) == 1


def test_kto_in_fixed_shapes(fixed, opened):
    """Its examples ahead of a step have a shape of their own, which grows with the longest."""
    rated = [[one | {"label": i % 2} for i, one in enumerate(answers(s, *n))] for s, n in enumerate(LENGTHS)]
    session, plain = fixed(loss="kto"), opened(loss="kto", **SETTINGS)
    for data in rated:
        alike(stepped(session, data), stepped(plain, data))
    shapes = session.parts.pipeline.ahead_shapes
    assert session.parts.pipeline.captured <= 2 and len(shapes) >= 4 and len(set(shapes[:3])) == 1
    assert len(set(shapes)) <= 2


def test_kto_takes_a_step_in_one_call(opened):
    """Its KL is of all examples of the step: of a second call, or of a packed batch, it would be another one."""
    data = [one | {"label": i % 2} for i, one in enumerate(answers(1, 9, 12))]
    session = opened(loss="kto", **SETTINGS)
    session.forward_backward(data)
    with pytest.raises(GraftuneError, match=r"Kto needs sums over all examples of a step.*one call"):
        session.forward_backward(data)
    assert session.optim_step().figures["kl"] >= 0
    examples = session.feed.examples(data, "test")
    with pytest.raises(GraftuneError, match="not as packed batches"):
        session.forward_backward(pack(examples, layout=session.loss.layout(examples)))


LENGTHS = (40, 30, 20), (9, 20, 4, 17, 22), (5, 11), (60, 90, 3)


def test_groups_stay_together(fixed):
    """Pairs, of which each is one micro-batch where two do not fit."""
    session = fixed(loss="simpo", documents_per_micro_batch=3)
    pairs = examples_in_pairs()
    session.forward_backward(pairs)
    assert session._micro == 3 and session.optim_step().loss > 0


def examples_in_pairs():
    draw = np.random.default_rng(7)
    return [
        Example(draw.integers(3, tiny.VOCAB, n).tolist(), [i > 1 for i in range(n)], group=i // 2)
        for i, n in enumerate((9, 12, 5, 7, 30, 8))
    ]
