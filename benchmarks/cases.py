"""What is timed: the named cases, as a small grammar, so that a sweep or a test is a case like any other.

    SHAPE[-OPTION...]-ROWSxLENGTH[xMICRO][-POLICY]
    8b-4x2048    1.5b-nf4-qv-4x512    350m-full-4x512x4    1b-r64-4x2048    8b-nf4-4x2048-full    1b-q4_k-4x512

Before the size stands what trains, and on what: qv (adapters on q and v only), full (every parameter), rN (rank N), lN
(N layers), and the base: nf4, fp8, or a GGUF's blocks (q4_k, q8_0, ...). Behind it what the backward
computes again: selective (gate and up), full (whole blocks) or offload (the same, from inputs kept in host memory);
without a word nothing. Everything else is fixed: alpha twice the rank, dropout 0, AdamW, clip 1.0, and the first half
of each row is prompt, which is masked. MICRO micro-batches of ROWSxLENGTH make one optimizer step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HYPER = {"lr": 2e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "clip": 1.0}
BATCHES = 4  # distinct batches, taken in turn
POLICIES = ("none", "selective", "full", "offload")
BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")
BASES = ("nf4", "fp8", *BLOCKS)
LARGE = 30e9  # parameters from which nobody else is run: a folder of such weights fits nowhere


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
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    max_positions: int = 131_072

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def parameters(self) -> int:
        block = self.qkv * self.width + self.width * self.width + 3 * self.ffn * self.width
        return self.layers * block + self.vocab * self.width * (1 if self.tied else 2)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("350m", 1024, 4096, 24, 16, 4, 32768, tied=False),
        Shape("1b", 2048, 8192, 16, 32, 8, 128256, tied=True),
        Shape("1.5b", 1536, 8960, 28, 12, 2, 151936, tied=True),
        Shape("8b", 4096, 14336, 32, 32, 8, 128256, tied=False),
        Shape("70b", 8192, 28672, 80, 64, 8, 128256, tied=False),
        Shape("tiny", 64, 96, 2, 4, 2, 300, tied=True),  # for the tests
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

    @property
    def alpha(self) -> float:
        return 2.0 * self.rank

    @property
    def prompt(self) -> int:
        """Tokens of a row that are not trained."""
        return self.length // 2

    @property
    def micro_tokens(self) -> int:
        return self.rows * self.length

    @property
    def tokens(self) -> int:
        """Of one optimizer step."""
        return self.micro * self.micro_tokens

    @property
    def responses(self) -> int:
        """Rows of one micro-batch that reach the head."""
        return self.rows * (self.length - self.prompt)


# What the project sets out to reach. `floor`: ours over it, at most; a peer's name: its time over ours, at least, and
# `best_peer`: that of the fastest; peak_gib, ms, start_s: at most. `ours@CASE`: ours over our own time of that case, at
# most; `PEER@CASE`: that peer's time there over ours here, at least. Both only where the two cases were measured in one
# run.
GOALS: dict[str, dict[str, float]] = {
    "8b-4x2048": {"floor": 1.12, "unsloth": 1.12, "liger": 1.3, "peak_gib": 43.0},
    "8b-1x512": {"floor": 1.15, "best_peer": 6.7},
    "1b-1x512": {"floor": 1.35, "best_peer": 14.0, "start_s": 10.0},
    "1b-4x2048": {"floor": 1.18, "best_peer": 1.27, "start_s": 10.0},
    "350m-full-4x512x4": {"hf-compiled": 4.0},
    "8b-nf4-4x2048": {"ours@8b-4x2048": 1.06},
    "8b-nf4-4x2048-full": {"peak_gib": 9.5, "ms": 620.0},
    "8b-nf4-4x2048-offload": {"peak_gib": 8.2, "ms": 650.0},
    "1.5b-nf4-qv-4x512": {"floor": 1.3, "best_peer": 4.0},
    "8b-fp8-4x2048": {"floor": 1.25, "unsloth@8b-4x2048": 1.7},
    "70b-nf4-1x2048-full": {"peak_gib": 139.0},
}
HOST_MS, HOST_SYNCS = 2.0, 0  # of every case: what the host may spend on a step, and how often it may wait for the card

DEFAULT = ("1b-1x512", "1b-4x512", "1b-4x2048", "8b-1x512", "8b-4x2048", "350m-full-4x512x4")
PEERS = ("peft", "liger", "liger-bf16", "unsloth", "hf", "hf-compiled")
SWEEPS = ("tokens", "rank", "layers", "documents")


def parse(name: str) -> Case:
    parts = name.split("-")
    if parts[0] not in SHAPES:
        raise ValueError(f"case {name!r}: unknown shape {parts[0]!r}; known are {', '.join(SHAPES)}")
    case = Case(name, SHAPES[parts[0]], 0, 0)
    for part in parts[1:]:
        if found := re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?", part):
            case = replace(case, rows=int(found[1]), length=int(found[2]), micro=int(found[3] or 1))
        elif found := re.fullmatch(r"r(\d+)", part):
            case = replace(case, rank=int(found[1]))
        elif found := re.fullmatch(r"l(\d+)", part):
            case = replace(case, shape=replace(case.shape, layers=int(found[1])))
        elif part == "qv":
            case = replace(case, targets=("q_proj", "v_proj"))
        elif case.rows and part in POLICIES[1:]:
            case = replace(case, recompute=part)
        elif part == "full":
            case = replace(case, method="full")
        elif part in BASES:
            case = replace(case, base=part)
        else:
            raise ValueError(f"case {name!r}: unknown option {part!r}; see the head of benchmarks/cases.py")
    if case.rows < 1 or case.length < 2 or case.micro < 1:
        raise ValueError(f"case {name!r}: say how many rows of how many tokens, as in {parts[0]}-4x2048")
    if case.method == "full" and (case.base != "bf16" or "qv" in parts):
        raise ValueError(f"case {name!r}: full-parameter training has neither adapters nor a quantised base")
    return case


def participants(case: Case, asked: Sequence[str] = ()) -> list[str]:
    """Who runs the case, in this order: the floor first, so that everyone is measured against the same. Those asked
    for, as far as the case is theirs, or everyone who is usually shown."""
    peers = ["hf", "hf-compiled"] if case.method == "full" else ["peft", "liger", "liger-bf16", "unsloth"]
    if case.base not in ("bf16", "nf4") or case.shape.parameters > LARGE or case.recompute == "selective":
        peers = []  # nothing of theirs is like it
    able = ["floor", "ours", *peers]
    rare = {"liger-bf16"} if case.name != "8b-4x2048" else set()
    if case.recompute != "none":
        rare.add("floor")  # what recomputing adds is not in it
    return [name for name in able if (name in asked if asked else name not in rare)]


def usual_peers(name: str) -> list[str]:
    """Whose times a case has to have before its best peer is known."""
    return [who for who in participants(parse(name)) if who in PEERS]


def tokens(case: Case) -> torch.Tensor:
    """[batch, micro, rows, length], the same for everyone; step i takes batch i % BATCHES."""
    generator = torch.Generator().manual_seed(20261115)
    size = (BATCHES, case.micro, case.rows, case.length)
    return torch.randint(0, case.shape.vocab, size, generator=generator)


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
    raise ValueError(f"sweep is {axis!r}; use one of {', '.join(SWEEPS)} or all")


def _tokens_case(shape: str, tokens: int) -> str:
    """In one micro-batch, but for an 8B's 65,536 tokens, which a card of 139 GiB has to take in two."""
    micro = 2 if (shape, tokens) == ("8b", 65536) else 1
    rows = max(1, tokens // micro // 2048)
    return f"{shape}-{rows}x{tokens // micro // rows}" + (f"x{micro}" if micro > 1 else "")
