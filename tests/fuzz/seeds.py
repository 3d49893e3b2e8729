"""Small whole files of every format, from which damaged ones are made. Needs nothing but what the package itself needs:
the long form of the fuzzing runs on machines that have no transformers."""

# ruff: noqa: E501 (files written out, many to a line)
from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from graftune.batch import Example
from graftune.data.summary import Summary
from graftune.data.writer import NewExample, StoreWriter
from graftune.model.arena import Arena
from graftune.model.lora import build_arena
from graftune.settings.sections import LoraConfig
from graftune.weights import adapter as adapters
from graftune.weights import checkpoint
from graftune.weights.adapter import load_adapter
from graftune.weights.apr import save_apr
from graftune.weights.base import Base, open_base
from tests.fuzz.binary import Tree, gguf

LAYERS, WIDTH, HEADS, FFN = 1, 32, 2, 32
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 260,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "float32",
    "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 32, "rope_theta": 10000.0},
}  # fmt: skip
# Other families, for config.json alone.
CONFIGS: tuple[dict[str, Any], ...] = (
    CONFIG,
    CONFIG | {"model_type": "gemma2", "layer_types": ["sliding_attention"], "hidden_activation": "gelu_pytorch_tanh"},
    CONFIG | {"model_type": "smollm3", "no_rope_layers": [0], "rope_parameters": None, "use_sliding_window": True, "sliding_window": 8},
    CONFIG | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    CONFIG | {"model_type": "lfm2", "conv_L_cache": 3, "layer_types": ["conv"], "block_ff_dim": 48, "block_multiple_of": 16},
    CONFIG | {"model_type": "phi3", "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
    CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}},
    CONFIG | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {
        "type": "float", "num_bits": 8, "block_structure": [16, 16]}}}}},
    CONFIG | {"quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}},
)  # fmt: skip
ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "What is it?", "response": "A thing.", "system": "Be brief.", "loss_weight": 0.5},
    {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["a", "b"], ["c", "d"]]},
    {"text": "Some plain text."},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]},
                  {"role": "assistant", "content": "a", "weight": 1, "reasoning_content": "r"},
                  {"role": "user", "content": "u2"}, {"role": "assistant", "content": None, "tool_calls": [
                      {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": [1, {\"y\": 2}]}"}}]},
                  {"role": "tool", "tool_call_id": "1", "content": "7"}, {"role": "assistant", "content": "done"}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "tools": "[]"},
    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
    {"prompt": "p", "chosen": "good", "rejected": "bad", "label": True},
)  # fmt: skip
EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "run_start", "time": 1.0, "steps": 9, "base": "x", "settings": {"rank": 4}},
    {"event": "phase", "time": 1.1, "phase": "training"},
    {"event": "eval", "time": 1.2, "step": 0, "epoch": 0, "loss": 2.5, "perplexity": 12.1, "response_tokens": 7},
    {
        "event": "step",
        "time": 2.0,
        "step": 1,
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 1e-4,
        "tokens": 99,
        "tok_s": 5.0,
        "skipped": False,
    },
    {
        "event": "step",
        "time": 2.5,
        "step": 2,
        "loss": None,
        "grad_norm": 1.0,
        "lr": 1e-4,
        "tokens": 99,
        "tok_s": 5.0,
        "skipped": 1,
    },
    {"event": "memory", "time": 2.5, "step": 1, "planned": 5, "measured": 6, "owners": {"base": 3}},
    {"event": "sample", "time": 2.6, "step": 2, "prompts": ["p"], "answers": ["a"]},
    {"event": "warning", "time": 2.7, "text": "slow"},
    {"event": "resume", "time": 3.0, "step": 1},
    {"event": "extend", "time": 3.0, "steps": 12},
    {
        "event": "run_end",
        "time": 4.0,
        "step": 2,
        "stopped": "finished",
        "host_ms": 1.0,
        "best_step": 2,
        "validation_loss": {"start": 2.5, "best": 2.0},
    },
)


