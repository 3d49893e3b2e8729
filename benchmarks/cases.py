"""What is timed: named cases in a small grammar, and the documents of each.

    SHAPE[-OPTION...]-ROWSxLENGTH[xMICRO][-POLICY]
    8b-4x2048    1.5b-nf4-qv-4x512    350m-full-4x512x4    1b-r64-4x2048    8b-nf4-4x2048-full    1b-q4_k-4x512
    8b-dpo-4x1024    8b-nf4-dpo-stored-4x1024    8b-dpo-drawn-8x1024

Before the size stands what trains, and on what: qv (adapters on q and v only), attention (on its four projections),
full (every parameter), rN (rank N), lN (N layers), and the base: nf4, fp8, or the blocks of a GGUF (q4_k, q8_0, ...);
mxfp4: the experts alone are blocks, as in gpt-oss; without a word it is bf16. host: its frozen weights lie in host
memory; table: its embedding alone does; shard: they are gathered, here from the one rank that there is. Behind the size
stands the activation checkpointing: selective (gate and up), full (whole blocks) or offload (whole blocks, from inputs
kept in host memory); without a word nothing is recomputed. Everything else is fixed: alpha twice the rank, dropout 0,
AdamW, clip 1.0, and the first half of each row is prompt, which is masked. MICRO micro-batches of ROWSxLENGTH make one
optimizer step.

dpo: ROWS are preference pairs, two answers to one prompt in documents of LENGTH tokens each, half of them prompt. The
reference model runs in every step; stored: its log-probabilities were computed before. drawn: the lengths are drawn
from a lognormal distribution with the median 350 and are at most LENGTH; the prompt is half of the shorter document.
Every second half of the batches has the answers of the first half exchanged, so that the loss stays near log 2 and its
gradient does not vanish, however many steps are timed.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from graftune.batch import Example
from graftune.model.families import from_config
from graftune.settings.config import Config

SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
PAIR_LR = 1e-5
HYPER = {"lr": 2e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "clip": 1.0}
BATCHES = 4  # distinct batches, taken in turn
POLICIES = ("none", "selective", "full", "offload")
BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")
BASES = ("nf4", "fp8", "mxfp4", *BLOCKS)
LORA_PEERS = ("peft", "peft-fp32", "liger", "liger-bf16", "unsloth", "unsloth-eager")
FULL_PEERS = ("hf", "hf-compiled")
PAIR_PEERS = ("trl", "trl-none", "trl-liger-bf16", "unsloth")
PEERS = tuple(dict.fromkeys((*LORA_PEERS, *FULL_PEERS, *PAIR_PEERS)))
LARGE = 40e9  # parameters from which no peer is run: a folder of such weights fits nowhere
SWEEPS = ("tokens", "rank", "layers", "documents")
SEED = 20261115
MEDIAN, DEVIATION, SHORTEST = 350, 0.7, 32  # tokens of drawn documents; the deviation is that of their logarithm


@dataclass(frozen=True)
class Shape:
    name: str
    width: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    head: int = 0  # width of a head; 0: width / heads
    experts: int = 0  # of each layer, `ffn` being the width of one; 0: a dense model
    chosen: int = 0  # experts for each token
    delta: tuple[int, int] = (0, 0)  # key and value heads of 128, in three layers of four; zeros: attention in all
    whole: tuple[int, int] = (0, 0)  # key heads and their width in every sixth layer, others have a window; zeros: none
    sinks: bool = False  # gpt-oss: sinks, biases, and a window of 128 in every other layer

    @property
    def targets(self) -> tuple[str, ...]:
        """Every projection that adapters may be on."""
        return SEVEN + (DELTA if self.delta[0] else ())

    @property
    def head_width(self) -> int:
        return self.head or self.width // self.heads

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def parameters(self) -> int:
        if self.delta[0] or self.whole[0] or self.sinks:
            return from_config(self.settings, self.name).parameters
        attention = (self.qkv + self.heads * self.head_width) * self.width
        block = attention + 3 * max(1, self.experts) * self.ffn * self.width
        return self.layers * block + self.vocab * self.width * (1 if self.tied else 2)

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of a Hugging Face config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        } | self._family

    @property
    def _family(self) -> dict[str, Any]:
        """What differs from Llama's keys."""
        if self.sinks:
            return {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 128} | {
                "num_local_experts": self.experts,
                "num_experts_per_tok": self.chosen,
            }
        if self.experts:
            return self._mixture
        return self._hybrid if self.delta[0] else self._windowed if self.whole[0] else {}

    @property
    def _mixture(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": self.ffn,
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "norm_topk_prob": True,
        }

    @property
    def _hybrid(self) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "rope_theta": 10_000_000.0,
            "rope_parameters": rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
            "linear_num_key_heads": self.delta[0],
            "linear_num_value_heads": self.delta[1],
        }

    @property
    def _windowed(self) -> dict[str, Any]:
        """Gemma 4's: keys are the values of the layers without a window."""
        ropes = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        }
        return {
            "architectures": ["Gemma4UnifiedForCausalLM"],
            "model_type": "gemma4_unified_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_parameters": ropes,
            "sliding_window": 1024,
            "global_head_dim": self.whole[1],
            "num_global_key_value_heads": self.whole[0],
            "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0,
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("135m", 576, 1536, 30, 9, 3, 49152, tied=True),  # SmolLM2's
        Shape("350m", 1024, 4096, 24, 16, 4, 32768, tied=False),
        Shape("1b", 2048, 8192, 16, 32, 8, 128256, tied=True),
        Shape("1.5b", 1536, 8960, 28, 12, 2, 151936, tied=True),
        Shape("8b", 4096, 14336, 32, 32, 8, 128256, tied=False),
        Shape("9b", 4096, 12288, 32, 16, 4, 248320, tied=False, head=256, delta=(16, 32)),  # Qwen3.5-9B's
        Shape("12b", 3840, 15360, 48, 16, 8, 262144, tied=True, head=256, whole=(1, 512)),  # Gemma-4-12B's
        Shape("20b", 2880, 2880, 24, 64, 8, 201088, tied=False, head=64, experts=32, chosen=4, sinks=True),  # gpt-oss
        Shape("30ba3b", 2048, 768, 48, 32, 4, 151936, tied=False, head=128, experts=128, chosen=8),
        Shape("70b", 8192, 28672, 80, 64, 8, 128256, tied=False),
        Shape("405b", 16384, 53248, 126, 128, 8, 128256, tied=False),
        Shape("tiny", 64, 96, 2, 4, 2, 300, tied=True),  # for the tests
        Shape("tinymoe", 64, 32, 2, 4, 2, 300, tied=False, head=16, experts=4, chosen=2),
        Shape("tinysinks", 64, 64, 2, 4, 2, 300, tied=False, head=16, experts=4, chosen=2, sinks=True),
        Shape("tinydelta", 64, 96, 4, 4, 2, 300, tied=False, head=32, delta=(1, 2)),
        Shape("tinywhole", 64, 96, 6, 4, 2, 300, tied=True, head=16, whole=(1, 32)),
    )
}


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    rows: int
    length: int
    micro: int = 1
    rank: int = 16
    targets: tuple[str, ...] = SEVEN
    method: str = "lora"  # lora | full
    base: str = "bf16"  # bf16 | one of BASES
    recompute: str = "none"  # of POLICIES
    where: str = "device"  # device | host | table | shard: where the frozen weights lie
    loss: str = "cross_entropy"  # cross_entropy | dpo
    reference: str = ""  # of dpo: each | stored
    drawn: bool = False

    @property
    def alpha(self) -> float:
        return 2.0 * self.rank

    @property
    def pairs(self) -> bool:
        return self.loss == "dpo"

    @property
    def hyper(self) -> dict[str, float]:
        return HYPER | ({"lr": PAIR_LR} if self.pairs else {})

    @property
    def prompt(self) -> int:
        """Tokens of a row that are not trained, where all rows have one length."""
        return self.length // 2

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the documents of a micro-batch; the two of a pair follow each other."""
        count = (2 if self.pairs else 1) * self.rows
        if not self.drawn:
            return (self.length,) * count
        normal = torch.randn(count, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
        found = (MEDIAN * torch.exp(DEVIATION * normal)).clamp(min(SHORTEST, self.length), self.length)
        return tuple(int(length) for length in found)

    @property
    def prompts(self) -> tuple[int, ...]:
        """Tokens of each document that are not trained."""
        if not self.pairs:
            return tuple(length // 2 for length in self.lengths)
        return tuple(min(self.lengths[i - i % 2 : i - i % 2 + 2]) // 2 for i in range(len(self.lengths)))

    @property
    def micro_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def tokens(self) -> int:
        """Of one optimizer step."""
        return self.micro * self.micro_tokens

    @property
    def responses(self) -> int:
        """Rows of one micro-batch that reach the head."""
        return sum(self.lengths) - sum(self.prompts)

    @property
    def forwards(self) -> int:
        """Forward passes besides the trained one."""
        return int(self.reference == "each")

    def config(self, device: torch.device, **more: Any) -> Config:
        """What a user would write for it."""
        values: dict[str, Any] = {
            "device": str(device),
            "compute_dtype": "bf16" if device.type == "cuda" else "auto",
            "base_dtype": "keep" if self.base in (*BLOCKS, "mxfp4") else self.base,
            "method": self.method,
            "max_seq_len": self.length,
            "tokens_per_step": self.tokens,
            "tokens_per_micro_batch": self.micro_tokens,
            "recompute": self.recompute,
            "base_on": "host" if self.where == "host" else "device",
            "embedding_on": "host" if self.where == "table" else "device",
            "shard_base": "yes" if self.where == "shard" else "no",
            "loss": self.loss,
        }
        if self.pairs:
            values["reference_pass"] = self.reference
        if self.base == "bf16" and device.type != "cuda":
            values["base_dtype"] = "auto"
        if self.method == "lora":
            targets = "all_linear" if self.targets == self.shape.targets else self.targets
            values |= {"rank": self.rank, "alpha": self.alpha, "targets": targets}
        return Config.of(values | more)


def parse(name: str) -> Case:
    parts = name.split("-")
    if parts[0] not in SHAPES:
        raise ValueError(f"case {name!r}: unknown shape {parts[0]!r}; known are {', '.join(SHAPES)}")
    case = Case(name, SHAPES[parts[0]], 0, 0, targets=SHAPES[parts[0]].targets)
    for part in parts[1:]:
        if found := re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?", part):
            case = replace(case, rows=int(found[1]), length=int(found[2]), micro=int(found[3] or 1))
        elif found := re.fullmatch(r"r(\d+)", part):
            case = replace(case, rank=int(found[1]))
        elif found := re.fullmatch(r"l(\d+)", part):
            case = replace(case, shape=replace(case.shape, layers=int(found[1])))
        elif part == "qv":
            case = replace(case, targets=("q_proj", "v_proj"))
        elif part == "attention":
            case = replace(case, targets=SEVEN[:4])
        elif case.rows and part in POLICIES[1:]:
            case = replace(case, recompute=part)
        elif part == "full":
            case = replace(case, method="full")
        elif part in BASES:
            case = replace(case, base=part)
        elif part in ("host", "table", "shard"):
            case = replace(case, where=part)
        elif part == "dpo":
            case = replace(case, loss=part, reference="each")
        elif part == "stored" and case.pairs:
            case = replace(case, reference=part)
        elif part == "drawn" and case.pairs:
            case = replace(case, drawn=True)
        else:
            raise ValueError(f"case {name!r}: unknown option {part!r}; see the head of benchmarks/cases.py")
    if case.rows < 1 or case.length < 2 or case.micro < 1:
        raise ValueError(f"case {name!r}: say how many rows of how many tokens, as in {parts[0]}-4x2048")
    if case.method == "full" and (case.base != "bf16" or case.where != "device" or "qv" in parts or case.pairs):
        raise ValueError(f"case {name!r}: full-parameter training has neither adapters nor a frozen base")
    return case


def participants(case: Case, asked: Sequence[str] = ()) -> list[str]:
    """Those asked for, as far as the case is theirs; by default the floor and ours. The floor comes first."""
    peers = PAIR_PEERS if case.pairs else FULL_PEERS if case.method == "full" else LORA_PEERS
    mixture = case.shape.experts > 0
    ours_alone = (
        (mixture and (case.base != "bf16" or case.pairs or case.method == "full"))
        or case.base not in ("bf16", "nf4")
        or case.where != "device"
        or case.recompute == "selective"
    )
    if ours_alone or case.shape.parameters > LARGE:
        peers = ()  # they have nothing like it
    elif mixture:
        peers = ("peft", "unsloth")
    floor = ["floor"] if case.recompute == "none" else []  # what recomputing adds is not in the floor
    own = ["ours", "eager", "ranked", *([] if case.pairs else ["api"]), "profile"]
    able = [*floor, *own, *peers]
    return [name for name in able if name in (asked or ("floor", "ours"))]


def tokens(case: Case) -> torch.Tensor:
    """[batch, micro, documents, length], the same for everyone; step i takes batch i % BATCHES. Documents are those of
    `Case.lengths`, each filled up to the length of the longest."""
    generator = torch.Generator().manual_seed(SEED)
    size = (BATCHES, case.micro, len(case.lengths), case.length)
    return torch.randint(0, case.shape.vocab, size, generator=generator)


class Pair(NamedTuple):
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def pairs(case: Case) -> list[list[list[Pair]]]:
    """[batch][micro][pair], the same for everyone; step i takes batch i % BATCHES."""

    def pair(batch: int, micro: int, number: int) -> Pair:
        at, prompt = 2 * number, case.prompts[2 * number]
        first, second = (ids[batch % half, micro, at + i, : case.lengths[at + i]].tolist() for i in (0, 1))
        answers = (first, second) if batch < half else (second, first)
        return Pair(first[:prompt], *(answer[prompt:] for answer in answers))

    ids, half = tokens(case), BATCHES // 2
    places = range(len(case.lengths) // 2)
    return [[[pair(b, m, n) for n in places] for m in range(case.micro)] for b in range(BATCHES)]


def documents(case: Case) -> list[list[list[Example]]]:
    """[batch][micro][document], as graftune takes them."""
    if case.pairs:
        numbers = itertools.count()
        return [[_answers(micro, numbers) for micro in batch] for batch in pairs(case)]
    masks = [[i >= prompt for i in range(n)] for n, prompt in zip(case.lengths, case.prompts, strict=True)]
    return [
        [[Example(*one) for one in zip(micro, masks, strict=True)] for micro in batch]
        for batch in tokens(case).tolist()
    ]


def _answers(micro: list[Pair], numbers: Iterator[int]) -> list[Example]:
    return [
        Example(pair.prompt + answer, [False] * len(pair.prompt) + [True] * len(answer), group=number)
        for number, pair in zip(numbers, micro, strict=False)
        for answer in (pair.chosen, pair.rejected)
    ]


def labels(ids: torch.Tensor, case: Case) -> torch.Tensor:
    """Hugging Face's: the token itself where it is trained, -100 where it is not."""
    masked = ids.clone()
    masked[..., : case.prompt] = -100
    return masked


