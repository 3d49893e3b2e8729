"""Writes and reads adapters in PEFT's layout: adapter_config.json, adapter_model.safetensors, tokenizer and template.

A run can continue with an adapter of PEFT's, and PEFT loads ours: names, shapes and the unscaled A and B are the same.
Norms and tables with the rows of added tokens are stored as PEFT's modules_to_save. The configuration names the base,
with its path where it is a file of the user's own. PEFT warns about each field that it does not know, so what it has no
field for (the base's hash, added tokens, how answers were rendered) is in graftune.json. Adapters are also read from
single files, llama.cpp's (.gguf, adapter_gguf.py) and entrenar's (.apr, apr.py); all become one `Adapter`
(adapter_fit.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.io.files import check_inside, new_folder
from graftune.model.arena import Arena
from graftune.model.families import NORMS, family_of, short_targets
from graftune.model.lora import target_names, targets_of
from graftune.model.spec import ModelSpec
from graftune.settings.sections import LoraConfig
from graftune.settings.targets import is_target, ordered_targets
from graftune.weights import experts, names, rows, safetensors_io
from graftune.weights.adapter_fit import TABLES, Adapter, adapted_paths
from graftune.weights.apr import load_apr
from graftune.weights.base import Base
from graftune.weights.finite import is_finite
from graftune.weights.names import NamingScheme
from graftune.weights.opening import read_json, sensible
from graftune.weights.uniform_rank import with_uniform_rank

NAMINGS = ("checkpoint", "text", "multimodal")  # of an adapter's tensors
CONFIG, TENSORS, OWN_FACTS = "adapter_config.json", "adapter_model.safetensors", "graftune.json"
# PEFT options that change what the adapter computes and that this engine does not have.
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "adapter biases",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trainable token indices",
    "fan_in_fan_out": "transposed weights",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
# Initialisations that subtract the adapter's first B A from the base: on the original weights the adapter is wrong.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


def is_adapter(path: Path) -> bool:
    """Whether the path is an adapter's folder, or a file that holds an adapter."""
    if path.suffix == ".gguf" and path.is_file():
        from graftune.weights.gguf_io import is_adapter_file

        return is_adapter_file(path)
    if path.suffix == ".apr" and path.is_file():
        return True
    return (path / CONFIG).is_file()


