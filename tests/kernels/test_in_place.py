"""What takes the place of what it was computed from is bit for bit what it is elsewhere; and what a recomputed block
does not make again. (Whole steps in test_whole_step.py and test_fp8_weight.py have their gradients in such places.)"""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import fp8, swiglu
from graftune.model import projection
from graftune.model.projection import augmented_buffer
from graftune.settings.sections import LoraConfig
from tests.kernels.harness import batch, stepped
from tests.kernels.test_swiglu_kernel import inputs
from tests.support import oracle
from tests.support.pairwise import pairwise

ALL = LoraConfig(rank=4, alpha=10.0)


def wide(x: torch.Tensor, padding: int) -> torch.Tensor:
    """x in a buffer with padding, which is full of NaN."""
    buffer = augmented_buffer(x, len(x), x.shape[1], padding).fill_(float("nan"))
    return buffer[:, : x.shape[1]].copy_(x)


@pairwise(("tokens, width", [(1, 1), (9, 30), (2, 2049)]), ("padding", [0, 5]), ("kind", swiglu.KINDS))
def test_gated_units(kernels_on, device, tokens, width, padding, kind):
    gate_up, grad = inputs(tokens, width, torch.bfloat16, device, kind)
    out, act, forward = torch.empty_like(gate_up), torch.empty_like(grad), torch.empty_like(grad)
    swiglu.backward(grad, gate_up, out, act, kind)
    place, coming = wide(gate_up, padding), wide(grad, padding)
    swiglu.forward(place, forward, kind)
    swiglu.backward(coming, place, place, coming, kind)
    assert torch.equal(place, out) and torch.equal(coming, act) and torch.equal(forward, act)


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (5, 48), (3, 4112)])
def test_gated_units_beside_codes(kernels_on, device, tokens, width):
    gate_up, grad = inputs(tokens, width, torch.bfloat16, device, "silu")
    factor, reach = torch.rand(2 * width, device=device) + 0.5, torch.tensor(0.3, device=device)
    out, act = torch.empty_like(gate_up), torch.empty_like(grad)
    codes, codes_ = (fp8.buffer(tokens, 2 * width, torch.device(device), zero=True) for _ in range(2))
    scale = fp8.act_backward(grad, gate_up, out, act, codes, factor, reach=reach)
    scale_ = fp8.act_backward(grad, gate_up, gate_up, grad, codes_, factor, reach=reach)
    assert torch.equal(gate_up, out) and torch.equal(grad, act) and torch.equal(scale, scale_)
    assert torch.equal(codes.view(torch.uint8), codes_.view(torch.uint8)) and codes.float().abs().max() > 0


@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_the_last_product_is_made_once(variant, tiny_folder, monkeypatch):
    """Under full recompute, unless a norm behind it reads it."""
    ours, made = oracle.ours(tiny_folder(variant), ALL), []
    plain = projection.Projection.after_act
    monkeypatch.setattr(
        projection.Projection, "after_act", lambda self, *args: made.append(self.mask_id) or plain(self, *args)
    )
    stepped(ours, "cpu", "cpu", batch(), 0.0, "full")
    layers = len(ours.decoder.blocks)
    assert len(made) == (2 * layers if variant == "gemma2" else layers)
