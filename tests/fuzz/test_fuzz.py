"""The short form of tests/soak/soak_fuzz.py: some damaged inputs of every format, and all that ever failed.

What is asked of each: an answer or GraftuneError, with a message of one printable line, in memory by the file's size.
Time is asked for in the long form only. The corpus has one folder for each kind of failure that was found, named by
format and case: FORMAT--CASE, its files as the reader looks for them.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from graftune.tokenizer import examine
from tests.fuzz import formats, mutate, seeds, text
from tests.fuzz.judge import judged
from tests.support.thorough import THOROUGH

INPUTS = 400 if THOROUGH else 10  # of each format
CORPUS = Path(__file__).parent / "corpus"
CASES = sorted(path.name for path in CORPUS.iterdir())
SEEDED = {
    "record": [mutate.dumped(row) for row in seeds.ROWS[:6]],
    "yaml": [words.encode() for words in text.YAML[:3]],
    "template": [words.encode() for words in text.TEMPLATES],
    "csv": [words.encode() for words in text.CSV],
}
NAMES = {"record": "row.json", "yaml": "c.yaml", "template": "t.jinja", "csv": "d.csv"}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, formats.Format]:
    return {one.name: one for one in formats.all_formats(tmp_path_factory.mktemp("fuzz") / "seeds")}


def test_damaged_inputs(known: dict[str, formats.Format], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "faults_of", formats.examined_here)
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / "cache"))
    refused = dict.fromkeys(known, 0)
    (tmp_path / "input").mkdir()
    for name, one in known.items():
        for number in range(INPUTS):
            size = formats.write(tmp_path / "input", one.made(random.Random(f"3/{name}/{number}")))
            verdict = judged(lambda: one.read(tmp_path / "input"), size, one.factor)  # noqa: B023 (called at once)
            assert verdict.fault in ("", "slow"), f"{name} {number}: {verdict.fault}\n{verdict.detail}"
            refused[name] += not verdict.accepted
    assert all(refused.values()), refused  # or the damage does not reach the readers


@pytest.mark.parametrize("name", SEEDED)
def test_whole_inputs_are_accepted(name: str, known: dict[str, formats.Format], tmp_path: Path) -> None:
    """Or what is made of them is refused for another reason than its damage."""
    for content in SEEDED[name]:
        formats.write(tmp_path, {NAMES[name]: content})
        known[name].read(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_what_failed_before(
    case: str, known: dict[str, formats.Format], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / "cache"))
    one = known[case.partition("--")[0].replace("_", " ")]
    files = {str(p.relative_to(CORPUS / case)): p.read_bytes() for p in (CORPUS / case).rglob("*") if p.is_file()}
    (tmp_path / "input").mkdir()
    size = formats.write(tmp_path / "input", files)
    verdict = judged(lambda: one.read(tmp_path / "input"), size, one.factor)
    assert verdict.fault in ("", "slow"), f"{verdict.fault}\n{verdict.detail}"
    assert verdict.accepted == (case == "jsonl--nested"), "rows are refused one by one"
