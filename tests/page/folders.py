"""Run folders written by hand, for the page's tests, pictures and benchmarks: no model, no training, no torch.

Figures are made by formulas with a seed, so that pictures of the page stay as they are. A run that "trains" has the
lock of a process, by default this one, as graftune.io.lock writes it.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from graftune.io.lock import LOCK, LockOwner

OWNERS = {
    "base": 269_030_400, "adapters": 19_537_920, "gradients": 19_537_920, "moments": 39_075_840,
    "saved activations": 187_432_960, "scratch": 33_554_432, "logits": 50_331_648,
    "interpreter and libraries": 342_601_728,
}  # fmt: skip
PROMPTS = [
    "Good morning. I bought the blanket by mistake, cancel order 2495. I need an answer today.",
    "My parcel says delivered, but there is nothing at the door. Order 7731.",
    "Can I change the address of order 118? No hurry.",
]
RIGHT = [
    '{"topic":"cancel","order":2495,"urgent":true}',
    '{"topic":"missing","order":7731,"urgent":false}',
    '{"topic":"address","order":118,"urgent":false}',
]
BASE = [
    "The blanket you bought is a gift from a friend.",
    "I'm sorry to hear that. Could you tell me more about your parcel?",
    "Yes, you can change the address of your order at any time.",
]

# Markup, an escape sequence of a terminal, and a character that turns the direction of the text around.
HOSTILE = '<img src=x onerror="window.hacked=1"><b>bold</b>\u001b[31mred\u001b[0m\u202eevil'


@dataclass
class RunFolder:
    """A run folder that can be written to as a run would."""

    folder: Path
    steps: int = 400
    lr: float = 2e-4
    rank: int = 16
    seed: int = 0
    metric: str = ""  # its name, where evaluations have one
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random, self.time = random.Random(self.seed), time.time() - 0.9 * self.steps
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "metrics.jsonl"

    def emit(self, *events: dict[str, Any]) -> None:
        """Append events as graftune.observe.events writes them: `event` first, then `time`."""
        lines = [{"event": each["event"], "time": round(self.time, 3), **each} for each in events]
        with open(self.log, "a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def start(self, **more: Any) -> RunFolder:
        """The configuration, the plan and the first event."""
        config = {
            "base": {"base": "HuggingFaceTB/SmolLM2-135M-Instruct", "base_dtype": "bf16", "device": "cpu"},
            "lora": {"rank": self.rank, "alpha": 2.0 * self.rank, "targets": ["all_linear"]},
            "data": {"data": "support.jsonl", "max_seq_len": 512},
            "optim": {"lr": self.lr, "schedule": "cosine", "clip": 1.0},
            "train": {"method": "lora", "max_steps": self.steps, "tokens_per_step": 4096, "seed": self.seed},
            "run": {"out": str(self.folder)},
        }
        for section, values in self.settings.items():
            config[section] |= values
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        plan = {"device": "cpu", "owners": OWNERS, "expected": sum(OWNERS.values()), "fits": True}
        (self.folder / "plan.json").write_text(json.dumps(plan))
        command = f"graftune train HuggingFaceTB/SmolLM2-135M-Instruct support.jsonl --rank {self.rank} --lr {self.lr}"
        self.emit({"event": "run_start", "steps": self.steps, "trainable": 4_884_480, "command": command, **more})
        return self

    def step(self, number: int) -> dict[str, Any]:
        """The event of one step: a loss that falls, noise, a warm-up and a cosine."""
        done, noise = number / self.steps, self.random.gauss(0, 1)
        scale = 0.35 + 0.05 * math.log2(self.lr / 1e-4)
        loss = 0.011 + 2.6 * math.exp(-done * 14 * scale) * (1 + 0.11 * noise) + 0.03 * abs(noise) * (1 - done)
        warm = min(1.0, number / max(1, self.steps * 0.05))
        lr = self.lr * warm * 0.5 * (1 + math.cos(math.pi * done))
        norm = 0.25 + 1.6 * math.exp(-done * 9) * (1 + 0.3 * abs(noise)) + 0.12 * abs(noise)
        spiked = number % 173 == 0
        self.time += 0.9
        return {
            "event": "step", "time": round(self.time, 3), "step": number, "loss": loss * (2.5 if spiked else 1),
            "grad_norm": norm * (4 if spiked else 1), "lr": lr, "tokens": 4096,
            "tok_s": 4550 + 60 * noise - (900 if number % 100 == 1 else 0), "skipped": spiked,
            "floor_share": 0.71 + 0.01 * noise,
        }  # fmt: skip

    def evaluation(self, number: int) -> dict[str, Any]:
        loss = 0.016 + 2.55 * math.exp(-number / self.steps * 14 * (0.35 + 0.05 * math.log2(self.lr / 1e-4)))
        metrics = {"metrics": {self.metric: 1 - loss / 3}} if self.metric else {}
        return {"event": "eval", "step": number, "epoch": 0, "loss": loss, "perplexity": math.exp(loss), **metrics}

    def train(self, upto: int, *, since: int = 0, every: int = 50) -> RunFolder:
        """Steps since + 1 to upto with their evaluations, samples and one memory event."""
        events: list[dict[str, Any]] = [] if since else [self.evaluation(0)]
        for number in range(since + 1, upto + 1):
            events.append(self.step(number))
            if events[-1]["skipped"]:
                text = f"step {number}: the gradient was not finite; this update was skipped"
                events.append({"event": "warning", "step": number, "text": text})
            if number == 1:
                planned = sum(OWNERS.values())
                memory = {"planned": planned, "measured": int(0.983 * planned), "owners": OWNERS}
                events.append({"event": "memory", "step": 1, **memory})
            if number % every == 0:
                events.append(self.evaluation(number))
        self.emit(*events)
        return self

    def resumed(self, step: int, total: int) -> RunFolder:
        """Killed, and resumed at `step` with another length."""
        self.time += 60
        self.emit({"event": "resume", "step": step})
        self.emit({"event": "extend", "step": step, "steps": total, "steps_before": self.steps})
        self.steps = total
        return self

    def answered(self, *steps: int) -> RunFolder:
        """Sample answers: the base's, and the tuned model's, right from the second half on."""
        self.emit({"event": "sample", "step": 0, "prompts": PROMPTS, "references": RIGHT, "answers": BASE})
        for number in steps:
            half = [text[: len(text) // 2] for text in RIGHT]
            self.emit({"event": "sample", "step": number, "answers": RIGHT if number > self.steps / 2 else half})
        return self

    def held(self, pid: int | None = None, since: float = 0.0) -> RunFolder:
        """Locked, as by a run that goes on: by this process, or by another one that is here; before its first event,
        unless `since` says otherwise."""
        holder = replace(LockOwner.me(), since=since)
        held = asdict(holder if pid is None else replace(holder, pid=pid, began=""))
        (self.folder / LOCK).write_text(json.dumps(held))
        return self

    def ended(self, stopped: str = "finished", **more: Any) -> RunFolder:
        (self.folder / LOCK).unlink(missing_ok=True)
        last = json.loads(self.log.read_bytes().splitlines()[-1])
        self.emit({"event": "run_end", "step": last.get("step", self.steps), "stopped": stopped, **more})
        return self

    def checkpoints(self, *steps: int, adapter: bool = True) -> RunFolder:
        for number in steps:
            (self.folder / "checkpoints" / f"step-{number}").mkdir(parents=True)
        if adapter:
            (self.folder / "adapter").mkdir()
        return self

    def preview(self, examples: Iterable[tuple[list[str], list[int]]]) -> RunFolder:
        """preview.jsonl with tokens and their mask."""
        lines = [
            {"index": index, "row": index + 1, "tokens": tokens, "trained": trained, "truncated": False}
            for index, (tokens, trained) in enumerate(examples)
        ]
        (self.folder / "preview.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self

    def profiled(self) -> RunFolder:
        (self.folder / "profile.json").write_text(json.dumps(profile()))
        return self


def chat_example(user: str, answer: str) -> tuple[list[str], list[int]]:
    """Tokens of one conversation, cut at spaces, and the mask: the answer and the token that ends it."""
    head = ["<|im_start|>", "user", "\n", *_words(user), "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    trained = [*_words(answer), "<|im_end|>"]
    return [*head, *trained, "\n"], [*[0] * len(head), *[1] * len(trained), 0]


def _words(text: str) -> list[str]:
    return [word if number == 0 else f" {word}" for number, word in enumerate(text.split(" "))]


def profile() -> dict[str, Any]:
    """A document as `graftune profile` writes it."""
    shares = {"norms": 0.05, "qkv": 0.17, "rope": 0.03, "attention": 0.16, "o": 0.11, "gate_up": 0.26, "down": 0.22}

    def branch(name: str, ms: float) -> dict[str, Any]:
        layers = [{"name": f"layer {i}", "ms": ms / 6, "children": _split(shares, ms / 6)} for i in range(6)]
        return {"name": name, "ms": ms, "children": layers}

    tree = {
        "name": "step",
        "ms": 104.0,
        "children": [
            {"name": "host to device", "ms": 1.1},
            branch("forward", 31.0),
            {"name": "loss", "ms": 7.5, "children": _split({"head": 0.8, "cross-entropy": 0.2}, 7.5)},
            branch("backward", 58.0),
            {"name": "update", "ms": 6.0, "children": _split({"gradient norm": 0.2, "adamw": 0.77}, 6.0)},
        ],
    }
    phases = [{**_times(each["ms"]), "name": each["name"], "share": each["ms"] / 104} for each in tree["children"]]
    operations = [
        {"name": f"{phase} {name}", "phase": phase, "ms": ms * share, "calls": 6, "share": ms * share / 104}
        for phase, ms in (("forward", 31.0), ("backward", 58.0))
        for name, share in shares.items()
    ]
    return {
        "version": 1, "device": "cpu", "gpu": None, "model": "SmolLM2-135M", "shape": {"rows": 4, "length": 512},
        "captured": False, "step_ms": 104.0, "plain_ms": 101.8, "eager_ms": None, "floor_ms": 72.4,
        "floor_share": 0.711, "owned": 0.981,
        "bottleneck": "Backward of gate_up takes 14% of the step; it is limited by the CPU's products.",
        "phases": phases, "operations": sorted(operations, key=lambda each: -each["ms"]), "tree": tree,
        "layers": [{"layer": i, "forward_ms": 31 / 6, "backward_ms": 58 / 6} for i in range(6)],
        "hotspots": [{"name": "backward gate_up", "ms": 15.08, "times_the_mean": 2.37}],
    }  # fmt: skip


def _times(ms: float) -> dict[str, float]:
    return {"ms": ms, "p50": ms, "p95": 1.05 * ms, "p99": 1.12 * ms}


def _split(shares: dict[str, float], ms: float) -> list[dict[str, Any]]:
    return [{"name": name, "ms": share * ms} for name, share in shares.items()]


def gallery(root: Path) -> Path:
    """The folder of runs that the pictures show: one that trains, and finished, stopped and dead ones."""
    asked = [chat_example(prompt, right) for prompt, right in zip(PROMPTS, RIGHT, strict=True)]
    live = RunFolder(root / "support-r16", seed=1).start().train(268).held().answered(100, 200)
    live.checkpoints(200, 100, adapter=False).preview(asked * 8).profiled()
    done = RunFolder(root / "support-r64", seed=2, rank=64).start().train(400).answered(100, 200, 300, 400)
    done.preview(asked * 8).checkpoints(400).ended()
    RunFolder(root / "support-lr5e-4", seed=3, lr=5e-4).start().train(400).ended()
    RunFolder(root / "sweep" / "lr1e-4", seed=4, lr=1e-4).start().train(190).ended("interrupted", signal=15)
    RunFolder(root / "sweep" / "lr1e-3", seed=5, lr=1e-3, rank=8).start().train(63)
    return root
