"""Adapters out and in, in PEFT's layout: adapter_config.json and adapter_model.safetensors, tokenizer and template.

What PEFT writes can be continued here, and what we write loads there: names, shapes and the unscaled A and B are
PEFT's. Norms and the tables with added tokens' rows travel as PEFT's modules_to_save. Which base the adapter belongs
to stands in the configuration, with path and hash where the base is a file of the user's own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from graftune.config import PROJECTIONS, LoraConfig, expand_targets
from graftune.errors import GraftuneError
from graftune.model.lora import Arena
from graftune.weights import names, safetensors_io
from graftune.weights.base import Base

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# PEFT options that change what the adapter computes and that this engine does not have.
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "adapter biases",
    "rank_pattern": "ranks that differ between projections",
    "alpha_pattern": "alphas that differ between projections",
    "layers_to_transform": "adapters on some layers only",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trainable token indices",
    "target_parameters": "adapters on bare parameters",
    "fan_in_fan_out": "transposed weights",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
# Ways to start an adapter that take what it starts with out of the base: it means nothing over the base's own weights.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """An adapter read from disk: its settings, its tensors by our names, and the base it says it belongs to."""

    folder: Path
    lora: LoraConfig
    tensors: Mapping[str, torch.Tensor]
    base_name: str
    base_sha256: str
    template: str  # "none" if it was trained on plain prompt ++ response, else "auto"
    append_eos: bool
    revision: str  # of a base from the Hub


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def save_adapter(
    folder: Path,
    arena: Arena,
    lora: LoraConfig,
    base: Base,
    embedding_rows: dict[str, torch.Tensor],
    facts: Mapping[str, Any] = MappingProxyType({"template": "auto", "append_eos": False, "revision": ""}),
) -> None:
    """Write into a fresh folder beside the target, then swap: a reader finds the old adapter or the new one.

    `facts` are the template, append_eos and revision it was trained with. `embedding_rows` holds, for added tokens,
    the base's own table(s) by name, ahead of the trained rows.
    """
    if folder.exists() and not is_adapter(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise GraftuneError("is in use for something else", where=str(folder), mend="save the adapter to a new folder")
    aside = folder.with_name(folder.name + ".part")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    saved: list[str] = []
    for name in arena.slots:
        value = arena.view(name, arena.weights)
        if name.endswith(".rows"):
            module = name.removesuffix(".rows")
            table = torch.cat((embedding_rows[module].float().cpu(), value.cpu()))
            tensors[names.to_peft(f"{module}.weight")] = table
            saved.append(module)
            if base.spec.tied:  # PEFT wants the table a second time, or its head would not know the new rows
                tensors[names.to_peft("lm_head.weight")] = table.clone()
                saved.append("lm_head")
        else:
            tensors[names.to_peft(name)] = value.clone()
            if name.endswith("norm.weight"):
                saved.append(name.removesuffix(".weight").rpartition(".")[2])
    safetensors_io.write(tensors, aside / TENSORS, {"format": "pt"})
    text = json.dumps(_peft_config(lora, base, facts, sorted(set(saved))), indent=2)
    (aside / CONFIG).write_text(text + "\n")
    base.tokenizer.save(aside)
    for file in aside.iterdir():
        safetensors_io.flush(file)
    swap(aside, folder)


def swap(aside: Path, folder: Path) -> None:
    """Put `aside` where `folder` is. A folder cannot be renamed over a full one, so the old one steps away first."""
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        if old.exists():
            shutil.rmtree(old)
        os.rename(folder, old)
    os.rename(aside, folder)
    safetensors_io.flush(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def _peft_config(lora: LoraConfig, base: Base, facts: Mapping[str, Any], modules_to_save: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.reference,
        "revision": facts["revision"] or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": list(expand_targets(lora.targets)),
        "modules_to_save": modules_to_save or None,
        "ensure_weight_tying": base.spec.tied and bool(lora.new_tokens),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "graftune": {
            "base_kind": base.kind,
            "base_name": base.name,
            "base_sha256": base.sha256,
            "new_tokens": list(lora.new_tokens),
            "template": facts["template"],
            "append_eos": facts["append_eos"],
        },
    }


def load_adapter(folder: Path) -> Adapter:
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text())
        assert isinstance(values, dict)
    except FileNotFoundError:
        raise GraftuneError(f"holds no {CONFIG}", where=str(folder), mend="give an adapter or run folder") from None
    except (ValueError, AssertionError):
        raise GraftuneError("is not valid JSON", where=str(path), mend="copy the adapter again") from None
    lora = _lora_config(values, path)
    if not (folder / TENSORS).exists():
        raise GraftuneError(f"holds no {TENSORS}", where=str(folder), mend="copy the adapter again")
    try:
        raw = load_file(folder / TENSORS)
    except (SafetensorError, OSError) as error:
        raise GraftuneError(
            f"is damaged or cut short ({error})", where=str(folder / TENSORS), mend="copy the adapter again"
        ) from None
    ours = values.get("graftune") or {}
    return Adapter(
        folder,
        lora,
        {names.from_peft(name): tensor.float() for name, tensor in raw.items()},
        str(values.get("base_model_name_or_path") or ""),
        str(ours.get("base_sha256", "")),
        "none" if ours.get("template") == "none" else "auto",
        bool(ours.get("append_eos", False)),
        str(values.get("revision") or ""),
    )


def _lora_config(values: dict[str, Any], path: Path) -> LoraConfig:
    def refuse(what: str) -> GraftuneError:
        return GraftuneError(f"the adapter uses {what}", where=str(path), mend="this cannot be loaded here")

    if values.get("peft_type") != "LORA":
        raise refuse(f"the method {values.get('peft_type')!r}")
    for key, what in _REFUSED.items():
        if values.get(key):
            raise refuse(what)
    if values.get("bias", "none") != "none":
        raise refuse("trained biases")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING):
        raise refuse(f"{start!r}, which changes the base's weights")
    targets = values.get("target_modules")
    if targets == "all-linear":
        targets = list(PROJECTIONS)
    if not isinstance(targets, list) or not set(targets) <= set(PROJECTIONS):
        raise refuse(f"target modules {targets!r}")
    for key in ("r", "lora_alpha"):
        if not isinstance(values.get(key), int | float):
            raise GraftuneError(f"has no {key}", where=str(path), mend="copy the adapter again")
    saved = [str(m).rpartition(".")[2] for m in values.get("modules_to_save") or []]
    known = {"input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm", "embed_tokens", "lm_head"}
    if not set(saved) <= known:
        raise refuse(f"modules_to_save {sorted(set(saved) - known)}")
    return LoraConfig(
        rank=int(values["r"]),
        alpha=float(values["lora_alpha"]),
        dropout=float(values.get("lora_dropout") or 0.0),
        rslora=bool(values.get("use_rslora")),
        targets=tuple(p for p in PROJECTIONS if p in targets),
        train_norms=any(s.endswith("norm") for s in saved),
        new_tokens=tuple((values.get("graftune") or {}).get("new_tokens", ())),
    )


def place_adapter(adapter: Adapter, arena: Arena, vocab: int) -> None:
    """Copy the tensors into the arena, whose norms hold the base's values; whatever is missing, left over or of another
    shape is an error."""
    left = dict(adapter.tensors)
    if "embed_tokens.rows" in arena.slots and "lm_head.rows" not in arena.slots:  # tied: one table, stored twice
        head, table = left.get("lm_head.weight"), left.get("embed_tokens.weight")
        if head is not None and table is not None and torch.equal(head, table):
            del left["lm_head.weight"]
    kinds = {name.split(".")[-2] for name in left}
    for name, slot in arena.slots.items():
        stored = name.removesuffix(".rows") + ".weight" if name.endswith(".rows") else name
        tensor = left.pop(stored, None)
        if tensor is None and name.endswith("norm.weight") and name.split(".")[-2] not in kinds:
            continue  # PEFT may train one kind of norm and not another: the base's own stands
        if tensor is not None and name.endswith(".rows"):
            tensor = tensor[vocab:]
        if tensor is None or tuple(tensor.shape) != slot.shape:
            found = "is missing" if tensor is None else f"is {list(tensor.shape)}, not {list(slot.shape)}"
            raise GraftuneError(
                f"{stored} {found}: the adapter was made for another base",
                where=str(adapter.folder),
                mend="give its own base",
            )
        arena.view(name, arena.weights).copy_(tensor)
    if left:
        raise GraftuneError(
            f"holds {len(left)} tensors this base has no place for, such as {next(iter(left))}",
            where=str(adapter.folder),
            mend="give the base it was made for",
        )
    arena.publish()
