"""Architectures that are known and refused, each with its reason: by Hugging Face's model type and by GGUF's name."""

from __future__ import annotations

_OTHER = "train another model"
_YET = "not supported yet"
# (reason, the model types and architectures that it is true of)
_REASONS: tuple[tuple[str, str], ...] = (
    (
        "has Mamba-2 layers, which are not supported",
        "mamba2 nemotron_h nemotronh nemotron_h_moe nemotron_h_omni granitehybrid falcon_h1 falcon-h1 bamba zamba2 "
        "plamo2",
    ),
    ("has Mamba layers, which are not supported", "mamba falcon_mamba jamba"),
    (
        "has multi-head latent attention (MLA), which is not supported",
        "deepseek_v2 deepseek_v3 deepseek_v32 deepseek2 deepseek32 glm4_moe_lite glm_moe_dsa glm-dsa glm5_next "
        "glm5_next_text glm5-next mistral4 mistral_large4 mistral_large4_text kimi_k2 kimi_k25 minicpm3 longcat_flash",
    ),
    ("has attention over compressed keys, which is not supported", "deepseek_v4 deepseek4"),
    ("has Kimi's linear attention, which is not supported", "kimi_linear kimi-linear"),
    ("has hyper-connections and indexed attention, which are not supported", "qwen4_exp qwen4_exp_text qwen4exp"),
    (
        "has layer norms with a mean and parallel layers, which are not supported",
        "cohere cohere2 cohere2_moe cohere2moe command-r",
    ),
    ("has attention in chunks, which is not supported", "llama4 llama4_text"),
    ("(a draft model of Gemma 4) is not supported", "gemma4_assistant gemma4_unified_assistant gemma4-assistant"),
    (f"(Gemma 3n) is {_YET}", "gemma3n gemma3n_text"),
    (
        f"is a mixture of experts that is {_YET}",
        "qwen3_vl_moe qwen3_vl_moe_text qwen3vlmoe qwen2_moe qwen2moe granitemoe",
    ),
)
REFUSED = {name: (reason, _OTHER) for reason, names in _REASONS for name in names.split()}
