"""Everything that trains, in one flat fp32 buffer.

Adapters, and on request norm weights and the rows of added tokens, are views into `Arena.weights`; their gradients and
AdamW's moments lie in buffers of the same layout, and `Arena.compute` is the copy in the compute dtype that products
read. Norm, clip, update, zero and checkpoint are then one operation each, however many tensors there are. A list of
parameters, as everybody else has it, costs a launch per tensor for every one of these.

Layout: a layer's adapters lie together, and the A's of projections that share an input lie next to each other, so
that the stacked A is itself a view. What AdamW must not decay (norms) comes last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from graftune.config import FUSED, LoraConfig, expand_targets
from graftune.errors import GraftuneError
from graftune.kernels import fp8, lora_linear
from graftune.kernels.lora_linear import Copy, Low
from graftune.kernels.room import Adapters
from graftune.model.experts import ExpertLora
from graftune.model.frozen import Fp8, Roomy
from graftune.model.spec import NORMS, ModelSpec

# A mixture's: each of the two stacked weights of the experts has one adapter an expert.
EXPERT_GROUPS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
HOMES = dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"), "self_attn") | dict.fromkeys(
    ("gate_proj", "up_proj", "gate_up_proj", "down_proj"), "mlp"
)


@dataclass(frozen=True)
class Slot:
    """One trainable tensor: its name as PEFT writes it (behind the model's prefix), its place and its layer."""

    name: str
    shape: tuple[int, ...]
    start: int
    layer: int  # -1: belongs to no layer
    decay: bool

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class LoraGroup:
    """Adapters of projections with one input: their A's and B's stacked, as views into the arena."""

    down: torch.Tensor  # [R * members, in], compute dtype
    up: torch.Tensor  # [sum of the members' outs, R], compute dtype
    grad_down: torch.Tensor  # fp32
    grad_up: torch.Tensor  # fp32
    columns: tuple[tuple[int, int], ...]  # of the group's product, for each member
    scale: float
    arena: Arena = field(repr=False, compare=False)
    diagonal: torch.Tensor | None = None  # the B's on the diagonal of one matrix, where that is faster

    def low(self, h: torch.Tensor) -> Low:
        return Low(h, self.up, self.columns, self.scale, self.diagonal)

    def settle(self, weight: Roomy) -> None:
        """Have A lie in the rows below the weight and s B in the columns beside it, whenever a product reads them."""
        self.arena.copies += weight.settle(Adapters(self.down, self.up, self.columns, self.scale))
        if isinstance(weight, Fp8) and weight.share is not None:
            self.arena.shares.append(weight.share)


@dataclass
class Arena:
    slots: dict[str, Slot]
    device: torch.device
    compute_dtype: torch.dtype
    weights: torch.Tensor = field(init=False)
    grads: torch.Tensor = field(init=False)
    m: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    compute: torch.Tensor = field(init=False)
    copies: list[Copy] = field(default_factory=list)
    shares: list[fp8.Share] = field(default_factory=list)
    own_bytes: int = 0  # of what is kept beside the flat buffers

    def __post_init__(self) -> None:
        size = max((slot.stop for slot in self.slots.values()), default=0)
        self.weights, self.grads, self.m, self.v = (
            torch.zeros(size, dtype=torch.float32, device=self.device) for _ in range(4)
        )
        self._tables: dict[str, torch.Tensor] = {}
        same = self.compute_dtype == torch.float32
        self.compute = self.weights if same else torch.zeros(size, dtype=self.compute_dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        own = 0 if self.compute is self.weights else self.compute.nbytes
        return 4 * self.weights.nbytes + own + self.own_bytes

    @property
    def full(self) -> bool:
        """Whether every weight of the model trains."""
        return "embed_tokens.weight" in self.slots

    def span(self, first: str, last: str) -> slice:
        """The run of the buffers from one slot to another."""
        return slice(self.slots[first].start, self.slots[last].stop)

    def view(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        slot = self.slots[name]
        return buffer[slot.start : slot.stop].view(slot.shape)

    def publish(self, cast: bool = True) -> None:
        """Bring what products read up to date after the weights have changed (`cast`: the flat copy too)."""
        if cast and self.compute is not self.weights:
            self.compute.copy_(self.weights)
        lora_linear.spread(self.copies, self._tables)
        fp8.settle(self.shares, self._tables)

    @property
    def decayed(self) -> int:
        """Slots before this index decay, those from it on do not."""
        return max((slot.stop for slot in self.slots.values() if slot.decay), default=0)

    def segments(self, mode: str) -> list[list[slice]]:
        """What is clipped together: everything, or each layer by itself (what has no layer is one more segment)."""
        if mode == "global":
            return [[slice(0, len(self.weights))]]
        runs: dict[int, list[slice]] = {}
        for slot in self.slots.values():
            run = runs.setdefault(slot.layer, [])
            if run and run[-1].stop == slot.start:
                run[-1] = slice(run[-1].start, slot.stop)
            else:
                run.append(slice(slot.start, slot.stop))
        return list(runs.values())


def adapter_name(layer: int, projection: str, matrix: str) -> str:
    return f"layers.{layer}.{HOMES[projection]}.{projection}.lora_{matrix}.weight"


def expert_adapter_name(layer: int, group: str, matrix: str) -> str:
    return f"layers.{layer}.mlp.experts.{group}.lora_{matrix}.weight"


def weight_name(layer: int, projection: str, kind: str = "weight") -> str:
    return f"layers.{layer}.{HOMES[projection]}.{projection}.{kind}"


def norm_names(spec: ModelSpec) -> list[tuple[int, str, int]]:
    """(layer, name, width) of every norm weight."""
    kinds = [(kind, spec.width) for kind in NORMS[spec.norms] if kind is not None]
    if spec.qk_norm:
        kinds += zip(("self_attn.q_norm", "self_attn.k_norm"), spec.qk_norm_widths, strict=True)
    blocks = [(i, f"layers.{i}.{kind}.weight", width) for i in range(spec.layers) for kind, width in kinds]
    return [*blocks, (-1, "norm.weight", spec.width)]


def scaling(config: LoraConfig) -> float:
    return config.resolved().alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def targets_of(spec: ModelSpec, config: LoraConfig) -> tuple[str, ...]:
    """The projections that get adapters, as the model's family calls them."""
    asked = expand_targets(config.targets)
    wanted = {p for p in asked if p in spec.projections}
    for fused, parts in FUSED.items():
        given = [p for p in parts if p in asked]
        if fused not in spec.projections or not given:
            continue
        if len(given) < len(parts):
            raise GraftuneError(
                f"targets: {spec.family} has no {given[0]}, it is a part of {fused}", mend=f"use {fused} or all_linear"
            )
        wanted.add(fused)
    alien = [p for p in asked if p not in spec.projections and not any(p in parts for parts in FUSED.values())]
    if alien:
        raise GraftuneError(
            f"targets: {spec.family} has no {alien[0]}", mend=f"use {', '.join(spec.projections)} or all_linear"
        )
    return tuple(p for p in spec.projections if p in wanted)


def room_of(spec: ModelSpec, config: LoraConfig, group: str) -> int:
    """Columns and rows that a group's adapters take beside its weight, a multiple of eight for aligned rows."""
    members = [p for p in spec.groups[group] if p in targets_of(spec, config)]
    return -(-len(members) * config.rank // 8) * 8


def build_arena(
    spec: ModelSpec, config: LoraConfig, device: torch.device, compute: torch.dtype, *, full: bool = False
) -> Arena:
    """Lay out: the adapters and what trains beside them, or (`full`) every weight of the model."""
    place = _Layout()
    if full and spec.experts:
        raise GraftuneError("training every weight of a mixture of experts is not supported", mend="use method lora")
    if full:
        _place_everything(place, spec)
    else:
        _place_adapters(place, spec, config)
    return Arena(place.slots, device, compute)


class _Layout:
    """Slots one behind the other."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.at = 0

    def __call__(self, name: str, shape: tuple[int, ...], layer: int, decay: bool) -> None:
        self.slots[name] = slot = Slot(name, shape, self.at, layer, decay)
        self.at = slot.stop


def _place_adapters(place: _Layout, spec: ModelSpec, config: LoraConfig) -> None:
    targets = targets_of(spec, config)
    for layer in range(spec.layers):
        for group in spec.groups.values():
            members = [p for p in group if p in targets]
            for projection in members:
                shape = (config.rank, spec.projections[projection][1])
                place(adapter_name(layer, projection, "A"), shape, layer, True)
            for projection in members:
                shape = (spec.projections[projection][0], config.rank)
                place(adapter_name(layer, projection, "B"), shape, layer, True)
        for name in adapted_experts(spec, config):
            out, width = _expert_shape(spec, name)
            place(expert_adapter_name(layer, name, "A"), (spec.experts * config.rank, width), layer, True)
            place(expert_adapter_name(layer, name, "B"), (spec.experts, out, config.rank), layer, True)
    if config.new_tokens:
        place("embed_tokens.rows", (len(config.new_tokens), spec.width), -1, True)
        if not spec.tied:
            place("lm_head.rows", (len(config.new_tokens), spec.width), -1, True)
    if config.train_norms:
        for layer, name, width in norm_names(spec):
            place(name, (width,), layer, False)


def _expert_shape(spec: ModelSpec, group: str) -> tuple[int, int]:
    """(out, in) of an expert's share of a stacked weight."""
    shapes = [spec.projections[p] for p in EXPERT_GROUPS[group]]
    return sum(out for out, _ in shapes), shapes[0][1]


def adapted_experts(spec: ModelSpec, config: LoraConfig) -> list[str]:
    """Those of EXPERT_GROUPS that the targets are. They hold gate and up as one, and dropout on what an expert reads is
    nothing PEFT could load."""
    targets = set(targets_of(spec, config))
    found = [group for group, members in EXPERT_GROUPS.items() if spec.experts and set(members) & targets]
    if "gate_up_proj" in found and not set(EXPERT_GROUPS["gate_up_proj"]) <= targets:
        raise GraftuneError(
            "the experts hold gate and up as one weight, and only one of the two is a target",
            mend="target gate_proj and up_proj, or neither",
        )
    if found and config.dropout:
        raise GraftuneError("adapters on experts have no dropout", mend="set dropout to 0, or target attention")
    return found


def _place_everything(place: _Layout, spec: ModelSpec) -> None:
    """By the names the base has. Projections that share an input lie together: one product serves them."""
    place("embed_tokens.weight", (spec.vocab, spec.width), -1, True)
    for layer in range(spec.layers):
        for projection in spec.projections:
            place(weight_name(layer, projection), spec.projections[projection], layer, True)
    if not spec.tied:
        place("lm_head.weight", (spec.vocab, spec.width), -1, True)
    for layer in range(spec.layers if spec.qkv_bias else 0):
        for projection in spec.groups["qkv"]:
            place(weight_name(layer, projection, "bias"), spec.projections[projection][:1], layer, False)
    for layer, name, width in norm_names(spec):
        place(name, (width,), layer, False)


def start_from_scratch(arena: Arena, spec: ModelSpec, seed: int) -> None:
    """Weights of a model that was never trained: Gaussian of std 0.02, those that write to the residual stream smaller
    by the root of the number of such; norms one, biases zero. Drawn on the CPU: every device starts alike."""
    generator = torch.Generator().manual_seed(seed)
    for slot in arena.slots.values():
        value = arena.view(slot.name, arena.weights)
        if len(slot.shape) == 1:
            value.fill_(0.0 if slot.name.endswith("bias") else 1.0)
            continue
        writes = slot.name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 0.02 / math.sqrt(2 * spec.layers) if writes else 0.02
        value.copy_(torch.empty(slot.shape).normal_(0.0, std, generator=generator))
    arena.publish()


def initialise(arena: Arena, config: LoraConfig, seed: int) -> None:
    """A is PEFT's Kaiming uniform or Gaussian (std init_scale/rank), drawn on the CPU: every device starts alike;
    B is zero, so the adapted model starts as the base."""
    generator = torch.Generator().manual_seed(seed)
    for slot in arena.slots.values():
        if not slot.name.endswith("lora_A.weight"):
            continue
        start = torch.empty(slot.shape)
        if config.init == "gaussian":
            start.normal_(0.0, config.init_scale / config.rank, generator=generator)
        else:  # kaiming_uniform(a=sqrt(5)) comes to a bound of 1/sqrt(in)
            bound = config.init_scale / math.sqrt(slot.shape[1])
            start.uniform_(-bound, bound, generator=generator)
        arena.view(slot.name, arena.weights).copy_(start)
    arena.publish()


def lora_groups(arena: Arena, spec: ModelSpec, config: LoraConfig, layer: int) -> dict[str, LoraGroup]:
    """The layer's adapters as views into the arena."""
    found: dict[str, LoraGroup] = {}
    for name, group in spec.groups.items():
        members = [p for p in group if adapter_name(layer, p, "A") in arena.slots]
        if not members:
            continue
        downs = arena.span(adapter_name(layer, members[0], "A"), adapter_name(layer, members[-1], "A"))
        ups = arena.span(adapter_name(layer, members[0], "B"), adapter_name(layer, members[-1], "B"))
        ends = list(itertools.accumulate(spec.projections[p][0] for p in group))
        columns = tuple((ends[i] - spec.projections[p][0], ends[i]) for i, p in enumerate(group) if p in members)
        width, rank = spec.projections[members[0]][1], config.rank
        found[name] = LoraGroup(
            down=arena.compute[downs].view(-1, width),
            up=arena.compute[ups].view(-1, rank),
            grad_down=arena.grads[downs].view(-1, width),
            grad_up=arena.grads[ups].view(-1, rank),
            columns=columns,
            scale=scaling(config),
            arena=arena,
            diagonal=_diagonal(arena, ends[-1], columns, ups, rank) if _one_diagonal(arena, group) else None,
        )
    return found


def expert_groups(arena: Arena, spec: ModelSpec, config: LoraConfig, layer: int) -> dict[str, ExpertLora]:
    """The adapters of a layer's experts as views into the arena."""
    found = {}
    for group in adapted_experts(spec, config):
        a, b = (expert_adapter_name(layer, group, matrix) for matrix in "AB")
        split = (spec.experts, config.rank)
        found[group] = ExpertLora(
            down=arena.view(a, arena.compute).unflatten(0, split),
            up=arena.view(b, arena.compute),
            grad_down=arena.view(a, arena.grads).unflatten(0, split),
            grad_up=arena.view(b, arena.grads),
            scale=scaling(config),
        )
    return found


def _one_diagonal(arena: Arena, group: Sequence[str]) -> bool:
    """A CPU prefers one product with zeros beside the diagonal to several without; a GPU has better ways."""
    return len(group) > 1 and arena.device.type != "cuda"


def _diagonal(arena: Arena, out: int, columns: Sequence[tuple[int, int]], ups: slice, rank: int) -> torch.Tensor:
    """The group's B's as one [out, R * members] matrix, kept up to date by `publish`."""
    matrix = torch.zeros(out, len(columns) * rank, dtype=arena.compute_dtype, device=arena.device)
    stacked = arena.compute[ups].view(-1, rank)
    for place, rows, ranks in lora_linear.members(columns, rank):
        arena.copies.append(Copy(stacked[rows], matrix[place, ranks], 1.0))
        matrix[place, ranks] = stacked[rows]
    arena.own_bytes += matrix.nbytes
    return matrix
