"""Windows of attention through GGUF: every family that may have one comes back with it, and gives the same logits.

llama.cpp honours them in gemma2, gemma3 and olmo3 (test_families.py). In the others it reads past the key:
up to the window it says what we say, beyond it what we would say without one, and the export warns of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from graftune.api import export
from graftune.errors import GraftuneError
from graftune.model.spec import ModelSpec
from graftune.weights.base import open_base
from tests.exporting import models
from tests.exporting.judges import DOCUMENT, LlamaCpp, gap, in_transformers, opened, ours
from tests.support import moe, tiny

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


class Warned:
    """A console that keeps its warnings."""

    def __init__(self) -> None:
        from graftune.observe.console import Console

        self.console, self.texts = Console(quiet=True), list[str]()
        self.console.warn = self.texts.append  # type: ignore[method-assign]


@pytest.mark.few(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_window_comes_back(variant: str, folder: Any, tmp_path: Path) -> None:
    model, warned = folder(variant), Warned()
    gguf = export(str(model), "gguf", kind="F32", out=str(tmp_path / "m.gguf"), console=warned.console).path
    assert len(warned.texts) == 1 and f"window of {WINDOW} tokens" in warned.texts[0]
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
        block.mixer.window = 0
    free = ours(without)
    assert gap(free, want) > 0.05, "a window that changes nothing proves nothing"
    theirs = LlamaCpp(gguf).along(DOCUMENT)
    assert gap(theirs[:WINDOW], want[:WINDOW]) < 1e-4
    assert gap(theirs, free) < 1e-4, "llama.cpp honours the window now: set windows_in_llama_cpp of its family"


def windows(spec: ModelSpec) -> list[int]:
    return [layer.mixer.attention.window for layer in spec.layers if layer.mixer.attention]


def test_no_warning_where_no_text_is_longer_than_the_window(folder: Any, tmp_path: Path) -> None:
    model, warned = folder("mistral-window", sliding_window=256), Warned()
    gguf = export(str(model), "gguf", kind="F32", out=str(tmp_path / "m.gguf"), console=warned.console).path
    assert warned.texts == [] and set(windows(open_base(str(gguf)).spec)) == {256}


def test_a_mistral_without_a_window_is_a_llama(folder: Any, tmp_path: Path) -> None:
    gguf = export(str(folder("mistral")), "gguf", kind="F32", out=str(tmp_path / "m.gguf")).path
    spec = open_base(str(gguf)).spec
    assert spec.family == "llama" and not any(windows(spec))


@pytest.mark.parametrize("told", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00"])
def test_a_lying_window(told: bytes, folder: Any, tmp_path: Path) -> None:
    """-1 is no window; 0 is none."""
    gguf = export(str(folder("mistral-window")), "gguf", kind="F32", out=str(tmp_path / "m.gguf")).path
    data, key = bytearray(gguf.read_bytes()), b"llama.attention.sliding_window"
    at = data.index(key) + len(key)
    data[at : at + 8] = (5).to_bytes(4, "little") + told  # a signed number
    gguf.write_bytes(data)
    if told == bytes(4):
        spec = open_base(str(gguf)).spec
        assert spec.family == "llama" and not any(windows(spec))
    else:
        with pytest.raises(GraftuneError, match="makes no sense \\(window\\)"):
            open_base(str(gguf))


def test_gemma3_without_its_gelu_is_llama_cpps_to_fp32s_noise(tmp_path: Path) -> None:
    """With gates of zero nothing of ggml's table over fp16 is left, which is all that parts gemma3 here and there:
    windows, both ropes, QK norms and all four norms of seven layers are the same to 1e-5."""
    folder = models.make_folder("gemma3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "gate_proj" in name:
            tensors[name].zero_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    gguf = export(str(folder), "gguf", kind="F32", out=str(tmp_path / "m.gguf")).path
    document = [*DOCUMENT, *DOCUMENT[::-1]]
    own = ours(opened(gguf), document)
    apart = gap(LlamaCpp(gguf).along(document), own)
    print(f"gemma3 with gates of zero: llama.cpp is within {apart:.1e}")
    assert apart < 3e-5 and gap(in_transformers(folder, document), own) < 3e-5
