"""The sustained floor of a step: one CUDA graph of its base products (forward and input gradient), attention and the
response-only head, at the step's sizes and in its order, replayed for two seconds before it is timed.

Nothing else is in it: no norm, no adapter, no update. The card's clocks fall under load: the same products timed one by
one are about 5% faster, which no step can reach. Every layer has weights of its own, so that caches behave; inputs are
random and are never overwritten, because zeros and infinities draw less power and run faster.

Every layer is computed in full; our step leaves out the first block's input gradient (nothing below it trains) and the
prompt rows of the last MLP. Full-parameter training adds the weight gradients.

The delta rule of a gated delta net is not run but added: 1.43 ms a layer, forward and backward, for 4x2048 tokens and
32 value heads of 128x128, which is the best time published for an H200 (FlashQLA's), scaled by tokens and the size of
the state. On other cards there is no floor for these models (training/floors.py).

Quantised bases: nf4 and GGUF blocks are brought into one scratch before every product, once in each pass, and the
product reads it there. A copy that moves as many bytes stands for that, codes in and values out, at the
memory's own speed; our dequantisation is not in it. fp8 multiplies codes with a scale a row (torch._scaled_mm),
forward and back, from weights that lie ready for both ways and activations that are codes already; the head, which
is never quantised, stays as it is. Codes and scales are read as they are: nothing is quantised on the way.

`graftune profile` and benchmarks/floor.py measure it; training/floors.py remembers the result.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from graftune.kernels import attention
from graftune.model.spec import ModelSpec

HEAD_ROWS = 2048
SUSTAIN_S = 2.0
HEAD = "head"
LAYERS = 8  # layers of attention that are timed together
DELTA_CARD, DELTA_MS, DELTA_TOKENS, DELTA_STATE = r"\bH200\b", 1.43, 4 * 2048, 32 * 128 * 128

Size = tuple[int, int]  # (out, in)


class Heads(NamedTuple):
    query: int
    key: int
    width: int
    window: int = 0

    @property
    def split(self) -> list[int]:
        return [self.query, self.key, self.key]


class Layer(NamedTuple):
    """The products of one layer, by name: those ahead of attention, then the others."""

    before: tuple[tuple[str, Size], ...]
    heads: Heads | None  # of its attention; None: it has none
    after: tuple[tuple[str, Size], ...]
    state_values: int = 0  # of a delta net's state; 0: the layer is none

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
    packed_bytes: float = 0.0  # of a value of a projection that is unpacked before a product; 0: it is not
    fp8: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def sizes(self) -> dict[Size, None]:
        """Of the layers' products, each once."""
        return dict.fromkeys(size for layer in self.layers for _, size in layer.products)

    @property
    def delta_ms(self) -> float:
        """Milliseconds of the delta rule in all layers, on the card that DELTA_CARD names."""
        states = sum(layer.state_values for layer in self.layers) * (1 + self.forwards / 3)
        return DELTA_MS * self.tokens / DELTA_TOKENS * states / DELTA_STATE


def layers_of(spec: ModelSpec) -> tuple[Layer, ...]:
    """The products of a model without experts."""
    assert not spec.experts, "which experts compute depends on the data"
    found = []
    for layer in spec.layers:
        (first, *rest), shape = layer.mixer.products.items(), layer.mixer.attention
        heads = None if shape is None else Heads(shape.heads, shape.kv_heads, shape.head_width, shape.window)
        after = (*rest, *layer.feed_forward.products.items())
        found.append(Layer((first,), heads, after, layer.mixer.state_values))
    return tuple(found)


@dataclass(frozen=True)
class Op:
    kind: str  # forward | input_grad | weight_grad | unpack | attend | attend_back
    name: str = ""
    layer: int = -1
    rows: int = 0
    start: int = 0