def adapter_tensors(arena: Arena, base: Base, embedding_rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that the arena trains, by our names. `embedding_rows`: for added tokens, the base's embedding (and
    head) by name; the trained rows are appended to them."""
    tensors: dict[str, torch.Tensor] = {}
    for name in arena.slots:
        value = arena.view(name, arena.weights)
        if name.endswith(".rows"):
            module = name.removesuffix(".rows")
            table = torch.cat((embedding_rows[module].float().cpu(), value.cpu()))
            tensors[f"{module}.weight"] = table
            if base.spec.tied:  # PEFT needs the table a second time, or its head would lack the new rows
                tensors["lm_head.weight"] = table.clone()
        else:
            tensors[name] = value.clone()
    return tensors


def write_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    lora: LoraConfig,
    base: Base,
    facts: Mapping[str, Any],
    naming: str = "checkpoint",
) -> None:
    """Write tensors by our names, as the engine has them, into a fresh folder beside the target, then swap: a reader
    finds the old adapter or the new one. An adapter at `folder` is replaced. `facts` are the template, append_eos and
    revision it was trained with. `naming` (one of NAMINGS): name the tensors as in transformers' class of the text
    model, as in that of the text-and-vision model, or (`checkpoint`) as in the class of the base's configuration."""
    if folder.exists() and not is_adapter(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise GraftuneError("is in use for something else", where=str(folder), fix="save the adapter to a new folder")
    shifts = {name: base.spec.norm_offset(name) for name in tensors}
    tensors = {name: t - shifts[name] if shifts[name] else t for name, t in tensors.items()}
    tensors = {name: rows.adapter_to_file(t, "folder", base.spec, name) for name, t in tensors.items()}
    multimodal = base.multimodal if naming == "checkpoint" else naming == "multimodal"
    scheme = names.MULTIMODAL if multimodal else names.TEXT
    whole = [name.removesuffix(".weight") for name in tensors if ".lora_" not in name]
    stored = experts.adapters_to_peft(tensors)
    with new_folder(folder) as aside:
        named = {names.to_peft(n, scheme): t for n, t in stored.items()}
        safetensors_io.write(named, aside / TENSORS, {"format": "pt"})
        for name, values in (
            (CONFIG, _peft_config(lora, base, facts, whole, scheme)),
            (OWN_FACTS, _own_facts(lora, base, facts, scheme)),
        ):
            (aside / name).write_text(json.dumps(values, indent=2) + "\n")
        base.tokenizer.save(aside)
        back = load_adapter(aside).tensors
        if back.keys() != tensors.keys() or not all(torch.equal(back[n], t.float().cpu()) for n, t in tensors.items()):
            raise GraftuneError(
                "reading back what was written gives other values", where=str(folder), fix="check the disk"
            )


def _peft_config(
    lora: LoraConfig, base: Base, facts: Mapping[str, Any], whole: list[str], scheme: NamingScheme
) -> dict[str, Any]:
    """The contents of adapter_config.json. PEFT adapts every module whose name ends in one of target_modules. A vision
    tower may have modules of the same names, so beside one they are named by their whole paths, and PEFT raises an
    error in a class that has other paths. `whole`: the modules that were trained whole."""
    spec, targets = base.spec, targets_of(base.spec, lora)
    of_experts = experts.target_parameters(spec, targets)
    matrices = [path for path in targets if not _is_experts(spec, path)]
    if family_of(spec).dense_by_parameter:
        dense = [path for path in matrices if path.rpartition(".")[2] in experts.PROJECTIONS]
        matrices = [path for path in matrices if path not in dense]
        of_experts += [f"{path}.weight" for path in dense]
    target_modules = list(target_names(spec, matrices))
    modules_to_save = sorted({name.rpartition(".")[2] for name in whole})
    if _has_paths(base, scheme):
        layers = enumerate(spec.layers)
        found = [f"layers.{index}.{path}" for index, kind in layers for path in kind.projections if path in matrices]
        target_modules, modules_to_save = ([scheme.of(f"{n}.").removesuffix(".") for n in ns] for ns in (found, whole))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.reference,
        "revision": facts["revision"] or None,
        "r": lora.rank,
        "lora_alpha": lora.resolved().alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": target_modules,
        "target_parameters": of_experts or None,
        "modules_to_save": modules_to_save or None,
        "ensure_weight_tying": base.spec.tied and bool(lora.new_tokens),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _has_paths(base: Base, scheme: NamingScheme) -> bool:
    """Whether the configuration names modules with their whole paths."""
    return base.multimodal or scheme is names.MULTIMODAL


def _is_experts(spec: ModelSpec, path: str) -> bool:
    parts = [part for kind in spec.kinds for part in kind.parts if path in map(part.path, part.projections)]
    return any(part.expert_counts[0] for part in parts)


def _own_facts(lora: LoraConfig, base: Base, facts: Mapping[str, Any], scheme: NamingScheme) -> dict[str, Any]:
    """The contents of graftune.json: what PEFT's configuration has no field for, and the targets if that configuration
    names modules by their paths."""
    targets = list(target_names(base.spec, targets_of(base.spec, lora)))
    return ({"targets": targets} if _has_paths(base, scheme) else {}) | {
        "base_kind": base.kind,
        "base_name": base.name,
        "base_sha256": base.sha256,
        "new_tokens": list(lora.new_tokens),
        "template": facts["template"],
        "append_eos": facts["append_eos"],
    }


def load_adapter(folder: Path) -> Adapter:
    """Loads a folder in PEFT's layout, a GGUF adapter or an APR file."""
    if folder.suffix == ".gguf" and folder.is_file():
        from graftune.weights.adapter_gguf import load_gguf_adapter

        return _finite(load_gguf_adapter(folder), folder)
    if folder.suffix == ".apr" and folder.is_file():
        return _finite(load_apr(folder), folder)
    path = folder / CONFIG
    check_inside(path)
    if not folder.exists():
        raise GraftuneError("does not exist", where=str(folder), fix="check the path")
    if not path.exists():
        raise GraftuneError(f"holds no {CONFIG}", where=str(folder), fix="give an adapter or run folder")
    values = read_json(path, "copy the adapter again")
    with sensible("its settings make", path, "copy the adapter again"):
        _refuse_unknown(values, path)
    if not (folder / TENSORS).exists():
        raise GraftuneError(f"holds no {TENSORS}", where=str(folder), fix="copy the adapter again")
    raw = safetensors_io.load(folder / TENSORS)
    ours = _read_own_facts(folder)
    tensors = {names.from_peft(name): tensor.float() for name, tensor in raw.items()}
    odd = [name for name in tensors if name.count(".") < 1 or not name.endswith(".weight")]
    if odd:
        raise GraftuneError(
            f"holds {odd[0]}, which is not a known part of an adapter", where=str(folder / TENSORS),
            fix="this cannot be loaded here",
        )  # fmt: skip
    values |= {"target_modules": ours["targets"]} if isinstance(ours.get("targets"), list) else {}
    with sensible("its settings make", path, "copy the adapter again"):
        lora, tensors, partial = _interpreted(values | {"new_tokens": ours.get("new_tokens")}, tensors, path)
    adapter = Adapter(
        folder,
        lora,
        tensors,
        str(values.get("base_model_name_or_path") or ""),
        str(ours.get("base_sha256", "")),
        "none" if ours.get("template") == "none" else "auto",
        bool(ours.get("append_eos", False)),
        str(values.get("revision") or ""),
        order="folder",
        partial=partial,
        hf_norms=True,
    )
    return _finite(adapter, folder / TENSORS)


def _read_own_facts(folder: Path) -> dict[str, Any]:
    """The contents of graftune.json; empty for a folder that another tool has written."""
    path = folder / OWN_FACTS
    check_inside(path)
    return read_json(path, "copy the adapter again") if path.exists() else {}


def _finite(adapter: Adapter, where: Path) -> Adapter:
    bad = next((name for name, tensor in adapter.tensors.items() if not is_finite(tensor)), None)
    if bad is not None:
        raise GraftuneError(f"{bad} holds values that are not finite", where=str(where), fix="train it again")
    return adapter


def _uses(what: str, path: Path) -> GraftuneError:
    return GraftuneError(f"the adapter uses {what}", where=str(path), fix="this cannot be loaded here")


def _refuse_unknown(values: dict[str, Any], path: Path) -> None:
    """Refuses settings that the engine does not support, before the tensors are read."""
    if values.get("peft_type") != "LORA":
        raise _uses(f"the method {values.get('peft_type')!r}", path)
    for key, what in _REFUSED.items():
        if values.get(key):
            raise _uses(what, path)
    if values.get("bias", "none") != "none":
        raise _uses("trained biases", path)
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING):
        raise _uses(f"{start!r}, which changes the base's weights", path)
    for key in ("r", "lora_alpha"):
        if not isinstance(values.get(key), int | float):
            raise GraftuneError(f"has no {key}", where=str(path), fix="copy the adapter again")
    targets = values.get("target_modules")
    if not isinstance(targets, str | list | None) or not all(isinstance(target, str) for target in targets or ()):
        raise _uses(f"target modules {targets!r}", path)
    if unknown := _modules_to_save(values) - NORMS - {*TABLES}:
        raise _uses(f"modules_to_save {sorted(unknown)}", path)


