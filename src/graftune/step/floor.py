"""The sustained floor of a step: one CUDA graph of its base products (forward and input gradient), attention and the
response-only head, at the step's sizes and in its order, replayed for two seconds before it is timed.

Nothing else is in it: no norm, no adapter, no update. The card's clocks fall under load: the same products timed one by
one are about 5% faster, which no step can reach. Every layer has weights of its own, so that the L2 cache behaves as in
a step; inputs are random and never overwritten, because zeros and infinities draw less power and run faster.

Every layer is computed in full; our step leaves out the first block's input gradient (nothing below it trains) and the
prompt rows of the last MLP. Full-parameter training adds the weight gradients.

The delta rule of a gated delta net is not run but added: 1.43 ms a layer, forward and backward, for 4x2048 tokens and
32 value heads of 128x128, which is the best time published for an H200 (FlashQLA's), scaled by tokens and the size of
the state. On other cards there is no floor for these models (training/floors.py).

A mixture's products are torch's grouped_mm with a row for each token and chosen expert. The rows are divided among the
experts as in a step of the run, layer by layer, or at random if no step is known; they are sorted beforehand, and
nothing is gathered or added up.

Quantised bases: nf4, GGUF blocks and MXFP4 are dequantised into one scratch buffer before every product, once in each
pass, and the product reads that buffer. The floor times a copy that moves as many bytes instead (codes read, values
written), at memory speed; our dequantisation is not in it, nor are experts without rows. fp8 multiplies codes with one
scale per row (torch._scaled_mm), forward and backward, from weights stored in both layouts and activations that are
codes already: nothing is quantised on the way. The head, which is never quantised, stays as it is.

`graftune profile` and benchmarks/floor.py measure it; training/floors.py remembers the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from graftune.model.feed_forward.routing import LayerRouting
from graftune.model.part import PartSpec
from graftune.model.spec import ModelSpec
from graftune.step.floor_attention import FloorAttention, Heads, fastest_attention, sustained

HEAD_ROWS = 2048
SUSTAIN_S = 2.0
HEAD = "head"
DELTA_CARD, DELTA_MS, DELTA_TOKENS, DELTA_STATE = r"\bH200\b", 1.43, 4 * 2048, 32 * 128 * 128


class Size(NamedTuple):
    """The sizes of a product's weight; in a mixture, of one expert's weight."""

    out: int
    into: int
    experts: int = 0  # 0: not a mixture's
    chosen: int = 0  # experts for each token

    @property
    def values(self) -> int:
        """Values in the weight, of all experts."""
        return self.out * self.into * max(1, self.experts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.experts, self.out, self.into) if self.experts else (self.out, self.into)

    def rows(self, tokens: int) -> int:
        return tokens * max(1, self.chosen)


class Layer(NamedTuple):
    """The products of one layer, by name: those ahead of attention, then the others."""

    before: tuple[tuple[str, Size], ...]
    heads: Heads | None  # of its attention; None: it has none
    after: tuple[tuple[str, Size], ...]
    state_values: int = 0  # values in a delta net's state; 0: the layer is no delta net
    counts: tuple[int, ...] = ()  # rows of each expert in a step of the run; empty: not known

    def used_values(self, size: Size) -> int:
        """Values in a weight, without experts that have no rows."""
        known = size.experts and any(self.counts)
        return size.values * sum(count > 0 for count in self.counts) // size.experts if known else size.values

    @property
    def products(self) -> tuple[tuple[str, Size], ...]:
        return self.before + self.after


@dataclass(frozen=True)
class Work:
    """The work of one micro-batch that no implementation can leave out."""

    layers: tuple[Layer, ...]
    head: Size
    tokens: int
    rows: int  # that reach the head
    lengths: tuple[int, ...]  # of the documents
    forwards: int = 0  # forward passes of the loss besides the one that is trained, as those of a reference model
    full: bool = False  # every weight trains
    packed_bytes: float = 0.0  # stored bytes per value of projections dequantised before a product; 0: they are not
    packed_experts: float = 0.0  # the same for the experts of a mixture
    fp8: bool = False
    dtype: torch.dtype = torch.bfloat16

    def packed(self, size: Size) -> float:
        """Stored bytes per value of a weight that is dequantised before its product; 0: it is not."""
        return self.packed_experts if size.experts else self.packed_bytes

    @property
    def sizes(self) -> dict[Size, None]:
        """The distinct sizes of the layers' products, in order."""
        return dict.fromkeys(size for layer in self.layers for _, size in layer.products)

    @property
    def delta_ms(self) -> float:
        """Milliseconds of the delta rule in all layers, on the card that DELTA_CARD names."""
        states = sum(layer.state_values for layer in self.layers) * (1 + self.forwards / 3)
        return DELTA_MS * self.tokens / DELTA_TOKENS * states / DELTA_STATE


