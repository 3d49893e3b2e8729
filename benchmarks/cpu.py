"""Ours beside PEFT on a CPU: the same weights, adapters, batches and settings, step by step in one process.

    python benchmarks/cpu.py [--json FILE] [--rows 4] [--length 256] [--steps 5]

The base is SmolLM2-135M (out of its GGUF, dequantised once and given to both), seven targets, rank 16, the first half
of each row is prompt. PEFT runs in bf16 and in fp32; `ratio` is tokens/s over PEFT in bf16, `ratio_best` over the
faster of the two. Steps alternate between the engines, so that a shared machine slows both alike; medians are compared.
Without bf16 units torch's bf16 products take minutes a step: there PEFT bf16 is timed on one short row, and said so.
The floor is the step's own frozen products (forward and input gradient, response-only head), timed in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import HYPER
from tests.support.oracle import peft_name, smollm2_in_transformers
from tests.support.tiny import make_tokenizer

from benchmarks import measure
from graftune.batch import Example
from graftune.data.pack import pack
from graftune.runtime import has_fast_bf16
from graftune.session import Session, open_session
from graftune.settings.config import Config

SHAPE: dict[str, Any] = {  # SmolLM2-135M's
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


class OursRunner:
    def __init__(self, session: Session):
        self.session, self.name = session, f"graftune {session.runtime.compute_name}"

    def __call__(self, tokens: torch.Tensor) -> tuple[float, float]:
        half = tokens.shape[1] // 2
        batch = pack([Example(row, [i >= half for i in range(len(row))]) for row in tokens.tolist()])
        self.session.forward_backward(batch)
        stats = self.session.optim_step(**HYPER)
        assert not stats.skipped
        return stats.loss, stats.grad_norm


class PeftRunner:
    def __init__(self, session: Session, start: dict[str, torch.Tensor], dtype: torch.dtype):
        import peft

        model = smollm2_in_transformers(session.base).to(dtype)
        config = peft.LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        self.model = peft.get_peft_model(model, config).train()
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in start.items():
                own[peft_name(name)].copy_(value)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=HYPER["lr"], weight_decay=HYPER["weight_decay"], fused=True)
        self.dtype = dtype
        self.name = f"PEFT {'bf16' if dtype == torch.bfloat16 else 'fp32'}"

    def __call__(self, tokens: torch.Tensor) -> tuple[float, float]:
        labels = tokens.clone()
        labels[:, : tokens.shape[1] // 2] = -100
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self.model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained, HYPER["clip"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), float(norm)


def floor_seconds(session: Session, tokens: int, responses: int) -> float:
    """The frozen products of one step and nothing else, in the step's order."""
    decoder, compute = session.parts.decoder, session.runtime.compute
    weights = [projection.frozen for block in decoder.blocks for projection in block.projections]
    inputs = {width: torch.randn(tokens, width).to(compute) for width in {weight.in_features for weight in weights}}
    started = time.perf_counter()
    for weight in weights:
        weight.input_grad(weight.matmul(inputs[weight.in_features]))
    rows = torch.randn(responses, decoder.spec.width).to(compute)
    for part in rows.split(256):
        decoder.head.frozen.input_grad(decoder.head.frozen.matmul(part))
    return time.perf_counter() - started


def timed(runner: Callable[[torch.Tensor], tuple[float, float]], tokens: torch.Tensor) -> tuple[float, float, float]:
    started = time.perf_counter()
    loss, norm = runner(tokens)
    return time.perf_counter() - started, loss, norm


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--random", action="store_true", help="random weights of SmolLM2's shape: needs no model file")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        base = random_base(Path(folder)) if options.random else ""
        session = open_session(Config.of({"base": base, "device": "cpu", "rank": 16, "alpha": 32.0}))
        compare(options, session)


def random_base(folder: Path) -> str:
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save(folder)
    return str(folder)


