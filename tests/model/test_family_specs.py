"""The plain configurations of the GPU's tests give the same specs as those that transformers writes."""

from __future__ import annotations

import pytest
import torch

from graftune.errors import GraftuneError
from graftune.model.families import from_config
from graftune.settings.sections import LoraConfig
from graftune.weights.base import open_base
from tests.gpu.test_step import examples
from tests.support import families, quantised, tiny


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
    ],
)
def test_variants_that_are_not_computed_are_refused(variant, values, what):
    with pytest.raises(GraftuneError, match=what):
        from_config(tiny.config(variant) | values, variant)


def test_first_gemmas_gelu_is_the_tanh_form():
    config = tiny.config("gemma")
    assert from_config(config | {"hidden_act": "gelu"}, "") == from_config(config, "")
