"""The readers of GGUF and safetensors on small files that are cut at every byte or damaged at random, and on large
files whose headers claim to be large. They return tensors that lie in the file, or raise GraftuneError, after few calls
and in little memory."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from graftune.cli import main
from graftune.errors import GraftuneError
from graftune.observe.memory import peak_resident_bytes
from graftune.weights import safetensors_io
from graftune.weights.gguf_io import read_gguf
from tests.bad_input.test_base import header, tensor, text
from tests.support.counting import Calls

CALLS, BYTES = 100_000, 200 << 20


def array(kind: int, count: int, content: bytes) -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + content


KEYS = [
    (b"general.architecture", struct.pack("<I", 8) + text(b"llama")),
    (b"general.alignment", struct.pack("<II", 4, 32)),
    (b"words", array(8, 3, text(b"a") + text(b"") + text("\u00e9".encode()))),
    (b"numbers", array(5, 4, struct.pack("<4i", 1, -2, 3, 4))),
    (b"nested", array(9, 1, struct.pack("<IQ", 7, 2) + b"\1\0")),
    (b"float", struct.pack("<If", 6, 1.5)),
]
TENSORS = [(b"a", (4, 3), 0, 0), (b"b", (32, 2), 2, 64), (b"c", (2, 2, 2), 1, 128)]


def small_gguf() -> bytes:
    described = b"".join(text(key) + value for key, value in KEYS) + b"".join(tensor(*t) for t in TENSORS)
    head = header(tensors=len(TENSORS), keys=len(KEYS)) + described
    return head + bytes(-len(head) % 32) + bytes(range(144))


def small_safetensors() -> bytes:
    return bytes(save({"a": torch.randn(3, 4), "b": torch.randn(2, 2).bfloat16(), "c": torch.ones(5)}))


def open_gguf(path: Path) -> dict[str, Any]:
    return dict(read_gguf(path).tensors)


def open_safetensors(path: Path) -> dict[str, Any]:
    return dict(safetensors_io.open_folder(path.parent))


READERS: dict[str, tuple[Callable[[], bytes], str, Callable[[Path], dict[str, Any]]]] = {
    "gguf": (small_gguf, "m.gguf", open_gguf),
    "safetensors": (small_safetensors, "model.safetensors", open_safetensors),
}


def answer(reader: str, data: bytes, folder: Path) -> dict[str, torch.Tensor] | None:
    """What is read out of those bytes, or None where they are refused, with a sentence that names the file."""
    _, name, open_it = READERS[reader]
    path = folder / name
    path.unlink(missing_ok=True)  # the old one may still be mapped
    path.write_bytes(data)
    before = peak_resident_bytes()
    try:
        with Calls(most=CALLS):
            found = {key: source.values() for key, source in open_it(path).items()}
    except GraftuneError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        found = None
    assert peak_resident_bytes() - before < BYTES
    for value in (found or {}).values():
        assert value.numel() <= 8 * len(data) + 1, "no value comes from outside the file"
    return found


@pytest.mark.parametrize("reader", READERS)
def test_cut_at_every_byte(reader: str, tmp_path: Path) -> None:
    whole = READERS[reader][0]()
    good = answer(reader, whole, tmp_path)
    assert good is not None and len(good) == 3
    for keep in range(len(whole)):
        assert answer(reader, whole[:keep], tmp_path) is None, keep


def test_overlapping_safetensors(tmp_path: Path) -> None:
    places = {"a": [0, 16], "b": [8, 24]}
    entries = {n: {"dtype": "F32", "shape": [2, 2], "data_offsets": place} for n, place in places.items()}
    told = json.dumps(entries).encode()
    assert answer("safetensors", len(told).to_bytes(8, "little") + told + bytes(24), tmp_path) is None


LARGE: dict[str, bytes] = {
    "bytes": header(keys=1) + text(b"k") + array(0, 2**31, b""),
    "numbers": header(keys=1) + text(b"k") + array(10, 2**28, b""),
    "words": header(keys=1) + text(b"k") + array(8, 2**28, b""),
    "a word": header(keys=1) + text(b"k") + struct.pack("<IQ", 8, 2**31),
    "a name": header(keys=1) + struct.pack("<Q", 2**31),
    "keys": header(keys=2**27),
    "tensors": header(tensors=2**26),
}


@pytest.mark.parametrize("lie", LARGE)
def test_a_large_file_does_not_make_a_large_header(lie: str, tmp_path: Path) -> None:
    """Sparse: three gigabytes that take no disk. Everything claimed would fit into the file."""
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(LARGE[lie])
        file.truncate(3 << 30)
    before = peak_resident_bytes()
    with Calls(most=CALLS), pytest.raises(GraftuneError, match="more than any model has"):
        read_gguf(path)
    assert peak_resident_bytes() - before < 50 << 20


# An index and what it names


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Path]:
    for number in (1, 2):
        (tmp_path / f"s{number}.safetensors").write_bytes(save({f"t{number}": torch.ones(2, 2), "both": torch.ones(1)}))
    yield tmp_path


INDEXES: dict[str, tuple[Any, str]] = {
    "missing shard": ({"t1": "s1.safetensors", "t3": "s3.safetensors"}, "s3.safetensors: this shard is missing"),
    "missing tensor": ({"t1": "s2.safetensors"}, "names t1 in s2.safetensors, which does not hold it"),
    "another folder": ({"t1": "../s1.safetensors"}, "is not a shard index"),
    "an absolute path": ({"t1": "/etc/passwd"}, "is not a shard index"),
    "the folder itself": ({"t1": "."}, "is not a shard index"),
    "no name": ({"t1": ""}, "is not a shard index"),
    "a list": (["s1.safetensors"], "is not a shard index"),
    "a number": ({"t1": 5}, "is not a shard index"),
    "no JSON": ("{", "is not valid JSON"),
    "nested": ("[" * 100_000, "nested too deeply"),
    "no object": ("[]", "is not valid JSON"),
    "no map": ("{}", "is not a shard index"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_indexes(case: str, shards: Path) -> None:
    where, said = INDEXES[case]
    told = where if isinstance(where, str) else json.dumps({"weight_map": where})
    (shards / "model.safetensors.index.json").write_text(told)
    with pytest.raises(GraftuneError) as caught:
        safetensors_io.open_folder(shards)
    assert said in str(caught.value) and str(shards) in str(caught.value)


def test_the_index_says_which_of_two_is_meant(shards: Path) -> None:
    (shards / "s2.safetensors").write_bytes(save({"t2": torch.ones(2, 2), "both": torch.full((1,), 7.0)}))
    where = {"t1": "s1.safetensors", "t2": "s2.safetensors", "both": "s1.safetensors"}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    found = safetensors_io.open_folder(shards)
    assert set(found) == set(where) and found["both"].values().item() == 1.0


# Things that do not belong together


def test_an_adapter_for_other_weights_of_equal_shapes(tiny_folder: Any, tmp_path: Path, capsys: Any) -> None:
    import graftune

    own, other = tiny_folder("llama"), tmp_path / "other"
    shutil.copytree(own, other)
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, file, {"format": "pt"})
    adapter = graftune.open(str(own), device="cpu", rank=4).save(tmp_path / "adapter")
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "response": "b"}\n' * 4)
    on_the_other = ["--base", str(other), "--quiet"]
    lines = (
        ["chat", str(adapter), "--prompt", "hi", "--device", "cpu"],
        ["eval", str(adapter), str(data), "--device", "cpu"],
        ["train", "--data", str(data), "--adapter", str(adapter), "--device", "cpu", "--out", str(tmp_path / "run")],
        *(["export", str(adapter), "--to", to, "--out", str(tmp_path / "out")] for to in ("peft", "merged", "gguf")),
    )
    before = sorted(tmp_path.rglob("*"))
    for line in lines:
        assert main([*line, *on_the_other]) == 2
        said = capsys.readouterr()
        ours = [one for one in said.err.splitlines() if one.startswith("graftune: ")]
        assert len(ours) == 1 and "trained on another base" in ours[0] and "any_base" in ours[0] and said.out == ""
    assert sorted(tmp_path.rglob("*")) == before
    assert main([*lines[1], *on_the_other, "--any-base", "--json"]) == 0
    assert main([*lines[4], *on_the_other, "--any-base"]) == 0 and (tmp_path / "out").is_dir()
