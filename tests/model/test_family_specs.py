"""The plain configurations of the GPU's tests give the same specs as those that transformers writes."""

from __future__ import annotations

import pytest
import torch

from graftune.model.families import from_config
from graftune.settings.config import LoraConfig
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