def plan(work: Work) -> list[Op]:
    """The operations of one micro-batch, in order."""
    ops: list[Op] = []

    def product(kind: str, name: str, layer: int, rows: int, start: int = 0) -> None:
        if work.packed_bytes and name != HEAD:
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
    """The buffers of the products, and the products themselves."""

    work: Work
    device: torch.device
    say: Callable[[str], None] = field(default=lambda text: None)

    def __post_init__(self) -> None:
        work, layers = self.work, range(len(self.work.layers))
        each = {(i, name): size for i in layers for name, size in work.layers[i].products}
        self.weights = {(-1, HEAD): self._random(*work.head, scale=0.02)}
        self.unpack: Unpack | None = None
        self.codes: Fp8Products | None = None
        self.packed: dict[tuple[int, str], torch.Tensor] = {}
        if work.packed_bytes:
            # As many values as the bytes moved are copies of: they fill a part of the scratch, random like the rest.
            share = (work.packed_bytes + 2) / 4
            self.scratch = self._random(max(math.prod(size) for size in work.sizes), scale=0.02)
            self.packed = {
                key: self._random(math.ceil(share * math.prod(size)), scale=0.02) for key, size in each.items()
            }
            seen = {size: self.scratch[: math.prod(size)].view(size) for size in work.sizes}
            self.weights |= {key: seen[size] for key, size in each.items()}
        elif work.fp8:
            self.codes = Fp8Products(work, self.device)
        else:
            self.weights |= {key: self._random(*size, scale=0.02) for key, size in each.items()}
        self._make_buffers()
        kinds = {layer.heads for layer in work.layers if layer.heads}
        self.attention: dict[Heads, FloorAttention] = {
            heads: fastest_attention(heads, work.lengths, work.tokens, self.device, work.dtype, self.say)
            for heads in kinds
        }
        if self.packed:
            first = [self.packed[0, name] for name, _ in work.layers[0].products]
            self.unpack = fastest_copy(first, self.scratch, self.device, self.say)

    def _make_buffers(self) -> None:
        work = self.work
        rows = dict.fromkeys(work.sizes, work.tokens)
        held = {**rows, work.head: min(HEAD_ROWS, work.rows)}
        rows = {**rows, work.head: work.rows}
        self.x = {size: self._random(rows[size], size[1]) for size in rows}
        self.grad = {size: self._random(held[size], size[0]) for size in rows}
        self.y = {size: torch.empty_like(self.grad[size]) for size in rows}
        self.grad_x = {size: torch.empty_like(self.x[size]) for size in rows}
        self.grad_w = {size: self._random(*size) for size in rows} if work.full else {}

    @property
    def note(self) -> str:
        names = sorted({one.name for one in self.attention.values()})
        return f"attention: {', '.join(names) or 'none'}"

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
        if op.kind == "forward":
            torch.mm(self.x[size][place], weight.t(), out=self.y[size][chunk])
        elif op.kind == "input_grad":
            torch.mm(self.grad[size][chunk], weight, out=self.grad_x[size][place])
        else:
            torch.mm(self.grad[size][chunk].t(), self.x[size][place], out=self.grad_w[size])


class Fp8Products:
    """The projections' products in fp8: e4m3 codes, a scale a row of each operand."""

    def __init__(self, work: Work, device: torch.device):
        self.device = device
        each = {(i, name): size for i, layer in enumerate(work.layers) for name, size in layer.products}
        self.forward = {key: self._rows(*size) for key, size in each.items()}
        self.back = {key: self._rows(*size[::-1]) for key, size in each.items()}
        self.x = {size: self._rows(work.tokens, size[1]) for size in work.sizes}
        self.grad = {size: self._rows(work.tokens, size[0]) for size in work.sizes}

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
    """The driver's own copy or a kernel's, by the time of a layer: a copy as a node of a graph has gaps around it that
    a kernel has not, and is the faster on large weights."""
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


