"""Writes a whole model as a Hugging Face folder: the result of full training, or of merging.

The configuration is the base's own where it has one, so that settings only other programs read survive; a GGUF's is
written from the spec. Weights go out a few rows at a time under Hugging Face's names, a tied head once.
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
from graftune.model.families import FAMILIES, MODEL_TYPES
from graftune.model.frozen import RowSource
from graftune.model.lora import Arena
from graftune.model.rotary import RopeScaling, inverse_frequencies
from graftune.model.spec import ModelSpec
from graftune.weights import experts, names, rows, safetensors_io
from graftune.weights.base import Base, open_base
from graftune.weights.rows import NAMES, Held
from graftune.weights.streamed import UNWATCHED, OutputTensor, Watcher, check_safetensors, write_safetensors

SHARD_BYTES = 4 << 30
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PROBE = "Hello, World! It's 1234 o'clock:\n\n  \u00fcber \u65e5\u672c\u8a9e \U0001f44d"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def is_model(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def save_model(
    folder: Path,
    arena: Arena,
    base: Base,
    config: dict[str, Any],
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a fully trained model into a new folder beside the target and renames it, so that a reader finds the old
    model or the new one. `config` is the result of `hf_config` at the start of the run."""
    if folder.exists() and not is_model(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise GraftuneError("is in use for something else", where=str(folder), fix="save the model to a new folder")
    sources = {name: Held(arena.view(name, arena.weights)) for name in arena.slots}
    write_model(folder, sources, dict.fromkeys(sources, dtype), base, config, shard_bytes=shard_bytes)


def write_model(
    folder: Path,
    sources: Mapping[str, RowSource],
    dtypes: Mapping[str, torch.dtype],
    base: Base,
    config: dict[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
    watcher: Watcher = UNWATCHED,
) -> None:
    """Weights by our names, the tokenizer and template of `base`, and `config`: written aside, read back, put in place.
    What is at `folder` is replaced."""
    tensors = [
        OutputTensor(names.to_hf(experts.to_folder(name, base.spec)), source, NAMES[dtypes[name]])
        for name, source in rows.to_hf_norms(sources, base.spec).items()
    ]
    with new_folder(folder) as aside:
        sums = _write_weights(aside, tensors, shard_bytes, watcher)
        counts = Counter(t.kind for t in tensors if len(t.source.shape) > 1)
        dtype = _DTYPES[counts.most_common(1)[0][0]]
        _write_json(aside / CONFIG, config | {"dtype": dtype, "torch_dtype": dtype})
        _write_json(aside / "generation_config.json", _generation(base))
        base.tokenizer.save(aside)
        check_safetensors(safetensors_io.open_folder(aside), tensors, sums, aside)
        _check(aside, sources, base)


def _check(folder: Path, sources: Mapping[str, RowSource], base: Base) -> None:
    """The folder opens as a base of the same shape, and its tokenizer gives the same ids."""
    back = open_base(str(folder))
    same = base.tokenizer.encode(_PROBE) == back.tokenizer.encode(_PROBE)
    if set(back.tensors) != set(sources) or not same or back.spec.head_width != base.spec.head_width:
        raise GraftuneError("reads back as another model", where=str(folder), fix="report this, with its base")


def _write_weights(folder: Path, tensors: list[OutputTensor], shard_bytes: int, watcher: Watcher) -> dict[str, int]:
    shards = list(_shards(tensors, shard_bytes))
    where: dict[str, str] = {}
    sums: dict[str, int] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        sums |= write_safetensors(folder / file, shard, watcher)
        where |= {tensor.name: file for tensor in shard}
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors)
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    return sums


def _shards(tensors: list[OutputTensor], limit: int) -> Iterator[list[OutputTensor]]:
    """Splits the tensors, in order, into shards of at most `limit` bytes."""
    shard: list[OutputTensor] = []
    left = limit
    for tensor in tensors:
        if shard and tensor.nbytes > left:
            yield shard
            shard, left = [], limit
        shard.append(tensor)
        left -= tensor.nbytes
    yield shard


def hf_config(base: Base) -> dict[str, Any]:
    """Its config.json. A GGUF whose rope no configuration can say is refused, before a run rather than after it."""
    if base.config_file is not None:
        values = read_object(base.config_file) | {"tie_word_embeddings": base.spec.tied}
        values.pop("quantization_config", None)  # of a prequantised base: what is saved is not
        values.pop("auto_map", None)  # names code of the base's repository, which the saved model does not need
        return values
    spec, scaling = base.spec, _rope(base.spec, base)
    if spec.own:
        raise GraftuneError("its layers differ in size, which is not written to a config.json", where=base.name)
    return (
        {
            "architectures": [FAMILIES[spec.family].hf_class],
            "model_type": {family: kind for kind, family in MODEL_TYPES.items()}.get(spec.family, spec.family),
            "vocab_size": spec.vocab,
            "hidden_size": spec.width,
            "intermediate_size": spec.ffn,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_width,
            "hidden_act": "silu" if spec.activation == "silu" else "gelu_pytorch_tanh",
            "rms_norm_eps": spec.norm_eps,
            "max_position_embeddings": spec.max_positions,
            "rope_theta": spec.rope_theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": spec.tied,
            "use_sliding_window": False,
            "sliding_window": None,
            "attention_bias": False,
            "bos_token_id": base.tokenizer.bos_id,
            "eos_token_id": base.tokenizer.eos_id,
            "pad_token_id": base.tokenizer.pad_id,
        }
        | _family(spec, scaling)
        | _experts(spec)
    )


def _family(spec: ModelSpec, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """What some families have beside the rest."""
    found: dict[str, Any] = {}
    windows = ["sliding_attention" if i in spec.window_layers else "full_attention" for i in range(spec.layers)]
    if FAMILIES[spec.family].windows == "configured" and spec.window_layers:
        found |= {"use_sliding_window": True, "layer_types": windows}
    if spec.window_layers:
        found["sliding_window"] = spec.window
    if FAMILIES[spec.family].windows == "alternate":
        found["layer_types"] = windows
    if spec.family in ("gemma2", "gemma3"):
        found |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(spec.score_scale**-2),
            "attn_logit_softcapping": spec.attention_cap or None,
            "final_logit_softcapping": spec.logit_cap or None,
        }
    if spec.local_theta:  # by kind of layer for newer readers; older ones know the bases by these names
        scaled = {"rope_theta": spec.rope_theta} | (scaling or {"rope_type": "default"})
        local = {"rope_type": "default", "rope_theta": spec.local_theta}
        found["rope_parameters"] = {"full_attention": scaled, "sliding_attention": local}
        found["rope_local_base_freq"] = spec.local_theta
    if spec.family == "granite":
        found |= {
            "embedding_multiplier": spec.embedding_scale,
            "attention_multiplier": spec.score_scale,
            "residual_multiplier": spec.residual_scale,
            "logits_scaling": 1.0 / spec.logit_scale,
        }
    if spec.family == "lfm2":
        found |= {
            "norm_eps": spec.norm_eps,
            "block_auto_adjust_ff_dim": False,
            "conv_bias": False,
            "conv_L_cache": spec.conv_taps,
            "layer_types": ["conv" if i in spec.conv_layers else "full_attention" for i in range(spec.layers)],
        }
    if spec.family == "smollm3":
        found["no_rope_layers"] = [int(i not in spec.unrotated_layers) for i in range(spec.layers)]
    if spec.rotated:
        found["partial_rotary_factor"] = spec.rotated / spec.head_width
    if spec.rope.kind == "longrope":
        found["original_max_position_embeddings"] = spec.rope.original_length
    return found


def _experts(spec: ModelSpec) -> dict[str, Any]:
    if not spec.experts:
        return {}
    found: dict[str, Any] = {"num_experts_per_tok": spec.experts_chosen}
    if spec.family == "mixtral":
        return found | {"num_local_experts": spec.experts}
    return found | {
        "num_experts": spec.experts,
        "moe_intermediate_size": spec.ffn,
        "norm_topk_prob": spec.experts_normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope(spec: ModelSpec, base: Base) -> dict[str, Any] | None:
    rope = spec.rope
    if base.rope_factors is not None:
        rope = _llama3_of(spec, base)
    if rope.kind == "none":
        return None
    values: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "longrope":
        attention = spec.inverse_frequencies()[1]
        return {
            "rope_type": "longrope",
            "type": "longrope",
            "short_factor": list(rope.short),
            "long_factor": list(rope.long),
            "attention_factor": attention,
        }
    if rope.kind == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        _, attention = spec.inverse_frequencies()
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "attention_factor": attention}
    if rope.kind != "linear":
        values["original_max_position_embeddings"] = rope.original_length
    return values


def _llama3_of(spec: ModelSpec, base: Base) -> RopeScaling:
    """GGUF holds what Llama 3's scaling came to, one divisor a frequency: find the settings that give it."""
    assert base.rope_factors is not None
    plain = inverse_frequencies(spec.head_width, spec.rope_theta, RopeScaling())[0]
    wanted = plain / base.rope_factors
    for power in range(5, 21):
        factor = float(base.rope_factors.max())
        tried = RopeScaling("llama3", factor=factor, original_length=1 << power)
        found = inverse_frequencies(spec.head_width, spec.rope_theta, tried)[0]
        if torch.allclose(found, wanted, rtol=1e-4, atol=0):
            return tried
    raise GraftuneError(
        "its rope frequencies have no name in a Hugging Face configuration, so the model could not be saved",
        where=str(base.path),
        fix="train the model from its Hugging Face folder, or with method lora",
    )


def _generation(base: Base) -> dict[str, Any]:
    file = base.folder / "generation_config.json"
    if base.config_file is not None and file.is_file():
        check_inside(file)
        return read_object(file)
    tokenizer = base.tokenizer
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.stop_ids) or tokenizer.eos_id}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
