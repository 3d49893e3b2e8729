"""APR files: against a writer of the test's own, byte for byte, through every flipped byte and every cut, and as an
adapter that computes what it did before."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import graftune
from graftune.errors import GraftuneError
from graftune.observe.memory import peak_resident_bytes
from graftune.weights import apr
from graftune.weights.adapter import load_adapter
from graftune.weights.apr import AprFile, load_apr, save_apr
from tests.exporting.judges import opened, shaken
from tests.support.counting import Calls
from tests.weights.test_adapter import DOCUMENT, NEW, logits

CODES = {torch.float32: 0, torch.float16: 1, torch.float64: 3, torch.int32: 4, torch.int64: 5, torch.int8: 6,
         torch.uint8: 7, torch.bfloat16: 30}  # fmt: skip


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


def by_hand(
    metadata: dict[str, Any] | bytes,
    tensors: list[tuple[bytes, int, tuple[int, ...], bytes]],
    *,
    flags: int = 1024,
    version: tuple[int, int] = (2, 0),
    **lies: int,
) -> bytes:
    """Written from the format's description alone. `lies` replace fields; both checksums are right all the same."""
    text = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    index, data = b"", b""
    for name, code, shape, content in tensors:
        index += struct.pack("<H", len(name)) + name + bytes([code, len(shape)])
        index += b"".join(struct.pack("<Q", n) for n in shape)
        offset = lies.get("offset", len(data))
        index += struct.pack("<QQ", offset, lies.get("size", len(content)))
        data += padded(content)
    body = padded(text) + padded(index) + data
    index_at = lies.get("index_at", 64 + len(padded(text)))
    data_at = lies.get("data_at", 64 + len(padded(text)) + len(padded(index)))
    head = b"APR\0" + bytes(version) + struct.pack("<HI", flags, lies.get("count", len(tensors)))
    head += struct.pack("<QIQQ", lies.get("metadata_at", 64), lies.get("metadata_size", len(text)), index_at, data_at)
    assert len(head) == 40
    reserved = bytes([lies.get("reserved", 0)]) + bytes(19)
    file = head + struct.pack("<I", zlib.crc32(head + reserved)) + reserved + body
    return file + struct.pack("<I", zlib.crc32(file))