def sweep(axis: str) -> dict[str, list[tuple[int, str]]]:
    """curve -> [(x, case)], rising."""
    if axis == "tokens":
        sizes = (512, 2048, 8192, 32768, 65536)
        return {shape: [(n, _tokens_case(shape, n)) for n in sizes] for shape in ("1b", "8b")}
    if axis == "rank":
        return {"1b, 4x2048": [(r, f"1b-r{r}-4x2048") for r in (4, 16, 64, 256)]}
    if axis == "layers":
        return {"8b's widths, 4x2048": [(n, f"8b-l{n}-4x2048") for n in (4, 8, 16, 32)]}
    if axis == "documents":
        return {"1b, 8192 tokens": [(n, f"1b-{8192 // n}x{n}") for n in (128, 512, 2048, 8192)]}
    raise ValueError(f"sweep is {axis!r}; use one of {', '.join(SWEEPS)}")


def _tokens_case(shape: str, tokens: int) -> str:
    """In one micro-batch, except for an 8B's 65,536 tokens, which a card of 139 GiB has to take in two."""
    micro = 2 if (shape, tokens) == ("8b", 65536) else 1
    rows = max(1, tokens // micro // 2048)
    return f"{shape}-{rows}x{tokens // micro // rows}" + (f"x{micro}" if micro > 1 else "")
