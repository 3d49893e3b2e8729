"""The others, each as its own documentation sets it up: PEFT on transformers, the same with Liger's kernels, Unsloth,
and plain transformers for full-parameter training. Imported only inside a worker process; nothing here is ours.

Everyone gets random weights of the case's shape, bf16 autocast, fused AdamW and a clip at 1.0. Adapters are fp32 over a
bf16 base (PEFT's own default), bf16 in `liger-bf16`. Full-parameter training keeps fp32 weights under bf16 autocast:
with bf16 weights most updates of this size would round to nothing. A 4-bit base is loaded as QLoRA's users load it,
through bitsandbytes and prepare_model_for_kbit_training. Unsloth, and every 4-bit base, is loaded from a folder,
because it must be; `write_folder` makes that one without any of these packages.

Like with like: where a case recomputes, everyone does so in the way that is theirs. PEFT takes transformers' gradient
checkpointing, which keeps block inputs on the device (our `full`); Unsloth takes its own, which sends them to host
memory (our `offload`) and is what its documentation says to use. The note in the record says which.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from benchmarks.cases import BATCHES, HYPER, Case, Shape, labels, tokens
from benchmarks.measure import Runner

PACKAGES = (
    "transformers",
    "peft",
    "liger-kernel",
    "unsloth",
    "unsloth_zoo",
    "bitsandbytes",
    "trl",
    "nvidia-cudnn-frontend",
)
SHARD = 4 << 30  # bytes of weights in one file
# GiB of the card while it boots and steps, measured on an H200 or, of a 4-bit base, about what loading takes.
GIB: dict[str, dict[str, float]] = {
    "8b-4x2048": {"peft": 82, "liger": 60, "liger-bf16": 52, "unsloth": 48},
    "8b-1x512": {"peft": 20, "liger": 20, "unsloth": 20},
    "8b-nf4-4x2048-full": {"peft": 22, "liger": 22, "unsloth": 12},
    "8b-nf4-4x2048-offload": {"unsloth": 12},
    "1b-1x512": {"peft": 12, "liger": 12, "unsloth": 12},
    "1b-4x2048": {"peft": 30, "liger": 16, "unsloth": 13},
    "1.5b-nf4-qv-4x512": {"peft": 12, "liger": 12, "unsloth": 12},
    "350m-full-4x512x4": {"hf": 12, "hf-compiled": 12},
}
FOLDER_GIB = 6.0  # of writing a folder: a file's weights and what the runtime takes


@dataclass(frozen=True)
class Place:
    """Where a peer runs, and the folder its weights lie in where it reads them from one."""

    device: torch.device
    folder: Path | None = None


def build(name: str, case: Case, place: Place) -> Runner:
    makers: dict[str, Callable[[Case, Place], Runner]] = {
        "peft": lambda c, p: peft_runner(c, p),
        "liger": lambda c, p: peft_runner(c, p, liger=True),
        "liger-bf16": lambda c, p: peft_runner(c, p, liger=True, adapters=torch.bfloat16),
        "unsloth": unsloth_runner,
        "hf": lambda c, p: full_runner(c, p, compiled=False),
        "hf-compiled": lambda c, p: full_runner(c, p, compiled=True),
    }
    return makers[name](case, place)


def needs_folder(name: str, case: Case) -> bool:
    return name == "unsloth" or (case.base == "nf4" and name in ("peft", "liger", "liger-bf16"))


def gib(name: str, case: Case) -> float:
    """About what it needs of the card; a high guess where nobody has measured it."""
    known = GIB.get(case.name, {}).get(name)
    held = 2 * case.shape.parameters + 80 * case.micro_tokens * case.shape.layers * case.shape.width
    return known if known is not None else 8 + held / 2**30


def versions() -> dict[str, str]:
    """Of the peers that are installed here."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def peft_runner(case: Case, place: Place, *, liger: bool = False, adapters: torch.dtype = torch.float32) -> Runner:
    import peft

    if liger:  # before the model is made: it replaces the classes the model is made of
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            rope=True, swiglu=True, rms_norm=True, cross_entropy=False, fused_linear_cross_entropy=True
        )
    if case.base == "nf4":
        model = _nf4_llama(case, place)
    else:
        model = random_llama(case.shape, place.device, torch.bfloat16)
        if case.recompute != "none":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = peft.LoraConfig(
        r=case.rank,
        lora_alpha=int(case.alpha),
        target_modules=list(case.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=adapters == torch.float32).train()
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    assert kinds == {adapters}, f"adapters are {kinds}"
    again = ", blocks recomputed from inputs on the device" if case.recompute != "none" else ""
    return _trainer(model, case, place.device, note=f"adapters {str(adapters).removeprefix('torch.')}, sdpa{again}")


def full_runner(case: Case, place: Place, *, compiled: bool) -> Runner:
    model = random_llama(case.shape, place.device, torch.float32).train()
    note = "fp32 weights, bf16 autocast, sdpa" + (", torch.compile" if compiled else "")
    return _trainer(model, case, place.device, note=note, compiled=compiled)


def unsloth_runner(case: Case, place: Place) -> Runner:
    from unsloth import FastLanguageModel  # first of all: it patches what is imported after it

    assert place.folder is not None, "Unsloth reads its weights from a folder"
    recompute: Any = "unsloth" if case.recompute != "none" else False
    model, _ = FastLanguageModel.from_pretrained(
        str(place.folder),
        max_seq_length=case.length,
        dtype=torch.bfloat16,
        load_in_4bit=case.base == "nf4",
        use_gradient_checkpointing=recompute,
        use_exact_model_name=True,  # or it looks for a mirror of the name
        local_files_only=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=case.rank,
        lora_alpha=int(case.alpha),
        target_modules=list(case.targets),
        lora_dropout=0.0,
        bias="none",
        use_gradient_checkpointing=recompute,
        random_state=1,
    )
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad})
    again = ", blocks recomputed from inputs in host memory (its own way)" if recompute else ""
    return _trainer(model.train(), case, place.device, note=f"adapters {' and '.join(kinds)}{again}")