def byte_names() -> list[str]:
    """GPT-2's letter for each byte."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printed else next(spare)) for byte in range(256)]


def tokenizer_json() -> dict[str, Any]:
    tokens = [*SPECIAL, *byte_names(), "ab"]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True} for i, text in enumerate(SPECIAL)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": "q"}, "content": "q"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}| ?\\p{L}+|\\s+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                           {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                           {"Sequence": {"id": "B", "type_id": 1}}],
                           "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {text: i for i, text in enumerate(tokens)}, "merges": [["a", "b"]]},
    }  # fmt: skip


# Other parts of a tokenizer that the library knows, put in the place of those above.
PARTS: dict[str, tuple[Any, ...]] = {
    "normalizer": (
        None, {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}, {"type": "Prepend", "prepend": "\u2581"},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Lowercase"}, {"type": "ByteLevel"},
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"},
    ),
    "pre_tokenizer": (
        None, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}, {"type": "Digits", "individual_digits": True},
        {"type": "FixedLength", "length": 3}, {"type": "BertPreTokenizer"}, {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "CharDelimiterSplit", "delimiter": " "}, {"type": "UnicodeScripts"}, {"type": "WhitespaceSplit"},
    ),
    "post_processor": (
        None, {"type": "RobertaProcessing", "sep": ["<|im_end|>", 2], "cls": ["<|im_start|>", 1], "trim_offsets": True, "add_prefix_space": True},
        {"type": "BertProcessing", "sep": ["<|im_end|>", 2], "cls": ["<|im_start|>", 1]},
        {"type": "Sequence", "processors": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}]},
    ),
    "decoder": (
        None, {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
         {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}, {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}, {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
    ),
    "model": (
        {"type": "Unigram", "unk_id": 0, "byte_fallback": True, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.5], ["ab", -1.5]]},
        {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
         "vocab": {"[UNK]": 0, "a": 1, "##b": 2}},
        {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": 1}},
    ),
    "truncation": ({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},),
    "padding": ({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"},),
}  # fmt: skip
TOKENIZER_FILES: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {
        "bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>", "add_bos_token": False,
        "chat_template": TEMPLATE, "stop_token_ids": [0, 2],
        "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}, "260": {"content": "<late>", "special": False, "lstrip": True}},
    },
    "special_tokens_map.json": {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}},
    "generation_config.json": {"eos_token_id": [2, 0], "bos_token_id": 1},
    "chat_template.json": {"chat_template": [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}]},
}  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    q, k = (CONFIG["head_dim"] * CONFIG[key] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "embed_tokens": (260, WIDTH), "layers.0.self_attn.q_proj": (q, WIDTH), "layers.0.self_attn.k_proj": (k, WIDTH),
        "layers.0.self_attn.v_proj": (k, WIDTH), "layers.0.self_attn.o_proj": (WIDTH, q), "layers.0.mlp.gate_proj": (FFN, WIDTH),
        "layers.0.mlp.up_proj": (FFN, WIDTH), "layers.0.mlp.down_proj": (WIDTH, FFN), "layers.0.input_layernorm": (WIDTH,),
        "layers.0.post_attention_layernorm": (WIDTH,), "norm": (WIDTH,),
    }  # fmt: skip
    return {f"model.{name}.weight": torch.randn(shape) * 0.1 for name, shape in shapes.items()}


GGUF_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_model() -> Tree:
    keys: dict[str, Any] = {
        "general.architecture": "llama", "general.name": "seed", "general.alignment": 32, "llama.context_length": 64,
        "llama.embedding_length": WIDTH, "llama.block_count": LAYERS, "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": 1, "llama.attention.key_length": 16,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0, "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*SPECIAL, *byte_names(), "ab"], "tokenizer.ggml.token_type": [3] * 3 + [1] * 257,
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    made, data = [], b""
    for name, value in tensors().items():
        short = name.removeprefix("model.").removesuffix(".weight")
        block, _, rest = short.removeprefix("layers.").partition(".")
        ours = f"blk.{block}.{GGUF_NAMES[rest]}" if short.startswith("layers.") else GGUF_NAMES[short]
        made.append((f"{ours}.weight".encode(), tuple(value.shape)[::-1], 0, len(data)))
        data += value.numpy().tobytes()
    return gguf(keys, made, data)


def gguf_adapter() -> Tree:
    keys = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora", "adapter.lora.alpha": 8.0,
            "graftune.base": "x", "graftune.template": "auto"}  # fmt: skip
    shapes = {"blk.0.attn_q.weight.lora_a": (WIDTH, 4), "blk.0.attn_q.weight.lora_b": (4, WIDTH)}
    made = [(name.encode(), shape, 0, i * 512) for i, (name, shape) in enumerate(shapes.items())]
    return gguf(keys, made, bytes(1024))


def small_gguf() -> Tree:
    """Few bytes, many kinds of values and blocks."""
    keys = {
        "general.alignment": 32,
        "words": ["a", "", "é"],
        "numbers": [1, 2, 3],
        "float": 1.5,
        "yes": True,
        "text": "t",
        "nested": [[[1, 2]], [[3]]],
    }
    shapes = [
        (b"a", (4, 3), 0, 0),
        (b"b", (32, 2), 2, 64),
        (b"c", (2, 2, 2), 1, 128),
        (b"d", (256,), 12, 160),
        (b"e", (3,), 30, 320),
    ]
    return gguf(keys, shapes, bytes(range(256)) * 2)


def fp8_tensors() -> dict[str, torch.Tensor]:
    """A folder of FP8 codes and of bitsandbytes' NF4, which other readers put together."""
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [32, 32]}).encode()
    return {
        "model.a.weight": torch.zeros(32, 32, dtype=torch.float8_e4m3fn), "model.a.weight_scale_inv": torch.ones(2, 2),
        "model.b.weight": torch.zeros(32, 32, dtype=torch.float8_e4m3fn), "model.b.weight_scale": torch.ones(32, 1),
        "model.c.weight": torch.zeros(512, 1, dtype=torch.uint8), "model.c.weight.absmax": torch.ones(16),
        "model.c.weight.quant_map": torch.ones(16), "model.d": torch.ones(3).bfloat16(),
        "model.c.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state), dtype=torch.uint8),
    }  # fmt: skip


