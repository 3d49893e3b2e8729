"""What an attack on an earlier version found (R1 to R10), and where each finding is tested. Some have tests beside the
code they are about; the others are here, and in tests/fuzz/corpus, which tests/fuzz/test_fuzz.py reads.

| finding | test |
|---|---|
| R1 a checkpoint's own numbers are believed | tests/training/test_going_on.py: numbers_that_the_run_does_not_have |
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

from graftune.data import source
from graftune.data.find import files_of
from graftune.data.streams import _Unpacked
from graftune.errors import GraftuneError
from graftune.io.json_file import NotJson, read_object
from graftune.settings.config import Config
from graftune.settings.sources import Source
from graftune.tokenizer import core, examine, examine_process, from_folder
from tests.fuzz import seeds


def test_a_tokenizer_is_examined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its content: a file that was found whole is not examined again, and another one is."""
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / "cache"))
    asked: list[Any] = []
    real = examine.faults_of
    monkeypatch.setattr(examine, "faults_of", lambda files: asked.append(files) or real(files))
    tokenizer = seeds.tokenizer_json()
    for place in (tmp_path / "a", tmp_path / "b"):
        place.mkdir()
        (place / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert from_folder(place).encode("ab")
    assert len(asked) == 1
    with monkeypatch.context() as patch:
        patch.setattr(examine.tokenizers, "__version__", "of next year")
        from_folder(tmp_path / "b")
        assert len(asked) == 2, "another version of the library may fail on it"
    asked.pop()
    tokenizer["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(tokenizer))
    for _ in range(2):  # a refusal is not remembered
        with pytest.raises(GraftuneError, match="chunk size must be non-zero"):
            from_folder(tmp_path / "b")
    assert len(asked) == 3


def test_a_panic_is_a_sentence_and_a_signal_is_none() -> None:
    """A panic of the library's Rust code is no Exception; what else is none is not the library's."""

    class PanicException(BaseException):
        pass

    class Stopped(BaseException):
        pass

    said = r"a\.json: the tokenizer cannot be loaded \(index out of bounds\)"
    with pytest.raises(GraftuneError, match=said), core.guarded("be loaded", "a.json"):
        raise PanicException("index out of bounds")
    for other in (Stopped, KeyboardInterrupt, MemoryError):
        with pytest.raises(other), core.guarded("be loaded"):
            raise other


def test_the_process_that_examines_a_tokenizer_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in place of the real one reports the limits from inside the process."""
    (tmp_path / "tokenizers.py").write_text(
        "import resource as r\n"
        "class Tokenizer:\n"
        "    def from_str(text):\n"
        "        raise Exception([r.getrlimit(kind)[0] for kind in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_CORE)])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    limits = [examine_process.BYTES + 2 * examine_process.PER_BYTE, examine_process.SECONDS + 1, 0]
    (fault,) = examine.faults_of([examine.Untrusted("tokenizer", "{}", "t")])
    assert fault.endswith(str(limits))


def test_an_id_beyond_all_vocabularies_is_a_fault() -> None:
    """The library makes an array of that length."""
    tokenizer = seeds.tokenizer_json()
    assert examine_process.examine_tokenizer(json.dumps(tokenizer)) == ""
    tokenizer["model"]["vocab"]["a"] = examine_process.LARGEST_ID + 1
    assert (
        examine_process.examine_tokenizer(json.dumps(tokenizer))
        == f"a token has the id {examine_process.LARGEST_ID + 1}"
    )


def test_padding_and_truncation_of_a_file_are_not_ours(tmp_path: Path) -> None:
    """Some repositories ship those of their last training run: tokens would be lost, or made up, in silence."""
    tokenizer, found = seeds.tokenizer_json(), []
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "a"}
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    for more in ({}, {"padding": padding, "truncation": truncation}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | more))
        found.append(from_folder(tmp_path).encode("ab" * 9))
    assert found[0] == found[1] and len(found[0]) > 2


@pytest.mark.parametrize("zeros", [8, 10_240])
def test_zeros_behind_a_compressed_stream_are_no_damage(zeros: int, tmp_path: Path) -> None:
    """Tapes and archives fill up a file; Python's own gzip takes them, too."""
    (path := tmp_path / "d.gz").write_bytes((gzip.compress(b"one") + bytes(zeros)) * 2)
    with path.open("rb") as file:
        assert _Unpacked(file, ".gz", str(path), 1.0).read() == b"oneone"


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
    "nested, and whole": (b'{"a": ' * 150 + b"0" + b"}" * 150, "nested too deeply"),  # which Python reads
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
