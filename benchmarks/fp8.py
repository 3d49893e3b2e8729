"""FP8 kernels one by one, at the projections of 8B and 1B: right first, then how fast.

    python -m benchmarks.fp8 [--shapes 8b,1b] [--tokens 8192,2048] [--quick] [--json FILE]

Every figure is microseconds of one call, the median of a captured graph that calls it on buffers taken in turn, so that
the 50 MB of cache hold none of them from call to call. `share`: the ways to add the adapters' share to a product. The
table at the end is a layer: what the products alone take, and what our way there and back adds, apart and fused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cases import SHAPES, Shape
from benchmarks.floor import sizes

from graftune.kernels import fp8, lora_linear, matmul, rms_norm, rope, swiglu
from graftune.kernels.fp8 import Rows, kernel, reference
from graftune.kernels.lora_linear import Low
from graftune.kernels.room import Adapters
from graftune.model.frozen.fp8 import Fp8, Turned

RANK, CACHE = 16, 200 << 20
GROUPS = ("qkv", "o", "gate_up", "down")
Timed = Callable[[Callable[[int], Any], int], float]


def columns(shape: Shape, group: str) -> tuple[tuple[int, int], ...]:
    """Of the members of a group."""
    widths = {
        "qkv": [shape.heads * shape.head_width, *[shape.kv_heads * shape.head_width] * 2],
        "o": [shape.width],
        "gate_up": [shape.ffn] * 2,
        "down": [shape.width],
    }[group]
    ends = list(itertools.accumulate(widths))
    return tuple((end - width, end) for end, width in zip(ends, widths, strict=True))


def timed(call: Callable[[int], Any], turns: int, seconds: float = 0.15) -> float:
    """Microseconds of call(turn), over a graph of all turns."""
    for turn in range(turns):
        call(turn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = max(turns, 8)
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % turns)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / calls


def random(*size: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0.0, scale)


def turns(nbytes: int) -> int:
    return max(2, min(8, -(-CACHE // nbytes)))


class Group:
    """A projection with adapters, in several copies."""

    def __init__(self, shape: Shape, name: str, tokens: int):
        self.name, self.columns = name, columns(shape, name)
        self.out, self.into = sizes(shape)[name]
        self.ranks, device = RANK * len(self.columns), torch.device("cuda")
        self.turns = turns(self.out * self.into)
        self.bf16 = [random(self.out, self.into, scale=0.02) for _ in range(self.turns)]
        scratch = Turned(Turned.size(self.out, self.into, self.ranks), self.into, device)
        self.weights, self.adapters = [], []
        for values in self.bf16:
            weight = Fp8(self.out, self.into, device, torch.bfloat16, scratch, room=self.ranks)
            weight.fill(0, values)
            down, up = random(self.ranks, self.into, scale=1 / RANK), random(self.out, RANK, scale=0.01)
            weight.settle(Adapters(down, up, self.columns, 2.0))
            self.weights.append(weight)
            self.adapters.append((down, up))
        fp8.settle([w.share for w in self.weights if w.share is not None], {})
        self.x = [random(tokens, self.into) for _ in range(2)]
        self.grad = [random(tokens, self.out, scale=1e-3) for _ in range(2)]
        self.h = random(tokens, self.ranks)

    def low(self, turn: int) -> Low:
        return Low(self.h, self.adapters[turn % self.turns][1], self.columns, 2.0)


def check(group: Group) -> dict[str, float]:
    """Against the reference in fp32, on a few hundred rows (an odd number of them)."""
    weight, (down, up) = group.weights[0], group.adapters[0]
    assert weight.share is not None
    x, grad = group.x[0][:333], group.grad[0][:333]
    values, a, b = group.bf16[0].float(), down.float(), up.float()
    found = {}
    y, h = weight.forward(x)
    shares = [2.0 * h[:, r].float() @ b[rows].t() for _, rows, r in lora_linear.members(group.columns, RANK)]
    rows = weight._rows(x, None, weight.share.there.reach)
    base = reference.mm(
        Rows(rows.codes[:, : group.into], rows.scale), Rows(weight.weight, weight.scale), torch.float32
    )  # fmt: skip
    exact, share = x.float() @ values.t(), torch.cat(shares, 1)
    found["forward"] = off(y, exact + share)
    found["forward against its codes"] = off(y, base + share)
    grad_x, g = weight.backward(grad, group.low(0)._replace(h=h))
    exact, share = grad.float() @ values, g.float() @ a
    rows = weight._rows(grad, weight.scale, weight.share.back.reach)
    codes = rows.codes[:, : group.out].float() * rows.scale[:, None]
    found["dX"] = off(grad_x, exact + share)
    found["dX against its codes"] = off(grad_x, codes @ weight.weight.float() + share)
    turned = torch.empty(group.into, fp8.aligned(len(weight.whole)), dtype=torch.uint8, device="cuda").view(fp8.E4M3)
    fp8.transpose(weight.whole[:, : group.into], turned[:, : len(weight.whole)])
    same = torch.equal(
        turned[:, : len(weight.whole)].view(torch.uint8), weight.whole[:, : group.into].view(torch.uint8).t()
    )
    limits = {"forward": 0.05, "dX": 0.05, "forward against its codes": 0.01, "dX against its codes": 0.01}
    bad = [name for name, limit in limits.items() if not found[name] <= limit]
    if bad or not same:
        raise SystemExit(f"{group.name}: wrong: {bad} {found}, transposed codes equal: {same}")
    return {name: round(value, 5) for name, value in found.items()}


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def exact_sums(a: Rows, b: Rows) -> torch.Tensor:
    scales = {"scale_a": a.scale.unsqueeze(1), "scale_b": b.scale.unsqueeze(0)}
    return torch._scaled_mm(a.codes, b.codes.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=False)


def products(group: Group, tokens: int, quick: bool) -> dict[str, float]:
    """Of one projection: the products, and what comes before them."""
    n, into, out = group.turns, group.into, group.out
    room = fp8.room_of(group.ranks)
    device = torch.device("cuda")
    ones, t_scale = torch.ones(max(into, out), device=device), torch.rand(tokens, device=device)
    found: dict[str, float] = {}

    def codes(rows: int, width: int, exact: bool = False) -> torch.Tensor:
        made = torch.empty(rows, width, dtype=torch.uint8, device=device).view(fp8.E4M3)
        made = made if exact else fp8.buffer(rows, width, device)
        for part in made.split(4096):
            part.copy_(torch.randn(part.shape, device=device).mul_(50))
        return made

    found["bf16 forward"] = timed(lambda i: group.x[i % 2] @ group.bf16[i].t(), n)
    found["bf16 dX"] = timed(lambda i: group.grad[i % 2] @ group.bf16[i], n)
    for kind, height, width in (("forward", out, into), ("dX", into, out)):
        for name, more, exact in (("", 0, False), (" with room", room, False), (" with room, rows packed", room, True)):
            a = [Rows(codes(tokens, width + more, exact), t_scale) for _ in range(2)]
            b = [Rows(codes(height, width + more, exact), ones[:height]) for _ in range(n)]
            for how, on in (("", False), (", tuned", True)):
                with matmul.tuned(on):
                    found[f"fp8 {kind}{name}{how}"] = timed(
                        lambda i, a=a, b=b: fp8.mm(a[i % 2], b[i], torch.bfloat16), n
                    )
            if not more and not quick:
                found[f"fp8 {kind}, exact sums"] = timed(lambda i, a=a, b=b: exact_sums(a[i % 2], b[i]), n)
            del a, b
    # Two of each: one would stay in the cache.
    x_codes, x_more = (fp8.buffer(tokens, into + room, device, zero=True) for _ in range(2))
    y_codes, y_more = (fp8.buffer(tokens, out + room, device, zero=True) for _ in range(2))
    reach, shift = torch.ones((), device=device), torch.ones((), device=device)
    found["quantise x"] = timed(lambda i: fp8.quantise(group.x[i], x_codes[:, :into], reach=reach), 2)
    found["quantise dY"] = timed(
        lambda i: fp8.quantise(group.grad[i], y_codes[:, :out], factor=ones[:out], reach=reach), 2
    )
    found["h"] = timed(lambda i: lora_linear.down(group.x[i], group.adapters[0][0]), 2)
    found["g"] = timed(lambda i: lora_linear.up_backward(group.grad[i], group.low(0)), 2)
    x_rows, y_rows = ([Rows(codes, t_scale) for codes in pair] for pair in ((x_codes, x_more), (y_codes, y_more)))
    found["h of codes"] = timed(lambda i: fp8.down(x_rows[i], into, group.adapters[0][0], shift), 2)
    found["g with codes"] = timed(lambda i: fp8.up_backward(group.grad[i], group.low(0), y_rows[i], shift), 2)
    grad_up = torch.zeros(out, RANK, device=device)
    found["g and dB"] = timed(lambda i: lora_linear.up_both(group.grad[i], group.low(0), grad_up), 2)
    found["g and dB with codes"] = timed(
        lambda i: fp8.up_both(group.grad[i], group.low(0), grad_up, y_rows[i], shift), 2
    )
    found["share y, addmm"] = timed(lambda i: lora_linear.add_(group.grad[i], group.low(0)), 2)
    found["share dX, addmm"] = timed(lambda i: group.x[i].addmm_(group.h, group.adapters[0][0]), 2)
    turned = fp8.buffer(into, len(group.weights[0].whole), device)
    whole = [w.whole[:, :into] for w in group.weights]
    found["transpose"] = timed(lambda i: fp8.transpose(whole[i], turned), n)
    if not quick:
        for tile, warps in (((64, 64), 4), ((32, 64), 4), ((64, 32), 4), ((32, 32), 4), ((128, 32), 8), ((32, 128), 8)):
            name = f"transpose {tile[0]}x{tile[1]}, {warps} warps"
            found[name] = timed(lambda i, t=tile, w=warps: kernel.transpose(whole[i], turned, t, w), n)
    return found


def norms(shape: Shape, tokens: int) -> dict[str, float]:
    """With their quantising, apart and fused."""
    device, d = torch.device("cuda"), shape.width
    x, y, grad = ([random(tokens, d) for _ in range(4)] for _ in range(3))
    weight, rstd, reach = (torch.ones(n, device=device) for n in ((d,), (tokens,), ()))
    wide, codes = torch.empty_like(x[0]), fp8.buffer(tokens, d, device)
    return {
        "norm": timed(lambda i: rms_norm.add_forward(x[i], y[i], weight, 1e-5, wide), 4),
        "norm to codes": timed(lambda i: fp8.norm(x[i], y[i], weight, 1e-5, codes, reach=reach), 4),
        "norm back": timed(lambda i: rms_norm.add_backward(grad[i], x[i], rstd, weight, y[i]), 4),
        "norm back to codes": timed(
            lambda i: fp8.norm_backward(grad[i], x[i], rstd, weight, y[i], y[i], codes, weight, reach=reach), 4
        ),
    }


def swiglus(shape: Shape, tokens: int) -> dict[str, float]:
    """With their quantising, apart and fused."""
    device, f = torch.device("cuda"), shape.ffn
    gate_up, grad = [random(tokens, 2 * f) for _ in range(2)], [random(tokens, f) for _ in range(2)]
    out, act = torch.empty_like(gate_up[0]), torch.empty_like(grad[0])
    ones, reach = torch.ones(2 * f, device=device), torch.ones((), device=device)
    codes, wide = fp8.buffer(tokens, f, device), fp8.buffer(tokens, 2 * f, device)
    return {
        "swiglu": timed(lambda i: swiglu.forward(gate_up[i], act), 2),
        "swiglu to codes": timed(lambda i: fp8.act(gate_up[i], codes, reach=reach), 2),
        "swiglu back": timed(lambda i: swiglu.backward(grad[i], gate_up[i], out, act), 2),
        "swiglu back to codes": timed(
            lambda i: fp8.act_backward(grad[i], gate_up[i], out, act, wide, ones, reach=reach), 2
        ),
    }


def ropes(shape: Shape, tokens: int) -> dict[str, float]:
    """The way back, from where cuDNN leaves dq, dk and dv, with its quantising and without."""
    device, heads = torch.device("cuda"), (shape.heads, shape.kv_heads, shape.head_width)
    grads = [random(tokens, shape.qkv).unflatten(1, (-1, shape.head_width)) for _ in range(4)]
    parts = [(g[:, : heads[0]], *(random(tokens, *heads[1:]) for _ in range(2))) for g in grads]
    angles = torch.rand(tokens, shape.head_width // 2, device=device)
    cos, sin, out = angles.cos(), angles.sin(), random(tokens, shape.qkv)
    ones, reach = torch.ones(shape.qkv, device=device), torch.ones((), device=device)
    codes = fp8.buffer(tokens, shape.qkv, device)
    return {
        "rope back": timed(lambda i: rope.finish_backward(parts[i], out, cos, sin, heads, out.new_empty(0)), 4),
        "rope back to codes": timed(
            lambda i: fp8.rope_backward(parts[i], out, cos, sin, heads, codes, ones, reach=reach), 4
        ),
    }


def settling(shape: Shape) -> float:
    """All adapters of the model, once an update."""
    device, weights = torch.device("cuda"), []
    scratch = Turned(1 << 10, 1 << 10, device)
    for name in GROUPS:
        out, into = sizes(shape)[name]
        ranks = RANK * len(columns(shape, name))
        for _ in range(min(shape.layers, 8)):  # of large models a part: the time is in proportion
            weight = Fp8(out, into, device, torch.bfloat16, scratch, room=ranks)
            weight.settle(Adapters(random(ranks, into), random(out, RANK), columns(shape, name), 2.0))
            weights.append(weight)
    tables: dict[str, torch.Tensor] = {}
    shares = [w.share for w in weights if w.share is not None]
    return timed(lambda i: fp8.settle(shares, tables), 1) * shape.layers / min(shape.layers, 8)


def layer(found: dict[str, dict[str, float]], pro: dict[str, float]) -> dict[str, float]:
    """Sums over a layer. `apart` quantises by itself and adds shares by addmm; `room` takes them along; `fused` also
    has the producers write the codes. All count what the bf16 step has too: norms, SwiGLU, rope's way back, h, g and
    dB."""

    def total(*names: str) -> float:
        return sum(found[g][n] for g in GROUPS for n in names)

    kernels = total("h", "g and dB") + 2 * pro["norm"] + 2 * pro["norm back"]
    kernels += pro["swiglu"] + pro["swiglu back"] + pro["rope back"]
    quantising = total("quantise x", "quantise dY")
    rooms = total("fp8 forward with room", "fp8 dX with room")
    fused = (
        2 * pro["norm to codes"] + 2 * pro["norm back to codes"] + pro["swiglu to codes"]
        + pro["swiglu back to codes"] + total("h of codes", "g and dB with codes")
        + found["o"]["quantise x"] + pro["rope back to codes"]
    )  # fmt: skip
    return {
        "bf16 products": total("bf16 forward", "bf16 dX"),
        "fp8 products": total("fp8 forward", "fp8 dX"),
        "norms, swiglu, rope, h, g, dB in bf16": kernels,
        "apart": total("fp8 forward", "fp8 dX", "share y, addmm", "share dX, addmm", "transpose")
        + quantising
        + kernels,
        "room": rooms + total("transpose") + quantising + kernels,
        "fused": rooms + total("transpose") + fused,
        "fused, both copies kept": rooms + fused,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="FP8 kernels, one by one")
    parser.add_argument("--shapes", default="8b,1b")
    parser.add_argument("--tokens", default="8192,2048")
    parser.add_argument("--quick", action="store_true", help="leave out exact sums and other tiles")
    parser.add_argument("--json", default="", metavar="FILE")
    args = parser.parse_args()
    reason = fp8.refusal(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if reason is not None:
        raise SystemExit(reason)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    lines = []
    for name in args.shapes.split(","):
        shape = SHAPES[name]
        for tokens in map(int, args.tokens.split(",")):
            found = {}
            for number, group in enumerate(GROUPS):
                made = Group(shape, group, tokens)
                error = check(made)
                found[group] = products(made, tokens, args.quick or number not in (0, 2))
                print(f"{name} {tokens} {group} {made.out}x{made.into}: errors {error}", flush=True)
                for what, us in found[group].items():
                    print(f"    {what:32} {us:9.1f}{rate(what, us, made, tokens)}", flush=True)
                del made
                torch.cuda.empty_cache()
            pro = norms(shape, tokens) | swiglus(shape, tokens) | ropes(shape, tokens)
            print("\n".join(f"    {what:32} {us:9.1f}" for what, us in pro.items()), flush=True)
            sums = layer(found, pro) | {"settle, whole model": settling(shape)}
            torch.cuda.empty_cache()
            result[f"{name} {tokens}"] = {"projections": found, "producers": pro, "layer": sums}
            lines += [f"{name} {tokens:5} {what:30} {us:9.1f}" for what, us in sums.items()]
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    print("\nmicroseconds a layer\n" + "\n".join(lines))


def rate(what: str, us: float, group: Group, tokens: int) -> str:
    """The product's TFLOP/s, or the memory's TB/s."""
    if what.startswith(("bf16", "fp8")):
        return f"  {2e-6 * tokens * group.out * group.into / us:7.0f} TFLOP/s"
    sides = {"quantise x": 3 * group.into, "quantise dY": 3 * group.out, "h": 2 * group.into, "g": 2 * group.out}
    sides |= {"h of codes": group.into, "g with codes": 2 * group.out}
    if what.startswith("transpose"):
        return f"  {2e-6 * group.out * group.into / us:7.2f} TB/s"
    return f"  {1e-6 * tokens * sides[what] / us:7.2f} TB/s" if what in sides else ""


if __name__ == "__main__":
    main()
