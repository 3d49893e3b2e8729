"""The bundled data: made again byte for byte, without duplicates, short, and scored strictly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tools import sample_data

from graftune.data.sample import KEYS, TOPICS, is_sample_hash, sample_for, score_all
from graftune.io import digest


def test_the_file_is_what_the_generator_writes() -> None:
    assert sample_data.rendered() == sample_for("answers").read_bytes()


def rows() -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in sample_for("answers").read_text().splitlines()]


def test_records() -> None:
    messages = [turns[1]["content"] for turns in rows()]
    assert len(messages) == 600
    assert len({re.sub(r"\d+", "N", message) for message in messages}) == 600, "no wording occurs twice"
    counts = dict.fromkeys(TOPICS, 0)
    for system, user, answer in rows():
        assert [turn["role"] for turn in (system, user, answer)] == ["system", "user", "assistant"]
        value = json.loads(answer["content"])
        assert tuple(value) == KEYS and "\n" not in answer["content"]
        assert re.findall(r"\d+", user["content"]) == [str(value["order"])]
        assert bool(re.search("urgent|hurry|today", user["content"].lower())) == value["urgent"]
        assert (value["topic"] == "cancel") == bool(re.search(r"[Cc]ancel|stop", user["content"]))
        assert (value["topic"] == "refund") == bool(re.search(r"refund|[Mm]oney back", user["content"]))
        counts[value["topic"]] += 1
    assert set(counts.values()) == {150}


REFERENCE = '{"topic":"refund","order":4821,"urgent":false}'


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (REFERENCE, True),
        (f" {REFERENCE}\n", True),
        ('{"topic": "refund", "order": 4821, "urgent": false}', True),
        ('{"order":4821,"topic":"refund","urgent":false}', False),
        ('{"topic":"refund","order":"4821","urgent":false}', False),
        ('{"topic":"refund","order":4821.0,"urgent":false}', False),
        ('{"topic":"refund","order":4821,"urgent":0}', False),
        ('{"topic":"refund","order":4822,"urgent":false}', False),
        ('{"topic":"refund","order":4821,"urgent":true}', False),
        ('{"topic":"money","order":4821,"urgent":false}', False),
        ('{"topic":["refund"],"order":4821,"urgent":false}', False),
        ('{"topic":"refund","order":4821}', False),
        ('{"topic":"refund","topic":"refund","order":4821,"urgent":false}', False),
        (REFERENCE[:-1] + ',"note":""}', False),
        (f"Here it is: {REFERENCE}", False),
        (f"```json\n{REFERENCE}\n```", False),
        (REFERENCE.replace(",", ",\n"), False),
        (REFERENCE[:-1], False),
        (f"[{REFERENCE}]", False),
        ("[]", False),
        ("{}", False),
        ("null", False),
        ("", False),
        ("[" * 100_000, False),
    ],
)
def test_score(answer: str, right: bool) -> None:
    assert score_all([(REFERENCE, answer)])["exact"] == right


def test_score_all() -> None:
    answers = [REFERENCE, REFERENCE.replace("false", "true"), "no", '{"topic":"cancel","order":4821,"urgent":false}']
    report = score_all((REFERENCE, answer) for answer in answers)
    fields = {"topic": 0.5, "order": 0.75, "urgent": 0.5}
    assert report == {"exact": 0.25, "valid_json": 3, "total": 4, "fields": fields}


def test_the_sample_is_known_by_its_content(tmp_path: Path) -> None:
    copy = tmp_path / "mine.jsonl"
    copy.write_bytes(sample_for("answers").read_bytes())
    assert is_sample_hash(digest.sha256([copy]))
    copy.write_bytes(copy.read_bytes() + b"\n")
    assert not is_sample_hash(digest.sha256([copy]))
