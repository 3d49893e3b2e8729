"""Frozen weights that are fetched into buffers for the time of their block: what is computed is what resident weights
compute, to the bit, and the next block is under way while one computes. Here on a CPU, which would not need it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graftune.kernels import launch
from graftune.model.bundles import EMBEDDING, HEAD, Bundles, HostMemory
from graftune.model.decoder import PackedDocuments
from graftune.model.frozen import Fetched, Unpacked
from graftune.settings.sections import LoraConfig
from graftune.weights.base import Base, open_base, with_new_tokens
from tests.dist.sharded import results
from tests.support import moe, oracle, quantised
from tests.support.pairwise import pairwise

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8.0)


def pair(base: Base, lora: LoraConfig, base_dtype: str) -> tuple[oracle.Ours, oracle.Ours]:
    """Resident, and fetched from host memory into buffers that hold NaN at first."""
    resident, fetched = (
        quantised.placed(base, lora, base_dtype, storage=storage) for storage in (None, HostMemory(CPU))
    )
    for buffer in bundles_of(fetched).buffers.values():
        buffer.flat.fill_(0xFF)
    return resident, fetched


def bundles_of(ours: oracle.Ours) -> Bundles:
    assert isinstance(ours.decoder.bundles, Bundles)
    return ours.decoder.bundles


def check(base: Base, lora: LoraConfig, base_dtype: str) -> oracle.Ours:
    resident, fetched = pair(base, lora, base_dtype)
    want, got = results(resident, base_dtype), results(fetched, base_dtype)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    assert want["gradients full"].abs().amax() > 0
    return fetched


@pytest.mark.few(6)
@pairwise(
    ("variant", ["llama-untied", "llama", "lfm2", "gemma2", "qwen3_5"]),
    ("base_dtype", ["fp32", "bf16", "nf4"]),
    ("augmented", [False, True]),
)
def test_families(variant, base_dtype, augmented, tiny_folder, monkeypatch):
    """`augmented`: as on a GPU, with adapters beside the weights and a scratch for what is packed."""
    if augmented:
        monkeypatch.setattr(launch, "augments", lambda device: True)
    lora = dataclasses.replace(LORA, train_norms=True)
    fetched = check(open_base(str(tiny_folder(variant))), lora, base_dtype)
    weight = fetched.decoder.blocks[0].projections[0].frozen
    if augmented:
        assert isinstance(weight, Fetched if base_dtype == "fp32" else Unpacked)
    tied = fetched.decoder.spec.tied
    assert (EMBEDDING in bundles_of(fetched).bundles) is (HEAD in bundles_of(fetched).bundles) is (not tied)


@pytest.mark.few(1)
@pytest.mark.parametrize("augmented", [False, True], ids=["apart", "augmented"])
def test_gguf_blocks(augmented, monkeypatch):
    if augmented:
        monkeypatch.setattr(launch, "augments", lambda device: True)
    check(quantised.gguf_base("Q4_K", quantised.spec(256, layers=4), "Q6_K", "F16"), LORA, "keep")


@pytest.mark.few(1)
@pytest.mark.parametrize(("base_dtype", "augmented"), [("fp32", True), ("nf4", False)])
def test_experts(base_dtype, augmented, tmp_path_factory, monkeypatch):
    if augmented:
        monkeypatch.setattr(launch, "augments", lambda device: True)
    check(open_base(str(moe.make_folder("qwen3_moe", tmp_path_factory.mktemp("moe")))), LORA, base_dtype)


def test_rows_of_added_tokens(tiny_folder):
    lora = dataclasses.replace(LORA, new_tokens=("<one>", "<two>"))
    check(with_new_tokens(open_base(str(tiny_folder("llama-untied"))), lora.new_tokens), lora, "fp32")


def test_a_table_travels_in_pieces_between_the_blocks(tiny_folder, monkeypatch):
    monkeypatch.setattr("graftune.model.bundles.LARGEST_PIECE", 1 << 12)
    monkeypatch.setattr("graftune.model.bundles.SMALLEST_PIECE", 1 << 8)
    fetched = check(open_base(str(tiny_folder("llama-untied"))), LORA, "fp32")
    bundles = bundles_of(fetched)
    assert len(bundles.bundles[HEAD].kept) > 4 and bundles.at_once > 1
    run = fetched.decoder.begin(torch.arange(3), PackedDocuments.of((3,)))
    fetched.decoder.forward(torch.tensor([1, 2, 3]), run)
    assert bundles.buffers[HEAD].holds == HEAD and not bundles.pending


@pytest.mark.parametrize("count", [1, 65535, 65536, 3 << 20, (200 << 20) + 12345])
def test_pieces_of_pinned_memory_have_sizes_that_torch_does_not_round_up(count):
    sizes = HostMemory(CPU).sizes(count)
    assert sum(sizes) == count
    assert all(size & (size - 1) == 0 for size in sizes[:-1]) and len(sizes) <= count // (64 << 20) + 12
