"""Special tokens that a tokenizer has and the model's table has not, as in Gemma 3's small models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graftune.api import export
from graftune.errors import GraftuneError
from graftune.weights.base import described, open_base
from tests.exporting import models
from tests.exporting.judges import DOCUMENT, gap, opened, ours
from tests.support import tiny

IMAGE = "<image_soft_token>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = models.make_folder("gemma3", tmp_path / "base")
    tokenizer = open_base(str(made)).tokenizer
    tokenizer.with_tokens([IMAGE]).save(made)
    assert open_base(str(made)).spec.vocab == tiny.VOCAB
    return made


def test_it_loads_and_refuses_what_it_cannot_read(folder: Path) -> None:
    run = opened(folder)
    assert run.tokenizer.rows == tiny.VOCAB and run.tokenizer.encode("the cat")
    with pytest.raises(GraftuneError, match=f"holds {IMAGE}, a special token that the model has no row for"):
        run.tokenizer.encode(f"the {IMAGE} cat")
    with pytest.raises(GraftuneError, match="no row for"):
        run.tokenizer.encode_with_offsets(IMAGE)
    assert run.tokenizer.encode(IMAGE, special=False), "as text it can be read"
    with pytest.raises(GraftuneError, match=f"has no row for, such as {IMAGE}"):
        opened(folder, new_tokens=("<z>",))


def test_its_description_reads_as_it_does(folder: Path) -> None:
    assert described(str(folder)).tokenizer.rows == tiny.VOCAB
    with pytest.raises(GraftuneError, match="raise vocab_size"):  # what is to be trained from scratch needs each row
        open_base(str(folder), weights=False)


@pytest.mark.parametrize("to", ["merged", "gguf"])
def test_it_goes_out_and_comes_back(to: str, folder: Path, tmp_path: Path) -> None:
    want = ours(opened(folder))
    kind = {"kind": "F32"} if to == "gguf" else {}
    out = export(str(folder), to, out=str(tmp_path / ("x.gguf" if to == "gguf" else "x")), **kind).path
    assert gap(ours(opened(out)), want) < 1e-4 and len(want) == len(DOCUMENT)


def test_an_ordinary_token_beyond_is_another_model(folder: Path) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    for token in values["added_tokens"]:
        token["special"] = token["special"] and token["content"] != IMAGE
    path.write_text(json.dumps(values))
    with pytest.raises(GraftuneError, match="belong to different models"):
        open_base(str(folder))
