"""Adapters in GGUF files that are damaged, of another kind or for another base: one sentence, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graftune.api import export
from graftune.errors import GraftuneError
from graftune.exporting import gguf_file
from graftune.exporting.gguf_file import write_gguf
from graftune.model.frozen.interface import TensorRows
from graftune.weights.adapter import is_adapter
from graftune.weights.streamed import OutputTensor
from tests.exporting import models
from tests.exporting.judges import opened, shaken


@pytest.fixture(scope="module")
def good(tuned: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(str(tuned("llama").adapter), "gguf-lora", out=str(tmp_path_factory.mktemp("good") / "a.gguf")).path


def changed(good: Path, path: Path, change: Callable[[dict[str, bytes], list[OutputTensor]], None]) -> Path:
    from graftune.weights.gguf_io import header_bytes, read_gguf

    keys = header_bytes(good)
    tensors = [OutputTensor(n, TensorRows(t.values()), "F32") for n, t in read_gguf(good).tensors.items()]
    change(keys, tensors)
    write_gguf(path, keys, tensors)
    return path


def wide_rank(keys: dict[str, bytes], tensors: list[OutputTensor]) -> None:
    value = tensors[0].source.values()
    tensors[0] = OutputTensor(tensors[0].name, TensorRows(value.repeat(2, 1)), "F32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda keys, tensors: keys.pop("adapter.lora.alpha"), "has no adapter.lora.alpha"),
        (lambda keys, tensors: keys.update({"adapter.type": gguf_file.encoded("ia3")}), "is not a LoRA adapter"),
        (
            lambda keys, tensors: tensors.append(OutputTensor("blk.0.odd.lora_a", tensors[0].source, "F32")),
            "uses blk.0.odd",
        ),
        (lambda keys, tensors: tensors.pop(), "is missing: the adapter was made for another base"),
        (lambda keys, tensors: tensors.clear(), "uses no tensors"),
        (wide_rank, "ranks that differ"),
    ],
)
def test_refused_by_name(change: Any, said: str, good: Path, tuned: Any, tmp_path: Path) -> None:
    path = changed(good, tmp_path / "x.gguf", change)
    with pytest.raises(GraftuneError, match=said):
        opened(tuned("llama").base, path)


def test_cut_anywhere(good: Path, tuned: Any, tmp_path: Path) -> None:
    """At bytes spread over header and blocks; a model that is no adapter is not taken for one either."""
    data, path = good.read_bytes(), tmp_path / "cut.gguf"
    for size in np.linspace(0, len(data) - 1, 40).astype(int):
        path.write_bytes(data[:size])
        with pytest.raises(GraftuneError):
            opened(tuned("llama").base, path)
    whole = export(str(tuned("llama").base), "gguf", kind="F16", out=str(tmp_path / "m.gguf")).path
    assert is_adapter(good) and not is_adapter(whole)
    with pytest.raises(GraftuneError, match="not an adapter or run folder"):
        opened(tuned("llama").base, whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 0}, {"r": -4}, {"r": 1e9}, {"r": 2.5}, {"lora_alpha": 1e999}, {"lora_alpha": 0},
        {"lora_dropout": "x"}, {"lora_dropout": 2},
        {"modules_to_save": 5}, {"target_modules": [["q_proj"]]}, {"new_tokens": 5},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(changes, tmp_path):
    import json

    base = models.make_folder("llama", tmp_path / "base")
    folder = shaken(opened(base, rank=2)).save(tmp_path / "a")
    path = folder / ("graftune.json" if "new_tokens" in changes else "adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(GraftuneError):
        opened(base, folder)
    with pytest.raises(GraftuneError):
        export(str(folder), "peft", base=str(base), out=str(tmp_path / "out"))


@pytest.mark.parametrize(("name", "value"), [("weight", 1.0), ("x", 1.0), ("", float("nan"))])
def test_tensors_that_are_no_adapters_or_not_finite(name, value, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    base = models.make_folder("llama", tmp_path / "base")
    folder = shaken(opened(base, rank=2)).save(tmp_path / "a")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[name or next(iter(tensors))] = torch.full((2, 2), value)
    save_file(tensors, folder / "adapter_model.safetensors")
    for to in ("merged", "peft", "gguf-lora"):
        with pytest.raises(GraftuneError):
            export(str(folder), to, base=str(base), out=str(tmp_path / "out"))
