"""The bundled pairs: made again byte for byte, told apart by the order of their sentences alone, and scored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tools import preference_data

from graftune.data.dataset import prepare, split
from graftune.data.encoded import side_of
from graftune.data.pairs import PAIRS
from graftune.data.sample import sample_for, score_reply, score_sample
from graftune.errors import GraftuneError
from graftune.settings.sections import DataConfig
from tests.data.helpers import CHATML, with_template


def pairs() -> list[dict[str, Any]]:
    return [json.loads(line) for line in sample_for("pairs").read_text().splitlines()]


def sides(row: dict[str, Any]) -> list[str]:
    return [row[side][0]["content"] for side in ("chosen", "rejected")]


def test_the_file_is_what_the_generator_writes() -> None:
    assert preference_data.rendered() == sample_for("pairs").read_bytes()
    assert len({json.dumps(row["prompt"]) for row in pairs()}) == len(pairs()) == 500, "no prompt occurs twice"


def test_the_scorer_tells_the_sides_apart() -> None:
    for row in pairs():
        chosen, rejected = sides(row)
        assert score_reply(chosen, chosen) == {"in_order": 1, "complete": 1, "facts": 1}
        assert score_reply(rejected, chosen) == {"in_order": 0, "complete": 1, "facts": 1}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Thanks, Ada! The lamp is 51 euros. It comes on Monday.", (1, 1, 1)),
        ("Thank you, Ada. You pay 51 euros! We deliver on Monday", (1, 1, 1)),
        ("Thanks, Ada! The lamp is 51 euros.", (0, 0, 0)),
        ("Thanks, Ada! The lamp is 52 euros. It comes on Monday.", (1, 1, 0)),
        ("Thanks, Ada! It is 51 euros and comes on Monday.", (0, 0, 1)),
        ("Thanks, Ada! It is 51 euros. It comes on Monday. Thanks!", (0, 0, 1)),
        ("", (0, 0, 0)),
    ],
)
def test_score(answer: str, score: tuple[int, int, int]) -> None:
    assert tuple(score_reply(answer, "Thanks, Ada! The lamp is 51 euros. It comes on Monday.").values()) == score


def test_every_pair_is_used() -> None:
    data = prepare(str(sample_for("pairs")), with_template(CHATML), DataConfig(strict=True), kind=PAIRS)
    assert len(data) == 1000 and not data.summary.notes and not data.summary.duplicates
    training, held_out = split(data, 0.2, seed=1)
    assert (len(training), len(held_out)) == (800, 200)
    asked = held_out.leading()
    assert len(asked) == 100 and {side_of(data.examples, int(i)) for i in asked.examples.chosen} == {"chosen"}
    with pytest.raises(GraftuneError, match="no bundled sample of rated answers"):
        sample_for("rated answers")


def test_a_metric_knows_the_sample_by_the_reference() -> None:
    assert "exact" in score_sample("", '{"topic":"refund","order":4821,"urgent":false}')
    assert "in_order" in score_sample("", sides(pairs()[0])[0])
