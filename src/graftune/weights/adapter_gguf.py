"""Reads llama.cpp's adapters: a GGUF file of type `adapter`, with tensors named as the base's with .lora_a and .lora_b.

A and B have PEFT's shapes (GGUF states dimensions in reverse order, the bytes are the same), the scale is alpha over
the rank, and B's rows and A's columns have the order of the weight's in a GGUF of that architecture. Only the base
knows how many heads there are: `fitted` (adapter_fit.py) reorders them when adapter and base are joined.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from graftune.errors import GraftuneError
from graftune.model.families import by_architecture, modules_of, short_targets
from graftune.settings.sections import LoraConfig
from graftune.settings.targets import TARGETS
from graftune.weights import experts
from graftune.weights.adapter_fit import Adapter, adapted_paths
from graftune.weights.gguf_io import read_gguf

# Our keys beside those of llama.cpp: they name the base and say how to chat with the adapter.
BASE, BASE_SHA256, REVISION, TEMPLATE, APPEND_EOS = (
    f"graftune.{key}" for key in ("base", "base_sha256", "revision", "template", "append_eos")
)


def load_gguf_adapter(path: Path) -> Adapter:
    file = read_gguf(path)
    get = file.metadata.get
    if get("general.type") != "adapter" or get("adapter.type") != "lora":
        raise GraftuneError("is not a LoRA adapter", where=str(path), fix="give it as the base, if it is a model")
    alpha = get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or alpha <= 0:
        raise GraftuneError("has no adapter.lora.alpha", where=str(path), fix="export the adapter again")
    if get("adapter.alora.invocation_tokens"):
        raise GraftuneError("the adapter uses activated LoRA", where=str(path), fix="this cannot be loaded here")
    family = by_architecture(str(get("general.architecture")))
    tensors = experts.adapters_from_gguf(file.tensors, str(path), "mlp" if family is None else family.experts_module)
    for stored, tensor in file.tensors.items():
        match = re.fullmatch(r"(.+\.weight)\.lora_([ab])", stored)
        if experts.is_stacked(stored) or (match and family and family.is_second_part(match[1])):
            continue
        ours = family.our_name(match[1]) if match and family else None
        if match is None or ours is None or len(tensor.shape) != 2 or ours.split(".")[-2] not in TARGETS:
            raise GraftuneError(f"the adapter uses {stored}", where=str(path), fix="this cannot be loaded here")
        both = [f"{name}.lora_{match[2]}" for name in family.to_gguf(ours)] if family else []
        value = _joined([file.tensors[name].values() for name in both if name in file.tensors], match[2])
        if value is None or len(both) != sum(name in file.tensors for name in both):
            raise GraftuneError(
                f"the adapter uses {stored} without its second part, or with another A there",
                where=str(path),
                fix="this cannot be loaded here",
            )
        tensors[f"{ours.removesuffix('weight')}lora_{match[2].upper()}.weight"] = value
    return Adapter(
        path,
        _settings(tensors, float(alpha), path, modules_of([] if family is None else family.block_names)),
        tensors,
        str(get(BASE) or ""),
        str(get(BASE_SHA256) or ""),
        "none" if get(TEMPLATE) == "none" else "auto",
        bool(get(APPEND_EOS, False)),
        str(get(REVISION) or ""),
        order="gguf",
    )


def _joined(parts: list[torch.Tensor], matrix: str) -> torch.Tensor | None:
    """A projection's B, concatenated from its parts, or the A that all parts share; None if their A's differ."""
    if matrix == "b":
        return torch.cat(parts)
    return parts[0] if all(torch.equal(part, parts[0]) for part in parts) else None


def _settings(
    tensors: dict[str, torch.Tensor], alpha: float, path: Path, modules: dict[str, tuple[str, ...]]
) -> LoraConfig:
    """Rank, alpha and targets of the adapter. `modules`: the family's modules that hold each projection."""
    ranks = {len(t) for n, t in tensors.items() if n.endswith("lora_A.weight") and not experts.is_expert_adapter(n)}
    ranks |= {t.shape[-1] for n, t in tensors.items() if n.endswith("lora_B.weight")}
    if len(ranks) != 1:
        what = "ranks that differ between projections" if ranks else "no tensors"
        raise GraftuneError(f"the adapter uses {what}", where=str(path), fix="this cannot be loaded here")
    return LoraConfig(rank=ranks.pop(), alpha=alpha, targets=short_targets(adapted_paths(tensors), modules))
