"""What stands in the header of an exported GGUF: the base's own keys where it is one, else the spec in GGUF's words.

An architecture of GGUF is not always named as the family: Mistral's models are llama to llama.cpp. A window of
attention is a thing it does not know there: the key is written all the same, for our own reader (llama.cpp passes over
keys it does not ask for), and an export of a model with one says so.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gguf.constants import GGUFValueType

from graftune.errors import GraftuneError
from graftune.exporting import gguf_file
from graftune.exporting.gguf_vocab import CONTROL, vocabulary
from graftune.model.families import FAMILIES
from graftune.model.rotary import RopeScaling, inverse_frequencies
from graftune.model.spec import ModelSpec
from graftune.weights.base import Base
from graftune.weights.gguf_io import read_gguf

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ARCHITECTURES |= {"mixtral": "llama", "qwen3_moe": "qwen3moe", "olmo3": "olmo2"}
ARCHITECTURES |= {family: family for family in ("gemma2", "gemma3", "phi3", "granite", "smollm3", "olmo2", "lfm2")}
WINDOWED = ("gemma2", "gemma3", "olmo3")  # families whose windows llama.cpp has (of phi3 it reads them and says no)
Values = dict[str, int | float | str | list[bool] | list[int]]
# True of the file that was read, not of what is written now; and templates, of which one is checked and written.
_DROPPED = ("split.", "quantize.imatrix.", "general.alignment", "tokenizer.chat_template")


def architecture(base: Base) -> str:
    if base.kind == "gguf":
        return ARCHITECTURES.get(base.spec.family, base.spec.family)
    found = ARCHITECTURES.get(base.spec.family)
    if found is None:
        raise GraftuneError(
            f"how a GGUF of the family {base.spec.family} is written is not known here", fix="export to merged or peft"
        )
    return found


def model_keys(base: Base, name: str, file_type: int, end_of_turn: int | None) -> dict[str, bytes]:
    """Of a whole model; `base` is the merged one."""
    keys = _kept(base) if base.kind == "gguf" else _written(base, name, end_of_turn)
    keys["general.file_type"] = gguf_file.number(file_type)
    keys["general.quantization_version"] = gguf_file.number(2)
    template = base.tokenizer.template
    if template is not None:
        keys["tokenizer.chat_template"] = gguf_file.text(template.checked_source())
    return keys


def _kept(base: Base) -> dict[str, bytes]:
    keys = {k: v for k, v in gguf_file.header_of(base.path).items() if not k.startswith(_DROPPED)}
    metadata = read_gguf(base.path).metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    new = [base.tokenizer.token(id) for id in range(len(tokens), base.spec.vocab)]
    if new:
        longer: dict[str, tuple[list[Any], GGUFValueType]] = {
            "tokens": (new, GGUFValueType.STRING),
            "token_type": ([CONTROL] * len(new), GGUFValueType.INT32),
            "scores": ([-1000.0] * len(new), GGUFValueType.FLOAT32),
        }
        for key, (more, kind) in longer.items():
            if (stored := f"tokenizer.ggml.{key}") in keys:
                keys[stored] = gguf_file.array(metadata[stored] + more, kind)
        if (size := f"{architecture(base)}.vocab_size") in keys:
            keys[size] = gguf_file.number(base.spec.vocab)
    return keys


def _written(base: Base, name: str, end_of_turn: int | None) -> dict[str, bytes]:
    spec, arch = base.spec, architecture(base)
    if spec.own:
        raise GraftuneError("its layers differ in size, which is not written to GGUF", where=base.name)
    general = {"architecture": arch, "type": "model", "name": name}
    keys = {f"general.{key}": gguf_file.text(value) for key, value in general.items()}
    values: Values = {
        "context_length": spec.max_positions,
        "embedding_length": spec.width,
        "block_count": spec.layers,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_width,
        "attention.value_length": spec.head_width,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "rope.dimension_count": spec.rotated or spec.head_width,
        "rope.freq_base": float(spec.rope_theta),
        "vocab_size": spec.vocab,
    }
    values |= _rope(spec) | _experts(spec) | _family(spec)
    for key, value in values.items():
        keys[f"{arch}.{key}"] = _encoded(value)
    return keys | vocabulary(base.tokenizer, spec.vocab, end_of_turn)


def _encoded(value: int | float | str | list[bool] | list[int]) -> bytes:
    if isinstance(value, list):
        return gguf_file.array(value, GGUFValueType.BOOL if isinstance(value[0], bool) else GGUFValueType.INT32)
    return gguf_file.text(value) if isinstance(value, str) else gguf_file.number(value)


def _rope(spec: ModelSpec) -> Values:
    rope = spec.rope
    if rope.kind in ("none", "llama3"):  # Llama 3's is a tensor: see rope_factors
        return {}
    if rope.kind == "longrope":  # its divisors are tensors
        attention = spec.inverse_frequencies()[1]
        return {"rope.scaling.original_context_length": rope.original_length, "rope.scaling.attn_factor": attention}
    found: Values = {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "yarn":
        found["rope.scaling.original_context_length"] = rope.original_length
        if not rope.truncate:
            raise GraftuneError("GGUF has no key for yarn without truncation", fix="export to merged or peft")
        # llama.cpp multiplies by what comes from the factor alone: only the rest is written.
        usual = 1 + 0.1 * math.log(rope.factor) if rope.factor > 1 else 1.0
        rest = spec.inverse_frequencies()[1] / usual
        if not math.isclose(rest, 1.0, rel_tol=1e-6):
            found["rope.scaling.attn_factor"] = rest
        if rope.beta_fast != 32.0:
            found["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        if rope.beta_slow != 1.0:
            found["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    return found


def _family(spec: ModelSpec) -> Values:
    """What some families have beside the rest. Which layers have a window, no rope, or another scale of scores,
    llama.cpp knows by the architecture: where a model differs from that, reading the file back tells."""
    family = FAMILIES[spec.family]
    found: Values = {}
    if spec.window_layers:
        found["attention.sliding_window"] = spec.window
        if family.windows == "configured":
            found["attention.sliding_window_pattern"] = [i in spec.window_layers for i in range(spec.layers)]
    if spec.local_theta and spec.local_theta != spec.rope_theta:
        found["rope.freq_base_swa"] = float(spec.local_theta)
    if spec.family == "gemma2" and not (spec.attention_cap and spec.logit_cap):
        raise GraftuneError("llama.cpp caps the scores of every gemma2", fix="export to merged or peft")
    if spec.attention_cap:
        found["attn_logit_softcapping"] = float(spec.attention_cap)
    if spec.logit_cap:
        found["final_logit_softcapping"] = float(spec.logit_cap)
    if spec.family == "lfm2":
        found["shortconv.l_cache"] = spec.conv_taps
        found["attention.head_count_kv"] = [0 if i in spec.conv_layers else spec.kv_heads for i in range(spec.layers)]
    if spec.family == "granite":
        found |= {
            "embedding_scale": float(spec.embedding_scale),
            "residual_scale": float(spec.residual_scale),
            "attention.scale": float(spec.score_scale),
            "logit_scale": 1.0 / spec.logit_scale,
        }
    return found


def _experts(spec: ModelSpec) -> Values:
    """Of a mixture. llama.cpp has the weights of the chosen sum to one, whatever a file says."""
    if not spec.experts:
        return {}
    if not spec.experts_normalised:
        raise GraftuneError(
            "llama.cpp weighs the experts of this family so that they sum to one, which this model does not",
            fix="export to merged or peft",
        )
    found: Values = {"expert_count": spec.experts, "expert_used_count": spec.experts_chosen}
    return found if spec.family == "mixtral" else found | {"expert_feed_forward_length": spec.ffn}


def rope_factors(base: Base) -> torch.Tensor | None:
    """The divisors of frequencies that a file carries as rope_freqs.weight."""
    if base.rope_factors is not None:
        return base.rope_factors.float()
    spec = base.spec
    if spec.rope.kind != "llama3":
        return None
    plain = inverse_frequencies(spec.head_width, spec.rope_theta, RopeScaling())[0]
    return plain / spec.inverse_frequencies()[0]
