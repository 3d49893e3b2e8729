"""The supported families of models. Only a family's own file contains the family's names.

Each file holds one group: it reads a Hugging Face configuration and GGUF metadata into a spec, writes both, and maps
the names of tensors. To add a family, add an instance of `Family` to the file of its relatives (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.gemma import GEMMA
from graftune.model.families.gemma4 import GEMMA4
from graftune.model.families.glm import GLM
from graftune.model.families.gpt_oss import GPT_OSS
from graftune.model.families.granite import GRANITE
from graftune.model.families.lfm2 import LFM2
from graftune.model.families.llama import LLAMA
from graftune.model.families.muse import MUSE
from graftune.model.families.olmo import OLMO
from graftune.model.families.qwen import QWEN
from graftune.model.families.reading import FileConfig
from graftune.model.families.refused import REFUSED
from graftune.model.spec import ModelSpec
from graftune.settings.targets import TARGETS, ordered_targets


def modules_of(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The modules that contain each projection, for tensors given by our names after `layers.N.`."""
    split = [name.rpartition(".") for name in names]
    return {target: tuple(module for module, _, name in split if name == target) for target in TARGETS}


# Of several families with one GGUF architecture, those with a `gguf_marker` come first: `from_gguf` takes the first.
_GROUPS = (LLAMA, QWEN, GEMMA, GEMMA4, GRANITE, OLMO, LFM2, GLM, MUSE, GPT_OSS)
FAMILIES = {family.name: family for group in _GROUPS for family in group}
MODEL_TYPES = {family.hf_type: family for family in FAMILIES.values()}
_NAMES = sorted({name for family in FAMILIES.values() for name in family.block_names})
# The modules that a projection may be in, over all families.
MODULES = modules_of(_NAMES)
# MODULES without those inside another one (mlp.shared_expert is inside mlp), which most families do not have.
_outermost = {
    name: tuple(module for module in within if not any(module.startswith(f"{outer}.") for outer in within))
    for name, within in MODULES.items()
}
# The norms of all families, by the last part of their names.
NORMS = {
    name.rpartition(".")[2]
    for family in FAMILIES.values()
    for name in (*family.block_names, *family.top_names)
    if name.endswith("norm")
}


def short_targets(paths: Collection[str], modules: Mapping[str, Collection[str]] = _outermost) -> tuple[str, ...]:
    """The targets of an adapter on these paths whose base is not known: a projection's name alone where the adapter is
    on all projections of that name. `modules`: those that may contain a projection; by default, in any family."""
    found: dict[str, set[str]] = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        found.setdefault(name, set()).add(module)
    whole = {name for name, within in found.items() if set(modules.get(name, ())) <= within}
    return ordered_targets(whole | {path for path in paths if path.rpartition(".")[2] not in whole})


def family_of(spec: ModelSpec) -> Family:
    return FAMILIES[spec.family]


def is_multimodal(config: FileConfig) -> bool:
    """Whether a config.json describes a text-and-vision checkpoint, whose text model is under `text_config`."""
    return any(str(config.get("model_type", "")) in family.outer for family in FAMILIES.values())


def from_config(config: FileConfig, where: str) -> ModelSpec:
    """The spec that Hugging Face's config.json describes, in the spellings of old and new checkpoints. For a
    text-and-vision checkpoint it is the spec of the text model."""
    model_type = str(config.get("model_type", ""))
    if not is_multimodal(config):
        if model_type not in MODEL_TYPES:
            raise _unknown(_refused_inside(config) or model_type, where)
        return MODEL_TYPES[model_type].spec(config, where)
    inside = {family.hf_type: family for family in FAMILIES.values() if model_type in family.outer}
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise GraftuneError("has no text_config", where=where, fix="download the model again")
    text_type = str(text.get("model_type") or "")
    if text_type in ("", model_type):  # transformers uses the outer type
        text_type = next(iter(inside))
    if text_type not in inside:
        raise _unknown(text_type, where)
    tied = config.get("tie_word_embeddings")  # transformers uses the outer value
    return inside[text_type].spec(dict(text) | ({} if tied is None else {"tie_word_embeddings": tied}), where)


def with_text_values(config: FileConfig, values: FileConfig) -> dict[str, Any]:
    """A config.json with these values set for its text model."""
    if not is_multimodal(config):
        return dict(config) | dict(values)
    changed = dict(config) | {"text_config": dict(config["text_config"]) | dict(values)}
    return changed | {key: values[key] for key in ("tie_word_embeddings",) if key in values}


def from_gguf(metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec that GGUF metadata describes. `tensors` (name -> anything with a shape) supplies what metadata lacks."""
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


def _refused_inside(config: FileConfig) -> str:
    """The model type of the text model in a checkpoint of an unknown outer type, if that text model is refused."""
    text = config.get("text_config")
    found = str(text.get("model_type", "")) if isinstance(text, Mapping) else ""
    return found if found in REFUSED and config.get("model_type") not in REFUSED else ""


def _unknown(model_type: str, where: str) -> GraftuneError:
    if model_type in REFUSED:
        what, fix = REFUSED[model_type]
        return GraftuneError(f"architecture {model_type!r} {what}", where=where, fix=fix)
    known = ", ".join(sorted(FAMILIES))
    return GraftuneError(f"architecture {model_type or 'none'!r} is not known", where=where, fix=f"known are {known}")
