"""The peers, each as its own documentation sets it up: PEFT on transformers, the same with Liger's kernels, Unsloth,
and plain transformers for full-parameter training. Imported only inside a worker process of step.py.

    python benchmarks/peers.py CASE ... [--json FILE]         `step.py --who` with ours and every peer of the case

Everyone gets random weights of the case's shape, bf16 autocast, fused AdamW and a clip at 1.0. Adapters are fp32 over a
bf16 base (PEFT's own default), bf16 in `liger-bf16`; `peft-fp32` computes everything in fp32 from the same weights.
Full-parameter training keeps fp32 weights under bf16 autocast: with bf16 weights most updates of this size would round
to nothing. A 4-bit base is loaded as QLoRA's users load it, through bitsandbytes and prepare_model_for_kbit_training.
Unsloth, and every 4-bit base, can only be loaded from a folder, which `write_folder` makes without these packages.

Unsloth's first step takes minutes where its caches are empty: beside the GPU's tests 559 s for four layers of Qwen3.5,
368 for six of Gemma 4, 179 for two of a mixture. It brings fla's kernels along (0.5.1), lets Triton compile and time
every configuration of each, about 120 for forward and backward, and compiles each kind of block with torch.compile.
Run a case of few layers first, with a long --limit, TRITON_CACHE_AUTOTUNING=1 and the folders TRITON_CACHE_DIR and
TORCHINDUCTOR_CACHE_DIR that the timed run will have, too: its first step then takes 60 to 110 s. `unsloth-eager` turns
torch.compile off (UNSLOTH_COMPILE_DISABLE), which makes its steps slower and saves that part of the start only.

Like with like: where a case recomputes, everyone does so in the way that is theirs. PEFT takes transformers' gradient
checkpointing, which keeps block inputs on the device (our `full`); Unsloth takes its own, which sends them to host
memory (our `offload`) and is what its documentation says to use. The note in the record says which.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import BATCHES, HYPER, PEERS, Case, Shape, labels, tokens
from benchmarks.measure import Runner

from graftune.model.families import from_config
from graftune.weights import names
from graftune.weights.base import tensor_shapes

SHARD = 4 << 30  # bytes of weights in one file
EXPERTS = ("gate_proj", "up_proj", "down_proj")  # of a mixture: two parameters for all experts, no modules


def build(name: str, case: Case, device: torch.device) -> Runner:
    makers: dict[str, Callable[[Case, torch.device], Runner]] = {
        "peft": peft_runner,
        "peft-fp32": lambda c, d: peft_runner(c, d, compute=torch.float32),
        "liger": lambda c, d: peft_runner(c, d, liger=True),
        "liger-bf16": lambda c, d: peft_runner(c, d, liger=True, adapters=torch.bfloat16),
        "unsloth": unsloth_runner,
        "unsloth-eager": lambda c, d: unsloth_runner(c, d, compiled=False),
        "hf": lambda c, d: full_runner(c, d, compiled=False),
        "hf-compiled": lambda c, d: full_runner(c, d, compiled=True),
    }
    if case.pairs:
        from benchmarks import pair_peers

        return pair_peers.build(name, case, device)
    return makers[name](case, device)


@contextmanager
def weights_folder(shape: Shape, device: torch.device) -> Iterator[Path]:
    """In memory where enough of it is free: a 16 GB folder is then written and read in seconds."""
    shm = Path("/dev/shm")
    fits = shm.is_dir() and shutil.disk_usage(shm).free > 2.6 * shape.parameters
    with tempfile.TemporaryDirectory(dir=shm if fits else None) as folder:
        write_folder(shape, Path(folder), device)
        yield Path(folder)


def peft_runner(
    case: Case,
    device: torch.device,
    *,
    liger: bool = False,
    adapters: torch.dtype = torch.float32,
    compute: torch.dtype = torch.bfloat16,
) -> Runner:
    import peft

    if liger:  # before the model is made: it replaces the classes the model is made of
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(
            rope=True, swiglu=True, rms_norm=True, cross_entropy=False, fused_linear_cross_entropy=True
        )
    if case.base == "nf4":
        checkpointing = case.recompute != "none"
        model = peft.prepare_model_for_kbit_training(
            nf4_llama(case, device),
            use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        )
    else:
        model = random_llama(case.shape, device, torch.bfloat16).to(compute)
        if case.recompute != "none":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = peft.get_peft_model(model, lora_config(case), autocast_adapter_dtype=adapters == torch.float32).train()
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    assert kinds == {adapters}, f"adapters are {kinds}"
    again = ", blocks recomputed from inputs on the device" if case.recompute != "none" else ""
    note = f"adapters {str(adapters).removeprefix('torch.')}, sdpa{again}"
    return _trainer(model, case, device, note=note, compute=compute)


def lora_config(case: Case) -> Any:
    import peft

    experts = [name for name in EXPERTS if case.shape.experts and name in case.targets]
    joined = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]} if experts else {}
    return peft.LoraConfig(
        r=case.rank,
        lora_alpha=int(case.alpha),
        target_modules=[name for name in case.targets if name not in experts],
        **joined,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def full_runner(case: Case, device: torch.device, *, compiled: bool) -> Runner:
    model = random_llama(case.shape, device, torch.float32).train()
    note = "fp32 weights, bf16 autocast, sdpa" + (", torch.compile" if compiled else "")
    return _trainer(model, case, device, note=note, compiled=compiled)


def unsloth_runner(case: Case, device: torch.device, *, compiled: bool = True) -> Runner:
    if not compiled:
        os.environ["UNSLOTH_COMPILE_DISABLE"] = "1"
    model, note = unsloth_model(case, device)
    return _trainer(model.train(), case, device, note=note + ("" if compiled else ", without torch.compile"))


def unsloth_model(case: Case, device: torch.device) -> tuple[Any, str]:
    """The case's model with adapters, and a note on both."""
    from unsloth import FastLanguageModel  # first of all: it patches what is imported after it

    recompute: Any = "unsloth" if case.recompute != "none" else False
    with weights_folder(case.shape, device) as folder:
        model, _ = FastLanguageModel.from_pretrained(
            str(folder),
            max_seq_length=case.length,
            dtype=torch.bfloat16,
            load_in_4bit=case.base == "nf4",
            use_gradient_checkpointing=recompute,
            use_exact_model_name=True,  # otherwise it looks for a mirror of the name
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
    return model, f"adapters {' and '.join(kinds)}{again}"


def adamw(trained: list[torch.Tensor]) -> torch.optim.AdamW:
    betas = HYPER["beta1"], HYPER["beta2"]
    return torch.optim.AdamW(
        trained, lr=HYPER["lr"], betas=betas, eps=HYPER["eps"], weight_decay=HYPER["weight_decay"], fused=True
    )


def _trainer(
    model: Any,
    case: Case,
    device: torch.device,
    *,
    note: str,
    compiled: bool = False,
    compute: torch.dtype = torch.bfloat16,
) -> Runner:
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
            with torch.autocast(device.type, torch.bfloat16, enabled=compute == torch.bfloat16):
                loss = forward(input_ids=rows, labels=wanted, use_cache=False).loss / case.micro
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(trained, HYPER["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, norm.detach()

    return Runner(step, lambda: trained, lambda: note)


def random_llama(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """Made without storage and filled on the device: transformers' own initialisation of 8B takes minutes."""
    import transformers

    config = transformers.AutoConfig.for_model(shape.settings["model_type"], **_settings(shape))
    grouped = {"experts_implementation": "grouped_mm"} if shape.experts else {}
    attention = "eager" if shape.sinks else "sdpa"  # transformers has no other one with sinks here
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, **grouped)
    model = model.to(dtype)
    model = model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        offsets = _offsets(shape)
        for name, parameter in model.named_parameters():
            _fill(parameter, offsets.get(name, 0.0))
        for name, buffer in model.named_buffers():  # Gemma 4's, which have no storage either
            if name.endswith(("layer_scalar", "embed_scale")):
                buffer.fill_(1.0 if name.endswith("layer_scalar") else shape.width**0.5)
    return model


def nf4_llama(case: Case, device: torch.device) -> Any:
    """The case's model with a 4-bit base, as transformers loads it."""
    import transformers

    quantise = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with weights_folder(case.shape, device) as folder:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=quantise,
            device_map={"": "cpu" if device.type == "cpu" else device.index or 0},
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
        )


def _fill(parameter: torch.Tensor, offset: float) -> None:
    """`offset`: what a norm adds to its weight (Qwen3.5, Gemma)."""
    if parameter.dim() > 1:
        parameter.normal_(0.0, 0.02)
    else:
        parameter.fill_(1.0 - offset)


def _settings(shape: Shape) -> dict[str, Any]:
    """As transformers' constructor takes them."""
    found = {k: v for k, v in shape.settings.items() if k not in ("architectures", "model_type", "rope_theta")}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": shape.settings["rope_theta"]}} | found


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

    offsets = _offsets(shape)
    for name, size in _tensors(shape).items():
        tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
        _fill(tensor, offsets[name])
        shards[-1][name] = tensor
        held, total = held + tensor.nbytes, total + tensor.nbytes
        if held > SHARD:
            flush()
            shards.append({})
            held = 0
    if shards[-1]:
        flush()
    weights = {"metadata": {"total_size": total}, "weight_map": index}
    config = shape.settings | {"dtype": "bfloat16", "torch_dtype": "bfloat16", "use_cache": False}
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
        "model_max_length": shape.settings["max_position_embeddings"],
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
    return {names.TEXT.of(name): size for name, size in tensor_shapes(from_config(shape.settings, shape.name))}


def _offsets(shape: Shape) -> dict[str, float]:
    spec = from_config(shape.settings, shape.name)
    return {names.TEXT.of(name): spec.norm_offset(name) for name, _ in tensor_shapes(spec)}


if __name__ == "__main__":
    from benchmarks.step import main

    sys.exit(main([*sys.argv[1:], "--who", ",".join(["ours", *(who for who in PEERS if who != "peft-fp32")])]))
