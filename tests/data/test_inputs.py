"""Data as people have it: several files, folders, globs, compressed, in other encodings and separators, weighted and
with columns renamed. What is taken otherwise than by the book is noted; what could be two things is refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from graftune.data import readers, streams
from graftune.data.dataset import prepare, split
from graftune.data.row import Refusal, Row
from graftune.data.source import digest_of, rows, sources
from graftune.errors import GraftuneError
from graftune.io import digest
from graftune.settings.config import Config
from graftune.settings.sections import DataConfig
from graftune.settings.sources import absolute, checked, entries, label
from tests.data.helpers import CHATML, with_template

LINES = b'{"text": "a"}\n{"text": "b"}\n'


def read(data: Any, map: dict[str, str] | None = None) -> tuple[list[Row], list[str]]:
    notes: list[str] = []
    return list(rows(sources(checked("data", data), notes.append), map, notes.append)), notes


def texts(data: Any) -> list[str]:
    return [row.value["text"] for row in read(data)[0] if not isinstance(row.value, Refusal)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"b.jsonl": "b1 b2", "a.jsonl": "a1", "sub/c.json": "c1", ".hidden.jsonl": "no"}.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        values = [{"text": word} for word in text.split()]
        path.write_text(json.dumps(values) if name.endswith(".json") else "\n".join(map(json.dumps, values)))
    (tmp_path / "folder" / "README.md").write_text("about")
    (tmp_path / "folder" / "dataset_info.json").write_text("{}")
    return tmp_path / "folder"


def test_folders_globs_and_lists(folder: Path) -> None:
    assert texts(str(folder)) == ["a1", "b1", "b2", "c1"]
    assert texts(str(folder / "*.jsonl")) == ["a1", "b1", "b2"]
    assert texts(str(folder / "**" / "*.json*"))[:1] == ["a1"]
    listed, _ = read([str(folder / "b.jsonl"), {"path": str(folder / "a.jsonl")}])
    assert [row.value for row in listed] == [{"text": "b1"}, {"text": "b2"}, {"text": "a1"}]
    assert [row.number for row in listed] == [1, 2, 1], "a row's number is its own file's"
    assert [row.key for row in listed] == [1, 2, 3], "its key is no other file's"
    assert [row.place for row in listed][1:] == [f"{folder / 'b.jsonl'}, row 2", f"{folder / 'a.jsonl'}, row 1"]
    (alone,), _ = read(str(folder / "a.jsonl"))
    assert alone.key == alone.number == 1 and alone.place == "row 1"


def test_a_folder_with_splits_gives_the_training_set(tmp_path: Path) -> None:
    for name in ("train.jsonl", "valid.jsonl", "test.jsonl"):
        (tmp_path / name).write_bytes(b'{"text": "%s"}\n' % name.encode())
    found, notes = read(str(tmp_path))
    assert [row.value for row in found] == [{"text": "train.jsonl"}]
    assert notes == [f"{tmp_path}: took train.jsonl; left for other splits: test.jsonl, valid.jsonl"]
    assert texts([{"path": str(tmp_path), "split": "validation"}]) == ["valid.jsonl"]
    with pytest.raises(GraftuneError, match="has no split 'other'; it has test, train, validation"):
        read([{"path": str(tmp_path), "split": "other"}])
    with pytest.raises(GraftuneError, match="split and subset choose among the files of a folder"):
        read([{"path": str(tmp_path / "train.jsonl"), "split": "train"}])


def test_a_subset_is_whole_words(tmp_path: Path) -> None:
    for name in ("en", "french", "de"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert texts([{"path": str(tmp_path), "subset": "en"}]) == ["en"]
    (tmp_path / "chat-fr_2.jsonl").write_text(json.dumps({"text": "chat"}) + "\n")
    assert texts([{"path": str(tmp_path), "subset": "fr"}]) == ["chat"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("empty", "is a folder without data files; data files are .jsonl"),
        ("arrow", "as save_to_disk writes them; write Parquet files with Dataset.to_parquet"),
        ("no*.jsonl", "matches no file"),
        ("*/*.txt", "matches 1 files but no data file"),
        ("gone.jsonl", "no such file; check the path"),
        ("gone/too.csv.gz", "no such file; check the path"),
    ],
)
def test_nothing_found(given: str, message: str, tmp_path: Path) -> None:
    for name in ("empty/x.txt", "arrow/data-00000-of-00001.arrow"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    with pytest.raises(GraftuneError) as caught:
        sources(str(tmp_path / given))
    assert message in str(caught.value) and given in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
@pytest.mark.parametrize("packed", ["gz", "bz2", "xz", "zst"])
def test_compressed(kind: str, packed: str, tmp_path: Path) -> None:
    if packed == "zst":
        pytest.importorskip("zstandard", reason="zstandard is not installed; its absence is tested below")
    text = {"jsonl": LINES, "json": b'[{"text": "a"}, {"text": "b"}]', "csv": b"text\na\nb\n"}[kind]
    path = tmp_path / f"d.{kind}.{packed}"
    path.write_bytes(compress(packed, text))
    found, notes = read(str(path))
    assert [row.value for row in found] == [{"text": "a"}, {"text": "b"}] and not notes
    path.write_bytes(compress(packed, text * 1000)[:-9])
    with pytest.raises(GraftuneError, match="is damaged or cut off"):
        read(str(path))
    other = tmp_path / f"other.{kind}"
    other.write_bytes(compress(packed, text))
    assert texts(str(other)) == ["a", "b"], "told by its first bytes"
    assert read(str(other))[1] == [f"{other} is compressed (.{packed}), whatever its name"]


def compress(packed: str, text: bytes) -> bytes:
    if packed == "zst":
        import zstandard

        return b"".join(zstandard.ZstdCompressor().compress(part) for part in (text[:5], text[5:]))  # two frames
    return {"gz": gzip, "bz2": bz2, "xz": lzma}[packed].compress(text)


def test_zst_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(GraftuneError, match=r"reading \.zst needs zstandard; pip install graftune\[zstd\]"):
        read(str(path))


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("a.jsonl", b'[{"text": "a"},\n {"text": "b"}]', "holds one JSON list, not one object per line"),
        ("a.json", LINES, "holds one JSON object per line"),
        ("a.csv", b"text;n\na;1\nb;2\n", "separates its columns by ';'"),
        ("a.csv", b"text\tn\na\t1\nb\t2\n", "separates its columns by tabs"),
        ("a.tsv", b"text\tn\na\t1\nb\t2\n", ""),
        ("a.tsv", b"text,n\na,1\nb,2\n", "separates its columns by commas"),
        ("a.jsonl", '\ufeff{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"), "is UTF-16 text"),
        ("a.jsonl", LINES.decode().encode("utf-16-le"), "is UTF-16 text"),
        ("a.csv", "text\r\na\r\nb\r\n".encode("utf-16"), "is UTF-16 text"),
        ("a.csv", "text;é\na;1\nb;2\n".encode("cp1252"), "Windows-1252"),
        ("a.json", b'{"rows": [{"text": "a"}, {"text": "b"}], "version": 1}', ""),
        ("a.jsonl", LINES.replace(b"\n", b"\r\n\r\n"), ""),
    ],
)
def test_unusual_files_are_read_and_noted(name: str, content: bytes, note: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, content)
    assert texts(str(path)) == ["a", "b"]
    notes = read(str(path))[1]
    assert any(note in text for text in notes) if note else not notes


def test_windows_letters(tmp_path: Path) -> None:
    text = "Où est “Zoë”? \u2013 Là, naïve garçon… 5 €"
    for name, content in (("a.jsonl", json.dumps({"text": text}, ensure_ascii=False)), ("a.csv", f'text\n"{text}"\n')):
        assert texts(str(written(tmp_path / name, content.encode("cp1252")))) == [text]


@pytest.mark.parametrize(
    "content",
    [
        "Zażółć gęślą jaźń".encode("cp1250"),
        "Привет".encode("cp1251"),
        "你好吗".encode("gbk"),
        "こんにちは".encode("shift_jis"),
        "İstanbul ağaç".encode("cp1254"),
        "caf\xe9 ".encode("cp1252") + "café".encode(),  # two encodings in one file
    ],
)
def test_what_could_be_several_encodings_is_not_guessed(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match="is not UTF-8 text; convert it, as with: iconv"):
        read(str(written(tmp_path / "a.csv", b"text\n" + content + b"\n")))
    (row,), _ = read(str(written(tmp_path / "a.jsonl", b'{"text": "' + content + b'"}\n')))
    assert isinstance(row.value, Refusal) and row.value.reason == "not UTF-8"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"prompt,response,prompt\na,b,c\n", "has two columns named 'prompt'; rename or remove"),
        ("a.csv", b"\n\n", "has no header"),
        ("a.csv", b'text\na\n"b\n', "broken CSV at line 3, after row 1 .*a quote that is never closed"),
        ("a.jsonl", b"PK\x03\x04xx", "is a zip archive or an Excel workbook; save the sheet as CSV"),
        ("a.jsonl", b"PAR1xxxx", r"is a Parquet file; name it \.parquet"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("a.json", b"<!DOCTYPE html><html>", "is a web page"),
        ("a.json", b'{"prompt": {"0": "a"}}', r"not a list of records; .*in pandas"),
        ("a.json", b'[{"text": "a"}', "broken JSON at line 1, column 15"),
        ("a.json", b'[{"text": "a"}\n {"text": "b"}]', "broken JSON at line 2, column 2"),
        ("a.json", b'[{"text": "a"}] []', "broken JSON at line 1, column 17 .Extra data"),
        ("a.json", b"[" + b'{"a":' * 100_000, "nested too deeply"),
        ("a.jsonl", b"[" + b"[" * 100_000, "nested too deeply"),
        ("a.parquet.gz", b"x", "unknown kind of data file"),
        ("d.jsonl", b"", "is empty"),
        ("d.jsonl", b"\n\n", "holds no rows"),
        ("d.json", b"[]", "holds no rows"),
        ("d.json", b'{"a": 1}', "not a list of records"),
        ("d.json", b'[{"text": "a"},]', "broken JSON at line 1"),
        ("d.json", b'{"text":\n"a"}\n{"text":\n"b"}', r"broken JSON at line 3, column 1 \(Extra data\)"),
        ("d.json", b'["\xe9", "\xc3\xa9"]', "not UTF-8"),
        ("d.txt", b"hello", r"unknown kind of data file \(\.txt\)"),
        ("data", b"hello", "no extension"),
        ("d.jsonl", b"nope\n", r"none of the 1 rows can be used \(1 for: broken JSON; row 1"),
        ("d.csv", b"prompt,response\n", "holds no rows"),
        ("d.csv", b'prompt,response\n"a,b\n', "broken CSV at line"),
        ("d.csv", b"prompt,response\na\n", "fewer cells"),
        ("d.csv", b"prompt,response\na,b,c\n", "more cells"),
    ],
)
def test_files_that_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match=message) as caught:
        prepare(str(written(tmp_path / name, content)), with_template(CHATML), DataConfig())
    assert name in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_memory_does_not_grow_with_the_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CHUNK", 1 << 13)
    monkeypatch.setattr(readers, "BATCH", 50)
    path, text, count = tmp_path / f"d.{kind}", "word " * 40, 4_000
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pyarrow.table({"text": [f"{text}{n}" for n in range(count)]}), path, row_group_size=50
        )
    elif kind == "csv":
        path.write_text("text\n" + "".join(f"{text}{n}\n" for n in range(count)))
    else:
        path.write_text("\n".join(json.dumps({"text": f"{text}{n}"}) for n in range(count)))
    files = sources(str(path))
    next(rows(files))  # imports
    tracemalloc.start()
    assert sum(1 for _ in rows(files)) == count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250_000 < count * len(text), peak


def test_a_json_value_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LARGEST_JSON", 20)
    with pytest.raises(GraftuneError, match=r"is one JSON value of more than .* write it as .jsonl"):
        read(str(written(tmp_path / "a.json", b'[{"text": "0123456789"}]')))


def test_weights(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", b"".join(b'{"text": "%d"}\n' % n for n in range(1000)))
    twice, _ = read([{"path": str(path), "weight": 2}])
    assert len(twice) == 1000 and {row.times for row in twice} == {2}
    for weight, total in ((0.5, 500), (0.25, 250), (0.01, 10), (2.5, 2500), (0.333, 333)):
        found, _ = read([{"path": str(path), "weight": weight}])
        assert abs(sum(row.times for row in found) - total) <= 1
        assert found == read([{"path": str(path), "weight": weight}])[0], "the same rows at every start"
        assert set(Counter(row.times for row in found)) <= {int(weight), int(weight) + 1}
    half = [row.number for row in read([{"path": str(path), "weight": 0.5}])[0]]
    assert 200 < sum(number % 2 for number in half) < 300, "not every second row"
    few = written(tmp_path / "b.jsonl", b'{"text": "x"}\n' * 10)
    assert len(read([{"path": str(few), "weight": 0.5}])[0]) == 5


def test_hash_of_several_files(folder: Path) -> None:
    one = sources(str(folder / "a.jsonl"))
    assert digest_of(one) == digest.sha256([folder / "a.jsonl"])
    both = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    kinds = [both, both[::-1], [{"path": both[0], "weight": 2}], [{"path": both[0], "map": {"text": "text"}}]]
    assert len({digest_of(sources(checked("data", kind))) for kind in kinds} | {digest_of(one)}) == 5


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "data is 3; it must be a path"),
        ([], "data is an empty list"),
        ([3], r"data\[1\] is 3"),
        ([{"weight": 2}], r"data\[1\] has no path"),
        (["a", {"path": "b", "wieght": 2}], r"data\[2\] has the unknown key 'wieght'; a source takes path, weight"),
        ([{"path": "b", "weight": 0}], "a weight is above 0"),
        ([{"path": "b", "weight": -1}], "a weight is above 0"),
        ([{"path": "b", "weight": "2"}], "a weight is a number"),
        ([{"path": "b", "weight": float("nan")}], "a weight is a number"),
        ([{"path": "b", "split": 3}], "a split is a name"),
        ([{"path": "b", "map": ["x"]}], "a map is written"),
    ],
)
def test_settings_that_are_refused(value: Any, message: str) -> None:
    with pytest.raises(GraftuneError, match=message):
        checked("data", value)


def test_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    value = checked("data", [{"path": "a.jsonl", "weight": 2}, "me/set", "*.jsonl"])
    assert value == ({"path": "a.jsonl", "weight": 2}, {"path": "me/set"}, {"path": "*.jsonl"})
    assert checked("data", ["a.jsonl"]) == checked("data", {"path": "a.jsonl"}) == "a.jsonl"
    assert [e["path"] for e in absolute(value)] == [str(folder / "a.jsonl"), "me/set", str(folder / "*.jsonl")]  # type: ignore[index]
    assert checked("data", list(value)) == value, "as read back from the run's config.yaml"
    assert entries(value)[0].weight == 2 and label(value) == "a.jsonl and 2 more" and label("x") == "x"


MAPPED = {"Question": "What?", "Best": "That.", "prompt": "old", "messages": [], "id": 3}


@pytest.mark.parametrize(
    ("map", "value"),
    [
        ({"prompt": "Question", "response": "Best"}, {"prompt": "What?", "response": "That."}),
        ({"Prompt": "Question", "response": "Best"}, {"prompt": "What?", "response": "That."}),
        ({"response": "Best"}, {"response": "That.", "prompt": "old", "Question": "What?"}),
        ({"system": "Best"}, {"system": "That.", "Question": "What?", "prompt": "old", "messages": [], "id": 3}),
        ({"text": "Best"}, {"text": "That."}),
    ],
)
def test_columns_renamed(map: dict[str, str], value: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", json.dumps(MAPPED).encode())
    assert read(str(path), map)[0][0].value == value
    own = [{"path": str(path), "map": map}]
    assert read(own, {"text": "id"})[0][0].value == value, "a source's own map comes first"


def test_maps_that_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", json.dumps(MAPPED).encode() + b'\n{"Question": "only"}\nnope\n')
    with pytest.raises(GraftuneError, match="map: there is no field 'answr'; a map names answer, chosen, completion"):
        read(str(path), {"answr": "Best"})
    with pytest.raises(GraftuneError, match="map: there is no column 'Answer'; it has 'Question', 'Best', 'prompt'"):
        read(str(path), {"prompt": "Question", "response": "Answer"})
    found, _ = read(str(path), {"prompt": "Question", "response": "Best"})
    assert [str(row.value) for row in found[1:]] == [
        "missing column: 'Best', which map names", "broken JSON: Expecting value at column 1",
    ]  # fmt: skip


def test_odd_values_in_parquet_refuse_their_row(tmp_path: Path) -> None:
    """Times out of range, text that is not UTF-8 and pictures: none of them ends in a traceback."""
    pyarrow = pytest.importorskip("pyarrow")
    write = pytest.importorskip("pyarrow.parquet").write_table
    far = pyarrow.array([2**62, 0], pyarrow.timestamp("ms"))
    path = tmp_path / "a.parquet"
    write(pyarrow.table({"text": ["a", "b"], "made": far, "cost": pyarrow.array([1, 2], pyarrow.duration("s"))}), path)
    found, notes = read(str(path))
    assert [row.value for row in found] == [{"text": "a"}, {"text": "b"}]
    assert notes == [f"columns of {path} that hold no text are not used: made, cost"]
    nested = pyarrow.StructArray.from_arrays([far], ["when"])
    write(pyarrow.table({"text": ["a", "b"], "about": nested}), path)
    found, _ = read(str(path))
    assert isinstance(found[0].value, Refusal) and "in column 'about'" in found[0].value.text
    assert found[1].value["text"] == "b"  # type: ignore[index]
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, pyarrow.array([b"\xff\xfe", b"ok"], pyarrow.binary()).buffers()
    )
    write(pyarrow.table({"text": broken}), path)
    found, _ = read(str(path))
    assert isinstance(found[0].value, Refusal) and found[1].value == {"text": "ok"}
    write(pyarrow.table({"text": pyarrow.array([b"caf\xc3\xa9", b"\xff"], pyarrow.binary())}), path)
    found, _ = read(str(path))
    assert found[0].value == {"text": "café"} and isinstance(found[1].value, Refusal)


def test_a_mixture_as_a_run_reads_it(tmp_path: Path) -> None:
    """Weighted rows occur as often as they should, on one side of the split; refused rows name their file."""
    written(tmp_path / "a.jsonl", b"".join(b'{"prompt": "a%d", "response": "b"}\n' % n for n in range(20)))
    written(tmp_path / "b.csv", b"Question,Answer\nwhat,that\n ,blank\n")
    path = tmp_path / "run.yaml"
    path.write_text(f"data:\n- {{path: {tmp_path}/a.jsonl, weight: 3}}\n- {tmp_path}/b.csv\nval_split: 0.3\n")
    config = Config.load(path)
    config.save(tmp_path / "config.yaml")
    assert Config.load(tmp_path / "config.yaml") == config, "the run's own settings read back the same"
    data = prepare(config.data.data, with_template(CHATML), config.data)
    assert len(data) == 61 and data.summary.rows == 22 and data.summary.duplicates == 0, "repeats by weight"
    assert data.summary.details == [(2, f"blank prompt: 'Question' (in {tmp_path}/b.csv)")]
    training, validation = split(data, 0.3, seed=1)
    held = {example.row for example in validation.examples}
    assert len(training) + len(validation) == 61 and held.isdisjoint({example.row for example in training.examples})
    only_bad = [str(written(tmp_path / name, b'{"prompt": "a"}\n')) for name in ("c.jsonl", "d.jsonl")]
    with pytest.raises(GraftuneError, match=r"c\.jsonl and 1 more: none of the 2 rows can be used"):
        prepare(checked("data", only_bad), with_template(CHATML), DataConfig())
