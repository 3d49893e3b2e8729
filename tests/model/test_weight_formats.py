"""The table of weight formats: a toy format is one entry, chosen per tensor, for experts and projections alike."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

import pytest
import torch

from graftune.kernels import launch
from graftune.model.frozen import Dense, RowSource, Unpacked
from graftune.model.frozen.formats import FORMATS, stored_format
from graftune.model.frozen.interface import CheckpointWeight, RowsByReading, TensorRows
from graftune.model.frozen.weight_format import WeightFormat
from graftune.runtime import resolve
from graftune.settings.sections import BaseConfig, LoraConfig
from graftune.weights.base import Base, open_base
from graftune.weights.placement import choose_placement, held_bytes
from tests.support import moe, quantised

LORA = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))


@dataclasses.dataclass(frozen=True)
class ToyRows(RowsByReading):
    """Whole numbers of eight bits, eight of which make one."""

    codes: torch.Tensor
    dtype_name: str = "toy"

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    def unpack(self, out: torch.Tensor, start: int = 0, used: torch.Tensor | None = None) -> None:
        out.copy_(self.read(start, start + len(out)))

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.gather(ids).to(dtype)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.codes[start:stop].float() / 8

    def moved(self, place: typing.Any) -> ToyRows:
        return ToyRows(place(self.codes))

    def numbers(self) -> Iterator[torch.Tensor]:
        yield torch.ones(1)


class ToyTensor(CheckpointWeight):
    def load(self, device: torch.device) -> ToyRows:
        return ToyRows(self.parts["codes"].values().to(device, torch.int8))

    def empty(self, device: torch.device) -> ToyRows:
        return ToyRows(torch.empty(self.shape, dtype=torch.int8, device=device))


class ToyFormat(WeightFormat):
    name = "toy"
    quantises = True
    value_bytes = 1.0

    def claims(self, source: RowSource) -> bool:
        return source.dtype_name == "toy"

    def pack(self, source: RowSource, device: torch.device) -> ToyRows:
        assert isinstance(source, ToyTensor)
        return source.load(device)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "toy", ToyFormat())


def toy_base(folder: typing.Any, where: str) -> Base:
    """A base whose tensors with `where` in their names are stored in the toy format."""
    base = open_base(str(folder))
    tensors = dict(base.tensors)
    for name, source in tensors.items():
        if where in name:
            codes = (source.values().float() * 80).round().clamp(-127, 127)
            tensors[name] = ToyTensor(name, {"codes": TensorRows(codes)}, tuple(source.shape), "toy")
    return dataclasses.replace(base, tensors=tensors)


def test_every_name_a_user_may_ask_for_is_in_the_table() -> None:
    asked = set(typing.get_args(typing.get_type_hints(BaseConfig)["base_dtype"])) - {"auto", "keep"}
    assert asked <= set(FORMATS) and all(FORMATS[name].name == name for name in FORMATS)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("family, where", [("llama", ".mlp."), ("qwen3_moe-small", ".experts.")])
def test_a_toy_format_beside_floats(family, where, gpu, tiny_folder, tmp_path, toy, monkeypatch) -> None:
    """Only the tensors that the file stores in it have it; logits are those of the dequantised values."""
    monkeypatch.setattr(launch, "augments", lambda device: gpu)
    base = toy_base(tiny_folder(family) if family == "llama" else moe.make_folder(family, tmp_path / "moe"), where)
    kinds = {where in name: stored_format(source) for name, source in base.tensors.items()}
    assert kinds[True] is FORMATS["toy"] and kinds[False] is FORMATS["fp32"]
    found = choose_placement(base, "auto", resolve("cpu", "fp32"))
    assert found.base_dtype == "toy" and held_bytes(base, "toy", torch.float32) > 0
    ours = quantised.placed(base, LORA, "toy")
    block = ours.decoder.blocks[0]
    if gpu:
        assert isinstance(block.mixer.qkv.frozen, Dense)
        if family == "llama":
            assert isinstance(block.feed_forward.down.frozen, Unpacked) and block.feed_forward.down.frozen.kind == "toy"
        else:
            assert block.feed_forward.down.weights.kind == "toy"
    tokens = list(range(3, 20))
    want = quantised.placed(quantised.dequantised(base), LORA, "fp32").logits([tokens], adapted=False)
    assert (ours.logits([tokens], adapted=False) - want).abs().max() < 1e-5
