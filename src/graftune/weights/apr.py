"""Writes and reads an adapter as one APR file.

A and B are stored unscaled in fp32 as lora.LAYER.PROJECTION.lora_a and .lora_b; a reader multiplies by lora_alpha /
lora_rank. Rank-stabilised adapters are scaled by alpha over the root of the rank, so their lora_alpha is stored
multiplied by that root, and other readers compute the right product too. Trained norms and tables with added tokens are
stored under our own names. The key `graftune` has what only we read: the base, its hash and the template.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.model.families import FAMILIES, MODULES, family_of, modules_of, short_targets
from graftune.model.spec import ModelSpec
from graftune.settings.sections import LoraConfig
from graftune.weights import apr_io, experts, rows
from graftune.weights.adapter_fit import Adapter, fitted
from graftune.weights.apr_io import AprFile

SCHEMA = "1.3.0"
_OURS = re.compile(r"layers\.(\d+)\.([\w.]+)\.lora_([AB])\.weight")
_STORED = re.compile(r"lora\.(\d+)\.([\w.]+)\.lora_([ab])")
_BESIDE = re.compile(r"(layers\.\d+\.[\w.]*)?\w*norm\.weight|(embed_tokens|lm_head)\.weight")


def save_apr(path: Path, adapter: Adapter, spec: ModelSpec, facts: Mapping[str, Any] = MappingProxyType({})) -> None:
    """`facts` of the training, where known: epoch, val_loss, data_hash, started_at."""
    adapter = fitted(adapter, spec)
    lora = adapter.lora
    loss = facts.get("val_loss")
    metadata = {
        "__checkpoint__.schema_version": SCHEMA,
        "model_type": "adapter",
        "epoch": facts.get("epoch", 0),
        "val_loss": loss if isinstance(loss, int | float) and math.isfinite(loss) else None,
        "architecture": spec.family,
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha * math.sqrt(lora.rank) if lora.rslora else lora.alpha,
        "hidden_size": spec.width,
        "num_layers": len(spec.layers),
        "num_heads": spec.describe()["heads"],
        "num_kv_heads": spec.describe()["kv_heads"],
        "vocab_size": spec.vocab,
        "data_hash": facts.get("data_hash", ""),
        "provenance": {"tool": "graftune", "started_at": facts.get("started_at", "")},
        "graftune": {
            "base": adapter.base_name,
            "base_sha256": adapter.base_sha256,
            "revision": adapter.revision,
            "template": adapter.template,
            "append_eos": adapter.append_eos,
            "rslora_alpha": lora.alpha if lora.rslora else None,
            "dropout": lora.dropout,
            "new_tokens": list(lora.new_tokens),
        },
    }
    ordered = {name: rows.adapter_to_file(t, "folder", spec, name) for name, t in adapter.tensors.items()}
    modules = modules_of(family_of(spec).block_names)
    apr_io.write(path, AprFile(metadata, {_stored(name, modules): value.float() for name, value in ordered.items()}))


def _stored(name: str, modules: Mapping[str, Collection[str]]) -> str:
    """The projection by its name, or by its path where several modules of the family have one of that name."""
    if experts.is_expert_adapter(name):
        raise GraftuneError("an APR file has no place for adapters on experts", fix="export to peft or gguf-lora")
    match = _OURS.fullmatch(name)
    if match is None:
        return name
    last = match[2].rpartition(".")[2]
    return f"lora.{match[1]}.{match[2] if len(modules[last]) > 1 else last}.lora_{match[3].lower()}"


def load_apr(path: Path) -> Adapter:
    file = apr_io.read(path)
    get = file.metadata.get
    if get("model_type") != "adapter":
        raise GraftuneError(f"holds {get('model_type')!r}, not an adapter", where=str(path), fix="give an adapter")
    if not str(get("__checkpoint__.schema_version", SCHEMA)).startswith("1."):
        raise GraftuneError("was written by a newer schema", where=str(path), fix=f"write it as {SCHEMA}")
    for key in ("lora_rank", "lora_alpha"):
        value = get(key)
        if not _is_sensible(value):
            raise GraftuneError(f"its {key} is {value!r}", where=str(path), fix="export the adapter again")
    found = get("graftune")
    ours: dict[str, Any] = found if isinstance(found, dict) else {}
    family = FAMILIES.get(str(get("architecture")))
    modules = MODULES if family is None else modules_of(family.block_names)
    tensors = {_ours(name, modules, path): tensor.float() for name, tensor in file.tensors.items()}
    return Adapter(
        path,
        _settings(file.metadata, ours, tensors, modules, path),
        tensors,
        str(ours.get("base") or ""),
        str(ours.get("base_sha256") or ""),
        "none" if ours.get("template") == "none" else "auto",
        ours.get("append_eos") is True,
        str(ours.get("revision") or ""),
        order="folder",
    )


def _ours(stored: str, modules: Mapping[str, Collection[str]], path: Path) -> str:
    """`modules`: those that a projection may be in."""
    match = _STORED.fullmatch(stored)
    if match:
        within, _, last = match[2].rpartition(".")
        found = [module for module in modules.get(last, ()) if within in ("", module)]
        if len(found) == 1:
            place = f"{found[0]}.{last}".removeprefix(".")
            return f"layers.{match[1]}.{place}.lora_{match[3].upper()}.weight"
    elif _BESIDE.fullmatch(stored):
        return stored
    raise GraftuneError(f"the adapter uses {stored}", where=str(path), fix="this cannot be loaded here")


def _is_sensible(value: Any) -> bool:
    """Whether the value can be a rank or an alpha."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31


def _settings(
    metadata: Mapping[str, Any],
    ours: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    modules: Mapping[str, Collection[str]],
    path: Path,
) -> LoraConfig:
    rank, plain, stabilised = metadata["lora_rank"], metadata["lora_alpha"], ours.get("rslora_alpha")
    adapted = {match[2] for name in tensors if (match := _OURS.fullmatch(name))}
    new_tokens = ours.get("new_tokens") or []
    dropout = ours.get("dropout") or 0.0
    sound = stabilised is None or _is_sensible(stabilised)
    sound = sound and isinstance(dropout, int | float) and 0 <= dropout < 1
    if not adapted or not sound or not isinstance(new_tokens, list) or not all(isinstance(t, str) for t in new_tokens):
        raise GraftuneError("its settings make no sense", where=str(path), fix="export the adapter again")
    return LoraConfig(
        rank=int(rank),
        alpha=float(plain if stabilised is None else stabilised),
        dropout=float(dropout),
        rslora=stabilised is not None,
        targets=short_targets(adapted, modules),
        train_norms=any(name.endswith("norm.weight") for name in tensors),
        new_tokens=tuple(new_tokens),
    )
