"""Hugging Face folders in: one file or shards, whatever the float type; and the sentence when one of them is amiss."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftune.errors import GraftuneError
from graftune.weights import safetensors_io
from graftune.weights.base import open_base
from tests.support import oracle, tiny


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    tiny.hf_model("llama").save_pretrained(folder, max_shard_size="20KB")
    tiny.make_tokenizer().save(folder)
    return folder


def test_shards_equal_one_file(sharded: Path, tiny_folder) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 5 and not (sharded / "model.safetensors").exists()
    tokens = torch.randint(3, tiny.VOCAB, (40,)).tolist()
    for dtype in ("fp32", "keep"):
        one, many = (
            oracle.ours(f, base_dtype=dtype, random_b=False).logits([tokens]) for f in (tiny_folder("llama"), sharded)
        )
        assert torch.equal(one, many)
    assert open_base(str(sharded)).sha256 != open_base(str(tiny_folder("llama"))).sha256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights(dtype: torch.dtype, tiny_folder, tmp_path: Path) -> None:
    folder = tmp_path / "narrow"
    shutil.copytree(tiny_folder("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.to(dtype) for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    tokens = torch.randint(3, tiny.VOCAB, (40,)).tolist()
    model = tiny.hf_model("llama")
    for parameter in model.parameters():  # not model.to(): that would round the rotary frequencies as well
        parameter.data = parameter.data.to(dtype).float()
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0]
    for base_dtype in ("fp32", "keep"):
        got = oracle.ours(folder, base_dtype=base_dtype, random_b=False).logits([tokens])
        assert (got - want).abs().max() < 1e-4


def refused(folder: Path) -> str:
    with pytest.raises(GraftuneError) as caught:
        open_base(str(folder))
    return str(caught.value)


def test_whole_numbers_are_no_weights(tiny_folder, tmp_path: Path) -> None:
    folder = tmp_path / "ints"
    shutil.copytree(tiny_folder("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "tensor model.norm.weight is I32" in refused(folder)


def test_writing_reports_the_systems_error(tmp_path: Path) -> None:
    """safetensors raises an error class of its own, with the number in its text; the sentence needs the number."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:
        safetensors_io.write({"a": torch.zeros(3)}, tmp_path / "file" / "x.safetensors")
    assert caught.value.errno in (17, 20)  # exists, or not a folder


def test_a_file_larger_than_memory_is_one_sentence(tiny_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors maps a whole file as memory that may be written, which the system refuses beyond what it has."""

    def refuse(path: str, framework: str) -> None:
        raise RuntimeError(f"unable to mmap 61066787464 bytes from file <{path}>: Cannot allocate memory (12)")

    monkeypatch.setattr(safetensors_io, "safe_open", refuse)
    with pytest.raises(GraftuneError, match=r"cannot be mapped into memory \(unable to mmap 61066787464"):
        open_base(str(tiny_folder("llama")))
