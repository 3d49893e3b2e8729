"""Tiny random models with real structure: every family, GQA, odd widths, norms and biases that are not 1 and 0."""

from __future__ import annotations

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from graftune.weights.names import from_hf

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 256 + len(SPECIAL)
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
TIED = ("gemma", "gemma2", "gemma3", "gemma4", "gemma4_unified", "smollm3", "lfm2", "lfm3", "ernie4_5")
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "tie_word_embeddings": True}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
# Every family: the class of its configuration in transformers, and its options beside those of all. Layers are of both
# kinds wherever there are two. A row here is checked by all tests that go over families: logits and gradients against
# transformers and PEFT, exports to GGUF against llama.cpp, full training, generation.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_vl": (
        "Qwen3VLTextConfig",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    ),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"num_hidden_layers": 7}),  # llama.cpp: every sixth without a window
    "gemma2": ("Gemma2Config", GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}),
    "gemma4": (  # the small ones: two layers use the keys of the two before them
        "Gemma4TextConfig",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedTextConfig",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
    ),
    "phi3": ("Phi3Config", {"head_dim": None, "pad_token_id": 0}),
    "granite": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.4, "logits_scaling": 0.7},
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "tie_word_embeddings": True, "pad_token_id": 0}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "olmo2": ("Olmo2Config", {"head_dim": None}),
    "olmo3": ("Olmo3Config", {"head_dim": None, "num_hidden_layers": 5, "sliding_window": 6}),
    "lfm2": (
        "Lfm2Config",
        {
            "head_dim": None,
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
            "block_multiple_of": 8,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,  # the last one has attention
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rms_norm_eps": 1e-3,  # a head's output near zero is normed, too: fp32 has no digits left with less
        },
    ),
    "gemma": ("GemmaConfig", {"head_dim": 16, "tie_word_embeddings": True, "pad_token_id": 0}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
            "shared_intermediate_size": 72,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "mamba_n_heads": 6,
        },
    ),
    "glm4": ("Glm4Config", {"pad_token_id": 0}),
    "ernie4_5": ("Ernie4_5Config", {"tie_word_embeddings": True, "pad_token_id": 0}),
    "exaone4": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "granite_swa": (
        "GraniteSWAConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
            "num_hidden_layers": 5,
            "sliding_window": 6,
            "layer_rope_theta": [0, 10000.0, 10000.0, 10000.0, 0],
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
            "pad_token_id": 0,
        },
    ),
    "muse_glimmer": (
        "MuseGlimmerTextConfig",
        {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "qk_scale_factor": 1.5,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 3.0,
        },
    ),
    "lfm3": (
        "Lfm3Config",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention"],
            "sliding_window": 6,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 7.0, "factor": 1.0}, "pad_token_id": 0},
    ),
}
# Text-and-vision checkpoints: the class of the configuration, and what it has beside the text model's.
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 48,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            "image_token_id": 250,
            "video_token_id": 251,
            "vision_start_token_id": 252,
            "vision_end_token_id": 253,
        },
    ),
    "muse_glimmer": (
        "MuseGlimmerConfig",
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 4,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "max_position_embeddings": 16,
            },
            "out_hidden_size": 64,
            "projector_hidden_size": 24,
            "image_token_id": 300,  # no token of a text: transformers leaves the embedding of these out
            "video_token_id": 301,
        },
    ),
    "qwen3_5-vision": (
        "Qwen3_5Config",
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 48,
                "num_position_embeddings": 16,
            },
            "image_token_id": 250,
            "video_token_id": 251,
            "vision_start_token_id": 252,
            "vision_end_token_id": 253,
        },
    ),
    "ministral3-vision": (
        "Mistral3Config",
        {
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 8,
                "image_size": 8,
                "patch_size": 4,
            },
            "image_token_index": 250,
        },
    ),
    "gemma4-vision": (  # as E2B: with per-layer embeddings, and a tower for sounds
        "Gemma4Config",
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 8,
            },
            "audio_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [4, 4],
                "output_proj_dims": 12,
            },
            **dict.fromkeys(("image_token_id", "audio_token_id", "video_token_id"), 300),  # no token of a text
        },
    ),
    "gemma4_unified-vision": (
        "Gemma4UnifiedConfig",
        {
            "vision_config": {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 48},
            "audio_config": {"audio_embed_dim": 12},
            **dict.fromkeys(("image_token_id", "audio_token_id", "video_token_id"), 300),  # no token of a text
        },
    ),
    "gemma3-vision": (
        "Gemma3Config",
        {
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": 250,
            "boi_token_index": 251,
            "eoi_token_index": 252,
        },
    ),
}
VARIANTS = (
    *FAMILIES,
    "gemma3-vision",
    "ministral3-vision",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "llama-untied",
    "mistral-window",
    "gemma3-linear",
    "gemma2-odd",
    "phi3-long",
    "phi3-window",
    "granite-yarn",
    "smollm3-window",
    "olmo3-yarn",
    "exaone4-window",
    "glm4-unbiased",
    "gemma4-dense",
)
LONG = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.3],
    "long_factor": [1.1, 4.0],
}
VARIANT_OPTIONS: dict[str, dict[str, Any]] = {
    "llama-untied": {"tie_word_embeddings": False},
    "mistral-window": {"sliding_window": 5},
    "llama-shallow": {"num_hidden_layers": 1},  # for runs of which only the order of things is asked
    "gemma3-linear": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "gemma3-short": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo3-short": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5-short": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm3-short": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2-short": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "gemma2-odd": {"query_pre_attn_scalar": 7, "attn_logit_softcapping": None, "sliding_window": 3},
    "phi3-long": {"original_max_position_embeddings": 64, "rope_parameters": LONG},
    "phi3-far": {  # llama.cpp has no context below 256
        "original_max_position_embeddings": 256,
        "max_position_embeddings": 512,
        "rope_parameters": LONG,
    },
    "phi3-window": {"sliding_window": 5},
    "granite-yarn": {"num_key_value_heads": 6},
    "glm4-unbiased": {"attention_bias": False},
    "gemma4-dense": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True},
    "exaone4-window": {"num_hidden_layers": 5, "sliding_window": 6, "layer_types": None},
    # llama.cpp has windows in models of 64 layers only
    "exaone4-deep": {"num_hidden_layers": 64, "sliding_window": 6, "layer_types": None},
    "smollm3-window": {"no_rope_layers": [0, 1, 1, 0, 1], "use_sliding_window": True, "sliding_window": 4},
    "olmo3-yarn": {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e4, **ROPE["yarn"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
}


TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_5": "qwen3_5_text",
    "muse_glimmer": "muse_glimmer_text",
}


