"""Layouts of experts in files: what is read from one and written again is the same to the bit."""

from __future__ import annotations

import torch

from graftune.model.feed_forward.router import RouterSpec
from graftune.model.frozen.interface import TensorRows
from graftune.weights import experts, rows
from tests.support import specs

EXPERTS, WIDTH, FFN, RANK = 3, 8, 4, 2
SPEC = specs.edited(
    specs.made(
        "qwen3_moe", layers=1, width=WIDTH, ffn=FFN, heads=2, kv_heads=1, head_width=4, vocab=9, experts=EXPERTS,
        chosen=2,
    ),
    router=RouterSpec(bias=True, name="router"), bias=True, unit="clamped", interleaved=True,
)  # fmt: skip
STEM = "layers.0.mlp.experts"


def test_interleaved_stacks() -> None:
    """gate_up_proj [E, in, 2F]: even columns are the gate's, odd ones up's; biases the same."""
    stored = {
        f"{STEM}.gate_up_proj": torch.randn(EXPERTS, WIDTH, 2 * FFN),
        f"{STEM}.gate_up_proj_bias": torch.randn(EXPERTS, 2 * FFN),
        f"{STEM}.down_proj": torch.randn(EXPERTS, FFN, WIDTH),
        f"{STEM}.down_proj_bias": torch.randn(EXPERTS, WIDTH),
    }
    read = experts.from_folder({name: TensorRows(value) for name, value in stored.items()}, SPEC)
    shapes = {f"layers.0.{name}": shape for name, shape in SPEC.layers[0].weights.items() if ".experts." in name}
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == shapes
    gate_up = stored[f"{STEM}.gate_up_proj"]
    assert torch.equal(read[f"{STEM}.1.gate_proj.weight"].values(), gate_up[1, :, ::2].t())
    assert torch.equal(read[f"{STEM}.2.up_proj.weight"].read(1, 3), gate_up[2, :, 1::2].t()[1:3])
    assert torch.equal(read[f"{STEM}.0.down_proj.weight"].values(), stored[f"{STEM}.down_proj"][0].t())
    assert torch.equal(read[f"{STEM}.up_proj.bias"].values(), stored[f"{STEM}.gate_up_proj_bias"][:, 1::2])
    back = experts.to_folder(read, SPEC)
    assert {name: tuple(tensor.shape) for name, tensor in back.items()} == {
        n: tuple(t.shape) for n, t in stored.items()
    }
    assert all(torch.equal(back[name].values(), value) for name, value in stored.items())
    assert torch.equal(back[f"{STEM}.gate_up_proj"].read(1, 2), gate_up[1:2])
    stack = back[f"{STEM}.gate_up_proj"]
    assert isinstance(stack, experts.Stack)
    pieces = list(stack.divided(1, stack.read(1, 3)))
    assert len(pieces) == 4 and all(torch.equal(source.values(), values) for source, values in pieces)


def test_adapters_of_interleaved_stacks() -> None:
    """PEFT's B has the weight's columns in turns; A is the same."""
    name = f"{STEM}.gate_up_proj.lora_B.weight"
    ours = torch.randn(EXPERTS, 2 * FFN, RANK)
    stored = rows.adapter_to_file(ours, "folder", SPEC, name)
    assert torch.equal(stored[:, ::2], ours[:, :FFN]) and torch.equal(stored[:, 1::2], ours[:, FFN:])
    assert torch.equal(rows.adapter_from_file(stored, "folder", SPEC, name), ours)
    for other in (name.replace("lora_B", "lora_A"), f"{STEM}.down_proj.lora_B.weight"):
        assert rows.adapter_to_file(ours, "folder", SPEC, other) is ours
    assert rows.adapter_to_file(ours, "gguf", SPEC, name) is ours
