"""Writes a whole model as a Hugging Face folder: the result of full training, or of merging.

The configuration is the base's own where it has one, so that settings only other programs read survive; a GGUF's is
written from the spec. Weights go out a few rows at a time under the names of the base's folder, a tied head once. What
a text-and-vision checkpoint has beside its text model is copied: its other tensors, its configuration and the files of
its processors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.io.files import check_inside, new_folder
from graftune.io.json_file import read_object
from graftune.model.arena import Arena
from graftune.model.families import family_of, with_text_values
from graftune.model.frozen import RowSource
from graftune.model.frozen.formats import mxfp4
from graftune.model.frozen.interface import DTYPES, NAMES, TensorRows
from graftune.weights import experts, rows, safetensors_io
from graftune.weights.base import Base, open_base
from graftune.weights.streamed import (
    UNWATCHED,
    OutputTensor,
    Watcher,
    carried_outputs,
    check_safetensors,
    write_safetensors,
)

SHARD_BYTES = 4 << 30
CONFIG = "config.json"
TOKENIZER = "tokenizer_config.json"
_PROCESSOR_KEYS = ("processor_class", "extra_special_tokens", "model_specific_special_tokens")
_PROBE = "Hello, World! It's 1234 o'clock:\n\n  \u00fcber \u65e5\u672c\u8a9e \U0001f44d"


def is_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def save_model(folder: Path, arena: Arena, base: Base, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Writes a fully trained model into a new folder beside the target and renames it, so that a reader finds the old
    model or the new one. `config` is the result of `hf_config` at the start of the run."""
    if folder.exists() and not is_model(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise GraftuneError("is in use for something else", where=str(folder), fix="save the model to a new folder")
    sources = {name: TensorRows(arena.view(name, arena.weights)) for name in arena.slots}
    write_model(folder, sources, dict.fromkeys(sources, dtype), base, config)


def write_model(
    folder: Path,
    sources: Mapping[str, RowSource],
    dtypes: Mapping[str, torch.dtype],
    base: Base,
    config: dict[str, Any],
    *,
    in_mxfp4: bool = False,
    watcher: Watcher = UNWATCHED,
) -> None:
    """Writes weights (by our names), the tokenizer and template of `base`, and `config` beside the target, reads them
    back and replaces `folder`. `in_mxfp4`: the experts' bytes are copied (`experts.is_mxfp4`)."""
    files = {name: rows.to_file(source, "folder", base.spec, name) for name, source in sources.items()}
    stored = experts.to_folder(files, base.spec, in_mxfp4)
    kinds = {
        name: source.dtype_name if source.dtype_name == "U8" else NAMES[dtypes[experts.member_of(name)]]
        for name, source in stored.items()
    }
    to_folder = family_of(base.spec).to_folder
    tensors = [OutputTensor(base.scheme.of(to_folder(n)), source, kinds[n]) for n, source in stored.items()]
    config = config | ({"quantization_config": mxfp4.QUANTISATION} if in_mxfp4 else {})
    carried = carried_outputs(base.carried_to("safetensors"))
    with new_folder(folder) as aside:
        sums = _write_weights(aside, [*tensors, *carried], watcher)
        counts = Counter(t.kind for t in tensors if len(t.source.shape) > 1 and t.kind in DTYPES)
        dtype = str(DTYPES[counts.most_common(1)[0][0]]).removeprefix("torch.")
        _write_json(aside / CONFIG, config | {"dtype": dtype, "torch_dtype": dtype})
        _write_json(aside / "generation_config.json", _generation(base))
        base.tokenizer.save(aside)
        _copy_processors(aside, base)
        check_safetensors(safetensors_io.open_folder(aside), [*tensors, *carried], sums, aside)
        _check(aside, sources, base)


def _check(folder: Path, sources: Mapping[str, RowSource], base: Base) -> None:
    """Checks that the folder opens as a base of the same shape and that its tokenizer gives the same ids."""
    back = open_base(str(folder))
    same = base.tokenizer.encode(_PROBE) == back.tokenizer.encode(_PROBE)
    same = same and set(back.carried) == set(base.carried_to("safetensors"))
    if set(back.tensors) != set(sources) or not same or back.spec.attention != base.spec.attention:
        raise GraftuneError("reads back as another model", where=str(folder), fix="report this, with its base")


def _write_weights(folder: Path, tensors: list[OutputTensor], watcher: Watcher) -> dict[str, int]:
    shards = list(_shards(tensors))
    where: dict[str, str] = {}
    sums: dict[str, int] = {}
    for number, shard in enumerate(shards, 1):
        file = safetensors_io.SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        sums |= write_safetensors(folder / file, shard, watcher)
        where |= {tensor.name: file for tensor in shard}
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors)
        _write_json(folder / safetensors_io.INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    return sums


def _shards(tensors: list[OutputTensor]) -> Iterator[list[OutputTensor]]:
    """Splits the tensors, in order, into shards of at most SHARD_BYTES."""
    shard: list[OutputTensor] = []
    left = SHARD_BYTES
    for tensor in tensors:
        if shard and tensor.nbytes > left:
            yield shard
            shard, left = [], SHARD_BYTES
        shard.append(tensor)
        left -= tensor.nbytes
    yield shard


def hf_config(base: Base) -> dict[str, Any]:
    """The base's config.json, or one written from the spec: for a GGUF, and for the text model of a text-and-vision
    configuration that is trained from scratch, without its vision tower. A GGUF whose rope no config.json can express
    is refused, before a run rather than after it."""
    if base.config_file is not None and not (base.kind == "config" and base.multimodal):
        values = with_text_values(read_object(base.config_file), {"tie_word_embeddings": base.spec.tied})
        values.pop("quantization_config", None)  # of a prequantised base: the saved model is not quantised
        values.pop("auto_map", None)  # names code of the base's repository, which the saved model does not need
        return values
    tokenizer = base.tokenizer
    return family_of(base.spec).config(base.spec, str(base.path)) | {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }


def _generation(base: Base) -> dict[str, Any]:
    file = base.folder / "generation_config.json"
    if base.config_file is not None and file.is_file():
        check_inside(file)
        return read_object(file)
    tokenizer = base.tokenizer
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.stop_ids) or tokenizer.eos_id}


def _copy_processors(folder: Path, base: Base) -> None:
    """Copies what programs need to read images with a text-and-vision checkpoint: the files of its processors, and the
    tokens in tokenizer_config.json that a text model has no use for."""
    if not base.multimodal or base.kind != "safetensors":
        return
    for file in base.folder.glob("*processor_config.json"):
        check_inside(file)
        (folder / file.name).write_bytes(file.read_bytes())
    settings = base.folder / TOKENIZER
    if not settings.is_file():
        return
    check_inside(settings)
    ours, theirs = read_object(folder / TOKENIZER), read_object(settings)
    kept = {k: v for k, v in theirs.items() if k.endswith("_token") or k in _PROCESSOR_KEYS}
    _write_json(folder / TOKENIZER, kept | ours)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