def layers_of(spec: ModelSpec, routing: Sequence[LayerRouting] = ()) -> tuple[Layer, ...]:
    """The layers of a model. `routing`: tokens per expert in a step of the run."""
    found, counts = [], {one.layer: tuple(one.tokens) for one in routing}
    for number, layer in enumerate(spec.layers):
        (first, *rest), shape = _products(layer.mixer), layer.mixer.attention
        heads = None if shape is None else Heads(shape.heads, shape.kv_heads, shape.head_width, shape.window)
        for part in layer.parts:
            if part is not layer.mixer:
                rest += _products(part)
        found.append(Layer((first,), heads, tuple(rest), layer.mixer.state_values, counts.get(number, ())))
    return tuple(found)


def _products(part: PartSpec) -> list[tuple[str, Size]]:
    experts, chosen = part.expert_counts
    sizes = {part.path(name): size for name, size in part.products.items()}
    return [
        (name, Size(out // experts, into, experts, chosen) if experts else Size(out, into))
        for name, (out, into) in sizes.items()
    ]


@dataclass(frozen=True)
class Op:
    kind: str  # forward | input_grad | weight_grad | unpack | attend | attend_back
    name: str = ""
    layer: int = -1
    rows: int = 0
    start: int = 0


def plan(work: Work) -> list[Op]:
    ops: list[Op] = []

    def product(kind: str, name: str, layer: int, rows: int, start: int = 0) -> None:
        if name != HEAD:
            size = dict(work.layers[layer].products)[name]
            rows = size.rows(rows)
            if work.packed(size):
                ops.append(Op("unpack", name, layer))
        ops.append(Op(kind, name, layer, rows, start))

    def backward(name: str, layer: int, rows: int, start: int = 0) -> None:
        product("input_grad", name, layer, rows, start)
        if work.full:
            ops.append(Op("weight_grad", name, layer, rows, start))

    def forward() -> None:
        for number, layer in enumerate(work.layers):
            for name, _ in layer.before:
                product("forward", name, number, work.tokens)
            if layer.heads:
                ops.append(Op("attend", layer=number))
            for name, _ in layer.after:
                product("forward", name, number, work.tokens)

    def head(*directions: Callable[..., None]) -> None:
        for start in range(0, work.rows, HEAD_ROWS):
            for direction in directions:
                direction(HEAD, -1, min(HEAD_ROWS, work.rows - start), start)

    for _ in range(work.forwards):
        forward()
        head(partial(product, "forward"))
    forward()
    head(partial(product, "forward"), backward)
    for number, layer in reversed(list(enumerate(work.layers))):
        for name, _ in reversed(layer.after):
            backward(name, number, work.tokens)
        if layer.heads:
            ops.append(Op("attend_back", layer=number))
        for name, _ in reversed(layer.before):
            backward(name, number, work.tokens)
    return ops


def size_of(work: Work, op: Op) -> Size:
    return work.head if op.name == HEAD else dict(work.layers[op.layer].products)[op.name]


@dataclass
class Floor:
    work: Work
    device: torch.device
    say: Callable[[str], None] = field(default=lambda text: None)

    def __post_init__(self) -> None:
        work, layers = self.work, range(len(self.work.layers))
        each = {(i, name): size for i in layers for name, size in work.layers[i].products}
        self.weights = {(-1, HEAD): self._random(*work.head.shape, scale=0.02)}
        self.unpack: Unpack | None = None
        self.codes: Fp8Products | None = None
        self.packed: dict[tuple[int, str], torch.Tensor] = {}
        packed = {key: size for key, size in each.items() if work.packed(size)}
        if packed:
            value_bytes = work.dtype.itemsize
            # Copying one to the scratch moves as many bytes as dequantising: codes read, values written.
            self.scratch = self._random(max(size.values for size in packed.values()), scale=0.02)
            self.packed = {
                key: self._random(
                    math.ceil(
                        (work.packed(size) + value_bytes) / (2 * value_bytes) * work.layers[key[0]].used_values(size)
                    ),
                    scale=0.02,
                )
                for key, size in packed.items()
            }
            self.weights |= {key: self.scratch[: size.values].view(size.shape) for key, size in packed.items()}
        if work.fp8:
            self.codes = Fp8Products(work, self.device)
        else:
            stored = {key: size for key, size in each.items() if key not in packed}
            self.weights |= {key: self._random(*size.shape, scale=0.02) for key, size in stored.items()}
        self.ends = {key: self._ends(work.layers[key[0]].counts, size) for key, size in each.items() if size.experts}
        self._make_buffers()
        kinds = {layer.heads for layer in work.layers if layer.heads}
        self.attention: dict[Heads, FloorAttention] = {
            heads: fastest_attention(heads, work.lengths, work.tokens, self.device, work.dtype, self.say)
            for heads in kinds
        }
        if self.packed:
            layer = min(self.packed)[0]  # the first that has one: in a mixture the first layer may have none
            first = [values for (index, _), values in self.packed.items() if index == layer]
            self.unpack = fastest_copy(first, self.scratch, self.device, self.say)

    def _make_buffers(self) -> None:
        work = self.work
        rows = {size: size.rows(work.tokens) for size in work.sizes}
        held = {**rows, work.head: min(HEAD_ROWS, work.rows)}
        rows = {**rows, work.head: work.rows}
        self.x = {size: self._random(rows[size], size.into) for size in rows}
        self.grad = {size: self._random(held[size], size.out) for size in rows}
        plain = [size for size in rows if not size.experts]  # grouped products write to memory of their own
        self.y = {size: torch.empty_like(self.grad[size]) for size in plain}
        self.grad_x = {size: torch.empty_like(self.x[size]) for size in plain}
        self.grad_w = {size: self._random(*size.shape) for size in plain} if work.full else {}

    def _ends(self, counts: Sequence[int], size: Size) -> torch.Tensor:
        """Where the rows of each expert end, [E] int32: in the run's proportions, or as tokens choose at random."""
        if any(counts):
            parts = torch.tensor(counts, dtype=torch.float64).cumsum(0) * (size.rows(self.work.tokens) / sum(counts))
            return parts.round().to(self.device, torch.int32)
        drawn = torch.Generator(self.device).manual_seed(0)
        scores = torch.rand(self.work.tokens, size.experts, generator=drawn, device=self.device)
        chosen = torch.bincount(scores.topk(size.chosen, 1).indices.flatten(), minlength=size.experts)
        return chosen.cumsum(0, dtype=torch.int32)

    @property
    def note(self) -> str:
        names = sorted({one.name for one in self.attention.values()})
        counted = any(any(layer.counts) for layer in self.work.layers)
        routed = f", experts {'as in a step of the run' if counted else 'at random'}" if self.ends else ""
        return f"attention: {', '.join(names) or 'none'}{routed}"

    def _random(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=self.work.dtype, device=self.device).normal_(0.0, scale)

    def run(self, ops: Sequence[Op]) -> None:
        for each in self.attention.values():
            each.begin()
        kept: dict[int, Any] = {}
        for op in ops:
            heads = self.work.layers[op.layer].heads if not op.name else None
            if op.kind == "attend" and heads:
                kept[op.layer] = self.attention[heads].forward()
            elif op.kind == "attend_back" and heads:
                self.attention[heads].backward(kept.pop(op.layer))
            elif op.kind == "unpack":
                assert self.unpack is not None
                self.unpack(self.packed[op.layer, op.name], self.scratch)
            elif self.codes is not None and op.name != HEAD:
                self.codes.product(op, size_of(self.work, op))
            else:
                self._product(op, size_of(self.work, op))

    def _product(self, op: Op, size: Size) -> None:
        weight = self.weights[op.layer, op.name]
        place, chunk = slice(op.start, op.start + op.rows), slice(0, op.rows)
        if size.experts:
            given, weight = (self.x, weight.transpose(1, 2)) if op.kind == "forward" else (self.grad, weight)
            torch.nn.functional.grouped_mm(given[size], weight, offs=self.ends[op.layer, op.name])
        elif op.kind == "forward":
            torch.mm(self.x[size][place], weight.t(), out=self.y[size][chunk])
        elif op.kind == "input_grad":
            torch.mm(self.grad[size][chunk], weight, out=self.grad_x[size][place])
        else:
            torch.mm(self.grad[size][chunk].t(), self.x[size][place], out=self.grad_w[size])


class Fp8Products:
    """The projections' products in fp8: e4m3 codes, with one scale per row of each operand."""

    def __init__(self, work: Work, device: torch.device):
        self.device = device
        each = {(i, name): size for i, layer in enumerate(work.layers) for name, size in layer.products}
        self.forward = {key: self._rows(*size.shape) for key, size in each.items()}
        self.back = {key: self._rows(*size.shape[::-1]) for key, size in each.items()}
        self.x = {size: self._rows(work.tokens, size.into) for size in work.sizes}
        self.grad = {size: self._rows(work.tokens, size.out) for size in work.sizes}

    def _rows(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=self.device)
        for part in codes.split(4096):
            part.copy_(torch.randn(part.shape, device=self.device).mul_(100).clamp_(-448, 448))
        return codes, torch.rand(rows, 1, device=self.device) * 1e-3

    def product(self, op: Op, size: Size) -> None:
        forward = op.kind == "forward"
        left, left_scale = (self.x if forward else self.grad)[size]
        right, right_scale = (self.forward if forward else self.back)[op.layer, op.name]
        left, left_scale = left[: op.rows], left_scale[: op.rows]
        if self.device.type == "cuda":
            scales = left_scale, right_scale.t()
            torch._scaled_mm(left, right.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            torch.mm(left.float(), right.float().t())


Unpack = Callable[[torch.Tensor, torch.Tensor], Any]


def fastest_copy(
    packed: Sequence[torch.Tensor], scratch: torch.Tensor, device: torch.device, say: Callable[[str], None]
) -> Unpack:
    """The faster of the driver's copy and a kernel's, timed on one layer. In a graph, the driver's copy has gaps around
    it that a kernel has not, but is faster on large weights."""
    copies: dict[str, Unpack] = {
        "driver": lambda source, out: out[: len(source)].copy_(source),
        "kernel": lambda source, out: torch.neg(source, out=out[: len(source)]),
    }
    if device.type != "cuda":
        return copies["driver"]

    def layer(unpack: Unpack) -> None:
        for source in packed:
            unpack(source, scratch)

    moved = 2 * sum(source.nbytes for source in packed)
    times = {name: sustained(partial(layer, unpack), device, 5, sustain=0.05) for name, unpack in copies.items()}
    for name, ms in times.items():
        say(f"floor: a layer's unpacking by a {name}'s copy: {ms:.4f} ms, {moved / ms / 1e9:.2f} TB/s")
    return copies[min(times, key=lambda name: times[name])]


def measured(
    work: Work,
    device: torch.device,
    steps: int = 10,
    sustain: float = SUSTAIN_S,
    micro: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[float, str]:
    """(milliseconds of `micro` micro-batches one after the other, a note)."""
    floor, ops = Floor(work, device, say), plan(work)
    ms = sustained(partial(floor.run, ops * micro), device, steps, sustain)
    note = floor.note + (f", {work.delta_ms * micro:.1f} ms added for the delta rule" if work.delta_ms else "")
    return ms + work.delta_ms * micro, note
