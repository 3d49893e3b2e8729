"""The sustained floor of a step: one CUDA graph of its base products (forward and input gradient), attention and the
response-only head, at the step's sizes and in its order, replayed for two seconds before it is timed.

Nothing else is in it: no norm, no adapter, no update. The card's clocks fall under load, so the same products timed one
by one are about 5% faster and no honest bound. Every layer has weights of its own, so that caches behave; inputs are
random and are never overwritten, because zeros and infinities draw less power and run faster.

    python benchmarks/floor.py CASE ... [--json FILE]         `step.py --who floor`

Every layer is computed in full; our step leaves out the first block's input gradient (nothing below it trains) and the
prompt rows of the last MLP. Full-parameter cases add the weight gradients (bf16 outputs).

Quantised bases: nf4 and GGUF blocks are brought into one bf16 scratch before every product, once in each pass, and the
product reads it there. What stands for that is a copy that moves as many bytes, the codes in and the values out, at the
memory's own speed; no dequantisation of ours is in it. fp8 multiplies codes with a scale a row (torch._scaled_mm),
forward and back, from weights that lie ready for both ways and activations that are codes already; the head, which
nobody quantises, stays bf16. Rows of codes and scales are read as they are, nothing quantises on the way.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import BLOCKS, Case, Shape
from benchmarks.measure import sustained

HEAD_ROWS = 2048
SUSTAIN_S = 2.0
NF4_BYTES = 0.5 + (1 + 4 / 256) / 64  # of a value: half a byte, a byte of scale for 64, four of those for 256 of them


@dataclass(frozen=True)
class Op:
    kind: str  # forward | input_grad | weight_grad | unpack | attend | attend_back
    weight: str = ""  # qkv | o | gate_up | down | head
    layer: int = -1
    rows: int = 0
    start: int = 0


def sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """(out, in) of the five products of a model."""
    query = shape.heads * shape.head_width
    return {
        "qkv": (shape.qkv, shape.width),
        "o": (shape.width, query),
        "gate_up": (2 * shape.ffn, shape.width),
        "down": (shape.width, shape.ffn),
        "head": (shape.vocab, shape.width),
    }


def plan(case: Case) -> list[Op]:
    """One micro-batch, in order."""
    full, layers, rows = case.method == "full", case.shape.layers, case.micro_tokens
    packed = packed_bytes(case) > 0
    ops: list[Op] = []

    def product(kind: str, weight: str, layer: int, count: int, start: int = 0) -> None:
        if packed and weight != "head":
            ops.append(Op("unpack", weight, layer))
        ops.append(Op(kind, weight, layer, count, start))

    def backward(weight: str, layer: int, count: int, start: int = 0) -> None:
        product("input_grad", weight, layer, count, start)
        if full:
            ops.append(Op("weight_grad", weight, layer, count, start))

    for layer in range(layers):
        product("forward", "qkv", layer, rows)
        ops.append(Op("attend", layer=layer))
        product("forward", "o", layer, rows)
        for weight in ("gate_up", "down"):
            product("forward", weight, layer, rows)
    for start in range(0, case.responses, HEAD_ROWS):
        count = min(HEAD_ROWS, case.responses - start)
        product("forward", "head", -1, count, start)
        backward("head", -1, count, start)
    for layer in reversed(range(layers)):
        backward("down", layer, rows)
        backward("gate_up", layer, rows)
        backward("o", layer, rows)
        ops.append(Op("attend_back", layer=layer))
        backward("qkv", layer, rows)
    return ops


def packed_bytes(case: Case) -> float:
    """Of a value of a projection, where it has to be unpacked before a product."""
    if case.base == "nf4":
        return NF4_BYTES
    if case.base in BLOCKS:
        from graftune.kernels.gguf_dequant import KINDS

        block = KINDS[case.base.upper()]
        return block.bytes / block.values
    return 0.0


def unpacked_bytes(case: Case, ops: list[Op]) -> float:
    """Read and written by all unpacking of one optimizer step."""
    size = sizes(case.shape)
    values = sum(math.prod(size[op.weight]) for op in ops if op.kind == "unpack")
    return values * (packed_bytes(case) + 2) * case.micro


def flops(case: Case, ops: list[Op]) -> float:
    """Of one optimizer step. Causal attention counts half its square: two products forward, five backward."""
    total, size = 0.0, sizes(case.shape)
    pairs = case.rows * case.length**2 / 2
    product = 2 * pairs * case.shape.head_width * case.shape.heads
    for op in ops:
        if op.kind == "unpack":
            continue
        if op.weight:
            total += 2.0 * op.rows * math.prod(size[op.weight])
        else:
            total += product * (2 if op.kind == "attend" else 5)
    return total * case.micro


class Floor:
    """The buffers of the products, and the products themselves."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device = case, device
        size = sizes(case.shape)
        blocks = ("qkv", "o", "gate_up", "down")
        self.weights = {(-1, "head"): self._random(*size["head"], scale=0.02)}
        self.unpack: Unpack | None = None
        self.codes: Codes | None = None
        layers = range(case.shape.layers)
        if packed_bytes(case):
            # As many values as the bytes moved are copies of: they fill a part of the scratch, random like the rest.
            share = (packed_bytes(case) + 2) / 4
            largest = max(math.prod(size[w]) for w in blocks)
            self.scratch = self._random(largest, scale=0.02)
            self.packed = {
                (i, w): self._random(math.ceil(share * math.prod(size[w])), scale=0.02) for i in layers for w in blocks
            }
            seen = {w: self.scratch[: math.prod(size[w])].view(size[w]) for w in blocks}
            self.weights |= {(i, w): seen[w] for i in layers for w in blocks}
        elif case.base == "fp8":
            self.codes = Codes(case, device, blocks)
        else:
            self.weights |= {(i, w): self._random(*size[w], scale=0.02) for i in layers for w in blocks}
        rows = dict.fromkeys(blocks, case.micro_tokens) | {"head": case.responses}
        held = dict.fromkeys(blocks, case.micro_tokens) | {"head": min(HEAD_ROWS, case.responses)}
        self.x = {w: self._random(rows[w], size[w][1]) for w in size}
        self.grad = {w: self._random(held[w], size[w][0]) for w in size}
        self.y = {w: torch.empty_like(self.grad[w]) for w in size}
        self.grad_x = {w: torch.empty_like(self.x[w]) for w in size}
        full = case.method == "full"
        self.grad_w = {w: torch.empty_like(self.weights[-1 if w == "head" else 0, w]) for w in size} if full else {}
        self.attention = fastest(case, device)
        if packed_bytes(case):
            self.unpack = fastest_copy([self.packed[0, w] for w in blocks], self.scratch, device)

    def _random(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_(0.0, scale)

    def run(self, ops: list[Op]) -> None:
        self.attention.begin()
        kept: dict[int, Any] = {}
        for op in ops:
            if op.kind == "attend":
                kept[op.layer] = self.attention.forward()
            elif op.kind == "attend_back":
                self.attention.backward(kept.pop(op.layer))
            elif op.kind == "unpack":
                assert self.unpack is not None
                self.unpack(self.packed[op.layer, op.weight], self.scratch)
            elif self.codes is not None and op.weight != "head":
                self.codes.product(op)
            else:
                self._product(op)

    def _product(self, op: Op) -> None:
        weight = self.weights[op.layer, op.weight]
        place, chunk = slice(op.start, op.start + op.rows), slice(0, op.rows)
        if op.kind == "forward":
            torch.mm(self.x[op.weight][place], weight.t(), out=self.y[op.weight][chunk])
        elif op.kind == "input_grad":
            torch.mm(self.grad[op.weight][chunk], weight, out=self.grad_x[op.weight][place])
        else:
            torch.mm(self.grad[op.weight][chunk].t(), self.x[op.weight][place], out=self.grad_w[op.weight])


class Codes:
    """The projections' products in fp8: e4m3 codes, a scale a row of each operand."""

    def __init__(self, case: Case, device: torch.device, blocks: tuple[str, ...]):
        self.device, size, rows = device, sizes(case.shape), case.micro_tokens
        layers = range(case.shape.layers)
        self.forward = {(i, w): self._rows(*size[w]) for i in layers for w in blocks}
        self.back = {(i, w): self._rows(*size[w][::-1]) for i in layers for w in blocks}
        self.x = {w: self._rows(rows, size[w][1]) for w in blocks}
        self.grad = {w: self._rows(rows, size[w][0]) for w in blocks}

    def _rows(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=self.device)
        for part in codes.split(4096):
            part.copy_(torch.randn(part.shape, device=self.device).mul_(100).clamp_(-448, 448))
        return codes, torch.rand(rows, 1, device=self.device) * 1e-3

    def product(self, op: Op) -> None:
        forward = op.kind == "forward"
        left, left_scale = (self.x if forward else self.grad)[op.weight]
        right, right_scale = (self.forward if forward else self.back)[op.layer, op.weight]
        left, left_scale = left[: op.rows], left_scale[: op.rows]
        if self.device.type == "cuda":
            scales = left_scale, right_scale.t()
            torch._scaled_mm(left, right.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            torch.mm(left.float(), right.float().t())


Unpack = Callable[[torch.Tensor, torch.Tensor], Any]


def fastest_copy(packed: list[torch.Tensor], scratch: torch.Tensor, device: torch.device) -> Unpack:
    """The driver's own copy or a kernel's, by the time of a layer: a copy as a node of a graph has gaps around it that
    a kernel has not, and is the faster on large weights."""
    ways: dict[str, Unpack] = {
        "driver": lambda source, out: out[: len(source)].copy_(source),
        "kernel": lambda source, out: torch.neg(source, out=out[: len(source)]),
    }
    if device.type != "cuda":
        return ways["driver"]

    def layer(way: Unpack) -> None:
        for source in packed:
            way(source, scratch)

    moved = 2 * sum(source.nbytes for source in packed)
    times = {name: sustained(partial(layer, way), device, 5, sustain=0.05) for name, way in ways.items()}
    for name, ms in times.items():
        print(f"floor: a layer's unpacking by a {name}'s copy: {ms:.4f} ms, {moved / ms / 1e9:.2f} TB/s", flush=True)
    return ways[min(times, key=lambda name: times[name])]


class Attention(Protocol):
    name: str

    def begin(self) -> None:
        """A pass begins."""

    def forward(self) -> Any:
        """What the backward needs."""

    def backward(self, kept: Any) -> None: ...


class Sdpa:
    """torch's own, over rows of one length."""

    def __init__(self, case: Case, device: torch.device, name: str, backend: SDPBackend):
        self.name, self.backend = f"torch {name}", backend
        parts = _packed(case, device).view(case.rows, case.length, -1, case.shape.head_width)
        heads = [case.shape.heads, case.shape.kv_heads, case.shape.kv_heads]
        self.qkv = [part.transpose(1, 2).requires_grad_() for part in parts.split(heads, 2)]
        self.grad = torch.randn_like(self.qkv[0])

    def begin(self) -> None: ...

    def forward(self) -> torch.Tensor:
        with sdpa_kernel(self.backend):
            q, k, v = self.qkv
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def backward(self, kept: torch.Tensor) -> None:
        torch.autograd.grad(kept, self.qkv, self.grad)


class Packed:
    """graftune's, over documents laid end to end."""

    def __init__(self, case: Case, device: torch.device, backend: str = ""):
        from graftune.kernels import attention

        self.kernels: Any = attention
        self.scale = case.shape.head_width**-0.5
        self.backend = backend or attention.choose(device, torch.bfloat16, case.shape.head_width, False, False).backend
        self.name = f"graftune {self.backend}"
        self.lengths = (case.length,) * case.rows
        edges = [case.length * i for i in range(case.rows + 1)]
        self.edges = torch.tensor(edges, dtype=torch.int32, device=device)
        heads = [case.shape.heads, case.shape.kv_heads, case.shape.kv_heads]
        packed = _packed(case, device)
        self.qkv = packed.split(heads, 1)
        made = attention.grad_buffers(*self.qkv[:2], self.backend)
        self.grads = made or torch.empty_like(packed).split(heads, 1)
        self.grad = torch.randn(self.qkv[0].shape, dtype=packed.dtype, device=device)

    def begin(self) -> None:
        self.documents = self.kernels.Documents(self.edges, self.lengths, max(self.lengths))

    def forward(self) -> Any:
        return self.kernels.forward(*self.qkv, self.documents, self.scale, 0, self.backend)

    def backward(self, kept: Any) -> None:
        self.kernels.backward(self.grad, *self.qkv, *kept, self.documents, self.scale, 0, self.grads, self.backend)


def _packed(case: Case, device: torch.device) -> torch.Tensor:
    """A random q, k and v product, [T, N + 2K, H]."""
    heads = case.shape.heads + 2 * case.shape.kv_heads
    return torch.randn(case.micro_tokens, heads, case.shape.head_width, dtype=torch.bfloat16, device=device)


def fastest(case: Case, device: torch.device) -> Attention:
    """Of all there is, by the time of a few layers: a floor must not be higher than it need be."""
    if device.type != "cuda":
        return Sdpa(case, device, "math", SDPBackend.MATH)
    from graftune.kernels import attention

    choice = attention.choose(device, torch.bfloat16, case.shape.head_width, False, False)
    ours = dict.fromkeys((choice.backend, *choice.others, "triton"))  # whichever a step may take, and our own
    makers: list[Callable[[], Attention]] = [
        *(partial(Packed, case, device, backend) for backend in ours),
        lambda: Sdpa(case, device, "cuDNN", SDPBackend.CUDNN_ATTENTION),
        lambda: Sdpa(case, device, "flash", SDPBackend.FLASH_ATTENTION),
    ]
    times: list[tuple[float, Attention]] = []
    for make in makers:
        try:
            candidate = make()
            ms = sustained(partial(_layers, candidate, 8), device, 5, sustain=0.05)
        except (RuntimeError, ImportError, ValueError, AttributeError, TypeError, AssertionError) as error:
            # Not there, or not for these sizes: one of the others is.
            print(f"floor: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
            continue
        print(f"floor: {candidate.name}: {ms / 8:.4f} ms a layer", flush=True)
        times.append((ms, candidate))
    if not times:
        raise RuntimeError("no fused attention for these sizes")
    return min(times, key=lambda pair: pair[0])[1]


def _layers(attention: Attention, count: int) -> None:
    attention.begin()
    for _ in range(count):
        attention.backward(attention.forward())


def measure_floor(case: Case, device: torch.device, steps: int, sustain: float = SUSTAIN_S) -> dict[str, Any]:
    floor, ops = Floor(case, device), plan(case)
    ms = sustained(partial(floor.run, ops * case.micro), device, steps, sustain)
    work, moved = flops(case, ops), unpacked_bytes(case, ops)
    note = f"attention: {floor.attention.name}"
    if moved:
        note += f", {moved / 1e9:.1f} GB of codes and values moved"
    if case.base == "fp8":
        note += ", projections in fp8"
    return {
        "ms": round(ms, 3),
        "tok_s": round(case.tokens / ms * 1e3, 1),
        "flops": work,
        "tflops": round(work / ms / 1e9, 1),
        "note": note,
    }


if __name__ == "__main__":
    from benchmarks.step import main

    sys.exit(main([*sys.argv[1:], "--who", "floor"]))
