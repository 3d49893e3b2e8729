"""The config tree: every key, type and range is checked, and file, flags and saved copy agree."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftune.errors import GraftuneError
from graftune.settings.config import Config, leaves
from graftune.settings.sections import Resume
from graftune.settings.targets import PROJECTIONS, expand_targets
from graftune.settings.values import Leaf, number_or_auto
from tests.support.characters import CHARACTERS


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(*layers: dict[str, Any]) -> str:
    with pytest.raises(GraftuneError) as caught:
        Config.of(*layers)
    return str(caught.value)


def test_leaf_names_are_unique_and_have_help() -> None:
    names = [leaf.name for leaf in leaves()]
    assert len(names) == len(set(names))
    assert all(leaf.help for leaf in leaves())


def test_every_field_declares_whether_it_may_change_on_resume() -> None:
    sections = [field.default_factory for field in dataclasses.fields(Config)]
    fields = [field for section in sections for field in dataclasses.fields(section)]  # type: ignore[arg-type]
    missing = [field.name for field in fields if field.metadata.get("resume") not in typing.get_args(Resume)]
    assert len(fields) == len(leaves()) and not missing


def test_flat_and_sectioned_files_agree(tmp_path: Path) -> None:
    flat = Config.load(write(tmp_path, "rank: 8\nlr: 1e-3\nbase: a/b\ndata: d.jsonl\nmax_steps: 5\n"))
    text = "base: {base: a/b}\nlora:\n  rank: 8\noptim:\n  lr: 0.001\ndata: {data: d.jsonl}\ntrain: {max_steps: 5}\n"
    assert flat == Config.load(write(tmp_path, text))
    assert flat.base.base == "a/b" and flat.optim.lr == 1e-3


def test_empty_file_empty_section_and_bom(tmp_path: Path) -> None:
    assert Config.load(write(tmp_path, "")) == Config()
    assert Config.load(write(tmp_path, "lora:\n# rank: 8\ntrain:\n")) == Config()
    assert Config.load(write(tmp_path, "\ufeffrank: 8\n")).lora.rank == 8
    assert Config.load(write(tmp_path, "out:\nrank: 8\n")) == Config.of({"rank": 8})


def test_later_layers_win() -> None:
    assert Config.of({"rank": 4, "lr": 1.0}, {"lora": {"rank": 8}}).lora.rank == 8
    assert Config.of({"lr": 1.0}, {"rank": 8}).optim.lr == 1.0


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        ({"rnak": 3}, ["unknown key 'rnak'", "did you mean rank?"]),
        ({"lora": {"lr": 3}}, ["unknown key 'lora.lr'"]),
        ({"lora": {1: 2}}, ["unknown key 'lora.1'"]),
        ({1: 2}, ["unknown key '1'"]),
        ({"train": 5}, ["train is 5", "section"]),
        ({"lr": 1.0, "optim": {"lr": 2.0}}, ["lr is given twice"]),
        ({"rank": "16"}, ["rank is '16'", "whole number"]),
        ({"rank": 1.5}, ["rank is 1.5", "whole number"]),
        ({"rank": True}, ["rank is True", "whole number"]),
        ({"rank": None}, ["rank is None", "whole number"]),
        ({"rank": 0}, ["rank is 0", "at least 1"]),
        ({"rank": 10**400}, ["rank is 1000", "at most 4096"]),
        ({"lr": -1}, ["lr is -1", "at least 0"]),
        ({"lr": "fast"}, ["lr is 'fast'", "a number"]),
        ({"lr": float("nan")}, ["lr is nan", "finite"]),
        ({"lr": "inf"}, ["lr is inf", "finite"]),
        ({"lr": 10**400}, ["lr is 1000", "double"]),
        ({"alpha": -1}, ["alpha is -1", "at least 0"]),
        ({"eps": 0}, ["eps is 0", "above 0"]),
        ({"val_split": 1.0}, ["val_split is 1.0", "at most 0.9"]),
        ({"schedule": "exp"}, ["schedule is 'exp'", "cosine, linear, constant"]),
        ({"schedule": ["cosine"]}, ["schedule is ['cosine']", "one of"]),
        ({"strict": "yes"}, ["strict is 'yes'", "true or false"]),
        ({"strict": 1}, ["strict is 1", "true or false"]),
        ({"base": 7}, ["base is 7", "text"]),
        ({"targets": [1]}, ["targets is [1]", "list of names"]),
        ({"targets": {"a": 1}}, ["targets is", "list of names"]),
        ({"targets": "qkv"}, ["unknown projection 'qkv'", "q_proj"]),
        ({"map": "prompt=Question,response"}, ["'response' is not of the form key=value"]),
        ({"map": "prompt=A,prompt=B"}, ["prompt is given twice"]),
        ({"map": {"prompt": 3}}, ["prompt is 3; it must be a name"]),
        ({"map": ["a"]}, ["key=value"]),
        ({"template_vars": {1: 2}}, ["the key 1, which is not a name"]),
        ({"template_vars": {"a": {1, 2}}}, ["it must be text, a number"]),
        ({"max_seq_len": 3}, ["at least 8, or 0"]),
        ({"date": "17.11.2026"}, ["year-month-day"]),
        ({"epochs": 0}, ["above 0"]),
    ],
)
def test_bad_values_name_the_field(layer: dict[str, Any], parts: list[str]) -> None:
    text = complaint(layer)
    assert all(part in text for part in parts), text


def _bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    return "\n".join(lines + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "not valid YAML at line"),
        ("- rank\n", "keys and values"),
        ("just text", "keys and values"),
        ("rank: \x00", "not valid YAML"),
        ("[1]: 2", "not valid YAML"),
        (_bomb(12), "too many values"),
        ("base: &a [*a]", "nested too deeply"),
        ("rank: " + "9" * 5000, "cannot be read"),
        ("base: " + "[" * 600 + "]" * 600, "nested too deeply"),
        ("base: " + "[" * 100 + "]" * 100, "nested too deeply"),
        ("rank: 4\nrank: 8", "rank is given twice, at lines 1 and 2"),
        ("date: 2026-13-45", "cannot be read"),
        ("out: " + "x" * (1 << 20), "too large"),
        ("rank: " + "9" * 4000, "at most 4096"),
        ("out: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("out: !!python/name:os.getcwd", "not valid YAML"),
    ],
    ids=[
        "open",
        "list",
        "text",
        "zero",
        "key",
        "bomb",
        "itself",
        "digits",
        "deep",
        "levels",
        "twice",
        "date",
        "large",
        "long",
        "call",
        "name",
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, text: str, part: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(GraftuneError, match=part) as caught:
        Config.load(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


def test_mappings_come_from_text_and_from_yaml(tmp_path: Path) -> None:
    text = Config.of({"map": "prompt=Question, response=The answer", "template_vars": "a=true,b=2,c=0.5,d=x,e=null"})
    file = "map: {prompt: Question, response: The answer}\ntemplate_vars: {a: true, b: 2, c: 0.5, d: x, e: null}\n"
    assert text == Config.load(write(tmp_path, file))
    assert text.data.template_vars == {"a": True, "b": 2, "c": 0.5, "d": "x", "e": None}


def test_lengths_resolve_themselves() -> None:
    assert Config().data.longest(8192) == 2048 and Config().data.longest(512) == 512
    assert Config.of({"max_seq_len": 4096}).data.longest(512) == 4096


def test_missing_file_folder_and_other_encoding(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(GraftuneError, match="cannot be read"):
            Config.load(path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("out: caf\u00e9".encode("latin-1"))
    with pytest.raises(GraftuneError, match="not valid YAML"):
        Config.load(latin)


def test_a_date_without_quotes(tmp_path: Path) -> None:
    """Which YAML reads as a date, not as text."""
    file = tmp_path / "run.yaml"
    file.write_text("date: 2026-01-31\n")
    assert Config.load(file).data.date == "2026-01-31"


def test_the_folder_of_a_run_may_be_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/me")
    assert Config.of({"out": "~/runs/a"}).run.out == "/home/of/me/runs/a"
    assert Config.of({"out": "runs/~a"}).run.out == "runs/~a" and Config.of({}).run.out == ""


def test_targets_shorthands_keep_the_models_order() -> None:
    assert expand_targets(("mlp", "q_proj")) == ("q_proj", "gate_proj", "up_proj", "down_proj")
    assert Config.of({"targets": "v_proj, q_proj"}).lora.targets == ("v_proj", "q_proj")


def test_replace_checks_too() -> None:
    assert Config().replace(rank=4).lora.rank == 4
    with pytest.raises(GraftuneError, match="rank is 0"):
        Config().replace(rank=0)


def _values(leaf: Leaf) -> st.SearchStrategy[Any]:
    """Values inside the leaf's range."""
    low, high, above = leaf.min, leaf.max, leaf.above
    if leaf.name == "targets":
        return st.lists(st.sampled_from([*PROJECTIONS, "qv", "mlp"]), min_size=1).map(tuple)
    if typing.get_origin(leaf.type) is Literal:
        return st.sampled_from(typing.get_args(leaf.type))
    if typing.get_origin(leaf.type) is tuple:
        return st.lists(st.text(CHARACTERS, min_size=1)).map(tuple)
    if leaf.type == dict[str, str]:
        return st.dictionaries(st.text(CHARACTERS, min_size=1), st.text(CHARACTERS, min_size=1))
    if typing.get_origin(leaf.type) is dict:
        scalars = (
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(CHARACTERS)
        )
        return st.dictionaries(st.text(CHARACTERS, min_size=1), scalars | st.lists(scalars))
    if leaf.name == "date":
        return st.dates().map(str)
    if leaf.name == "max_seq_len":
        return st.sampled_from([0, 8, 4096])
    if number_or_auto(leaf.type):
        return st.just("auto") | _values(dataclasses.replace(leaf, type=number_or_auto(leaf.type)))
    if leaf.type is bool:
        return st.booleans()
    if leaf.type is int:
        return st.integers(low, high if high is not None else 10**9)
    if leaf.type is float:
        return st.floats(
            low if low is not None else above,
            high,
            allow_nan=False,
            allow_infinity=False,
            exclude_min=above is not None,
        )
    return st.text(CHARACTERS)


@given(st.fixed_dictionaries({}, optional={leaf.name: _values(leaf) for leaf in leaves()}))
def test_every_legal_config_survives_saving(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    config = Config.of(values)
    path = tmp_path_factory.mktemp("round") / "config.yaml"
    with mock.patch("os.fsync"):  # a hundred of them are slow on a busy disk
        config.save(path)
    assert Config.load(path) == config
    assert Config.of(config.flat()) == Config.of(config.nested()) == config
