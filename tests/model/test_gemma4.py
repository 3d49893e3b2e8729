"""Gemma 4: what checkpoints leave out or carry, and what is not computed is refused. Logits, gradients, exports and
generation are compared with transformers and llama.cpp over all families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftune.api import export
from graftune.errors import GraftuneError
from graftune.model.families import from_config
from graftune.weights.base import open_base, with_new_tokens
from graftune.weights.describe import base_facts
from tests.parity.test_full import transformers_logits
from tests.support import oracle, tiny

VARIANTS = ["gemma4", "gemma4-dense", "gemma4_unified"]


def test_a_checkpoint_with_towers(tiny_folder: Callable[[str], Path]) -> None:
    """As E2B is published: the text model is read, with its per-layer embeddings, and the towers are said to be left
    out. Exports of such a folder: tests/exporting/test_vision.py."""
    folder = tiny_folder("gemma4-vision")
    base, stored = open_base(str(folder)), load_file(folder / "model.safetensors")
    outside = {name for name in stored if "language_model" not in name}
    assert {name.split(".")[1] for name in outside} == {"vision_tower", "embed_vision", "audio_tower", "embed_audio"}
    assert set(base.carried) == outside and "embed_tokens_per_layer.weight" in base.tensors
    assert base_facts(base)["not loaded"].startswith(f"{len(outside)} tensors outside the text model (")
    text = [[5, 80, 7, 99, 130]]
    assert (oracle.ours(folder, random_b=False).logits(text) - transformers_logits(folder, text)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is set"),
        ({"num_kv_shared_layers": 3}, "shared keys"),
        ({"per_layer_config": {"1": {"hidden_size": 3}}}, "per_layer_config"),
        ({"layer_types": ["full_attention", "conv", "conv", "conv"]}, "kinds of layers"),
    ],
)
def test_what_is_not_computed_is_refused(values: dict[str, object], what: str) -> None:
    with pytest.raises(GraftuneError, match=what):
        from_config(tiny.config("gemma4_unified") | values, "a test")


def test_both_spellings_of_layers_without_a_window() -> None:
    """`global_head_dim` and `num_global_key_value_heads`, or `per_layer_config` of newer files."""
    config = tiny.config("gemma4_unified")
    newer = {name: value for name, value in config.items() if "global" not in name}
    newer["per_layer_config"] = {str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in (1, 3)}
    assert from_config(newer, "") == from_config(config, "")
    shapes = [layer.mixer.attention for layer in from_config(config, "").layers]
    assert [(shape.head_width, shape.kv_heads, shape.window) for shape in shapes if shape] == [
        (8, 2, 6),
        (16, 1, 0),
    ] * 2


def test_keys_that_no_layer_reads_are_carried(tmp_path: Path) -> None:
    """Checkpoints have keys and values of layers that use those of another: exports carry them, and loading does not
    need them."""
    folder = tiny.make_folder("gemma4", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    extra = {f"model.layers.3.self_attn.{name}.weight": torch.randn(32, 48) for name in ("k_proj", "v_proj")}
    extra["model.layers.3.self_attn.k_norm.weight"] = torch.randn(16)
    assert not set(extra) & set(tensors)
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    base = open_base(str(folder))
    assert set(base.carried) == set(extra) and not any(name.startswith("layers.3.self_attn.k") for name in base.tensors)
    merged = export(str(folder), "merged", out=str(tmp_path / "merged")).path
    stored = load_file(merged / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in extra.items())


def test_tokens_cannot_be_added_beside_per_layer_embeddings(tmp_path: Path) -> None:
    base = open_base(str(tiny.make_folder("gemma4", tmp_path / "model")))
    with pytest.raises(GraftuneError, match="has an embedding of every token in each layer"):
        with_new_tokens(base, ["<new>"])
