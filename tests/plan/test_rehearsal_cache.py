"""Rehearsals kept between runs: found again for the same run, and for no other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from graftune.io import user_cache
from graftune.observe.console import Console
from graftune.plan import job as jobs
from graftune.plan import rehearsal_cache
from graftune.plan.rehearse import Bytes, Setup
from graftune.settings.config import Config
from graftune.training.prepare import job_of


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Setup]:
    """The setups that are rehearsed, and an empty cache."""
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / "cache"))
    seen: list[Setup] = []

    def rehearse(setup: Setup, **_: Any) -> Bytes:
        seen.append(setup)
        return Bytes({"load": {"base": 1000 + len(seen)}}, after=7, without_rule=frozenset({"aten.x"}))

    monkeypatch.setattr(jobs, "rehearse", rehearse)
    return seen


def job(folder: Path, **settings: Any) -> jobs.Job:
    made = job_of(Config.of({"base": str(folder), "device": "cpu", **settings}), Console(quiet=True), memory=1 << 40)
    made.keeps = True
    return made


def test_the_same_run_is_rehearsed_once(rehearsed: list[Setup], tiny_folder: Any) -> None:
    first = job(tiny_folder("llama")).plan("none", 256)
    again = job(tiny_folder("llama")).plan("none", 256)
    assert again.bytes == first.bytes and len(rehearsed) == 1


@pytest.mark.parametrize(
    "other",
    [{"rank": 4}, {"targets": "q_proj"}, {"clip_mode": "layer"}, {"compute_dtype": "bf16"}, {"loss": "anchored"}],
    ids=lambda other: next(iter(other)),
)
def test_another_setting_is_rehearsed(rehearsed: list[Setup], tiny_folder: Any, other: dict[str, Any]) -> None:
    job(tiny_folder("llama")).plan("none", 256)
    job(tiny_folder("llama"), **other).plan("none", 256)
    assert len(rehearsed) == 2


def test_another_shape_policy_or_model_is_rehearsed(rehearsed: list[Setup], tiny_folder: Any) -> None:
    for folder, policy, capacity in (("llama", "none", 256), ("llama", "full", 256), ("llama", "none", 512)):
        job(tiny_folder(folder)).plan(policy, capacity)
    job(tiny_folder("llama-untied")).plan("none", 256)
    assert len(rehearsed) == 4


def test_other_code_or_versions_are_rehearsed(
    rehearsed: list[Setup], tiny_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tiny_folder("llama")).plan("none", 256)
    monkeypatch.setattr(rehearsal_cache, "_code", lambda: "another")
    job(tiny_folder("llama")).plan("none", 256)
    monkeypatch.setattr(rehearsal_cache, "_version", lambda package: "another")
    job(tiny_folder("llama")).plan("none", 256)
    assert len(rehearsed) == 3


def test_every_field_of_a_setup_is_in_the_key(tiny_folder: Any) -> None:
    """A field that is added later is, too, because the key goes by all of them."""
    setup = job(tiny_folder("llama")).setup("none", 256, job(tiny_folder("llama")).placement)
    plain = rehearsal_cache.key_of(setup)
    for field in dataclasses.fields(setup):
        if field.name not in ("base", "loss", "card", "runtime", "placement"):
            assert rehearsal_cache.key_of(dataclasses.replace(setup, **{field.name: "another"})) != plain, field.name


def test_how_the_weights_lie_is_in_the_key_and_what_is_free_is_not(tiny_folder: Any) -> None:
    """Another process on the card, and the same run finds its rehearsal all the same."""
    made = job(tiny_folder("llama"))
    setup = made.setup("none", 256, made.placement)

    def key(**changes: Any) -> str | None:
        return rehearsal_cache.key_of(
            dataclasses.replace(setup, placement=dataclasses.replace(setup.placement, **changes))
        )

    assert key(reason="resident: 1 MiB of 2 MiB free") == key(reason="resident: 1 MiB of 3 MiB free")
    assert len({key(), key(base_dtype="nf4"), key(on_host=True), key(ranks=2)}) == 4


@pytest.mark.parametrize(
    "entry", ["text", {}, {"phases": {}}, {"phases": {"load": 3}}, {"phases": {"load": {"a": -1}}}]
)
def test_a_damaged_entry_is_made_again(rehearsed: list[Setup], tiny_folder: Any, entry: Any) -> None:
    first = job(tiny_folder("llama")).plan("none", 256)
    place = user_cache.cache_folder() / "rehearsals.json"
    place.write_text(json.dumps(dict.fromkeys(json.loads(place.read_text()), entry)))
    assert job(tiny_folder("llama")).plan("none", 256).bytes.after == first.bytes.after
    assert len(rehearsed) == 2


def test_what_has_no_name_of_its_own_is_not_kept(tiny_folder: Any) -> None:
    class Nameless:
        pass

    made = job(tiny_folder("llama"))
    setup = dataclasses.replace(made.setup("none", 256, made.placement), layout=Nameless())  # type: ignore[arg-type]
    assert rehearsal_cache.key_of(setup) is None


def test_a_cache_of_kernels_that_was_removed_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds a rehearsal is not told which kernels to compile ahead: they have to be compiled by then."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    before = rehearsal_cache._triton_cache()
    assert rehearsal_cache._triton_cache() == before and before[1] is not None
    (tmp_path / "kernels").rename(tmp_path / "elsewhere")
    assert rehearsal_cache._triton_cache() != before
