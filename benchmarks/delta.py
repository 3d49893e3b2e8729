"""The gated delta rule on a GPU: right, and how long forward and backward take.

    python benchmarks/delta.py [--json FILE]

4 documents of 2,048 tokens, 16 key and 32 value heads of 128 in bf16: the shape of Qwen3.5-9B, for which fla publishes
0.485 + 1.467 ms and FlashQLA 0.167 + 1.259 ms on an H200. Output and gradients are first compared with the reference in
fp32; a difference of more than 2% is reported, and the exit code is 1. Times are of a CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernels import Bench
from benchmarks.measure import goal, said

from benchmarks import measure as record
from graftune.kernels import delta_gates, gated_delta, gated_norm, short_conv
from graftune.kernels.attention import Documents
from graftune.kernels.gated_delta import reference, tiles

KEY_HEADS, VALUE_HEADS, WIDTH, TAPS = 16, 32, 128, 4
DOCUMENTS, CHECKED = (2048,) * 4, (300, 1, 723)
MOST_US, AIM_US, MOST_OFF = 1950.0, 1430.0, 0.02


class Rule:
    """The delta rule over these documents, with q, k and v as columns of one buffer."""

    def __init__(self, documents: tuple[int, ...], heads: tuple[int, int], device: torch.device):
        tokens, (keys, values) = sum(documents), heads
        drawn = torch.Generator(device).manual_seed(tokens)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, generator=drawn, device=device).to(dtype)

        self.widths = [keys * WIDTH, keys * WIDTH, values * WIDTH]
        self.buffer, self.grads = normal(tokens, sum(self.widths)), normal(tokens, sum(self.widths))
        self.decay = -torch.nn.functional.softplus(normal(tokens, values, dtype=torch.float32) - 3)
        self.beta = normal(tokens, values, dtype=torch.float32).sigmoid()
        self.out, self.grad = normal(tokens, values, WIDTH), normal(tokens, values, WIDTH)
        self.grad_decay, self.grad_beta = torch.empty_like(self.decay), torch.empty_like(self.beta)
        self.docs = Documents.of(documents, device)

    def parts(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (part.unflatten(1, (-1, WIDTH)) for part in buffer.split(self.widths, 1))
        return q, k, v

    def forward(self) -> tuple[torch.Tensor, ...]:
        given = *self.parts(self.buffer), self.decay, self.beta
        return gated_delta.forward(*given, self.docs, WIDTH**-0.5, self.out)[0]

    def backward(self, saved: tuple[torch.Tensor, ...]) -> None:
        given = *self.parts(self.buffer), self.decay, self.beta
        gated_delta.backward(
            self.grad, *given, self.docs, WIDTH**-0.5, saved, self.parts(self.grads), self.grad_decay, self.grad_beta
        )  # fmt: skip

    def both(self) -> None:
        self.backward(self.forward())

    def off(self) -> float:
        """The largest relative difference from the reference in fp32, of the output and all gradients."""
        self.both()
        given = *(x.float() for x in self.parts(self.buffer)), self.decay, self.beta
        out = torch.empty_like(given[2])
        want = [torch.empty_like(x) for x in given]
        reference.forward(*given, self.docs, WIDTH**-0.5, out, None, False, False)
        grads = want[0], want[1], want[2]
        reference.backward(
            self.grad.float(), *given, self.docs, WIDTH**-0.5, (), grads, want[3], want[4], False
        )  # fmt: skip
        got = self.out, *self.parts(self.grads), self.grad_decay, self.grad_beta
        return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(got, (out, *want), strict=True))


def around(bench: Bench, rule: Rule) -> dict[str, float]:
    """The convolution, the gates and the gated norm at the same shape, in microseconds."""
    width = rule.buffer.shape[1]
    x, y, grad = rule.buffer, torch.empty_like(rule.buffer), torch.randn_like(rule.buffer)
    taps = torch.randn(width, TAPS, device=x.device)
    positions = torch.cat([torch.arange(n, device=x.device) for n in rule.docs.lengths or ()])
    o, gate, mixed = rule.out.flatten(1), rule.grad.flatten(1), torch.empty_like(rule.out).flatten(1)
    weight, rates = torch.ones(WIDTH, device=x.device), torch.ones(rule.decay.shape[1], device=x.device)
    a, b = (x[:, at : at + len(rates)] for at in (0, len(rates)))
    gates, norms = (a, b, rates, rates), (o, gate, weight, 1e-6)
    work = {
        "convolution": lambda: short_conv.silu_forward(x, taps, positions, y),
        "convolution, backward": lambda: short_conv.silu_backward(grad, x, taps, positions, y),
        "gates": lambda: delta_gates.forward(*gates, rule.grad_decay, rule.grad_beta),
        "gates, backward": lambda: delta_gates.backward(rule.decay, rule.beta, *gates, y[:, :32], y[:, 32:64]),
        "gated norm": lambda: gated_norm.forward(*norms, mixed),
        "gated norm, backward": lambda: gated_norm.backward(
            gate, *norms, torch.empty_like(o), torch.empty_like(o), mixed
        ),
    }  # fmt: skip
    return {name: round(bench.microseconds(each), 1) for name, each in work.items()}


def by_kernel(rule: Rule, rounds: int = 5) -> dict[str, float]:
    """Microseconds of each kernel of a forward and a backward, by the profiler; the backward's runs included."""
    rule.both()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(rounds):
            rule.both()
        torch.cuda.synchronize()
    found = {event.key: event.device_time_total / rounds for event in profile.key_averages()}
    return {name: round(found[name], 1) for name in tiles.TILES if name in found}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="", help="a GPU's record, or - to print")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    device, heads = torch.device("cuda"), (KEY_HEADS, VALUE_HEADS)
    bench, rule, checked = Bench(device), Rule(DOCUMENTS, heads, device), Rule(CHECKED, heads, device)
    off = checked.off()
    forward, both = bench.microseconds(rule.forward), bench.microseconds(rule.both)
    found: dict[str, Any] = {
        "off": round(off, 4), "forward_us": round(forward, 1), "both_us": round(both, 1), "kernels": by_kernel(rule),
        "around": around(bench, rule),
    }  # fmt: skip
    print(*(f"{name}: {value}" for name, value in found.items()), sep="\n")
    reached = [
        goal("delta rule: difference from the reference", "at most", MOST_OFF, off),
        goal("delta rule, forward and backward, us", "at most", MOST_US, both),
        goal("delta rule, as fast as FlashQLA, us", "at most", AIM_US, both),
    ]
    print("\n".join(map(said, reached)))
    record.keep(options.json, "delta", record.facts(options.commit) | found | {"goals": reached})
    return int(off > MOST_OFF)


if __name__ == "__main__":
    sys.exit(main())
