"""Writes an adapter for llama.cpp, which loads it beside a GGUF of the base: A and B under the base's names, and alpha.

llama.cpp computes alpha / rank itself; rank-stabilised adapters (alpha / sqrt(rank)) get an alpha with the same result.
The file can hold only A's and B's: an adapter that also has norms or tokens is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.exporting.gguf_file import encoded, write_gguf
from graftune.model.families import family_of
from graftune.model.frozen.interface import TensorRows
from graftune.model.lora import scaling
from graftune.weights import adapter_gguf, experts, rows
from graftune.weights.adapter_fit import Adapter
from graftune.weights.base import Base
from graftune.weights.streamed import OutputTensor

TYPES = ("F32", "F16", "BF16")


def lora_tensors(adapter: Adapter, base: Base, kind: str) -> list[OutputTensor]:
    """The adapter's A's and B's under GGUF's names. `adapter` is in the engine's order."""
    found = []
    for ours, value in adapter.tensors.items():
        if experts.is_expert_adapter(ours):
            scale = experts.scale_in_gguf(ours, base.spec, base.tensors)
            stacks = experts.adapters_to_gguf(ours, value if scale is None else value * scale, base.spec)
            found += [
                OutputTensor(name, TensorRows(stack.float().contiguous()), kind) for name, stack in stacks.items()
            ]
            continue
        stem, _, matrix = ours.removesuffix(".weight").rpartition(".")
        stored_as = family_of(base.spec).to_gguf(f"{stem}.weight") if matrix in ("lora_A", "lora_B") else ()
        if not stored_as:
            raise GraftuneError(
                f"the adapter also holds {ours}, which an adapter in GGUF has no place for",
                where=str(adapter.folder),
                fix="export to gguf, which merges it",
            )
        value = rows.adapter_to_file(value, "gguf", base.spec, ours)
        sizes = rows.gguf_rows(base.spec, ours, len(value), len(stored_as))
        parts = value.split(sizes) if matrix == "lora_B" else [value] * len(stored_as)
        for name, part in zip(stored_as, parts, strict=True):
            found.append(OutputTensor(f"{name}.{matrix.lower()}", TensorRows(part.float().contiguous()), kind))
    return found


def write_lora_gguf(path: Path, adapter: Adapter, base: Base, kind: str, name: str) -> None:
    lora = adapter.lora
    values: dict[str, Any] = {
        "general.architecture": family_of(base.spec).arch,
        "general.type": "adapter",
        "general.name": name,
        "adapter.type": "lora",
        adapter_gguf.BASE: base.reference,
        adapter_gguf.BASE_SHA256: base.sha256,
        adapter_gguf.REVISION: adapter.revision,
        adapter_gguf.TEMPLATE: adapter.template,
        "adapter.lora.alpha": float(scaling(lora) * lora.rank),
        adapter_gguf.APPEND_EOS: adapter.append_eos,
        "general.file_type": {"F32": 0, "F16": 1, "BF16": 32}[kind],
    }
    keys = {key: encoded(value) for key, value in values.items()}
    write_gguf(path, keys, lora_tensors(adapter, base, kind))
