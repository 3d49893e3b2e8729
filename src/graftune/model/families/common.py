"""The class `Family`, which reads and writes the files of a family; each family is an instance of it.

The common form is a configuration with Hugging Face's keys. config.json is one, GGUF metadata is converted to one by a
table of keys, and a spec is written as one, from which the same table derives GGUF's keys. A plain family is an
instance with other field values; a family that computes something of its own overrides the method that reads it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.model.families import rope
from graftune.model.families.reading import ACTIVATIONS, FileConfig, Getter, check_supported
from graftune.model.feed_forward.experts import ExpertsSpec
from graftune.model.feed_forward.gated import GatedSpec
from graftune.model.layer_spec import BranchPart, BranchSpec, LayerSpec, NormSpec
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.part import FeedForwardSpec, MixerSpec
from graftune.model.rotary import RopeSpec
from graftune.model.spec import EmbeddingSpec, HeadSpec, ModelSpec

# The names of a layer's norms: before and after the mixer, before and after the feed-forward; None: no such norm.
BEFORE = ("input_layernorm", None, "post_attention_layernorm", None)
# Hugging Face's keys -> GGUF's, without the prefix of the architecture's name.
KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
}
# Our tensor names (Hugging Face's without the prefix `model.` or `model.layers.N.`) -> GGUF's.
BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


@dataclass(frozen=True)
class Family:
    name: str
    hf_class: str
    model_type: str = ""  # Hugging Face's name for it; "": `name`
    architecture: str = ""  # GGUF's name for it; "": `name`
    outer: tuple[str, ...] = ()  # model types of text-and-vision checkpoints whose text_config is of this family
    gguf_marker: str = ""  # a key that distinguishes its GGUFs from others of the same architecture
    defaults: FileConfig = field(default_factory=dict)  # transformers' defaults for keys that a configuration omits
    norms: tuple[str | None, ...] = BEFORE
    norm_offset: float = 0.0
    final_norm: str = "norm"
    bias: bool = False  # of queries, keys and values
    qk_norm: bool = False
    wide_qk_norm: bool = False  # over all heads together
    attention_fields: Mapping[str, Any] = field(default_factory=dict)  # further values of AttentionSpec
    fused: bool = False  # checkpoints hold q, k and v as one projection
    mlp: str = "mlp"  # the feed-forward's module on disk
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # on disk; two names where gate and up are one
    windows: str = "none"  # layers with a window where layer_types is missing: none | all | configured | alternate
    pattern: int = 0  # alternate: every pattern-th layer has no window
    local_rope: bool = False  # layers with a window have a rope of their own, which is never scaled
    partial_rope: bool = False  # rope may rotate a part of each head
    # PEFT reads names such as down_proj as the experts' in every layer, so dense ones are target_parameters instead.
    dense_by_parameter: bool = False
    truncates_yarn: bool = True  # readers of the family's GGUFs truncate yarn; GGUF has no key for it
    experts_key: str = ""  # how many experts a mixture has; "": the family is dense
    experts_by_key: bool = True  # False: the family has models with experts and models without
    keys: Mapping[str, str] = field(default_factory=dict)  # further entries of KEYS
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # where GGUF's names are not those of BLOCK and TOP
    # Parts of our tensor names that folders spell otherwise -> the folders' spelling; N stands for a number.
    folder_names: Mapping[str, str] = field(default_factory=dict)
    gguf_parts: Mapping[str, str] = field(default_factory=dict)  # first -> second GGUF tensor of rows that it splits
    interleaved: tuple[str, ...] = ()  # AttentionSpec.interleaved
    prediction_key: str = ""  # how many layers after the last one predict further tokens; "": folders have none there
    in_llama_cpp: bool = True
    windows_in_llama_cpp: bool = False
    layers_of_70b: int = 0  # llama.cpp's quantiser treats a model with so many layers as one of 70B parameters

    @property
    def arch(self) -> str:
        return self.architecture or self.name

    @property
    def hf_type(self) -> str:
        return self.model_type or self.name

    @property
    def experts_module(self) -> str:
        return self.mlp

    @property
    def all_keys(self) -> dict[str, str]:
        found = KEYS | dict(self.keys)
        if self.experts_key:
            found |= {self.experts_key: "expert_count", "num_experts_per_tok": "expert_used_count"}
        return found

    # Reading a configuration

    def spec(self, config: FileConfig, where: str, spelled: Mapping[str, str] | None = None) -> ModelSpec:
        """The spec that a configuration describes. `spelled`: names of its keys in the file, for messages."""
        check_supported(config, where, bias=self.bias)
        get = Getter(self.completed(config), where, spelled or {})
        norms = self.layer_norms(get)
        scale = get.number("residual_multiplier", 1.0)
        kinds: dict[tuple[MixerSpec, tuple[FeedForwardSpec, ...]], LayerSpec] = {}
        parts = list(zip(self.mixers(get), self.feed_forwards(get), strict=True))
        for mixer, feed_forwards in dict.fromkeys(parts):
            branches = (BranchPart(mixer, *norms[:2]),), tuple(BranchPart(f, *norms[2:]) for f in feed_forwards)
            kinds[mixer, feed_forwards] = LayerSpec(tuple(BranchSpec(each, scale=scale) for each in branches))
        return ModelSpec(
            self.name,
            self.embedding(get),
            tuple(kinds[each] for each in parts),
            HeadSpec(
                self.head_norm(get),
                bool(get.config.get("tie_word_embeddings", False)),
                1.0 / get.number("logits_scaling", 1.0),
                get.number("final_logit_softcapping", 0.0),
            ),
            int(get.number("max_position_embeddings", 2048)),
        )

    def layer_norms(self, get: Getter) -> tuple[NormSpec | None, ...]:
        """A layer's norms: before and after the mixer, before and after the feed-forward."""
        width, eps = get.whole("hidden_size"), get.number("rms_norm_eps", 1e-6)
        return tuple(None if name is None else NormSpec(name, width, eps, self.norm_offset) for name in self.norms)

    def head_norm(self, get: Getter) -> NormSpec:
        width, eps = get.whole("hidden_size"), get.number("rms_norm_eps", 1e-6)
        return NormSpec(self.final_norm, width, eps, self.norm_offset)

    def completed(self, config: FileConfig) -> dict[str, Any]:
        """The configuration with defaults for omitted keys, and with the key names that all families share."""
        return dict(self.defaults) | dict(config)

    def embedding(self, get: Getter) -> EmbeddingSpec:
        scale = get.number("embedding_multiplier", 1.0)
        return EmbeddingSpec(get.whole("vocab_size"), get.whole("hidden_size"), scale)

    def attention(self, get: Getter) -> AttentionSpec:
        width, heads = get.whole("hidden_size"), get.whole("num_attention_heads")
        kv_heads = int(get.number("num_key_value_heads", heads))
        if kv_heads <= 0 or heads % kv_heads:
            raise GraftuneError(
                f"{heads} heads do not divide by {kv_heads} key heads", where=get.where, fix="download the model again"
            )
        head_width = self.head_width(get)
        found = AttentionSpec(
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            norm_eps=get.number("rms_norm_eps", 1e-6),
            score_scale=get.number("attention_multiplier", head_width**-0.5),
            score_cap=get.number("attn_logit_softcapping", 0.0),
            rope=self.ropes(get, head_width)[0],
            bias=self.bias,
            interleaved=self.interleaved,
            fused=self.fused,
            qk_norm=self.qk_norm,
            wide_qk_norm=self.wide_qk_norm,
            norm_offset=self.norm_offset,
        )
        return replace(found, **self.attention_fields)

    def head_width(self, get: Getter) -> int:
        return int(get.config.get("head_dim") or get.whole("hidden_size") // get.whole("num_attention_heads"))

    def ropes(self, get: Getter, head_width: int) -> tuple[RopeSpec, RopeSpec]:
        """The rope of the layers without a window, and that of the layers with one."""
        return rope.read_ropes(get.config, head_width, get.where, partial=self.partial_rope, local=self.local_rope)

    def mixers(self, get: Getter) -> list[MixerSpec]:
        """The mixer of each layer."""
        attention = self.attention(get)
        local = self.ropes(get, attention.head_width)[1]
        windowed = replace(attention, window=int(get.config.get("sliding_window") or 0), rope=local)
        return [windowed if has_window else attention for has_window in self.windowed(get)]

    def windowed(self, get: Getter) -> list[bool]:
        config, layers = get.config, get.layers()
        off = self.windows == "configured" and not config.get("use_sliding_window")
        if not config.get("sliding_window") or self.windows == "none" or off:
            return [False] * layers
        if config.get("layer_types"):
            return [kind == "sliding_attention" for kind in get.by_layer(config["layer_types"])]
        if self.windows == "alternate":
            step = int(config.get("sliding_window_pattern") or self.pattern)
            return [(index + 1) % step != 0 for index in range(layers)]
        first = int(config.get("max_window_layers", 0)) if self.windows == "configured" else 0
        return [index >= first for index in range(layers)]

    def feed_forwards(self, get: Getter) -> list[tuple[FeedForwardSpec, ...]]:
        """The parallel parts of each layer's feed-forward branch."""
        return [(self.dense(get),)] * get.layers()

    def dense(self, get: Getter) -> GatedSpec:
        """The feed-forward of a layer without experts."""
        width, ffn = get.whole("hidden_size"), get.whole("intermediate_size")
        return GatedSpec(width, ffn, get.activation(), self.mlp, self.mlp_names)

    # Reading GGUF metadata

    def from_gguf(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> ModelSpec:
        spelled = {ours: f"{self.arch}.{theirs}" for ours, theirs in self.all_keys.items()}
        return self.spec(self.gguf_config(metadata, tensors, where), where, spelled)

    def prediction_layers(self, config: FileConfig) -> int:
        """The number of layers that a folder stores after the model's own to predict further tokens."""
        return int(config.get(self.prediction_key) or 0) if self.prediction_key else 0

    def prediction_blocks(self, metadata: FileConfig) -> int:
        """The number of a GGUF's last blocks that predict further tokens; they are not layers of the model."""
        return int(metadata.get(f"{self.arch}.nextn_predict_layers") or 0)

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        """GGUF metadata as a configuration; `tensors` (name -> anything with a shape) supplies what metadata lacks."""
        if self.experts_by_key and bool(metadata.get(f"{self.arch}.expert_count")) != bool(self.experts_key):
            what = "has no experts" if self.experts_key else "is a mixture of experts"
            raise GraftuneError(
                f"{what}, other than models of {self.arch}", where=where, fix="this variant is not supported"
            )
        stored = {ours: metadata.get(f"{self.arch}.{theirs}") for ours, theirs in self.all_keys.items()}
        config = {ours: value for ours, value in stored.items() if value is not None}
        spelled = {ours: f"{self.arch}.{theirs}" for ours, theirs in self.all_keys.items()}
        get, blocks = Getter(config, where, spelled), self.prediction_blocks(metadata)
        if blocks:
            config["num_hidden_layers"] = get.layers() - blocks
        config |= {
            "vocab_size": int(tensors["token_embd.weight"].shape[0]),
            "tie_word_embeddings": "output.weight" not in tensors,
            "max_position_embeddings": int(get.number("max_position_embeddings", 2048)),
            "rms_norm_eps": get.number("rms_norm_eps", 1e-5),
            "rope_theta": get.number("rope_theta", 10_000.0),
            "sliding_window": config.get("sliding_window"),
        }
        head_width = self.head_width(Getter(config, where, spelled))
        rotated = metadata.get(f"{self.arch}.rope.dimension_count", head_width)
        config["partial_rotary_factor"] = rotated / head_width
        config.setdefault("attention_multiplier", head_width**-0.5)
        config["rope_scaling"] = rope.gguf_scaling(metadata, tensors, self.arch, head_width, where)
        pattern = metadata.get(f"{self.arch}.attention.sliding_window_pattern")
        if isinstance(pattern, list):
            windows = pattern[: len(pattern) - blocks]
            kinds = ["sliding_attention" if windowed else "full_attention" for windowed in windows]
            return config | {"layer_types": kinds, "use_sliding_window": True}
        return config | {"sliding_window_pattern": pattern}

    # Writing

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        """The configuration that describes a spec, without the tokenizer's values."""
        attention, feed_forward = uniform(spec, where)
        unit = feed_forward.activation if isinstance(feed_forward, GatedSpec) else feed_forward.unit
        full, local = self.written_ropes(spec)
        scaling = rope.written_scaling(full, where)
        windows = [0 if layer.mixer.attention is None else layer.mixer.attention.window for layer in spec.layers]
        found: dict[str, Any] = {
            "architectures": [self.hf_class],
            "model_type": self.hf_type,
            "vocab_size": spec.vocab,
            "hidden_size": spec.width,
            "intermediate_size": feed_forward.ffn,
            "num_hidden_layers": len(spec.layers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.kv_heads,
            "head_dim": attention.head_width,
            "hidden_act": next((theirs for theirs, ours in ACTIVATIONS.items() if ours == unit), "silu"),
            "rms_norm_eps": attention.norm_eps,
            "max_position_embeddings": spec.max_positions,
            "rope_theta": full.theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": spec.tied,
            "use_sliding_window": self.windows == "configured" and any(windows),
            "sliding_window": max(windows) or None,
            "attention_bias": self.bias,
        }
        if self.windows == "alternate" or found["use_sliding_window"]:
            found["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
        if self.local_rope:  # newer readers want one entry for each kind of layer, older ones rope_local_base_freq
            scaled = {"rope_theta": full.theta} | (scaling or {"rope_type": "default"})
            own = {"rope_type": "default", "rope_theta": local.theta}
            found["rope_parameters"] = {"full_attention": scaled, "sliding_attention": own}
            found["rope_local_base_freq"] = local.theta
        own_keys = {
            "embedding_multiplier": float(spec.embedding.scale),
            "attention_multiplier": float(attention.score_scale),
            "residual_multiplier": float(spec.layers[0].branches[0].scale),
            "logits_scaling": 1.0 / spec.head.logit_scale,
            "attn_logit_softcapping": attention.score_cap or None,
            "final_logit_softcapping": spec.head.logit_cap or None,
        }
        found |= {key: value for key, value in own_keys.items() if key in self.keys}
        if full.width != attention.head_width:
            found["partial_rotary_factor"] = full.width / attention.head_width
        if full.scaling.kind == "longrope":
            found["original_max_position_embeddings"] = full.scaling.original_length
        return found

    def written_ropes(self, spec: ModelSpec) -> tuple[RopeSpec, RopeSpec]:
        """The ropes to write: of the layers without a window, and of those with one."""
        enabled = [rope for rope in spec.ropes if rope.enabled] or list(spec.ropes)
        if not self.local_rope:
            return enabled[0], enabled[0]
        mixers = [kind.mixer for kind in spec.kinds if isinstance(kind.mixer, AttentionSpec)]
        full = next((mixer.rope for mixer in mixers if not mixer.window), enabled[0])
        return full, next((mixer.rope for mixer in mixers if mixer.window), full)

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        """The GGUF metadata of a model, without the architecture's prefix. llama.cpp mostly derives from the
        architecture which layers have a window, no rope or another scale of scores; if a model differs from that,
        the export notices when it reads the file back."""
        full, _ = self.written_ropes(spec)
        config = self.config(spec, where)
        attention, _ = uniform(spec, where)
        found = {theirs: config[ours] for ours, theirs in self.all_keys.items() if config.get(ours) is not None}
        if config.get("rope_local_base_freq") == full.theta:
            del found["rope.freq_base_swa"]
        if config["use_sliding_window"]:
            kinds = config["layer_types"]
            found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
        return found | {
            "attention.value_length": attention.head_width,
            "rope.dimension_count": full.width,
            "vocab_size": spec.vocab,
            **rope.gguf_keys(full, self.truncates_yarn),
        }

    def gguf_vision_keys(self, config: FileConfig) -> dict[str, Any]:
        """GGUF keys that come from config.json, not from the spec: a text model computes the same without them, but a
        vision tower beside it needs them."""
        return {}

    def gguf_tensors(self, spec: ModelSpec) -> dict[str, torch.Tensor]:
        """Tensors that only a GGUF has, computed from values of the spec."""
        return rope.gguf_tensors(self.written_ropes(spec)[0])

    def is_gguf_only(self, name: str) -> bool:
        return name in rope.GGUF_TENSORS

    def is_unused(self, name: str, spec: ModelSpec) -> bool:
        """Whether a tensor, given by our name, is in files but never read by the model: exports copy it."""
        return False

    # Names of tensors

    @property
    def block_names(self) -> dict[str, str]:
        return BLOCK | {ours: theirs for ours, theirs in self.gguf_names.items() if ours != self.final_norm}

    @property
    def top_names(self) -> dict[str, str]:
        return TOP | {ours: theirs for ours, theirs in self.gguf_names.items() if ours == self.final_norm}

    def to_gguf(self, ours: str) -> tuple[str, ...]:
        """GGUF's name of one of our tensors: two names where a GGUF divides its rows (in halves, or as the spec's
        `gguf_rows` says), none where it has no place for the tensor."""
        found = _renamed(ours, "layers", "blk", self.block_names, self.top_names)
        second = self.gguf_parts.get(found.split(".")[-2]) if found else None
        if found is None or second is None:
            return () if found is None else (found,)
        stem, _, kind = found.rsplit(".", 2)
        return found, f"{stem}.{second}.{kind}"

    def our_name(self, gguf: str) -> str | None:
        """Our name of a tensor of a GGUF, or None for one that is not a weight of the model (rope_freqs and others)."""
        block, top = ({theirs: ours for ours, theirs in t.items()} for t in (self.block_names, self.top_names))
        return _renamed(gguf, "blk", "layers", block, top)

    def is_second_part(self, gguf: str) -> bool:
        """Whether a tensor of a GGUF is the second part of another one."""
        return any(re.fullmatch(rf"blk\.\d+\.{second}\.weight", gguf) for second in self.gguf_parts.values())

    def to_folder(self, ours: str) -> str:
        """The name of one of our tensors in a Hugging Face folder of the family, without the prefix `model.`."""
        return _respelled(ours, self.folder_names.items())

    def from_folder(self, name: str) -> str:
        return _respelled(name, ((theirs, ours) for ours, theirs in self.folder_names.items()))


def _respelled(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for old, new in pairs:
        name = _numbered(old).sub(new.replace("N", r"\1"), name)
    return name


@functools.cache
def _numbered(text: str) -> re.Pattern[str]:
    """Matches a text of `Family.folder_names`. A folder has a name per expert, so each is compiled only once."""
    return re.compile(re.escape(text).replace("N", r"(\d+)"))


def _renamed(name: str, stem: str, new_stem: str, block: FileConfig, top: FileConfig) -> str | None:
    """Translates a tensor's name by `block` (names inside layers) or `top` (all others); None if it is not there. The
    tables have whole names, or names without their last word (weight, bias)."""
    match = re.fullmatch(rf"{stem}\.(\d+)\.(.+)", name)
    table, inner, where = (block, match[2], f"{new_stem}.{match[1]}.") if match else (top, name, "")
    if inner in table:
        return where + table[inner]
    inner, _, kind = inner.rpartition(".")
    return f"{where}{table[inner]}.{kind}" if inner in table else None


def uniform(spec: ModelSpec, where: str) -> tuple[AttentionSpec, GatedSpec | ExpertsSpec]:
    """The attention and the feed-forward that all layers share (except for windows and ropes), since a file states them
    once. A mixture's feed-forward is the dense MLP if some layers have one, else the experts."""
    mixers = [kind.mixer for kind in spec.kinds if isinstance(kind.mixer, AttentionSpec)]
    parts = dict.fromkeys(part for kind in spec.kinds for part in kind.parts if isinstance(part, FeedForwardSpec))
    feed_forwards = [part for part in parts if isinstance(part, GatedSpec | ExpertsSpec)]
    same = {replace(mixer, window=0, rope=mixers[0].rope) for mixer in mixers}
    kinds = {(type(part), part.module) for part in feed_forwards}
    if len(same) != 1 or not len(kinds) == len(feed_forwards) == len(parts):
        raise GraftuneError(
            "its layers differ in size, which no configuration and no GGUF of its family can state",
            where=where,
            fix="export to peft or gguf-lora",
        )
    outer = min(len(part.module) for part in feed_forwards)  # a shared expert is inside the mixture's module
    found = [part for part in feed_forwards if len(part.module) == outer]
    return same.pop(), next((part for part in found if isinstance(part, GatedSpec)), found[0])
