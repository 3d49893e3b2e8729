"""Logits and gradients against transformers and PEFT, in fp32, on tiny random models of every family."""

from __future__ import annotations

import pytest
import torch

from graftune.batch import Example
from graftune.errors import GraftuneError
from graftune.settings.sections import LoraConfig
from tests.support import oracle, tiny
from tests.support.thorough import THOROUGH

KEPT = ("llama", "gemma2", "phi3", "lfm2", "qwen3_5", "gemma3-vision")  # one of each layout


def documents(*lengths: int) -> list[list[int]]:
    return [torch.randint(3, tiny.VOCAB, (n,)).tolist() for n in lengths]


def examples(*lengths: int) -> list[Example]:
    return [
        Example(d, [i >= len(d) // 3 and (i * 7 + len(d)) % 5 != 0 for i in range(len(d))]) for d in documents(*lengths)
    ]


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_logits_equal_transformers(variant, tiny_folder):
    docs = documents(90, 1, 11)
    ours = oracle.ours(tiny_folder(variant), random_b=False)
    got = ours.logits(docs)
    model = tiny.hf_model(variant)
    with torch.no_grad():
        want = torch.cat([model(torch.tensor([d])).logits[0] for d in docs])
    assert want.std() > 0.3, "a model whose logits are all alike proves nothing"
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_every_lora_gradient_equals_pefts(variant, tiny_folder):
    """Over weights in memory, and for some families over weights that stay in the file."""
    base_dtypes = ("fp32", "keep") if THOROUGH or variant in KEPT else ("fp32",)
    check_gradients(variant, LoraConfig(rank=4, alpha=10.0), base_dtypes, tiny_folder)


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=3, alpha=1.0, targets=("qv",)),
        LoraConfig(rank=8, alpha=5.0, targets=("mlp",), rslora=True),
        LoraConfig(rank=4, alpha=10.0, targets=("k_proj", "down_proj")),
        LoraConfig(rank=4, alpha=10.0, train_norms=True),
    ],
    ids=["qv", "mlp-rslora", "k-down", "norms"],
)
def test_gradients_with_other_targets(lora, tiny_folder):
    check_gradients("qwen2", lora, ("fp32",), tiny_folder)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "variant", ["qwen3", "gemma3", "gemma2", "phi3", "olmo2", "lfm2", "qwen3_5", "hunyuan_v1_dense", "glm4"]
)
def test_gradients_of_norms(variant, tiny_folder):
    check_gradients(variant, LoraConfig(rank=4, alpha=10.0, train_norms=True), ("fp32",), tiny_folder)


@pytest.mark.parametrize("targets", [("qkv_proj",), ("qkv_proj", "down_proj"), ("mlp",)])
def test_gradients_of_fused_projections(targets, tiny_folder):
    check_gradients("phi3", LoraConfig(rank=4, alpha=10.0, targets=targets), ("fp32",), tiny_folder)


def test_gradients_of_projections_by_their_path(tiny_folder):
    """LFM2's convolutions have an out_proj too, without adapters here."""
    targets = ("self_attn.out_proj", "conv.in_proj", "w1")
    check_gradients("lfm2", LoraConfig(rank=4, alpha=10.0, targets=targets), ("fp32",), tiny_folder)


def test_targets_that_a_family_does_not_have_are_refused(tiny_folder):
    with pytest.raises(GraftuneError, match=r"phi3 has no v_proj, it is a part of qkv_proj.*use qkv_proj"):
        oracle.ours(tiny_folder("phi3"), LoraConfig(targets=("v_proj",)))
    with pytest.raises(GraftuneError, match="llama has no qkv_proj"):
        oracle.ours(tiny_folder("llama"), LoraConfig(targets=("qkv_proj",)))


def check_gradients(variant, lora, base_dtypes, tiny_folder):
    batch, sides, folder = examples(20, 33, 5), [], tiny_folder(variant)
    for base_dtype in base_dtypes:
        torch.manual_seed(1)  # the same adapters each time
        sides.append(oracle.ours(folder, lora, base_dtype=base_dtype))
    model = oracle.peft_model(tiny.hf_model(variant), sides[0]).train()
    total = oracle.loss_sum(model, batch)
    total.backward()
    theirs = oracle.plain_names((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    for ours in sides:
        loss, got = ours.gradients(batch)
        assert loss == pytest.approx(float(total.detach()), rel=1e-5)
        compare(oracle.as_stored(got, ours.base.spec), theirs, lora)


def compare(got, theirs, lora):
    checked = 0
    for name, grad in got.items():
        if oracle.peft_name(name) not in theirs and name in ("norm.weight", "embedding_norm.weight"):
            continue  # modules_to_save of the oracle leaves the final norm out
        want = theirs[oracle.peft_name(name)]
        assert want.norm() > 1e-4, name
        assert (grad - want).norm() / want.norm() < 1e-5, name
        checked += 1
    assert checked >= 2 * 3 * len(lora.targets)
