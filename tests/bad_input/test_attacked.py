"""What an attack on an earlier version found (R1 to R10), and where each finding is tested. Some have tests beside the
code they are about; the others are here, and in tests/fuzz/corpus, which tests/fuzz/test_fuzz.py reads.

| finding | test |
|---|---|
| R1 a checkpoint's own numbers are believed | tests/training/test_going_on.py: WRONG |
| R2 nested JSON: rows, adapters, checkpoints, logs | corpus: jsonl, adapter, checkpoint and run_folder--nested |
| R3 YAML: aliases, digits, nesting | corpus: yaml--*; tests/test_config.py |
| R4 tokenizer.json: panics and aborts | corpus: tokenizer--*; below |
| R5 config.json with absurd counts | corpus: model_folder--counts; tests/bad_input/test_base.py: CONFIG |
| R6 parquet: times out of range, invalid UTF-8 | tests/data/test_inputs.py |
| R7 long names, FP8 of wrong types, 70 dimensions | corpus: safetensors--*, model_folder--fp8*, adapter--seventy* |
| R8 control characters, long messages | tests/test_errors.py; every message of the fuzzer; below |
| R9 events without steps, odd names of checkpoints | corpus: run_folder--nested; below |
| R10 two resumes at once, SIGHUP | tests/test_lock.py, tests/training/test_going_on.py, tests/soak/soak_kills.py |
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from graftune.config import Config
from graftune.data import source
from graftune.data.find import files_of
from graftune.errors import GraftuneError
from graftune.json_file import NotJson, read_object
from graftune.mixture import Source
from graftune.tokenizer import examine, from_folder
from graftune.weights import checkpoint
from tests.fuzz import seeds


def test_a_tokenizer_is_examined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its content: a file that was found whole is not examined again, and another one is."""
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / "cache"))
    asked: list[str] = []
    real = examine.fault_of
    monkeypatch.setattr(examine, "fault_of", lambda text: asked.append(text) or real(text))
    tokenizer = seeds.tokenizer_json()
    for place in (tmp_path / "a", tmp_path / "b"):
        place.mkdir()
        (place / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert from_folder(place).encode("ab")
    assert len(asked) == 1
    tokenizer["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(tokenizer))
    for _ in range(2):  # a refusal is not remembered
        with pytest.raises(GraftuneError, match="chunk size must be non-zero"):
            from_folder(tmp_path / "b")
    assert len(asked) == 3


def test_odd_names_among_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for name in ("step-\u00b2", "step-3.part", "step-", "step--1", "step-" + "9" * 20):
        (root / name).mkdir(parents=True)
        (root / name / "state.json").write_text("{}")
    (root / "step-4").symlink_to("/nowhere")
    assert checkpoint.steps(root) == {}


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.csv.gz", "d.json.gz"])
def test_a_bomb_ends_at_the_limit(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    heads: dict[str, Any] = {"d.csv.gz": b"text\n", "d.json.gz": b"["}
    path.write_bytes(gzip.compress(heads.get(name, b"") + b'{"text": "a"}\n' * 200_000))
    files = files_of(Source(str(path)), print)
    with pytest.raises(GraftuneError, match=r"is larger than .* GiB when it is unpacked; raise max_unpacked"):
        list(source.rows(files, max_unpacked=1e-3))
    assert Config.of({"max_unpacked": 2}).data.max_unpacked == 2


def test_a_parquet_bomb_ends_at_the_limit(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": ["a" * 1000] * 4000}), path, use_dictionary=False)
    assert path.stat().st_size < 1 << 20
    files = files_of(Source(str(path)), print)
    with pytest.raises(GraftuneError, match="is larger than"):
        list(source.rows(files, max_unpacked=1e-3))
    assert len(list(source.rows(files))) == 4000


WRONG = {
    "twice": (b'{"a": 1, "a": 2}', "holds the key 'a' twice"),
    "twice inside": (b'{"x": [{"\x1b[2J": 1, "\x1b[2J": 2}]}', "is not valid JSON"),
    "nested": (b'{"a": ' * 3000, "nested too deeply"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "thousands of digits"),
    "a list": (b"[]", "not an object"),
    "bytes": (b"\xff", "not UTF-8"),
    "long": (b" " * 2000, "is larger than"),
}


@pytest.mark.parametrize("case", WRONG)
def test_json_of_others(case: str, tmp_path: Path) -> None:
    content, said = WRONG[case]
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(NotJson, match=said):
        read_object(tmp_path / "x.json", largest=1000 if case == "long" else 1 << 20)
