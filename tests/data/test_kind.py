"""What the records of data are: read by their kind, kept apart by it, and whole where examples belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftune.batch import Example
from graftune.data.dataset import prepare, split
from graftune.data.encoded import Examples, groups_of, numbers_of, take
from graftune.data.fit import TOO_LONG
from graftune.data.kind import ANSWERS, DataKind
from graftune.data.writer import NewExample, StoreWriter
from graftune.errors import GraftuneError
from graftune.settings.sections import DataConfig
from tests.data.helpers import CHATML, load, trained_runs, with_template
from tests.losses.pairs import PAIRS, RATED_PAIRS

CHAT = with_template(CHATML)
ROWS = [{"prompt": f"Say {i}", "chosen": f"yes {i}", "rejected": f"no {i}", "margin": i / 4} for i in range(9)]


def test_a_row_becomes_a_group(tmp_path: Path) -> None:
    data = load(tmp_path, *ROWS, kind=RATED_PAIRS)
    runs = [run for example in data.examples for run in trained_runs(example)]
    assert runs == [f"{answer} {i}<|im_end|>" for i in range(9) for answer in ("yes", "no")], "the chosen one first"
    assert groups_of(data.examples).tolist() == [i // 2 for i in range(18)]
    assert numbers_of(data.examples, "margin", 7.0).tolist() == [i / 4 for i in range(9) for _ in "ab"]
    assert numbers_of(data.examples, "other", 7.0).tolist() == [7.0] * 18
    assert data.examples[3].numbers == {"margin": 0.25} and data.examples[3].group == 1
    assert "column not used: margin" not in data.summary.notes
    train, held = split(data, 0.3, seed=5)
    for part in (train, held, data.at_most(7, seed=2), data.at_most(1, seed=2)):
        groups = groups_of(part.examples)
        assert len(part) and groups[::2].tolist() == groups[1::2].tolist(), "groups stay whole"
    assert len(data.at_most(7, seed=2)) == 6 and len(data.at_most(1, seed=2)) == 2


def test_an_incomplete_group_is_refused_as_a_row(tmp_path: Path) -> None:
    odd = {"prompt": "Say", "chosen": "yes"}
    long = {**ROWS[0], "rejected": "no " * 90}
    unrated = {name: value for name, value in ROWS[0].items() if name != "margin"}
    data = load(tmp_path, ROWS[0], odd, long, {**ROWS[1], "margin": "much"}, unrated, kind=RATED_PAIRS, max_seq_len=64)
    assert len(data) == 2 and data.summary.refused == {"an incomplete group": 1, TOO_LONG: 1, "no number": 2}
    assert not data.summary.dropped
    reasons = dict(data.details())
    assert reasons[2] == "an incomplete group: there is no rejected answer"
    assert reasons[3] == TOO_LONG
    assert reasons[4] == "no number: 'margin' must be a finite number and is 'much'"
    assert reasons[5] == "no number: 'margin' must be a finite number and is missing"


def test_data_of_another_kind_is_not_found(tmp_path: Path) -> None:
    """Neither in the cache nor in the file."""
    rows = [{"prompt": "Say", "response": "so", "chosen": "yes", "rejected": "no"}] * 2
    with pytest.raises(GraftuneError, match="preference data"):
        load(tmp_path, *rows)
    path = str(tmp_path / "d.jsonl")
    pairs = prepare(path, CHAT, DataConfig(), kind=PAIRS)
    assert pairs.kind == "pairs of answers" and len(pairs) == 4
    with pytest.raises(GraftuneError, match="preference data"):
        prepare(path, CHAT, DataConfig(), kind=ANSWERS)

    class Others(DataKind):
        pass

    answers = prepare(path, CHAT, DataConfig(map={"response": "rejected"}), kind=ANSWERS)
    others = prepare(path, CHAT, DataConfig(map={"response": "rejected"}), kind=Others("other answers"))
    assert (answers.kind, others.kind) == ("answers", "other answers") and answers.digest == others.digest
    assert prepare(path, CHAT, DataConfig(), kind=PAIRS).kind == "pairs of answers"


@pytest.mark.parametrize("times", [1, 3])
def test_groups_and_numbers_are_stored(times: int) -> None:
    """A group is repeated as a whole; numbers and weights come back, and tell examples apart."""
    examples = [
        Example([1, 2, 3], [False, True, True], 1, group=4, numbers={"label": 1.0}),
        Example([1, 4], [False, True], 1, group=4, numbers={"label": 0.0}),
        Example([5, 6], [False, True], 2, weights=[1.0, 2.0], group=9),
        Example([5, 6], [False, True], 2, weights=[1.0, 2.0], group=9, numbers={"label": 1.0}),
        Example([7, 8], [False, True], 3),
    ]
    writer = StoreWriter(10)
    writer.add([NewExample(example, "", "", [], times) for example in examples[:2]])
    writer.add([NewExample(example, "", "", [], times) for example in examples[2:]])
    assert writer.duplicates() == 0, "a number more is another example"
    found = Examples(writer.in_memory(kind="pairs"))
    assert [example.tokens for example in found][: 2 * times] == [[1, 2, 3], [1, 4]] * times
    assert groups_of(found).tolist() == [n // 2 for n in range(4 * times)] + [-1] * times
    assert found[0].numbers == examples[0].numbers and list(found)[-1] == examples[-1]
    assert found[2 * times].weights == [1.0, 2.0]
    some = take(found, [1, 0, 4 * times])
    plain = [examples[1], examples[0], examples[4]]
    for part in (some, plain):
        assert numbers_of(part, "label", 0.5).tolist() == [0.0, 1.0, 0.5]


def test_a_rated_answer_is_one_example_with_a_number(tmp_path: Path) -> None:
    """What answers refuse as made for another loss is a kind's column here."""
    rows = [{"prompt": f"Say {i}", "completion": "so", "label": bool(i % 2)} for i in range(4)]
    with pytest.raises(GraftuneError, match="rated good or bad"):
        load(tmp_path, *rows)
    data = load(tmp_path, *rows, kind=DataKind("rated answers", numbers=("label",)))
    assert (
        numbers_of(data.examples, "label", 9.0).tolist() == [0, 1, 0, 1] and not (groups_of(data.examples) >= 0).any()
    )
