"""Data that cannot be trained on, in whole or in part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from graftune.cli import main
from tests.bad_input.conftest import Refuse, rows
from tests.training.runs import SETTINGS

GOOD = {"prompt": "abc", "response": "def"}
CHAT = {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def"}]}


FLAGGED = {"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "train": False}]}
LONG = {"prompt": "a", "response": "b" * 100}
# The name of a data file, its rows or its content, the flags, and what is said.
FILES: dict[str, tuple[str, list[object] | str | bytes, tuple[str, ...], str]] = {
    "unknown kind": ("d.xyz", "x", (), "unknown kind of data file (.xyz)"),
    "empty": ("d.jsonl", "", (), "is empty"),
    "blank lines": ("d.jsonl", "\n\n\n", (), "holds no rows"),
    "nothing supervised": ("d.jsonl", [FLAGGED] * 5, ("--train-on", "flagged"), "nothing to train"),
    "too long": ("d.jsonl", [LONG] * 5, ("--max-seq-len", "32"), "none of the 5 rows can be used"),
    "one row": ("d.jsonl", [GOOD], (), "only 1 usable row"),
    "unknown columns": ("d.csv", "colour,size\nred,5\nblue,6\n", (), "unknown keys"),
    "no UTF-8": ("d.csv", b"prompt,response\na,\xff\xfe\n", (), "is not UTF-8"),
    "no parquet": ("d.parquet", b"no parquet at all", (), "d.parquet"),
    "half a list": ("d.json", '[{"prompt": "a"},', (), "broken JSON at line 1"),
}


def test_no_such_data(base: Path, tmp_path: Path, refuse: Refuse) -> None:
    assert "no such file" in refuse(base, tmp_path / "none.jsonl")
    assert "is a folder" in refuse(base, tmp_path)


@pytest.mark.parametrize("case", FILES)
def test_files_that_cannot_be_used(case: str, base: Path, tmp_path: Path, refuse: Refuse) -> None:
    name, content, flags, said = FILES[case]
    if isinstance(content, list):
        rows(tmp_path / name, *content)
    else:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in refuse(base, tmp_path / name, *flags)


def test_bad_json_on_line_n(base: Path, tmp_path: Path, refuse: Refuse, capsys) -> None:
    path = rows(tmp_path / "d.jsonl", GOOD, GOOD, '{"prompt": "a", ', *[GOOD] * 9)
    assert "row 3: broken JSON" in refuse(base, path, "--strict")
    line = ["train", str(base), str(path), *SETTINGS, "--max-steps", "1", "--out", str(tmp_path / "run")]
    assert main(line) == 0
    assert "1 row left out: broken JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a", "response": " \n"}, "blank response"),
        ({"prompt": " ", "response": "a"}, "blank prompt"),
        ({"prompt": "a"}, "missing key"),
        ({"colour": "a", "size": "b"}, "unknown keys"),
        ({"prompt": 5, "response": "b"}, "wrong type"),
        (["a"], "not an object"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant turn"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}, "blank response"),
    ],
)
def test_rows_that_cannot_be_used(record: object, reason: str, base: Path, tmp_path: Path, refuse: Refuse) -> None:
    text = refuse(base, rows(tmp_path / "d.jsonl", *[record] * 5))
    assert f"none of the 5 rows can be used (5 for: {reason}" in text
    assert f"row 2: {reason}" in refuse(base, rows(tmp_path / "s.jsonl", GOOD, record), "--strict")


def test_everything_supervised(base: Path, tmp_path: Path, refuse: Refuse) -> None:
    """A template that renders nothing but the assistant's turns leaves no prompt."""
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}")
    text = refuse(base, rows(tmp_path / "d.jsonl", *[GOOD] * 5), "--template", str(template))
    assert "everything is trained" in text or "does not render the role 'user'" in text


def test_chat_data_without_a_template(base: Path, tmp_path: Path, refuse: Refuse) -> None:
    mine = tmp_path / "model"
    shutil.copytree(base, mine)
    (mine / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((mine / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (mine / "tokenizer_config.json").write_text(json.dumps(config))
    path = rows(tmp_path / "d.jsonl", *[CHAT] * 5)
    assert "this is chat data, and the model has no chat template" in refuse(mine, path)
    assert str(tmp_path / "no.jinja") in refuse(mine, path, "--template", str(tmp_path / "no.jinja"))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    assert "bad.jinja" in refuse(mine, path, "--template", str(tmp_path / "bad.jinja"))


def test_bad_validation_data(base: Path, data: Path, tmp_path: Path, refuse: Refuse) -> None:
    assert "no such file" in refuse(base, data, "--eval-data", str(tmp_path / "none.jsonl"))
    bad = rows(tmp_path / "e.jsonl", "{")
    assert "none of the 1 rows" in refuse(base, data, "--eval-data", str(bad))


def test_bad_adapters(base: Path, data: Path, tmp_path: Path, refuse: Refuse) -> None:
    assert "is a folder of data files, not an adapter" in refuse(base, data, "--adapter", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{")
    assert "is not valid JSON" in refuse(base, data, "--adapter", str(tmp_path))