def config(variant: str) -> dict[str, Any]:
    """The configuration in plain values: it can be read without transformers."""
    family, _, extra = variant.partition("-")
    options: dict[str, Any] = {
        "model_type": TEXT_TYPES.get(family, family),
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": None,
        "use_cache": False,
    }
    options |= FAMILIES[family][1]
    if extra in ROPE:
        options["rope_parameters"] = {"rope_theta": 10000.0, **ROPE[extra]}
    options |= VARIANT_OPTIONS.get(variant, {})
    options = {name: value for name, value in options.items() if (name, value) != ("head_dim", None)}
    if variant not in VISION:
        return options
    outer_type = {"ministral3": "mistral3"}.get(family, family)
    outer = {"model_type": outer_type, "text_config": options, "tie_word_embeddings": options["tie_word_embeddings"]}
    return outer | copy.deepcopy(VISION[variant][1])


def hf_config(variant: str) -> Any:
    import transformers

    options = config(variant)
    del options["model_type"]
    return getattr(transformers, _config_class(variant))(**options)


def in_transformers(variant: str) -> bool:
    """An older version does not have every family."""
    import transformers

    return hasattr(transformers, _config_class(variant))


def _config_class(variant: str) -> str:
    return VISION[variant][0] if variant in VISION else FAMILIES[variant.partition("-")[0]][0]


def hf_model(variant: str, seed: int = 0) -> Any:
    """Random, but not nearly linear: weights wide enough that attention and gates saturate here and there. A copy of
    what was made before, and the random numbers that follow are the same, too."""
    model, state = _hf_model(variant, seed, json.dumps(config(variant)))
    torch.set_rng_state(state)
    return copy.deepcopy(model)


@cache
def _hf_model(variant: str, seed: int, config: str) -> tuple[Any, torch.Tensor]:
    """`config` is part of the key: tests change the options of a variant."""
    import transformers

    torch.manual_seed(seed)
    family = variant.partition("-")[0]
    kind = transformers.AutoModelForImageTextToText if variant in VISION else transformers.AutoModelForCausalLM
    model = kind.from_config(hf_config(variant), attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
                if from_hf(name) in ("norm.weight", "embedding_norm.weight") and family in TIED:
                    p[::2] *= -1  # a tied head would say its own input again and again
                less_one = family in ("gemma", "gemma2", "gemma3", "qwen3_5") and "linear_attn" not in name
                if less_one or (family == "muse_glimmer" and "layernorm" in name):
                    p.sub_(1.0)  # theirs is the weight less one
            elif name.endswith("bias"):
                p.normal_(0, 0.5)
            elif "conv1d" in name:  # q and k mostly positive: a norm decides by the sign of a product near zero
                p.normal_(0, 2.0)
            else:
                p.normal_(0, 0.6 / p.shape[-1] ** 0.5 if "embed" not in name else 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.2)
    return model.float().eval(), torch.get_rng_state()


def make_folder(variant: str, folder: Path) -> Path:
    files, state = _files(variant, json.dumps(config(variant)))
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(state)
    return folder


@cache
def _files(variant: str, config: str) -> tuple[dict[str, bytes], torch.Tensor]:
    """What lies in a variant's folder, and the random state after the model was made. Written once a process, since
    transformers takes longer to copy and save a model than to make one."""
    with tempfile.TemporaryDirectory() as made:
        hf_model(variant).save_pretrained(made)
        state = torch.get_rng_state()
        make_tokenizer().save(Path(made))
        return {path.name: path.read_bytes() for path in Path(made).iterdir()}, state


def load_hf(folder: Path, **options: Any) -> Any:
    """A folder in transformers' class for what it holds, in fp32."""
    import transformers

    vision = "vision_config" in json.loads((folder / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)


def make_tokenizer() -> Any:
    """Bytes as tokens, a ChatML template, three special tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from graftune.tokenizer import ChatTemplate, Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(
        backend=backend,
        bos_id=None,
        eos_id=2,
        pad_id=0,
        add_bos=False,
        add_eos=False,
        template=ChatTemplate(TEMPLATE, eos_token=SPECIAL[2]),
        stop_ids=(0, 2),
    )