def compare(options: argparse.Namespace, session: Session) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in session.parts.arena.slots:  # B not zero, so that every gradient is there from the first step
        if name.endswith("lora_B.weight"):
            view = session.parts.arena.view(name, session.parts.arena.weights)
            view.copy_(torch.empty(view.shape).normal_(0, 0.01, generator=generator))
    session.parts.arena.publish()
    start = {n: session.parts.arena.view(n, session.parts.arena.weights).clone() for n in session.parts.arena.slots}
    batches = [
        torch.randint(0, session.base.spec.vocab, (options.rows, options.length), generator=generator)
        for _ in range(options.steps + 1)
    ]
    fast_bf16 = has_fast_bf16(torch.device("cpu"))
    runners: list[Any] = [OursRunner(session), PeftRunner(session, start, torch.float32)]
    if fast_bf16:
        runners.append(PeftRunner(session, start, torch.bfloat16))
    times: dict[str, list[tuple[float, float, float]]] = {r.name: [] for r in runners}
    floors: list[float] = []
    for index, tokens in enumerate(batches):
        for runner in runners:
            figures = timed(runner, tokens)
            if index or options.steps == 0:  # the first step warms up
                times[runner.name].append(figures)
            print(f"step {index} {runner.name:14} {figures[0]:8.2f} s  loss {figures[1]:.5f}  norm {figures[2]:.5f}")
        if index:
            floors.append(floor_seconds(session, options.rows * options.length, options.rows * options.length // 2))
    count = options.rows * options.length
    speeds = {name: count / statistics.median(t[0] for t in rows) for name, rows in times.items()}
    note = ""
    if not fast_bf16:
        del runners[1:]
        short = torch.randint(0, session.base.spec.vocab, (1, 32), generator=generator)
        seconds, loss, norm = timed(PeftRunner(session, start, torch.bfloat16), short)
        speeds["PEFT bf16"] = short.numel() / seconds
        times["PEFT bf16"] = [(seconds, loss, norm)]
        note = f"no bf16 units here: PEFT bf16 timed on one row of {short.numel()} tokens only"
    report(options, session, speeds, times, count / statistics.median(floors), note)


def report(
    options: argparse.Namespace,
    session: Session,
    speeds: dict[str, float],
    times: dict[str, list[tuple[float, float, float]]],
    floor: float,
    note: str,
) -> None:
    ours = next(n for n in speeds if n.startswith("graftune"))
    if not all(norm > 0 for rows in times.values() for _, _, norm in rows):
        sys.exit("no gradient flowed: no speed is reported")
    peft_best = max(v for n, v in speeds.items() if n.startswith("PEFT"))
    shape = "SmolLM2-135M's shape, random weights" if options.random else "SmolLM2-135M"
    result = {
        "case": f"{shape}, {options.rows}x{options.length}, seven targets, rank 16, half of each row prompt",
        "tok_s": {n: round(v, 1) for n, v in speeds.items()} | {"floor": round(floor, 1)},
        "ratio": round(speeds[ours] / speeds["PEFT bf16"], 2),
        "ratio_best": round(speeds[ours] / peft_best, 2),
        "share_of_floor": round(speeds[ours] / floor, 3),
        "last_loss": {n: round(rows[-1][1], 5) for n, rows in times.items()},
        "last_grad_norm": {n: round(rows[-1][2], 5) for n, rows in times.items()},
        "note": note,
        "machine": session.runtime.describe(),
        "cpu": platform.processor() or platform.machine(),
    } | measure.facts()
    print(f"\n{'':16}{'tok/s':>10}{'last loss':>12}{'last norm':>12}")
    for name, rows in times.items():
        print(f"{name:16}{speeds[name]:10.1f}{rows[-1][1]:12.5f}{rows[-1][2]:12.5f}")
    print(f"{'floor':16}{floor:10.1f}")
    print(
        f"ratio to PEFT bf16 {result['ratio']}, to the faster PEFT {result['ratio_best']}{'; ' + note if note else ''}"
    )
    if options.json == "-":
        print(json.dumps(result))
    elif options.json:
        measure.write(Path(options.json), measure.read(Path(options.json)) | result)


if __name__ == "__main__":
    main()
