"""Files of every kind and every way they can be wrong: each bad row is counted with its number and reason."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from graftune.data.dataset import Dataset, prepare
from graftune.errors import GraftuneError
from graftune.settings.sections import DataConfig
from tests.data.helpers import CHATML, jsonl, trained_runs, turns, with_template

GOOD: dict[str, dict[str, Any]] = {
    "prompt/response": {"prompt": "What?", "response": "That."},
    "prompt/completion": {"prompt": "What?", "completion": "That."},
    "question/answer": {"question": "What?", "answer": "That."},
    "alpaca": {"instruction": "What?", "input": "", "output": "That."},
    "alpaca without input": {"instruction": "What?", "output": "That."},
    "messages": {"messages": turns("What?", "That.")},
    "conversations": {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}]}, *turns("", "That.")[1:]]},
}


def load(path: str | Path, **config: Any) -> Dataset:
    return prepare(str(path), with_template(CHATML), DataConfig(**config))


def test_kinds_may_mix(tmp_path: Path) -> None:
    data = load(jsonl(tmp_path / "d.jsonl", *GOOD.values(), {"text": "Just text"}))
    assert data.summary.kinds == {"prompt/response": 3, "alpaca": 2, "messages": 2, "conversations": 1, "text": 1}
    assert [example.row for example in data.examples] == list(range(1, 10))
    assert set(data.prompts[:8]) == {"<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"}
    assert set(data.references[:8]) == {"That."} and trained_runs(data.examples[0]) == ["That.<|im_end|>"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "wrapped.json", "csv"])
def test_file_types(kind: str, mark: bytes, tmp_path: Path) -> None:
    rows = [{"prompt": "Où?", "response": 'Là\n🎉, "here"'}, {"prompt": "b", "response": "c"}]
    path = tmp_path / f"data.{kind}"
    if kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "response"])
            writer.writeheader()
            writer.writerows(rows)
        text = path.read_bytes()
    elif kind.endswith("jsonl") or kind == "ndjson":
        text = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    else:
        text = json.dumps({"data": rows} if kind.startswith("wrapped") else rows).encode()
    path.write_bytes(mark + text)
    data = load(path)
    assert data.references == [row["response"] for row in rows]
    assert [example.row for example in data.examples] == ([1, 3] if "jsonl" in kind or kind == "ndjson" else [1, 2])
    assert len(data.sha256) == 64


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    messages = [turns("What?", "That."), [*turns("a", "b", system="S")]]
    messages[0][1]["train"] = True  # type: ignore[assignment]
    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": m} for m in messages]), path)
    assert load(path).references == ["That.", "b"]
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(GraftuneError, match="not a Parquet file"):
        load(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(GraftuneError, match=r"pip install graftune\[parquet\]"):
        load(path)


def test_nested_cells_of_csv_are_json(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["messages"], [json.dumps(turns("a", "b"))], ["{nope"]])
        writer.writerow([json.dumps(turns("a", "x" * 200_000))])
    data = load(path, max_seq_len=400_000)
    assert len(data.examples) == 2 and data.summary.details == [(2, "broken JSON: in column 'messages'")]


BAD: dict[str, tuple[object, str, str]] = {
    "broken": ('{"prompt": "a"', "broken JSON", "column"),
    "list": ([1], "not an object", "a list"),
    "null": ("null", "not an object", "null"),
    "huge number": ('{"prompt": ' + "1" * 5000 + "}", "broken JSON", "limit"),
    "deep": ('{"a":' * 200_000, "broken JSON", "deeply"),
    "blank prompt": ({"prompt": " \n", "response": "a"}, "blank prompt", "'prompt'"),
    "blank response": ({"prompt": "a", "response": ""}, "blank response", "'response'"),
    "blank output": ({"instruction": "a", "output": "\t"}, "blank response", "'output'"),
    "blank text": ({"text": ""}, "blank text", "'text'"),
    "blank turn": ({"messages": turns("a", " ")}, "blank response", "message 2"),
    "blank question": ({"messages": turns(" ", "b")}, "blank prompt", "message 1"),
    "blank value": ({"conversations": [{"from": "human", "value": ""}]}, "blank prompt", "message 1"),
    "number": ({"prompt": 3, "response": "a"}, "wrong type", "'prompt' must be text, is a number"),
    "null answer": ({"prompt": "a", "response": None}, "wrong type", "is null"),
    "bool": ({"prompt": "a", "response": True}, "wrong type", "true/false"),
    "messages text": ({"messages": "hi"}, "wrong type", "must be a list"),
    "messages mixed": ({"messages": [1]}, "wrong type", "other things"),
    "no messages": ({"messages": []}, "no turns", "empty"),
    "no role": ({"messages": [{"content": "a"}]}, "wrong type", "no 'role'"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "images (only text is supported)",
        "message 1",
    ),
    "object content": ({"messages": [{"role": "user", "content": {}}]}, "wrong type", "an object"),
    "flag": ({"messages": [{"role": "user", "content": "a", "train": "yes"}]}, "wrong type", "'train'"),
    "weight": ({"messages": [{"role": "user", "content": "a", "weight": -0.5}]}, "wrong type", "0 or more"),
    "weight text": ({"messages": [{"role": "user", "content": "a", "weight": "1"}]}, "wrong type", "0 or more"),
    "row weight": ({"prompt": "a", "response": "b", "loss_weight": "much"}, "wrong type", "'loss_weight'"),
    "row weight 0": ({"prompt": "a", "response": "b", "loss_weight": 0}, "nothing to train", "'loss_weight' is 0"),
    "only user": ({"messages": turns("a")}, "no assistant turn", ""),
    "assistant first": ({"messages": turns("a", "b")[1:]}, "no user turn before the first assistant turn", ""),
    "speaker": ({"conversations": [{"from": "alien", "value": "a"}]}, "unknown role", "'alien'"),
    "role": ({"messages": [{"role": "usr", "content": "a"}, *turns("a", "b")]}, "unknown role", "did you mean 'user'?"),
    "no user": ({"messages": [{"role": "usr", "content": "a"}, *turns("a", "b")[1:]]}, "unknown role", "'user'?"),
    "no assistant": ({"messages": [*turns("a"), {"role": "asistant", "content": "b"}]}, "unknown role", "'assistant'?"),
    "value": ({"conversations": [{"from": "gpt", "value": 1}]}, "wrong type", "a number"),
    "tools": ({"messages": turns("a", "b"), "tools": {}}, "wrong type", "'tools'"),
    "tools json": ({"messages": turns("a", "b"), "tools": "["}, "broken JSON", "'tools'"),
    "unknown": ({"foo": 1, "bar": 2}, "unknown keys", "'foo', 'bar'"),
    "none": ({}, "unknown keys", "no keys"),
    "half": ({"prompt": "a"}, "missing key", "response"),
    "half alpaca": ({"instruction": "a"}, "missing key", "'output'"),
    "half answer": ({"answer": "a"}, "missing key", "'question'"),
    "surrogate": ('{"prompt": "\\ud83d", "response": "a"}', "not Unicode text", "lone surrogate"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_counted_and_strict_stops_at_them(name: str, tmp_path: Path) -> None:
    row, reason, detail = BAD[name]
    good = {"prompt": "a", "response": "b"}
    path = jsonl(tmp_path / "d.jsonl", good, row, good)
    data = load(path)
    assert data.summary.refused == {reason: 1} and data.summary.rows == 3 and data.summary.examples == 2
    ((number, why),) = data.summary.details
    assert number == 2 and why.startswith(reason) and detail in why
    with pytest.raises(GraftuneError, match=r"d\.jsonl, row 2: ") as caught:
        load(path, strict=True)
    assert reason in str(caught.value)
