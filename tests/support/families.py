"""Tiny models of the families that differ most from Llama, without transformers: their specs by hand (a test holds them
against what transformers' configurations say), and random weights in memory. For machines that have torch alone."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path
from typing import Any, cast

import torch

from graftune.model.rotary import RopeScaling
from graftune.model.spec import ModelSpec
from graftune.tokenizer import Tokenizer
from graftune.weights.base import Base
from graftune.weights.synthetic import random_base
from tests.support import quantised, tiny

SIZES: dict[str, Any] = {
    "layers": 3, "width": 48, "ffn": 72, "heads": 6, "kv_heads": 2, "head_width": 8, "vocab": tiny.VOCAB,
    "norm_eps": 1e-5, "rope_theta": 1e4, "max_positions": 256, "tied": False,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "head_width": 16, "norm_eps": 1e-6, "tied": True, "norms": "around", "norm_shift": 1.0, "activation": "gelu",
    "window": 6, "embedding_scale": 48**0.5, "attention_scale": 0.25,
}  # fmt: skip
LONG = RopeScaling("longrope", factor=4.0, original_length=64, short=(1.0, 1.3), long=(1.1, 4.0))
OLMO: dict[str, Any] = {"norms": "behind", "qk_norm": True, "wide_qk_norm": True}
DIFFERENT: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA | {"window_layers": (0, 2), "attention_cap": 1.5, "logit_cap": 3.0},
    "gemma3": GEMMA
    | {"layers": 7, "rope_theta": 1e6, "local_theta": 1e4, "qk_norm": True, "window_layers": (0, 1, 2, 3, 4, 6)},
    "phi3": {"fused": True},
    "phi3-long": {"fused": True, "rotated": 4, "rope": LONG},
    "granite": {
        "norm_eps": 1e-6, "embedding_scale": 3.0, "attention_scale": 0.5, "residual_scale": 0.4, "logit_scale": 1 / 0.7,
    },
    "smollm3": {"layers": 5, "norm_eps": 1e-6, "tied": True, "rope_theta": 2e6, "unrotated_layers": (3,)},
    "olmo2": OLMO,
    "lfm2": {
        "layers": 5, "ffn": 48, "rope_theta": 1e6, "tied": True, "norms": "operator", "qk_norm": True,
        "conv_layers": (0, 1, 3), "conv_taps": 3,
    },
    "olmo3": OLMO
    | {"layers": 5, "rope_theta": 5e5, "local_theta": 5e5, "window": 6, "window_layers": (0, 1, 2, 4)},
}  # fmt: skip


def spec(variant: str) -> ModelSpec:
    return ModelSpec(family=variant.partition("-")[0], **(SIZES | DIFFERENT[variant]))


def far(variant: str = "phi3-long", length: int = 32) -> ModelSpec:
    """One whose documents reach beyond its original length."""
    made = spec(variant)
    return dataclasses.replace(made, rope=dataclasses.replace(made.rope, original_length=length))


def base_of(shape: ModelSpec) -> Base:
    """Weights wide enough that attention and gates saturate here and there, norms that are not one; drawn by name, so
    that every machine has the same."""
    tensors = {}
    for name, source in random_base(shape, torch.device("cpu")).tensors.items():
        drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if len(source.shape) == 1:
            value = torch.rand(source.shape, generator=drawn) + 0.5
            if name == f"{shape.names.final_norm}.weight" and shape.tied:
                value[::2] *= -1  # a tied head would say its own input again and again
        else:
            wide = 0.5 if "embed" in name else 0.6 / source.shape[-1] ** 0.5
            value = torch.randn(source.shape, generator=drawn).mul_(wide)
        tensors[name] = quantised.Values(value)
    return Base(shape.family, Path(shape.family), "safetensors", shape, cast(Tokenizer, None), tensors)
