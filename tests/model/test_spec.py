"""Configurations as older checkpoints and the GPU's tests write them say the same as those of today's transformers, and
what no family computes is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftune.errors import GraftuneError
from graftune.model.families import from_config, from_gguf
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.spec import ModelSpec
from graftune.settings.sections import LoraConfig
from graftune.weights.base import open_base
from tests.gpu.test_step import examples
from tests.support import families, quantised, tiny

# What the checkpoints on the Hub have in place of rope_parameters and layer_types.
OLD: dict[str, dict[str, Any]] = {
    "gemma3-linear": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    },
    "gemma3": {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "sliding_window_pattern": 6},
    "gemma2": {"rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh"},
    "phi3-long": {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "su", "short_factor": [1.0, 1.3], "long_factor": [1.1, 4.0]},
        "partial_rotary_factor": 0.5,
    },
    "olmo3-yarn": {"rope_theta": 1e4, "rope_scaling": tiny.ROPE["yarn"]},
    "smollm3": {"rope_theta": 2e6, "no_rope_layer_interval": 4},
    "granite": {"rope_theta": 10000.0, "rope_scaling": None},
    "olmo2": {"rope_theta": 10000.0, "rope_scaling": None},
}


@pytest.mark.parametrize("variant", OLD)
def test_old_configurations_say_the_same(variant: str) -> None:
    new = tiny.hf_config(variant).to_dict()
    gone = ("rope_parameters", "layer_types", "no_rope_layers", "tie_word_embeddings")
    old = {k: v for k, v in new.items() if k not in gone} | OLD[variant]
    if not new["tie_word_embeddings"]:
        old["tie_word_embeddings"] = False
    assert from_config(old, "old") == from_config(new, "new")


def test_ropes_and_windows_by_layer() -> None:
    gemma = from_config(tiny.hf_config("gemma3-linear").to_dict(), "x")
    assert [mixer.window for mixer in mixers(gemma)] == [6, 6, 6, 6, 6, 0, 6]
    local, full = gemma.ropes
    assert [mixer.rope for mixer in mixers(gemma)] == [local, local, local, local, local, full, local]
    assert float(full.build().frequencies[0]) == pytest.approx(1 / 8) and float(local.build().frequencies[0]) == 1
    smol = from_config(tiny.hf_config("smollm3").to_dict(), "x")
    assert [mixer.rope.enabled for mixer in mixers(smol)] == [True, True, True, False, True]
    assert not smol.ropes[1].build().frequencies.any()
    (phi,) = from_config(tiny.hf_config("phi3-long").to_dict(), "x").ropes
    assert phi.width == 4 and phi.build().limit == 64 and phi.scaling.factor == 4.0
    granite = tiny.hf_config("granite").to_dict()
    assert mixers(from_config(granite, "x"))[0].score_scale == 0.5
    plain = mixers(from_config(granite | {"attention_multiplier": 1.0}, "x"))
    assert plain[0].score_scale == 1.0, "granite's default is one, not a root of the head's width"


def mixers(spec: ModelSpec) -> list[AttentionSpec]:
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (
            "nemotron_h nemotron_h_omni falcon_h1 mamba2 falcon-h1 granitehybrid",
            "Mamba-2 layers, which are not supported",
        ),
        (
            "deepseek_v2 deepseek_v3 glm4_moe_lite glm_moe_dsa glm5-next mistral4 mistral_large4 deepseek2 deepseek32",
            r"attention \(MLA\), which is not supported",
        ),
        ("kimi_linear kimi-linear", "linear attention, which is not supported"),
        ("qwen4_exp cohere2 cohere2moe llama4 llama4_text", "not supported"),
        ("deepseek_v4 deepseek4", "compressed keys, which is not supported"),
        ("gemma3n gemma3n_text", "not supported yet"),
        ("qwen3_vl_moe qwen3vlmoe qwen2_moe qwen2moe granitemoe", "not supported yet"),
    ],
)
def test_architectures_that_are_refused_say_why(names: str, why: str) -> None:
    for name in names.split():
        with pytest.raises(GraftuneError, match=f"x: architecture '{name}' .*{why}"):
            from_config({"model_type": name}, "x")
        with pytest.raises(GraftuneError, match=f"x: architecture '{name}' .*{why}"):
            from_gguf({"general.architecture": name}, {}, "x")


def test_the_text_model_of_an_unknown_checkpoint_is_named_where_it_is_refused() -> None:
    with pytest.raises(GraftuneError, match="'cohere2' has layer norms with a mean"):
        from_config({"model_type": "some_vision", "text_config": {"model_type": "cohere2"}}, "x")
    with pytest.raises(GraftuneError, match="'some_vision' is not known"):
        from_config({"model_type": "some_vision", "text_config": {"model_type": "llama"}}, "x")


def test_a_text_model_under_the_name_of_its_checkpoint() -> None:
    """transformers goes by the outer model type alone."""
    text = tiny.config("qwen3_5")
    want = from_config({"model_type": "qwen3_5", "text_config": text}, "x")
    assert from_config({"model_type": "qwen3_5", "text_config": text | {"model_type": "qwen3_5"}}, "x") == want


def test_what_ministral_3_leaves_out() -> None:
    import transformers

    whole = transformers.Ministral3Config(num_hidden_layers=2).to_dict()
    said = from_config(whole, "x")
    assert from_config({k: v for k, v in whole.items() if k != "rope_parameters"}, "x") == said
    assert said.ropes[0].temperature > 0


def test_what_gemma_3_leaves_out_with_its_vision_tower() -> None:
    """The configuration of the 4B model on the Hub."""
    import transformers

    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        **rope,
    }
    whole = transformers.Gemma3Config(text_config=dict(text)).to_dict()
    assert from_config({"model_type": "gemma3", "text_config": text}, "x") == from_config(whole, "x")


def test_what_a_gemma_configuration_leaves_out():
    """As transformers has it: left out is a default, null is none."""
    import transformers

    plain = transformers.Gemma2Config(num_hidden_layers=2).to_dict()
    said = from_config(plain, "x")
    left = {k: v for k, v in plain.items() if not k.endswith("softcapping") and k != "query_pre_attn_scalar"}
    assert from_config(left, "x") == said and mixers(said)[0].score_cap == 50.0 and said.head.logit_cap == 30.0
    assert mixers(from_config(plain | {"attn_logit_softcapping": None}, "x"))[0].score_cap == 0.0


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_a_spec_by_hand_is_the_configurations(variant, tiny_folder):
    assert open_base(str(tiny_folder(variant))).spec == from_config(tiny.config(variant), variant)


@pytest.mark.parametrize("variant", families.DIFFERENT)
def test_its_model_has_a_gradient_in_every_adapter(variant):
    ours = quantised.placed(families.base_of(families.spec(variant)), LoraConfig(rank=4, alpha=8.0), "fp32")
    loss, grads = ours.gradients(examples(1, 20, 33, 5))
    assert 0 < loss < 1000 and all(bool(grad.any()) and bool(grad.isfinite().all()) for grad in grads.values())
    again = quantised.placed(families.base_of(families.spec(variant)), LoraConfig(rank=4, alpha=8.0), "fp32")
    assert torch.equal(again.decoder.embedding.rows(torch.arange(9)), ours.decoder.embedding.rows(torch.arange(9)))


def test_a_pattern_of_letters_is_a_number_of_layers():
    config = tiny.config("exaone4-window")
    assert from_config(config | {"sliding_window_pattern": "LLLG"}, "") == from_config(config, "")
    other = from_config(config | {"sliding_window_pattern": "LG"}, "")
    assert [layer.mixer.attention.window for layer in other.layers] == [6, 0, 6, 0, 6]


@pytest.mark.parametrize(
    ("variant", "values", "what"),
    [
        ("granitemoehybrid", {"layer_types": ["attention", "mamba", "attention"]}, "has Mamba-2 layers"),
        ("granitemoehybrid", {"num_local_experts": 8}, "has experts beside the shared MLP"),
        ("ernie4_5", {"use_bias": True}, "use_bias is set"),
        ("lfm3", {"layer_types": ["mamba"] * 5}, "kinds of layers"),
        ("gemma2", {"model_type": "gemma3"}, "has no text_config"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"hidden_activation": "relu"}, "activation 'relu' is not known"),
        ("gemma2", {"attention_bias": True}, "attention_bias"),
        ("gemma3", {"model_type": "gemma3", "text_config": {"model_type": "mistral4"}}, "'mistral4' has multi-head"),
    ],
)
def test_variants_that_are_not_computed_are_refused(variant, values, what):
    with pytest.raises(GraftuneError, match=what):
        from_config(tiny.config(variant) | values, variant)


def test_first_gemmas_gelu_is_the_tanh_form():
    config = tiny.config("gemma")
    assert from_config(config | {"hidden_act": "gelu"}, "") == from_config(config, "")
