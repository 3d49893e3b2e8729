"""A GGUF model in several files, as llama.cpp's gguf-split names and describes them; written by the gguf package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from graftune.weights.base import open_base
from graftune.weights.gguf_io import read_gguf
from tests.support import oracle, tiny
from tests.weights import tiny_gguf
from tests.weights.test_safetensors import refused


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("split")
    real = gguf.GGUFWriter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf.gguf, "GGUFWriter", lambda path, arch: real(path, arch, split_max_tensors=9))
        tiny_gguf.write(folder / "tiny.gguf")
    found = sorted(folder.iterdir())
    assert [f.name for f in found] == [f"tiny-0000{i}-of-00004.gguf" for i in (1, 2, 3, 4)]
    return found


@pytest.mark.parametrize("given", range(4))
def test_any_part_opens_the_whole(given: int, parts: list[Path], tmp_path: Path) -> None:
    one = tiny_gguf.write(tmp_path / "one.gguf")
    tokens = torch.randint(3, tiny.VOCAB, (30,)).tolist()
    for dtype in ("fp32", "keep"):
        whole = oracle.ours(one, base_dtype=dtype, random_b=False).logits([tokens])
        assert torch.equal(oracle.ours(parts[given], base_dtype=dtype, random_b=False).logits([tokens]), whole)
    base = open_base(str(parts[given]))
    assert base.path == parts[0] and base.parts == tuple(parts) and base.sha256 == open_base(str(parts[0])).sha256
    assert base.sha256 != open_base(str(one)).sha256 and base.tensors.keys() == open_base(str(one)).tensors.keys()


@pytest.fixture
def copied(parts: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(part, tmp_path)) for part in parts]


def test_what_is_amiss_is_named(copied: list[Path]) -> None:
    first, second, third, fourth = copied
    third.rename(third.with_name("aside"))
    assert f"{third}: this part of a split model is missing" in refused(first)
    shutil.copy(second, third)
    assert f"{third}: says it is part 1 of 4" in refused(fourth)
    third.unlink()
    third.with_name("aside").rename(third)
    assert open_base(str(first)).kind == "gguf"
    fourth.write_bytes(fourth.read_bytes()[:-200])
    assert str(fourth) in (said := refused(first)) and "cut short" in said
    renamed = first.rename(first.with_name("model.gguf"))
    assert "is one of 4 parts of a split model, under another name" in refused(renamed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split.tensors.count": 99}, "its parts hold 29 tensors of 99"),
        ({"split.count": 3}, "says it is part 1 of 3"),
        ({"split.count": None}, "says it is part 1 of None"),
    ],
)
def test_parts_of_different_models(change: dict[str, Any], said: str, copied: list[Path]) -> None:
    """The count of tensors stands in the first part, the rest is wrong in the second."""
    part = copied["split.tensors.count" not in change]
    data = bytearray(part.read_bytes())
    ((key, value),) = change.items()
    at = data.index(key.encode()) + len(key)
    if value is None:
        data[at - 1] ^= 1  # another key
    else:
        data[at + 4 : at + 6] = value.to_bytes(2, "little")
    part.write_bytes(data)
    assert said in refused(copied[0])


def test_a_tensor_in_two_parts(copied: list[Path]) -> None:
    """The third part comes to hold a tensor of the second under the name it has there."""
    names = [sorted(read_gguf(part).tensors) for part in copied[1:3]]
    mine, theirs = next((a, b) for b in names[0] for a in names[1] if len(a) == len(b))
    copied[2].write_bytes(copied[2].read_bytes().replace(mine.encode(), theirs.encode()))
    assert "its parts hold 28 tensors of 29" in refused(copied[0])