def adamw(trained: list[torch.Tensor]) -> torch.optim.AdamW:
    betas = HYPER["beta1"], HYPER["beta2"]
    return torch.optim.AdamW(
        trained, lr=HYPER["lr"], betas=betas, eps=HYPER["eps"], weight_decay=HYPER["weight_decay"], fused=True
    )


def _trainer(model: Any, case: Case, device: torch.device, *, note: str, compiled: bool = False) -> Runner:
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained, "nothing is to be trained"
    optimizer = adamw(trained)
    ids = tokens(case)
    targets = labels(ids, case).to(device)
    ids = ids.to(device)
    forward = torch.compile(model) if compiled else model

    def step(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros((), device=device)
        for rows, wanted in zip(ids[index % BATCHES], targets[index % BATCHES], strict=True):
            with torch.autocast(device.type, torch.bfloat16):
                loss = forward(input_ids=rows, labels=wanted, use_cache=False).loss / case.micro
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(trained, HYPER["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, norm.detach()

    return Runner(step, lambda: trained, note)


def llama_config(shape: Shape) -> Any:
    import transformers

    return transformers.LlamaConfig(**_settings(shape), attn_implementation="sdpa")


def random_llama(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """Made without storage and filled on the device: transformers' own initialisation of 8B takes minutes."""
    import transformers

    config = llama_config(shape)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(dtype)
    model = model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            _fill(parameter)
    return model


def _nf4_llama(case: Case, place: Place) -> Any:
    import peft
    import transformers

    assert place.folder is not None, "a 4-bit base is quantised while it is read from a folder"
    quantise = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place.folder,
        quantization_config=quantise,
        device_map={"": place.device.index or 0},
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
    )
    return peft.prepare_model_for_kbit_training(
        model,
        use_gradient_checkpointing=case.recompute != "none",
        gradient_checkpointing_kwargs={"use_reentrant": False} if case.recompute != "none" else None,
    )


def _fill(parameter: torch.Tensor) -> None:
    if parameter.dim() > 1:
        parameter.normal_(0.0, 0.02)
    else:
        parameter.fill_(1.0)  # norms


def _settings(shape: Shape) -> dict[str, Any]:
    """The keys of config.json that say what the shape is."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def write_folder(shape: Shape, folder: Path, device: torch.device) -> None:
    """A Hugging Face folder with random bf16 weights and a tokenizer of words; needs torch and safetensors only."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    index: dict[str, str] = {}
    held = total = 0

    def flush() -> None:
        name = f"model-{len(shards):05d}.safetensors"
        save_file(shards[-1], folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shards[-1], name))
        shards[-1].clear()

    for name, size in _tensors(shape).items():
        tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
        _fill(tensor)
        shards[-1][name] = tensor
        held, total = held + tensor.nbytes, total + tensor.nbytes
        if held > SHARD:
            flush()
            shards.append({})
            held = 0
    if shards[-1]:
        flush()
    weights = {"metadata": {"total_size": total}, "weight_map": index}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"} | _settings(shape)
    config |= {"rope_theta": shape.rope_theta, "dtype": "bfloat16", "torch_dtype": "bfloat16", "use_cache": False}
    words = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, shape.vocab)}
    special = [
        {"id": i, "content": w, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for w, i in list(words.items())[:4]
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_positions,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    for name, content in (
        ("model.safetensors.index.json", weights),
        ("config.json", config),
        ("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", tokenizer_config),
        ("special_tokens_map.json", {k: v for k, v in tokenizer_config.items() if k.endswith("_token")}),
    ):
        (folder / name).write_text(json.dumps(content))


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and sizes of every weight."""
    query, key = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.width)}
    for layer in range(shape.layers):
        for name, size in {
            "input_layernorm": (shape.width,),
            "self_attn.q_proj": (query, shape.width),
            "self_attn.k_proj": (key, shape.width),
            "self_attn.v_proj": (key, shape.width),
            "self_attn.o_proj": (shape.width, query),
            "post_attention_layernorm": (shape.width,),
            "mlp.gate_proj": (shape.ffn, shape.width),
            "mlp.up_proj": (shape.ffn, shape.width),
            "mlp.down_proj": (shape.width, shape.ffn),
        }.items():
            sizes[f"model.layers.{layer}.{name}.weight"] = size
    sizes["model.norm.weight"] = (shape.width,)
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab, shape.width)
    return sizes
