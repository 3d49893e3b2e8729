"""The cases of the comparison with TRL: models, adapters, pairs and rated answers, the same on every machine, since all
numbers are integers of numpy's generator. tools/store_preferences.py lets TRL compute and writes tests/fixtures;
test_preferences.py compares."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from graftune.batch import Example
from graftune.settings.sections import LoraConfig
from tests.support import oracle, tiny
from tests.support.stored import numbers

STORED = Path(__file__).parents[1] / "fixtures" / "preferences.json"
GRADS = STORED.with_suffix(".safetensors")  # of every LoRA weight, named family/case/weight
FAMILIES = ("llama-shallow", "qwen3")
LORA = LoraConfig(rank=4, alpha=10.0)
# The settings of each case; `label_smoothing` and others as the settings are called.
CASES: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.4},
    "dpo, sft": {"loss": "dpo", "beta": 0.4, "sft_share": 0.3},
    "dpo_norm": {"beta": 1.5},
    "ipo": {"beta": 0.4},
    "hinge": {"beta": 0.1},
    "robust": {"beta": 0.4, "label_smoothing": 0.2},
    "apo_zero": {"beta": 0.4},
    "simpo": {"beta": 2.0, "gamma": 0.7},
    "orpo": {"beta": 0.4},
    "kto": {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.8},
    "kto_zero": {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.8},
}


def settings(name: str) -> dict[str, Any]:
    return {"loss": name} | CASES[name]


def folder_of(family: str, folder: Path) -> Path:
    """The tiny model of a family, with weights on a grid."""
    made, model, draw = tiny.make_folder(family, folder), tiny.hf_model(family), np.random.default_rng(5)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" not in name:
                weight.copy_(numbers(draw, tuple(weight.shape), 0.5 / math.sqrt(weight.shape[-1])))
            else:
                weight.copy_(1 + numbers(draw, tuple(weight.shape), 0.2))
    model.save_pretrained(made)
    return made


def ours_of(family: str, folder: Path) -> oracle.Ours:
    ours, draw = oracle.ours(folder_of(family, folder), LORA, random_b=False), np.random.default_rng(6)
    for name in sorted(ours.arena.slots):
        view = ours.arena.view(name, ours.arena.weights)
        view.copy_(numbers(draw, tuple(view.shape), 0.1))
    ours.arena.publish()
    return ours


def pairs(count: int = 6) -> list[Example]:
    """A prompt, then a chosen and a rejected answer of other lengths."""
    draw, made = np.random.default_rng(7), list[Example]()
    for pair in range(count):
        prompt = draw.integers(3, tiny.VOCAB, draw.integers(2, 7)).tolist()
        for length in draw.integers(2, 12, 2).tolist():
            answer = draw.integers(3, tiny.VOCAB, length).tolist()
            made.append(Example(prompt + answer, [False] * len(prompt) + [True] * length, group=pair))
    return made


def rated(count: int = 7) -> list[Example]:
    draw, made = np.random.default_rng(8), list[Example]()
    for place in range(count):
        prompt, answer = (draw.integers(3, tiny.VOCAB, draw.integers(2, 9)).tolist() for _ in range(2))
        label = float(place % 3 == 0)
        supervised = [False] * len(prompt) + [True] * len(answer)
        made.append(Example(prompt + answer, supervised, place, numbers={"label": label}))
    return made


def data_of(name: str) -> list[Example]:
    return rated() if name.startswith("kto") else pairs()


@cache
def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


@cache
def _grads(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)


def grads_of(family: str, name: str, path: Path = GRADS) -> dict[str, torch.Tensor]:
    """The gradients that TRL and PEFT computed, by the names of the weights."""
    start = f"{family}/{name}/"
    return {key.removeprefix(start): grad for key, grad in _grads(path).items() if key.startswith(start)}
