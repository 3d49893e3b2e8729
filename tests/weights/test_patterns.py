"""PEFT's patterns mean here what they mean there, and none of them takes for ever."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from graftune.errors import GraftuneError
from graftune.weights import uniform_rank
from graftune.weights.adapter import load_adapter
from tests.exporting import judges

NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10, 11, 29)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
]
NAMES += ["lm_head", "model.embed_tokens", "q_proj", "", "a" * 30]
KEYS = [
    "q_proj", "layers.1.self_attn.q_proj", r"layers\.1\.self_attn\.q_proj", "[qk]_proj", "[^q]_proj", ".*q_proj", ".*",
    r"layers\.\d+\.self_attn\.(q|v)_proj", "^model.layers.(0|1).*", "^q_proj$", "^layers.0.*", r"\w+_proj", r"\W", "",
    "(q|k)_pro(j|k)?", "layers.[0-9]{2}.*proj", "layers.(?:1|2)[0-9]?.mlp.+", ".+?_proj", "a{3,}", "a{30}", "a{31}",
    "(a*)*", "(a|aa)+", "((a|b)*c)?a+", "[a-z_]+", "[]a-]+", r"[\d.]+.*", "x*y*z*", "(|q)_proj", "a{2,5}a{25}", "()*a+",
    r"mlp\.(gate|up|down)_proj", "^$", "^", "$", "q_proj|k_proj", "^model|lm_head", r"\Amodel.*", r"down_proj\Z",
    "(?i:Q)_proj", r"(q)\3?_proj", "(?=q)q_proj", r"q_proj\b", r".*(l)\3.*", "(?!.*k_).*_proj", "(?<=q)_proj",
    "a*+", "(?>a+)a",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_as_re_has_it(key: str) -> None:
    found = uniform_rank._values({key: 3}, dict.fromkeys(NAMES), 8)
    for name in NAMES:
        assert found[name] == (3 if re.match(rf"(.*\.)?({key})$", f"model.{name}") else 8), name


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
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rank_pattern": table}))
    with pytest.raises(GraftuneError, match=said) as error:
        load_adapter(folder)
    assert "\n" not in str(error.value)
