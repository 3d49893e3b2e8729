"""The mask as a user sees it, with and without colour, and as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from graftune.data.dataset import Dataset
from graftune.data.encoded import side_of
from graftune.data.pairs import PAIRS, kind_of_data
from graftune.data.preview import MaskView, preview, summary_json
from graftune.settings.sections import DataConfig
from tests.data.helpers import CHATML, jsonl, load, turns, with_template

CHAT = with_template(CHATML)


ROWS = [{"messages": turns("a [red]", "b", "c", "d[/]")}, {"nope": 1}, {"prompt": "p", "response": "r"}]


MARKED = (
    "<|im_start|>user\na [red]<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n<|im_start|>user\nc<|im_end|>\n"
    "<|im_start|>assistant\n⟦d[/]<|im_end|>⟧"
)


def shown(data: Dataset, **console: object) -> str:
    out = io.StringIO()
    Console(file=out, **{"width": 200, **console}).print(preview(data, CHAT, 1))  # type: ignore[arg-type]
    return out.getvalue()


def test_plain(tmp_path: Path) -> None:
    data = load(tmp_path, *ROWS)
    assert MaskView(data.examples[0], CHAT).plain() == MARKED
    text = shown(data)
    assert all(line in text for line in MARKED.splitlines())
    assert "row 1:" in text and "refused" in text and "row 2: unknown keys: found 'nope'" in text
    assert "\x1b" not in text


def test_colour(tmp_path: Path) -> None:
    text = shown(load(tmp_path, *ROWS), force_terminal=True, color_system="standard")
    assert "⟦" not in text and "\x1b[1;32mb<|im_end|>\x1b[0m" in text and "\x1b[2m" in text
    text = shown(load(tmp_path, *ROWS), force_terminal=True, color_system="standard", no_color=True)
    assert "⟦b<|im_end|>⟧" in text


def test_json(tmp_path: Path) -> None:
    data = load(tmp_path, *ROWS)
    made = json.loads(json.dumps(summary_json(data, CHAT, 1)))
    assert made["rows"] == 3 and made["examples"] == 2 and made["refused"] == {"unknown keys": 1}
    assert made["details"][0]["row"] == 2 and made["sha256"] == data.sha256
    assert 0 < made["supervised_share"] < 1
    segments = made["preview"][0]["segments"]
    assert "".join(f"⟦{s['text']}⟧" if s["trained"] else s["text"] for s in segments) == MARKED
    assert "preview" not in summary_json(data)


def test_lengths_repeats_and_what_is_cut(tmp_path: Path) -> None:
    rows = [{"prompt": f"why {i} " * (i + 1), "response": "a"} for i in range(20)]
    data = load(tmp_path, *rows, rows[0], max_seq_len=64)
    text = " ".join(shown(data).split())
    summary = data.summary
    assert "tokens per example, before anything is cut 1 to 32 ████" in text
    assert f"{summary.needed}: 100% (now 64)" in text and "64: " in text
    assert "examples are longer than max_seq_len 64" in text and "1 of 21 examples repeats an earlier one" in text
    made = json.loads(json.dumps(summary_json(data)))
    assert sum(part["examples"] for part in made["histogram"]) == 21 and made["duplicates"] == 1
    assert made["kept_whole"][-1] == {"max_seq_len": summary.needed, "share": 1.0}
    assert made["warnings"] == summary.warnings() != [] and made["template"] == "template"


def test_pairs_are_shown_side_by_side(tmp_path: Path) -> None:
    rows = [{"prompt": f"Ask {i}", "chosen": "good", "rejected": "bad"} for i in range(3)]
    data = load(tmp_path, *rows, {"prompt": "a", "chosen": "b", "rejected": "b"}, kind=PAIRS)
    wide, narrow = shown(data), shown(data, width=60)
    for text in (wide, narrow):
        assert text.count("Ask 0") == 1 and "Ask 1" not in text, "one prompt for both, and one pair"
        assert "1: equal answers" in text and "for loss: dpo" in text
    side_by_side = [line for line in wide.splitlines() if "⟦good<|im_end|>⟧" in line and "⟦bad<|im_end|>⟧" in line]
    assert len(side_by_side) == 1 and "⟦good<|im_end|>⟧\n" in narrow
    made = json.loads(json.dumps(summary_json(data, CHAT, 2)))
    assert made["kind"] == "pairs" and [one["group"] for one in made["preview"]] == [0, 0, 1, 1]
    assert [side_of(data.examples, i) for i in range(4)] == ["chosen", "rejected"] * 2


def test_the_kind_of_data_is_recognised(tmp_path: Path) -> None:
    kinds = {"pairs": {"prompt": "a", "chosen": "b", "rejected": "c"}, "answers": {"prompt": "a", "response": "b"}}
    kinds["rated answers"] = {"prompt": "a", "completion": "b", "label": True}  # type: ignore[dict-item]
    for name, row in kinds.items():
        assert kind_of_data(jsonl(tmp_path / "k.jsonl", "broken", row), DataConfig()).name == name
