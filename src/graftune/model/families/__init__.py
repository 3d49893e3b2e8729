"""The families of models that are known. A family file is the only place that knows its family's names.

Each file holds one group: it reads a Hugging Face configuration and GGUF metadata into a spec, writes both, and maps
the names of tensors. To add a family, add an instance of `Family` to the file of its relatives (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.exaone import EXAONE
from graftune.model.families.gemma import GEMMA, REFUSED
from graftune.model.families.granite import GRANITE
from graftune.model.families.lfm2 import LFM2
from graftune.model.families.llama import LLAMA
from graftune.model.families.olmo import OLMO
from graftune.model.families.phi import PHI
from graftune.model.families.qwen import QWEN
from graftune.model.spec import ModelSpec
from graftune.settings.config import TARGETS

# Of several with one architecture, those with a marker come first.
FAMILIES = {family.name: family for family in (*LLAMA, *QWEN, *GEMMA, *PHI, *GRANITE, *OLMO, *LFM2, *EXAONE)}
MODEL_TYPES = {family.hf_type: family for family in FAMILIES.values()}
_NAMES = sorted({name for family in FAMILIES.values() for name in family.block_names})
# The modules that a projection may be in, over all families.
MODULES = {
    target: tuple(name.rpartition(".")[0] for name in _NAMES if name.rpartition(".")[2] == target) for target in TARGETS
}
# The norms of all families, by the last part of their names.
NORMS = {
    name.rpartition(".")[2]
    for family in FAMILIES.values()
    for name in (*family.block_names, *family.top_names)
    if name.endswith("norm")
}


def family_of(spec: ModelSpec) -> Family:
    return FAMILIES[spec.family]


def from_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec that Hugging Face's config.json describes, in the spellings of old and new checkpoints."""
    model_type = str(config.get("model_type", ""))
    if model_type not in MODEL_TYPES:
        raise _unknown(model_type, where)
    return MODEL_TYPES[model_type].spec(config, where)


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec that GGUF metadata describes. `tensors` (name -> anything with a shape) decides what it leaves open."""
    arch = str(metadata.get("general.architecture", ""))
    found = [family for family in FAMILIES.values() if family.arch == arch]
    if not found:
        raise _unknown(arch, where)
    if "token_embd.weight" not in tensors:
        raise GraftuneError("holds no model weights (no token_embd.weight)", where=where, fix="give a full model file")
    family = next(f for f in found if not f.gguf_marker or metadata.get(f"{arch}.{f.gguf_marker}"))
    return family.from_gguf(metadata, tensors, where)


def by_architecture(arch: str) -> Family | None:
    """A family of one of GGUF's architectures: those that share one have the same names."""
    return next((family for family in FAMILIES.values() if family.arch == arch), None)


def _unknown(model_type: str, where: str) -> GraftuneError:
    if model_type in REFUSED:
        what, fix = REFUSED[model_type]
        return GraftuneError(what, where=where, fix=fix)
    known = ", ".join(sorted(FAMILIES))
    return GraftuneError(f"architecture {model_type or 'none'!r} is not known", where=where, fix=f"known are {known}")
