"""A pattern of an adapter's file cannot take for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftune.errors import GraftuneError
from graftune.weights import uniform_rank
from graftune.weights.adapter import load_adapter
from tests.exporting import judges


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"(": 2}, "cannot be matched"),
        ({f"m{i}": 2 for i in range(5000)}, "5000 patterns"),
        ({".*" * 400 + "[!?]": 2}, "cannot be matched: regex timed out"),
    ],
)
def test_refused_by_name(
    table: dict[str, int], said: str, tiny_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uniform_rank, "SECONDS", 0.05)
    folder = judges.opened(tiny_folder("llama"), rank=2).save(tmp_path / "a")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alpha_pattern": table}))
    with pytest.raises(GraftuneError, match=said) as error:
        load_adapter(folder)
    assert "\n" not in str(error.value)