def sustained(work: Callable[[], Any], device: torch.device, steps: int, sustain: float) -> float:
    """Milliseconds of one replay of the work as a CUDA graph, median, after `sustain` seconds of replays."""
    if device.type != "cuda":
        work()
        return statistics.median(1e3 * _seconds(work) for _ in range(steps))
    graph = captured(work)
    until = time.perf_counter() + sustain
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * steps + 1)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Run until it is warm, then captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        begin = time.perf_counter()
        for _ in range(3):
            work()
            torch.cuda.synchronize()
            if time.perf_counter() - begin > 2:
                break
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measured(
    work: Work,
    device: torch.device,
    steps: int = 10,
    sustain: float = SUSTAIN_S,
    micro: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[float, str]:
    """(milliseconds of `micro` micro-batches one behind the other, a note)."""
    floor, ops = Floor(work, device, say), plan(work)
    ms = sustained(partial(floor.run, ops * micro), device, steps, sustain)
    note = floor.note + (f", {work.delta_ms * micro:.1f} ms added for the delta rule" if work.delta_ms else "")
    return ms + work.delta_ms * micro, note


class FloorAttention(Protocol):
    name: str

    def begin(self) -> None:
        """Called at the start of a pass."""

    def forward(self) -> Any:
        """Returns what the backward needs."""

    def backward(self, kept: Any) -> None: ...


class TorchAttention:
    """torch's own attention, over rows of one length."""

    def __init__(self, heads: Heads, rows: int, length: int, qkv: torch.Tensor, name: str, backend: SDPBackend):
        self.name, self.backend = f"torch {name}", backend
        parts = qkv.view(rows, length, -1, heads.width)
        self.qkv = [part.transpose(1, 2).requires_grad_() for part in parts.split(heads.split, 2)]
        self.grad = torch.randn_like(self.qkv[0])

    def begin(self) -> None: ...

    def forward(self) -> torch.Tensor:
        with sdpa_kernel(self.backend):
            q, k, v = self.qkv
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def backward(self, kept: torch.Tensor) -> None:
        torch.autograd.grad(kept, self.qkv, self.grad)


class PackedAttention:
    """graftune's attention, over documents laid end to end."""

    def __init__(self, heads: Heads, lengths: Sequence[int], qkv: torch.Tensor, backend: str):
        device = qkv.device
        self.window = heads.window if heads.window < max(lengths) else 0
        self.scale = heads.width**-0.5
        self.backend, self.name = backend, f"graftune {backend}"
        self.lengths = tuple(lengths)
        edges = [0, *itertools.accumulate(lengths)]
        self.edges = torch.tensor(edges, dtype=torch.int32, device=device)
        q, k, v = qkv.split(heads.split, 1)
        self.qkv = q, k, v
        made = attention.grad_buffers(q, k, self.backend)
        self.grads: Any = made or torch.empty_like(qkv).split(heads.split, 1)
        self.grad = torch.randn(self.qkv[0].shape, dtype=qkv.dtype, device=device)

    def begin(self) -> None:
        self.documents = attention.Documents(self.edges, self.lengths, max(self.lengths))

    def forward(self) -> Any:
        return attention.forward(*self.qkv, self.documents, self.scale, self.window, self.backend)

    def backward(self, kept: Any) -> None:
        q, k, v = self.qkv
        out, stats = kept
        more = self.documents, self.scale, self.window, self.grads, self.backend
        attention.backward(self.grad, q, k, v, out, stats, *more)


def fastest_attention(
    heads: Heads,
    lengths: Sequence[int],
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    say: Callable[[str], None],
) -> FloorAttention:
    """The fastest attention over these documents, by the time of a few layers. torch's own kernels, which need
    documents of one length, are tried beside ours: the floor must not be higher than necessary."""
    assert sum(lengths) == tokens, (sum(lengths), tokens)
    even, windowed = len(set(lengths)) == 1, 0 < heads.window < max(lengths)

    def qkv() -> torch.Tensor:
        return torch.randn(tokens, sum(heads.split), heads.width, dtype=dtype, device=device)

    def ours(backend: str) -> FloorAttention:
        return PackedAttention(heads, lengths, qkv(), backend)

    def sdpa(name: str, backend: SDPBackend) -> Callable[[], FloorAttention]:
        return lambda: TorchAttention(heads, len(lengths), lengths[0], qkv(), name, backend)

    if device.type != "cuda":
        return sdpa("math", SDPBackend.MATH)() if even and not windowed else ours("cpu")
    choice = attention.choose(device, dtype, heads.width, False, windowed)
    backends = dict.fromkeys((choice.backend, *choice.others, "triton"))  # those that a step may take, and our own
    makers: list[Callable[[], FloorAttention]] = [partial(ours, backend) for backend in backends]
    if even and not windowed:
        makers += [sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION), sdpa("flash", SDPBackend.FLASH_ATTENTION)]
    times: list[tuple[float, FloorAttention]] = []
    for make in makers:
        try:
            candidate = make()
            ms = sustained(partial(_layers, candidate, LAYERS), device, 5, sustain=0.05)
        except (RuntimeError, ImportError, ValueError, AttributeError, TypeError, AssertionError) as error:
            # Not installed, or not for these sizes: another one is.
            say(f"floor: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            continue
        say(f"floor: {candidate.name}: {ms / LAYERS:.4f} ms a layer")
        times.append((ms, candidate))
    if not times:
        raise RuntimeError("no fused attention for these sizes")
    return min(times, key=lambda pair: pair[0])[1]


def _layers(candidate: FloorAttention, count: int) -> None:
    candidate.begin()
    for _ in range(count):
        candidate.backward(candidate.forward())
