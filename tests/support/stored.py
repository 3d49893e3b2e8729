"""Five small runs whose losses are kept in tests/stored_losses: a dense family, experts, NF4, GGUF blocks, full.

Everything that goes in is made of integers of numpy's generator, so that it is the same on every machine: torch draws
Gaussian numbers in ways that depend on the CPU. Steps go through the loader, the schedule and the loop of a real run.
tests/test_stored_losses.py compares, tools/store_losses.py writes; a change that moves them must say why.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from benchmarks.random_bases import SCALES

from graftune.batch import Example
from graftune.data.loader import Loader
from graftune.kernels.gguf_dequant import KINDS, row_bytes
from graftune.model.frozen.interface import TensorRows
from graftune.model.lora import build_arena, initialise, norm_names
from graftune.model.spec import ModelSpec
from graftune.runtime import resolve
from graftune.settings.sections import LoraConfig, OptimConfig
from graftune.step.pipeline import HostPipeline
from graftune.step.schedule import hyperparameters, learning_rate
from graftune.step.step import Step
from graftune.tokenizer import Tokenizer
from graftune.weights.base import Base
from graftune.weights.load import build_decoder
from graftune.weights.placement import Placement
from tests.support import specs
from tests.support.quantised import Blocks

FOLDER = Path(__file__).parents[1] / "stored_losses"
STEPS, SEED, VOCAB = 100, 42, 96
NEAR = 1e-5  # relative, everywhere
OPTIM = OptimConfig(lr=2e-3, warmup=0.1, eps=1e-6, weight_decay=0.01, clip=1.0)


def spec(width: int, **more: Any) -> ModelSpec:
    shape = {
        "family": "llama", "layers": 1, "width": width, "ffn": 96 if width < 256 else 256, "heads": 4, "kv_heads": 2,
        "head_width": width // 4, "vocab": VOCAB, "norm_eps": 1e-5, "rope_theta": 10000.0, "max_positions": 128,
        "tied": False,
    }  # fmt: skip
    return specs.made(**cast(Any, shape | more))


def numbers(draw: np.random.Generator, shape: tuple[int, ...], spread: float) -> torch.Tensor:
    """Uniform within 1.75 times the spread, on a grid that fp32 holds exactly."""
    whole = draw.integers(-7 << 12, 7 << 12, shape).astype(np.float32)
    return torch.from_numpy(whole * np.float32(2.0 ** math.floor(math.log2(spread)) / (1 << 14)))


def blocks(draw: np.random.Generator, kind: str, rows: int, width: int) -> Blocks:
    """Random codes under a scale that is a power of two."""
    size = KINDS[kind].bytes
    raw = torch.from_numpy(draw.integers(0, 256, (rows, row_bytes(kind, width) // size, size), dtype=np.uint8))
    for at, share in SCALES[kind]:
        raw[:, :, at : at + 2] = torch.tensor([2.0**-12 * share], dtype=torch.float16).view(torch.uint8)
    return Blocks(kind, (rows, width), raw.view(rows, -1))


def base_of(shape: ModelSpec, kind: str = "") -> Base:
    """Matrices in the blocks of `kind`, or in fp32."""
    draw, tensors = np.random.default_rng(SEED), dict[str, Any]()
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("embed_tokens.weight", "lm_head.weight"), (shape.vocab, shape.width)
    )
    for index, layer in enumerate(shape.layers):
        shapes |= {f"layers.{index}.{name}": size for name, size in layer.weights.items()}
    for name, size in shapes.items():
        if kind:
            tensors[name] = blocks(draw, kind, size[0], size[1])
        else:
            tensors[name] = TensorRows(numbers(draw, size, 0.5 if "embed" in name else 1 / size[-1] ** 0.5))
    for _, name, width in norm_names(shape):
        tensors[name] = TensorRows(1 + numbers(draw, (width,), 0.25))
    made_as = "gguf" if kind else "safetensors"
    return Base("stored", Path("stored"), made_as, shape, cast(Tokenizer, None), tensors)


def examples() -> list[Example]:
    """Runs of tokens that follow from each other, so that there is something to learn."""
    draw, found = np.random.default_rng(SEED + 1), list[Example]()
    for row in range(1, 121):
        length, first, stride = (int(draw.integers(*ends)) for ends in ((8, 25), (0, VOCAB), (1, 5)))
        tokens = [(first + stride * place) % VOCAB for place in range(length)]
        found.append(Example(tokens, [place > 2 for place in range(length)], row))
    return found


def losses(
    shape: ModelSpec, held: str, *, blocks: str = "", full: bool = False, dropout: float = 0.0, tokens: int = 32
) -> list[float]:
    """Of the first hundred steps of so many tokens, in micro-batches of 32, in fp32."""
    runtime, base = resolve("cpu", "fp32", threads=torch.get_num_threads()), base_of(shape, blocks)
    lora = LoraConfig(rank=4, dropout=dropout).resolved()
    arena = build_arena(shape, lora, runtime.device, runtime.compute, full=full)
    decoder = build_decoder(base, arena, lora, runtime, Placement(held, "stored"))
    arena.publish() if full else initialise(arena, lora, SEED)
    step = Step(decoder, arena, dropout=dropout, seed=SEED)
    loop, found = HostPipeline(step), list[float]()
    loader = Loader(examples(), tokens_per_step=tokens, micro_capacity=32, seed=SEED)
    for epoch in range(STEPS):
        for number, batches in enumerate(loader.epoch(epoch)):
            hyper = hyperparameters(OPTIM)
            hyper |= {"lr": learning_rate(len(found), STEPS, OPTIM), "divisor": loader.divisor(epoch, number)}
            loop.step(batches, hyper, [4096 * len(found) + place for place in range(len(batches))])
            found.append(loop.next().loss)
            if len(found) == STEPS:
                return found
    raise AssertionError("the data is too short")


def experts() -> ModelSpec:
    return spec(48, family="qwen3_moe", head_width=16, ffn=32, experts=4, chosen=2)


CASES: dict[str, Callable[[], list[float]]] = {
    "dense": lambda: losses(spec(48, head_width=12), "fp32", dropout=0.1, tokens=40),
    "experts": lambda: losses(experts(), "fp32"),
    "nf4": lambda: losses(spec(64), "nf4"),
    "gguf": lambda: losses(spec(256), "keep", blocks="Q4_K"),
    "full": lambda: losses(spec(48, head_width=12), "fp32", full=True),
}


def machine() -> dict[str, Any]:
    """What has to be the same for losses to be the same to the bit. Libraries choose their kernels by the processor,
    beyond what its capability says."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "processor": named or platform.processor(),
    }


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def worst(got: list[float], want: list[float]) -> tuple[float, int]:
    """The largest relative difference, and the step (from 1) that has it."""
    return max((abs(a - b) / abs(b), place) for place, (a, b) in enumerate(zip(got, want, strict=True), 1))