def _modules_to_save(values: Mapping[str, Any]) -> set[str]:
    """The names, without paths, of the modules that were trained whole (modules_to_save)."""
    return {str(module).rpartition(".")[2] for module in values.get("modules_to_save") or []}


def _interpreted(
    values: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path
) -> tuple[LoraConfig, dict[str, torch.Tensor], bool]:
    """(settings, tensors by our names, whether modules may be missing)."""
    rank, alpha, partial = values["r"], values["lora_alpha"], False
    if not 1 <= rank <= 4096 or rank != int(rank):  # PEFT sizes its modules by r, whatever the tensors' shapes
        raise ValueError(f"r {rank}")
    targets: Collection[str]
    if parameters := values.get("target_parameters"):
        wrapped = experts.wrapped_parameters(parameters) if isinstance(parameters, list) else None
        listed = values.get("target_modules") or []
        if wrapped is None or not isinstance(listed, list) or not all(map(is_target, listed)):
            raise _uses(f"adapters on the parameters {parameters!r}", path)
        for key in ("rank_pattern", "alpha_pattern", "exclude_modules", "layers_to_transform"):
            if values.get(key):
                raise _uses(f"{key} beside adapters on experts", path)
        tensors = experts.adapters_from_peft(tensors, wrapped, int(rank))
        found_paths = adapted_paths(tensors)
        missing = [name for name in listed if not any(f".{path}".endswith(f".{name}") for path in found_paths)]
        targets = [*short_targets(found_paths), *missing]  # `place_adapter` says which tensor is missing
        if not all(map(is_target, targets)):
            raise _uses(f"adapters on the parameters {parameters!r}", path)
    else:
        where = str(path.with_name(TENSORS))
        found = with_uniform_rank(tensors, values, lambda what: _uses(what, path), where)
        tensors, rank, alpha, targets, partial = found
    dropout, added = float(values.get("lora_dropout") or 0.0), values.get("new_tokens") or ()
    if not (1 <= rank <= 4096 and rank == int(rank) and math.isfinite(alpha) and alpha and 0 <= dropout < 1):
        raise ValueError(f"r {rank}, lora_alpha {alpha}, lora_dropout {dropout}")
    if not isinstance(added, list | tuple) or not all(isinstance(token, str) for token in added):
        raise ValueError("new_tokens is not a list of strings")
    lora = LoraConfig(
        rank=int(rank),
        alpha=float(alpha),
        dropout=dropout,
        rslora=bool(values.get("use_rslora")),
        targets=ordered_targets(set(targets)),
        train_norms=bool(_modules_to_save(values) & NORMS),
        new_tokens=tuple(added),
    )
    return lora, tensors, partial
