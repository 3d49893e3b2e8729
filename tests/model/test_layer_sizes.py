"""Layers of different sizes in one model: heads, their width and the feed-forward's, each asked of its layer.

The judge is transformers' own Llama layer, made from a configuration for each layer, with PEFT around it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.batch import Example
from graftune.errors import GraftuneError
from graftune.exporting.gguf_model import model_keys
from graftune.infer.sample import Sampling
from graftune.model.feed_forward.gated import GatedSpec
from graftune.model.frozen.interface import TensorRows
from graftune.model.lora import initialise
from graftune.model.spec import ModelSpec
from graftune.settings.sections import LoraConfig
from graftune.weights import names, rows
from graftune.weights.base import Base, _checked_spec, open_base
from graftune.weights.model import hf_config
from tests.support import oracle, specs, tiny
from tests.support.generate import generate

LORA = LoraConfig(rank=4, alpha=10.0, targets=("all_linear",))


def own_layer(config: Any, index: int) -> Any:
    """A layer whose rotary tables have its own head width."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    class OwnLayer(LlamaDecoderLayer):
        def __init__(self) -> None:
            super().__init__(config, index)
            self.rotary = LlamaRotaryEmbedding(config)

        def forward(self, hidden_states: torch.Tensor, position_ids: Any = None, **more: Any) -> Any:
            more["position_embeddings"] = self.rotary(hidden_states, position_ids)
            return super().forward(hidden_states, position_ids=position_ids, **more)

    return OwnLayer()


def theirs(spec: ModelSpec) -> Any:
    model = tiny.hf_model("llama")
    layers = []
    for index, layer in enumerate(spec.layers):
        config, sizes = copy.deepcopy(model.config), layer.mixer.attention
        assert sizes is not None and isinstance(layer.feed_forward, GatedSpec)
        config.num_attention_heads, config.num_key_value_heads = sizes.heads, sizes.kv_heads
        config.head_dim, config.intermediate_size = sizes.head_width, layer.feed_forward.ffn
        layers.append(own_layer(config, index))
    model.model.layers = torch.nn.ModuleList(layers)
    for layer in layers:
        for weight in layer.parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, 0.0, 0.15)
    return model.eval()


@pytest.fixture
def base(tiny_folder: Callable[[str], Path]) -> Base:
    found = open_base(str(tiny_folder("llama")))
    spec = specs.edited(found.spec, (1,), heads=2, kv_heads=1, head_width=24, ffn=40)
    return dataclasses.replace(found, spec=_checked_spec(specs.edited(spec, (2,), ffn=88)))


def of_model(base: Base, model: Any) -> Base:
    tensors = {
        names.from_hf(n): TensorRows(t.detach().clone()) for n, t in model.state_dict().items() if "rotary" not in n
    }
    tied = {"lm_head.weight"} if base.spec.tied else set()
    return dataclasses.replace(base, tensors={n: t for n, t in tensors.items() if n not in tied})


def test_against_transformers_and_peft(base: Base) -> None:
    model = theirs(base.spec)
    ours = oracle.place(of_model(base, model), LORA)
    initialise(ours.arena, dataclasses.replace(LORA, init="gaussian"), seed=7)
    for name in ours.arena.slots:
        if name.endswith("lora_B.weight"):
            ours.arena.view(name, ours.arena.weights).normal_(0, 0.1)
    ours.arena.publish()
    wrapped = oracle.peft_model(model, ours)
    documents = [torch.randint(3, tiny.VOCAB, (n,)).tolist() for n in (9, 14)]
    with torch.no_grad():
        want = torch.cat([wrapped(torch.tensor([d])).logits[0] for d in documents])
    assert (ours.logits(documents) - want).abs().max() < 1e-4
    batch = [Example(d, [i >= 3 for i in range(len(d))]) for d in documents]
    loss, grads = ours.gradients(batch)
    total = oracle.loss_sum(wrapped, batch)
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    found = {name: p.grad for name, p in wrapped.named_parameters() if p.grad is not None}
    assert len(found) == len(grads) == 2 * 7 * 3
    for name, grad in grads.items():
        other = found[oracle.peft_name(name)]
        assert (grad - other).norm() / other.norm() < 2e-5, name
    (answer,) = generate(ours.decoder, [documents[0]], Sampling(max_new_tokens=6), ())
    for count in range(6):
        text = documents[0] + answer[:count]
        assert int(ours.logits([text])[-1].argmax()) == answer[count], "cached as uncached"


def test_who_asks_a_layer(base: Base) -> None:
    """Rope's tables and the order of rows in a GGUF; and what cannot be written says so."""
    spec = base.spec
    assert [rope.width for rope in spec.ropes] == [8, 24] and spec.layers[2].mixer.ropes == spec.ropes[:1]
    assert max(shape.head_width for shape in spec.attention) == 24
    for layer, projection, size, width in ((1, "q_proj", 48, 24), (2, "k_proj", 16, 8)):
        order = rows.order_in("gguf", spec, f"layers.{layer}.self_attn.{projection}.lora_B.weight")
        assert order is not None and len(order.indices) == size
        assert order.indices[:3].tolist() == [0, width // 2, 1] and int(order.indices[width]) == width
        assert rows.order_in("folder", spec, f"layers.{layer}.self_attn.{projection}.weight") is None
        assert rows.order_in("gguf", spec, f"layers.{layer}.self_attn.{projection}.lora_A.weight") is None
    assert specs.edited(spec, (2,), head_width=5).wrong() == "head width"
    with pytest.raises(GraftuneError, match="its layers differ in size"):
        model_keys(base, "x", 0, None)
    with pytest.raises(GraftuneError, match="its layers differ in size"):
        hf_config(dataclasses.replace(base, kind="gguf"))
