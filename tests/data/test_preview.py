"""The mask as a user sees it, with and without colour, and as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from graftune.config import DataConfig
from graftune.data.dataset import Dataset, prepare
from graftune.data.preview import MaskView, preview, summary_json
from tests.data.helpers import CHATML, turns, with_template

CHAT = with_template(CHATML)


def load(tmp_path: Path) -> Dataset:
    path = tmp_path / "d.jsonl"
    rows = [{"messages": turns("a [red]", "b", "c", "d[/]")}, {"nope": 1}, {"prompt": "p", "response": "r"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare(str(path), CHAT, DataConfig())


MARKED = (
    "<|im_start|>user\na [red]<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n<|im_start|>user\nc<|im_end|>\n"
    "<|im_start|>assistant\n⟦d[/]<|im_end|>⟧"
)


def shown(data: Dataset, **console: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200, **console).print(preview(data, CHAT, 1))  # type: ignore[arg-type]
    return out.getvalue()


def test_plain(tmp_path: Path) -> None:
    data = load(tmp_path)
    assert MaskView(data.examples[0], CHAT).plain() == MARKED
    text = shown(data)
    assert all(line in text for line in MARKED.splitlines())
    assert "row 1:" in text and "refused" in text and "row 2: unknown keys: found 'nope'" in text
    assert "\x1b" not in text


def test_colour(tmp_path: Path) -> None:
    text = shown(load(tmp_path), force_terminal=True, color_system="standard")
    assert "⟦" not in text and "\x1b[1;32mb<|im_end|>\x1b[0m" in text and "\x1b[2m" in text
    text = shown(load(tmp_path), force_terminal=True, color_system="standard", no_color=True)
    assert "⟦b<|im_end|>⟧" in text


def test_json(tmp_path: Path) -> None:
    data = load(tmp_path)
    made = json.loads(json.dumps(summary_json(data, CHAT, 1)))
    assert made["rows"] == 3 and made["examples"] == 2 and made["refused"] == {"unknown keys": 1}
    assert made["details"][0]["row"] == 2 and made["sha256"] == data.sha256
    assert 0 < made["supervised_share"] < 1
    segments = made["preview"][0]["segments"]
    assert "".join(f"⟦{s['text']}⟧" if s["trained"] else s["text"] for s in segments) == MARKED
    assert "preview" not in summary_json(data)