def raw(values: torch.Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("apr") / "small.apr"
    tensors = {"lora.0.q_proj.lora_a": torch.randn(2, 5), "lora.0.q_proj.lora_b": torch.randn(3, 2)}
    metadata = {"model_type": "adapter", "lora_rank": 2, "lora_alpha": 4.0, "name": "f\u00fcr dich"}
    apr.write(path, AprFile(metadata, tensors))
    return path


def test_the_bytes_are_those_of_the_description(tmp_path: Path) -> None:
    """Every dtype, an empty and a scalar tensor, names that sort by bytes."""
    tensors = {f"t.{i}": torch.randn(3, 7).mul(50).to(dtype) for i, dtype in enumerate(CODES)}
    tensors |= {"Z": torch.zeros(0, 4), "scalar": torch.tensor(3.5), "\u00e9": torch.ones(1)}
    metadata = {"model_type": "x", "text": "\u2603", "list": [1, None, {"a": True}]}
    apr.write(tmp_path / "a.apr", AprFile(metadata, tensors))
    entries = sorted((n.encode(), CODES[t.dtype], tuple(t.shape), raw(t)) for n, t in tensors.items())
    text = json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode()
    assert (tmp_path / "a.apr").read_bytes() == by_hand(text, entries)
    again = apr.read(tmp_path / "a.apr")
    assert again.metadata == metadata and next(iter(again.tensors)) == "Z"
    for name, value in tensors.items():
        assert again.tensors[name].dtype == value.dtype
        assert torch.equal(again.tensors[name], value)
    apr.write(tmp_path / "b.apr", again)
    assert (tmp_path / "b.apr").read_bytes() == (tmp_path / "a.apr").read_bytes()


def refused(path: Path, data: bytes) -> str:
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    with pytest.raises(GraftuneError) as caught:
        apr.read(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_every_flipped_byte_and_every_cut_is_noticed(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    assert len(whole) < 700
    for at in range(len(whole)):
        refused(tmp_path / "x.apr", whole[:at])
        for flip in (1, 128, 255):
            refused(tmp_path / "x.apr", whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])


ENTRY = (b"a", 0, (2, 2), bytes(16))
LIES: dict[str, tuple[bytes, str]] = {
    "magic": (b"APX\0" + bytes(200), "is not an APR file"),
    "version 2.1": (by_hand({}, [], version=(2, 1)), "APR version 2.1"),
    "column-major": (by_hand({}, [], flags=1024 | 2048), "uses column-major tensors"),
    "compressed": (by_hand({}, [], flags=1024 | 2), "uses Zstandard"),
    "metadata beyond the limit": (by_hand({}, [], metadata_size=2**32 - 1), "its metadata is"),
    "metadata beyond the file": (by_hand({}, [], metadata_at=2**63), ""),
    "index beyond the file": (by_hand({}, [ENTRY], index_at=2**63), ""),
    "data beyond the file": (by_hand({}, [ENTRY], data_at=2**63), "cannot be"),
    "tensor count": (by_hand({}, [ENTRY], count=2**32 - 1), ""),
    "offset": (by_hand({}, [ENTRY], offset=2**63), "cannot be"),
    "size": (by_hand({}, [ENTRY], size=2**62), "cannot be"),
    "huge shape": (by_hand({}, [(b"a", 0, (2**63, 2**63), bytes(16))]), "cannot be"),
    "type": (by_hand({}, [(b"a", 9, (2, 2), bytes(16))]), "of type 9 cannot be"),
    "dimensions": (by_hand({}, [(b"a", 0, (1,) * 9, bytes(4))]), "not in order"),
    "long name": (by_hand({}, [(b"a" * 257, 0, (1,), bytes(4))]), "not in order"),
    "unsorted": (by_hand({}, [(b"b", 0, (1,), bytes(4)), (b"a", 0, (1,), bytes(4))]), "not in order"),
    "twice": (by_hand({}, [ENTRY, ENTRY]), "not in order"),
    "name that is no text": (by_hand({}, [(b"\xff", 0, (1,), bytes(4))]), "utf-8"),
    "no JSON": (by_hand(b"{", []), ""),
    "no object": (by_hand(b"[1]", []), "not a JSON object"),
    "deep": (by_hand(b'{"a":' * 100_000, []), ""),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_under_right_checksums(lie: str, tmp_path: Path) -> None:
    data, said = LIES[lie]
    before = peak_resident_bytes()
    with Calls(most=20_000):
        assert said in refused(tmp_path / "x.apr", data)
    assert peak_resident_bytes() - before < 64 << 20


# As an adapter


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("llama", {}),
        ("mistral", {"rslora": True, "targets": ["attention"]}),
        ("qwen3", {"train_norms": True, "targets": ["mlp"]}),
        ("llama-untied", {"new_tokens": NEW}),
        ("lfm2", {"train_norms": True}),
        ("lfm2", {"targets": ["out_proj", "w2"]}),
        ("qwen3_5", {"targets": ["out_proj", "in_proj_z", "o_proj"]}),
    ],
)
def test_an_adapter_there_and_back(variant: str, settings: dict[str, Any], tiny_folder: Any, tmp_path: Path) -> None:
    base = tiny_folder(variant)
    run = shaken(opened(base, rank=3, alpha=7.0, dropout=0.25, **settings))
    adapter, spec = load_adapter(run.save(tmp_path / "adapter")), run.base.spec
    facts = {"epoch": 2, "val_loss": 1.25, "data_hash": "abc", "started_at": "2026-01-02T03:04:05Z"}
    path = tmp_path / "x.apr"
    save_apr(path, adapter, spec, facts)
    again = load_apr(path)
    assert dataclasses.replace(again, folder=adapter.folder, tensors={}) == dataclasses.replace(adapter, tensors={})
    save_apr(tmp_path / "y.apr", again, spec, facts)
    assert (tmp_path / "y.apr").read_bytes() == path.read_bytes()
    for given in ({"base": base, "adapter": path}, {"base": path}):
        assert torch.equal(logits(opened(**given), DOCUMENT), logits(run, DOCUMENT))
    stored = apr.read(path)
    metadata, scale = stored.metadata, run.parts.lora.alpha / (3**0.5 if settings.get("rslora") else 3)
    assert metadata["lora_alpha"] / metadata["lora_rank"] == pytest.approx(scale)
    assert metadata["__checkpoint__.schema_version"] == "1.3.0" and metadata["model_type"] == "adapter"
    assert metadata["epoch"] == 2 and metadata["val_loss"] == 1.25 and metadata["hidden_size"] == 48
    assert metadata["provenance"] == {"tool": "graftune", "started_at": facts["started_at"]}
    name = next(iter(n for n in stored.tensors if n.endswith("lora_a")))
    assert stored.tensors[name].dtype == torch.float32 and stored.tensors[name].shape[0] == 3


def changed(path: Path, source: Path, tensors: dict[str, torch.Tensor | None] | None = None, **metadata: Any) -> Path:
    file = apr.read(source)
    new = {n: t for n, t in (dict(file.tensors) | (tensors or {})).items() if t is not None}
    values = {k: v for k, v in (file.metadata | metadata).items() if v is not None}
    apr.write(path, AprFile(values, new))
    return path


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"lora_rank": None}, "its lora_rank is None"),
        ({"lora_alpha": None}, "its lora_alpha is None"),
        ({"lora_alpha": "16"}, "its lora_alpha is '16'"),
        ({"model_type": "llama"}, "holds 'llama', not an adapter"),
        ({"__checkpoint__.schema_version": "2.0.0"}, "newer schema"),
        ({"graftune": {"new_tokens": 5}}, "make no sense"),
        ({"graftune": {"rslora_alpha": "x"}}, "make no sense"),
    ],
)
def test_settings_that_cannot_be_guessed(metadata: dict[str, Any], said: str, small: Path, tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match=said):
        load_apr(changed(tmp_path / "x.apr", small, **metadata))
    assert load_apr(small).lora.targets == ("q_proj",)


def test_tensors_that_have_no_place(small: Path, tiny_folder: Any, tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match=r"the adapter uses lora\.0\.x_proj\.lora_a"):
        load_apr(changed(tmp_path / "x.apr", small, {"lora.0.x_proj.lora_a": torch.zeros(2, 5)}))
    shared = {"lora.0.out_proj.lora_a": torch.zeros(2, 5)}  # of attention, or of a convolution
    with pytest.raises(GraftuneError, match=r"the adapter uses lora\.0\.out_proj\.lora_a"):
        load_apr(changed(tmp_path / "x.apr", small, shared, graftune={"base": ""}))
    with pytest.raises(GraftuneError, match="make no sense"):
        load_apr(changed(tmp_path / "x.apr", small, dict.fromkeys(("lora.0.q_proj.lora_a", "lora.0.q_proj.lora_b"))))
    with pytest.raises(GraftuneError, match="made for another base"):
        graftune.open(str(tiny_folder("llama")), adapter=str(small), device="cpu")
