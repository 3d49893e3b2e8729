"""An adapter in memory: its tensors by our names, and how they are fitted to a base and copied into the arena."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from graftune.errors import GraftuneError
from graftune.model.arena import Arena
from graftune.model.frozen import RowSource
from graftune.model.lora import build_arena
from graftune.model.spec import ModelSpec
from graftune.settings.sections import LoraConfig
from graftune.weights import experts, rows
from graftune.weights.base import Base, with_new_tokens
from graftune.weights.uniform_rank import filled

TABLES = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class Adapter:
    """An adapter read from disk: its settings, its tensors by our names, and the base that it names."""

    folder: Path  # or the file, where it is one
    lora: LoraConfig
    tensors: Mapping[str, torch.Tensor]
    base_name: str
    base_sha256: str
    template: str  # "none" if it was trained on plain prompt ++ response, else "auto"
    append_eos: bool
    revision: str  # of a base from the Hub
    order: str = ""  # of B's rows and A's columns: that of folder or gguf files (rows.py); "": the engine's
    partial: bool = False  # whether its targets may have no A and B in some layers
    hf_norms: bool = field(default=False, compare=False)  # norms are Hugging Face's: Gemma's less one


def fitted(adapter: Adapter, spec: ModelSpec, tensors: Mapping[str, RowSource] = MappingProxyType({})) -> Adapter:
    """The adapter as the engine uses it: A and B for every layer, in the order of its products, and norms as factors
    to multiply by. `tensors`: the base's, which adapters on experts in a GGUF may depend on."""
    if adapter.partial:
        adapter = dataclasses.replace(adapter, tensors=filled(adapter.tensors, spec, adapter.lora), partial=False)
    if adapter.hf_norms:
        shifts = {name: spec.norm_offset(name) for name in adapter.tensors}
        shifted = {name: t + shifts[name] if shifts[name] else t for name, t in adapter.tensors.items()}
        adapter = dataclasses.replace(adapter, tensors=shifted, hf_norms=False)
    if not adapter.order:
        return adapter
    found = {name: rows.adapter_from_file(t, adapter.order, spec, name) for name, t in adapter.tensors.items()}
    for name in found if adapter.order == "gguf" else ():
        scale = experts.scale_in_gguf(name, spec, tensors)
        found[name] = found[name] if scale is None else found[name] / scale
    return dataclasses.replace(adapter, tensors=found, order="")


def adapted_paths(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The projections that have adapters, by their paths."""
    found: set[str] = set()
    for name in tensors:
        stem, _, matrix = name.removesuffix(".weight").rpartition(".")
        if matrix == "lora_A" and stem.count(".") > 1:
            path = stem.split(".", 2)[2]
            found |= experts.paths_of(path) if experts.is_expert_adapter(name) else {path}
    return found


def check_tables(adapter: Adapter, base: Base) -> None:
    """Refuses an adapter with a trained embedding or head: the engine takes only the rows of added tokens from them."""
    for module in TABLES:
        table, source = adapter.tensors.get(f"{module}.weight"), base.tensors.get(f"{module}.weight")
        if source is None and base.spec.tied:
            source = base.tensors.get("embed_tokens.weight")
        if table is None or source is None:
            continue
        if not adapter.lora.new_tokens or _differs(table, source, base.spec.vocab):
            raise GraftuneError(
                f"the adapter uses modules_to_save with a trained {module}",
                where=str(adapter.folder),
                fix="export it to merged and take that as the base",
            )


def _differs(table: torch.Tensor, source: RowSource, count: int) -> bool:
    """Whether rows were trained, not only rounded (a table is stored as the run held it, at worst in bf16)."""
    if len(table) < count or table.shape[1:] != tuple(source.shape[1:]):
        return False  # refused by its shape
    for start in range(0, count, 4096):
        stop = min(start + 4096, count)
        own = source.read(start, stop).float()
        if bool(((table[start:stop] - own).abs() > 0.01 * own.abs() + 1e-6).any()):
            return True
    return False


def check_fits(adapter: Adapter, base: Base) -> None:
    """Refuses an adapter that was made for another base, without memory for its arena."""
    base = with_new_tokens(base, adapter.lora.new_tokens)
    place_adapter(adapter, build_arena(base.spec, adapter.lora, torch.device("meta"), torch.float32), base)


def place_adapter(adapter: Adapter, arena: Arena, base: Base) -> None:
    """Copies the tensors into the arena, whose norms hold the base's values. A tensor that is missing, left over or of
    another shape is an error."""
    check_tables(adapter, base)
    adapter, vocab = fitted(adapter, base.spec, base.tensors), base.spec.vocab
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
                fix="give its own base",
            )
        arena.view(name, arena.weights).copy_(tensor)
    if left:
        raise GraftuneError(
            f"holds {len(left)} tensors this base has no place for, such as {next(iter(left))}",
            where=str(adapter.folder),
            fix="give the base it was made for",
        )
    arena.publish()
