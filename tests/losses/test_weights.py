"""Weights from the data to the loss: what turns and rows say, what is stored, what a run makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.synthetic import dataset_of

from graftune.batch import Example
from graftune.data.dataset import Dataset, prepare
from graftune.data.encoded import has_weights, take, weight_sums_of, weights_of
from graftune.data.kind import ANSWERS, DataKind
from graftune.data.pack import Capacities, pack
from graftune.data.pairs import PAIRS, RATED
from graftune.errors import GraftuneError
from graftune.losses import CrossEntropy, choose
from graftune.settings.sections import DataConfig, TrainConfig
from tests.data.helpers import CHATML, with_template


def read(tmp_path: Path, *rows: dict[str, Any], kind: DataKind = ANSWERS, **settings: Any) -> Dataset:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare(str(path), with_template(CHATML), DataConfig(**settings), kind=kind)


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def trained(example: Example) -> list[float]:
    assert example.weights is not None
    return [weight for weight, on in zip(example.weights, example.supervised, strict=True) if on]


def test_a_turns_weight_is_that_of_its_tokens(tmp_path: Path) -> None:
    said = [("a", "bcd", 0.5), ("e", "fg", 2), ("h", "ij", None), ("k", "lm", 0)]
    turns = [t for ask, answer, w in said for t in (turn("user", ask), turn("assistant", answer, weight=w))]
    (example,) = read(tmp_path, {"messages": turns}).examples
    assert trained(example) == [0.5] * 4 + [2.0] * 3 + [1.0] * 3, "each with its end token; weight 0 is not trained"
    assert example.response_weight == 2 + 6 + 3 and example.response_tokens == 10
    plain = [{k: v for k, v in one.items() if k != "weight"} for one in turns[:6]]
    (alone,) = read(tmp_path, {"messages": plain}).examples
    assert alone.weights is None and example.tokens[: len(alone.tokens)] == alone.tokens, "no template sees a weight"


def test_openais_weights_are_no_weights(tmp_path: Path) -> None:
    """0 and 1 say which turns are trained, and cost nothing."""
    turns = [
        turn("user", "a"),
        turn("assistant", "bcd", weight=0),
        turn("user", "e"),
        turn("assistant", "fg", weight=1),
    ]
    data = read(tmp_path, {"messages": turns})
    assert not has_weights(data.examples) and data.examples[0].weights is None
    assert not any("weights" in name for name in data.examples.store.arrays)
    assert CrossEntropy().layout(data.examples).fields == ()


def test_a_rows_weight_multiplies(tmp_path: Path) -> None:
    rows = [
        {"messages": [turn("user", "a"), turn("assistant", "bc", weight=0.5)], "loss_weight": 3},
        {"prompt": "a", "response": "bc", "loss_weight": "0.25"},
        {"text": "some words", "loss_weight": 4},
        {"prompt": "a", "response": "bc", "weight": 70, "loss_weight": None},
    ]
    data = read(tmp_path, *rows)
    assert not data.summary.refused
    assert [set(trained(example)) for example in data.examples[:3]] == [{1.5}, {0.25}, {4.0}]
    assert data.examples[3].weights is None, "a column `weight` may be anything"
    assert data.summary.notes["rows whose column 'loss_weight' multiplies their loss"] == 3
    mapped = read(tmp_path, {"prompt": "a", "response": "bc", "score": 0.75}, map={"loss_weight": "score"})
    assert set(trained(mapped.examples[0])) == {0.75}


@pytest.mark.parametrize(("loss", "kind"), [("dpo", PAIRS), ("kto", RATED)])
def test_weights_that_a_loss_does_not_read_are_refused(loss: Any, kind: DataKind, tmp_path: Path) -> None:
    sides = {"chosen": "bc", "rejected": "de"} if kind is PAIRS else {"completion": "bc", "label": True}
    data = read(tmp_path, {"prompt": "a", "loss_weight": 0.5, **sides}, kind=kind)
    assert has_weights(data.examples)
    with pytest.raises(GraftuneError, match=r"examples have weights, which (Dpo|Kto) does not read; leave them out"):
        choose(TrainConfig(loss=loss)).layout(data.examples)


def test_what_is_cut_or_divided_keeps_its_weights(tmp_path: Path) -> None:
    turns = [turn("user", "a" * 20), turn("assistant", "bcd", weight=0.5), turn("user", "e"), turn("assistant", "f" * 9,
             weight=2)]  # fmt: skip
    for limit in (40, 30, 24):
        found = list(read(tmp_path, {"messages": turns}, max_seq_len=limit).examples)
        sums = sorted({weight for example in found for weight in trained(example)})
        assert 2.0 in sums and all(len(example.tokens) <= limit for example in found)
        for example in found:
            assert len(example.weights or ()) == len(example.tokens)
    assert sums == [0.5, 2.0], "the early turn is an example of its own"


def test_stored_weights_are_those_that_were_made() -> None:
    made = [
        Example([5, 6, 7, 8], [False, True, False, True], 1, [9.0, 0.5, 7.0, 2.0]),
        Example([5, 6, 7, 8], [False, True, False, True], 2),
        Example([5, 6, 7, 8], [True, True, True, True], 3, [0.25] * 4),
    ]
    data = dataset_of(made)
    assert list(data.examples) == made and has_weights(data.examples)
    assert weight_sums_of(data.examples).tolist() == weight_sums_of(made).tolist() == [2.5, 2.0, 0.75]
    assert weights_of(data.examples).tolist() == weights_of(made).tolist() == [9, 0.5, 7, 2, 1, 1, 1, 1] + [0.25] * 4
    digests = {bytes(digest) for digest in data.examples.digests}
    assert len(digests) == 3, "weights are part of what an example is"
    assert not has_weights(data.subset([1]).examples) and has_weights(data.subset([2, 1]).examples)
    for order in ([2, 0], [1, 2, 0]):
        layout = CrossEntropy().layout(made)
        one, two = (pack(take(held, order), layout=layout) for held in (data.examples, made))
        assert one.divisor == two.divisor and one.extra["weights"].tolist() == two.extra["weights"].tolist()
    batch = pack(made, layout=layout, shape=Capacities(20, 5, 9, 8))
    assert batch.extra["weights"].tolist() == [0.5, 2.0, 1.0, 1.0, 0.25, 0.25, 0.25, 0, 0] and batch.divisor == 5.25
