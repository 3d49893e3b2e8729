"""Tiny models of the families that differ most from Llama, without transformers: specs out of plain configurations (a
test compares them with those of transformers) and random weights in memory. For machines that have torch alone."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path
from typing import cast

import torch
from benchmarks.synthetic import random_base

from graftune.model.families import from_config
from graftune.model.frozen.interface import TensorRows
from graftune.model.spec import ModelSpec
from graftune.tokenizer import Tokenizer
from graftune.weights.base import Base
from tests.support import specs, tiny

DIFFERENT = (
    "gemma2", "gemma3", "phi3", "phi3-long", "granite", "smollm3", "olmo2", "lfm2", "olmo3", "exaone4-window",
    "granite_swa", "hunyuan_v1_dense", "granitemoehybrid", "glm4", "qwen3_5", "muse_glimmer", "ministral3", "lfm3",
    "gemma4_unified", "gemma4",
)  # fmt: skip


def spec(variant: str) -> ModelSpec:
    return from_config(tiny.config(variant), variant)


def far(variant: str = "phi3-long", length: int = 32) -> ModelSpec:
    """One whose documents reach beyond its original length."""
    made = spec(variant)
    (rope,) = made.ropes
    scaling = dataclasses.replace(rope.scaling, original_length=length)
    return specs.edited(made, rope=dataclasses.replace(rope, scaling=scaling))


def base_of(shape: ModelSpec) -> Base:
    """Weights wide enough that attention and gates saturate here and there, norms that are not one; drawn by name, so
    that every machine has the same."""
    tensors = {}
    for name, source in random_base(shape, torch.device("cpu")).tensors.items():
        drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if len(source.shape) == 1:
            value = torch.rand(source.shape, generator=drawn) + 0.5
            if name == f"{shape.head.norm.name}.weight" and shape.tied:
                value[::2] *= -1  # a tied head would say its own input again and again
        else:
            wide = 0.5 if "embed" in name else 0.6 / source.shape[-1] ** 0.5
            value = torch.randn(source.shape, generator=drawn).mul_(wide)
        tensors[name] = TensorRows(value)
    return Base(shape.family, Path(shape.family), "safetensors", shape, cast(Tokenizer, None), tensors)
