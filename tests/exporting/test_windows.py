"""Windows of attention through GGUF: every family that may have one comes back with it, and gives the same logits.

llama.cpp honours them in gemma2, gemma3 and olmo3 (test_families.py). In the others it reads past the key:
up to the window it says what we say, beyond it what we would say without one, and the export warns of that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graftune.api import export
from graftune.model.spec import ModelSpec
from graftune.observe.console import Console
from graftune.weights.base import open_base
from tests.exporting import models
from tests.exporting.judges import DOCUMENT, LlamaCpp, gap, in_transformers, opened, ours
from tests.support import moe, tiny

QUIET = Console(quiet=True)
WINDOW = 5
TOLD = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
VARIANTS = ("mistral-window", "phi3-window", "qwen2-told", "qwen3-told", "mixtral-window")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(tiny.VARIANT_OPTIONS, "qwen2-told", TOLD)
    monkeypatch.setitem(tiny.VARIANT_OPTIONS, "qwen3-told", TOLD)

    def make(variant: str, **changed: Any) -> Path:
        place = tmp_path / variant
        if variant == "mixtral-window":
            moe.make_folder("mixtral", place)
            models.tokenizer().save(place)
            changed |= {"sliding_window": WINDOW}
        else:
            models.make_folder(variant, place)
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(config | changed))
        return place

    return make


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of an export."""
    texts: list[str] = []
    monkeypatch.setattr(QUIET, "warn", texts.append)
    return texts


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_window_comes_back(variant: str, folder: Any, tmp_path: Path, warned: list[str]) -> None:
    model = folder(variant)
    gguf = export(str(model), "gguf", kind="F32", out=str(tmp_path / "m.gguf"), console=QUIET).path
    assert len(warned) == 1 and f"window of {WINDOW} tokens" in warned[0]
    was, back = open_base(str(model)).spec, open_base(str(gguf)).spec
    assert windows(back) == windows(was) and set(windows(was)) | {0} == {0, WINDOW}
    assert back.family == was.family
    want = ours(opened(model))
    assert gap(in_transformers(model), want) < 1e-4
    assert gap(ours(opened(gguf)), want) < 1e-4
    again = export(str(gguf), "merged", kind="F32", out=str(tmp_path / "again")).path
    assert gap(ours(opened(again)), want) < 1e-4 and gap(in_transformers(again), want) < 1e-4
    second = export(str(gguf), "gguf", kind="F32", out=str(tmp_path / "second.gguf")).path
    assert gap(ours(opened(second)), want) < 1e-4
    without = opened(gguf)
    for block in without.parts.decoder.blocks:
        block.mixer.spec = replace(block.mixer.spec, window=0)
    free = ours(without)
    assert gap(free, want) > 0.05, "a window that changes nothing proves nothing"
    theirs = LlamaCpp(gguf).along(DOCUMENT)
    assert gap(theirs[:WINDOW], want[:WINDOW]) < 1e-4
    assert gap(theirs, free) < 1e-4, "llama.cpp honours the window now: set windows_in_llama_cpp of its family"


def windows(spec: ModelSpec) -> list[int]:
    return [layer.mixer.attention.window for layer in spec.layers if layer.mixer.attention]


def test_no_warning_where_no_text_is_longer_than_the_window(folder: Any, tmp_path: Path, warned: list[str]) -> None:
    model = folder("mistral-window", sliding_window=256)
    gguf = export(str(model), "gguf", kind="F32", out=str(tmp_path / "m.gguf"), console=QUIET).path
    assert warned == [] and set(windows(open_base(str(gguf)).spec)) == {256}


def test_a_mistral_without_a_window_is_a_llama(folder: Any, tmp_path: Path) -> None:
    gguf = export(str(folder("mistral")), "gguf", kind="F32", out=str(tmp_path / "m.gguf")).path
    spec = open_base(str(gguf)).spec
    assert spec.family == "llama" and not any(windows(spec))
