"""PEFT's patterns mean here what they mean there, and none of them takes for ever."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftune.errors import GraftuneError
from graftune.weights import patterns
from graftune.weights.adapter import load_adapter
from graftune.weights.uniform_rank import _values
from tests.exporting import judges
from tests.support.counting import Calls

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
    fits = patterns.ends_with(key, patterns.Deadline())
    for name in NAMES:
        assert fits(name) == (re.match(rf"(.*\.)?({key})$", name) is not None), name


def test_as_re_has_it_at_random() -> None:
    rng, tried = random.Random(7), 0
    pieces = ["a", "b", r"\.", ".", "[ab]", "[^a]", "(a|b)", "(ab|a)", "(b|)", r"\w", "^", "$"]
    repeats = ["", "", "", "*", "+", "?", "{2}", "{1,3}", "*?", "+?"]
    names = ["".join(rng.choice("ab.") for _ in range(rng.randrange(9))) for _ in range(40)]
    while tried < 400:
        parts = [rng.choice(pieces) + rng.choice(repeats) for _ in range(rng.randrange(1, 5))]
        key = "".join(parts) if rng.random() < 0.7 else f"({''.join(parts)}){rng.choice(repeats)}{rng.choice(pieces)}"
        try:
            wanted = re.compile(rf"(.*\.)?({key})$")
        except re.error:
            continue
        fits, tried = patterns.ends_with(key, patterns.Deadline()), tried + 1
        assert [fits(n) for n in names] == [wanted.match(n) is not None for n in names], key


def modules(*targets: str) -> dict[str, int]:
    """In more layers than models have."""
    return {f"layers.{layer}.self_attn.{target}": 8 for layer in range(130) for target in targets}


HOSTILE = [
    r"(\w+)+!", r"(\w+\.?)+[!?]", "(a|a)*b", r"((\w|\w\w)\.?)+$[!?]", ".*" * 200 + "[!?]", r"((((\w*)*)*)*)*[!?]",
    "(" * 300 + "a" + ")*" * 300, r"(?:\w{1,60000}){1,60000}[!?]", "|".join(["a*"] * 300), "(?:l?.?){999}" * 70,
    r"(\w+\.)*(\w+\.)*(\w+\.)*[!?]", r"(.+)(.+)(.+)(.+)(.+)(.+)\6\5\4\3\2[!?]", r"(?=(.*)*[!?]|.*(.+)+).*(.+)+[!?]",
]  # fmt: skip


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends endless matching as a failure instead of a hang, far behind any limit of ours."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("key", HOSTILE)
def test_no_pattern_takes_for_ever(key: str, alarm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    try:
        assert set(_values({key: 3}, modules("q_proj", "v_proj"), 8).values()) <= {3.0, 8.0}
    except patterns.Unmatched as error:
        assert "take too long" in str(error) or "not a valid expression" in str(error)


def test_a_pattern_that_never_ends_is_given_up(alarm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the clock ends this one."""
    monkeypatch.setattr(patterns, "SECONDS", 0.05)
    fits = patterns.ends_with(".*" * 400 + "[!?]", patterns.Deadline())
    with pytest.raises(patterns.Unmatched, match="take too long"):
        fits("a" * 200)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"(q_proj){e<=1}": 2}, "braces are not a repeat"),
        ({"[[:alpha:]]_proj": 2}, "not a valid expression"),
        ({r"\p{L}_proj": 2}, "not a valid expression"),
        ({"(": 2}, "not a valid expression"),
        ({"a" * 1001: 2}, "of 1001 characters"),
        ({f"m{i}": 2 for i in range(5000)}, "5000 patterns"),
        ({".*" * 400 + "[!?]": 2}, "take too long"),
    ],
)
def test_refused_by_name(
    table: dict[str, int], said: str, tiny_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.1)
    folder = judges.opened(tiny_folder("llama"), rank=2).save(tmp_path / "a")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rank_pattern": table}))
    with pytest.raises(GraftuneError, match=said) as error:
        load_adapter(folder)
    assert "\n" not in str(error.value) and "the adapter uses" in str(error.value)


def test_a_name_for_every_module_is_quick() -> None:
    """What PEFT writes when ranks were set one by one."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    table = {f"model.layers.{layer}.self_attn.{target}": 4 for layer in range(130) for target in targets}
    with Calls(most=3 * len(table) ** 2):
        assert set(_values(table, modules(*targets), 8).values()) == {4.0}