def split_safetensors(whole: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(save(tensors()))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                key: value
                for key, value in TOKENIZER_FILES["tokenizer_config.json"].items()
                if key != "added_tokens_decoder"
            }
        )
    )
    return folder


LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "v_proj"), init_scale=0.0)


@cache
def opened(folder: Path) -> tuple[Base, Arena]:
    base = open_base(str(folder))
    return base, build_arena(base.spec, LORA, torch.device("cpu"), torch.float32)


def write_adapter(folder: Path, model: Path) -> Path:
    base, arena = opened(model)
    facts = {"template": "auto", "append_eos": False, "revision": ""}
    adapters.write_adapter(folder, adapters.adapter_tensors(arena, base, {}), LORA, base, facts)
    return folder


def apr_bytes(adapter: Path, model: Path, place: Path) -> bytes:
    save_apr(place, load_adapter(adapter), opened(model)[0].spec)
    return place.read_bytes()


def write_checkpoint(run: Path, model: Path) -> Path:
    arena = opened(model)[1]
    progress = checkpoint.Progress(
        step=3, epoch=0, epoch_step=3, updates=3, last_eval=2, first_loss=2.0, best_loss=1.5, best_step=2
    )
    return checkpoint.save(run / "checkpoints", arena, progress, {"data": "d", "base": "b", "settings": {"rank": 4}})


def cache_bytes() -> bytes:
    file, writer = io.BytesIO(), StoreWriter(300)
    examples = [Example([1, 2, 3, 299], [False, True, True, True], 1), Example([7] * 20, [True] * 20, 2, [0.5] * 20)]
    writer.add([NewExample(one, "prompt", "reference", [{"role": "user", "content": "x"}]) for one in examples])
    writer.close(file, kind="answers", key="k", summary=Summary(rows=2, lengths={4: 1, 20: 1}).document())
    return file.getvalue()


def parquet_files() -> list[bytes]:
    """Tables of several types and compressions; none where pyarrow is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return []
    import datetime
    import decimal

    tables = [
        pa.table({"prompt": ["a", "b"], "response": ["c", "d"]}),
        pa.table({"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 3}),
        pa.table({"text": ["x" * 500] * 50, "when": [datetime.datetime(2026, 1, 1)] * 50, "n": list(range(50))}),
        pa.table({"text": pa.array(["a", None, "é"]).dictionary_encode(), "amount": [decimal.Decimal("1.50")] * 3}),
        pa.table({"prompt": pa.array([b"a", b"\xff"]), "response": pa.array([1.5, None]), "took": pa.array([1, 2], pa.duration("ns"))}),
        pa.table({"text": pa.array(["q"] * 5000, pa.large_string()), "tags": pa.array([[["a"], []]] * 5000)}),
        pa.table({"text": pa.array([], pa.string())}),
        pa.table({"map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())), "text": ["t"], "u": pa.array([2**63], pa.uint64())}),
    ]  # fmt: skip
    found = []
    for i, table in enumerate(tables):
        for packed in ("none", "snappy", "zstd", "gzip")[: 2 + i % 3]:
            out = io.BytesIO()
            pq.write_table(table, out, compression=packed, use_dictionary=bool(i % 2), row_group_size=1000)
            found.append(out.getvalue())
    return found
