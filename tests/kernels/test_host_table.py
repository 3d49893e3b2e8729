"""Tables in host memory, whose rows the kernel of a lookup reads: results equal those of tables on the device, to the
bit. On a GPU, and through the interpreter elsewhere, where all memory is the host's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graftune.errors import GraftuneError
from graftune.kernels import launch
from graftune.model.families import from_config
from graftune.model.frozen.host_table import HostTable
from graftune.runtime import resolve
from graftune.session.opening import check_method
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.weights.base import Base, with_new_tokens
from graftune.weights.placement import choose_placement
from tests.kernels.harness import batch, stepped
from tests.support import quantised, tiny

LORA = LoraConfig(rank=4, alpha=8.0)
WIDE = {"hidden_size": 64, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": tiny.VOCAB}


def base_of(table: str, **more: bool) -> Base:
    return quantised.gguf_base("F32", quantised.spec(64, layers=1, **more), table)


@pytest.mark.parametrize("table", ["F32", "BF16", "F16", "Q8_0", "Q4_1", "MXFP4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows(table: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(table)
    wanted = quantised.placed(base, LORA, "keep", compute=dtype)
    monkeypatch.setattr(launch, "fused", lambda x: x.numel() > 0)
    ours = quantised.placed(base, LORA, "keep", device, dtype, embedding_on_host=True)
    held = ours.decoder.embedding
    assert isinstance(held, HostTable) and held.members[0].blocks.device.type == "cpu"
    assert held.nbytes == base.tensors["embed_tokens.weight"].nbytes
    for ids in ([3], [0, 271, 5, 5, 17], []):
        got = held.rows(torch.tensor(ids, dtype=torch.int64, device=device))
        assert got.device.type == device and got.dtype == dtype
        assert torch.equal(got.cpu(), wanted.decoder.embedding.rows(torch.tensor(ids, dtype=torch.int64)))


def per_layer() -> Base:
    """Gemma 4 with per-layer embeddings; its embedding is also the head."""
    return quantised.gguf_base("F32", from_config(tiny.config("gemma4") | WIDE, "a test"))


@pytest.mark.parametrize(
    ("base", "base_dtype"), [(base_of("BF16"), "keep"), (base_of("Q8_0"), "fp32"), (per_layer(), "keep")]
)
def test_a_step_is_the_same(base: Base, base_dtype: str) -> None:
    resident, hosted = (quantised.placed(base, LORA, base_dtype, embedding_on_host=on) for on in (False, True))
    hidden = hosted.decoder.layer_inputs
    tables = [hosted.decoder.embedding if hidden is None else hidden.table]  # type: ignore[attr-defined]
    assert all(isinstance(table, HostTable) for table in tables)
    assert isinstance(hosted.decoder.embedding, HostTable) == (not base.spec.tied), "a tied table is multiplied"
    (want,), (got,) = (stepped(ours, "cpu", "cpu", batch(), 0.0) for ours in (resident, hosted))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_with_rows_of_new_tokens() -> None:
    base = dataclasses.replace(base_of("F32"), tokenizer=tiny.make_tokenizer())
    lora = dataclasses.replace(LORA, new_tokens=("<new>",))
    base = with_new_tokens(base, lora.new_tokens)
    resident, hosted = (quantised.placed(base, lora, "fp32", embedding_on_host=on) for on in (False, True))
    assert torch.equal(hosted.arena.weights, resident.arena.weights)


def test_what_is_refused() -> None:
    tied = base_of("F32", tied=True)
    with pytest.raises(GraftuneError, match="the embedding is also the head"):
        choose_placement(tied, "keep", resolve("cpu", "fp32"), embedding_on="host")
    assert not choose_placement(base_of("F32"), "keep", resolve("cpu", "fp32"), embedding_on="host").embedding_on_host
    with pytest.raises(GraftuneError, match="embedding_on is host and method is full, which freezes no weight"):
        check_method(Config.of({"embedding_on": "host", "method": "full"}))
