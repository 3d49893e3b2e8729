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

from graftune.config import LoraConfig, expand_targets
from graftune.kernels.lora_linear import Part
from graftune.model.spec import ModelSpec

GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
HOMES = {p: "self_attn" if p in (*GROUPS["qkv"], "o_proj") else "mlp" for ps in GROUPS.values() for p in ps}


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
    """Adapters of projections with one input: stacked A, B's on the diagonal of one matrix, and their gradients."""

    down: torch.Tensor  # [R * projections, in], compute dtype
    up: torch.Tensor  # [out of the whole group, R * projections], compute dtype
    grad_down: torch.Tensor  # fp32
    parts: Sequence[Part]
    scale: float


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
    diagonals: list[torch.Tensor] = field(default_factory=list)  # the B's of groups, see `_diagonal`
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (to, from), renewed by `publish`

    def __post_init__(self) -> None:
        size = max((slot.stop for slot in self.slots.values()), default=0)
        self.weights, self.grads, self.m, self.v = (
            torch.zeros(size, dtype=torch.float32, device=self.device) for _ in range(4)
        )
        same = self.compute_dtype == torch.float32
        self.compute = self.weights if same else torch.zeros(size, dtype=self.compute_dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        own = 0 if self.compute is self.weights else self.compute.nbytes
        return 4 * self.weights.nbytes + own + sum(up.nbytes for up in self.diagonals)

    def view(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        slot = self.slots[name]
        return buffer[slot.start : slot.stop].view(slot.shape)

    def publish(self) -> None:
        """Bring what products read up to date after the weights have changed."""
        if self.compute is not self.weights:
            self.compute.copy_(self.weights)
        for target, source in self.copies:
            target.copy_(source)

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


def norm_names(spec: ModelSpec) -> list[tuple[int, str, int]]:
    """(layer, name, width) of every norm weight."""
    kinds = [("input_layernorm", spec.width), ("post_attention_layernorm", spec.width)]
    if spec.qk_norm:
        kinds += [("self_attn.q_norm", spec.head_width), ("self_attn.k_norm", spec.head_width)]
    blocks = [(i, f"layers.{i}.{kind}.weight", width) for i in range(spec.layers) for kind, width in kinds]
    return [*blocks, (-1, "norm.weight", spec.width)]


def scaling(config: LoraConfig) -> float:
    return config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def build_arena(spec: ModelSpec, config: LoraConfig, device: torch.device, compute: torch.dtype) -> Arena:
    """Lay out and initialise: A from the seeded generator (see `initialise`), B zero."""
    targets = expand_targets(config.targets)
    slots: dict[str, Slot] = {}
    at = 0

    def place(name: str, shape: tuple[int, ...], layer: int, decay: bool) -> None:
        nonlocal at
        slots[name] = Slot(name, shape, at, layer, decay)
        at = slots[name].stop

    for layer in range(spec.layers):
        for group in GROUPS.values():
            members = [p for p in group if p in targets]
            for projection in members:
                shape = (config.rank, spec.projections[projection][1])
                place(adapter_name(layer, projection, "A"), shape, layer, True)
            for projection in members:
                shape = (spec.projections[projection][0], config.rank)
                place(adapter_name(layer, projection, "B"), shape, layer, True)
    if config.new_tokens:
        place("embed_tokens.rows", (len(config.new_tokens), spec.width), -1, True)
        if not spec.tied:
            place("lm_head.rows", (len(config.new_tokens), spec.width), -1, True)
    if config.train_norms:
        for layer, name, width in norm_names(spec):
            place(name, (width,), layer, False)
    return Arena(slots, device, compute)


def initialise(arena: Arena, config: LoraConfig, seed: int) -> None:
    """A is Gaussian (std init_scale/rank) or PEFT's Kaiming uniform, drawn on the CPU: every device starts alike;
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
    for name, group in GROUPS.items():
        members = [p for p in group if adapter_name(layer, p, "A") in arena.slots]
        if not members:
            continue
        first = arena.slots[adapter_name(layer, members[0], "A")]
        last = arena.slots[adapter_name(layer, members[-1], "A")]
        stacked, width = slice(first.start, last.stop), first.shape[1]
        up, parts = _diagonal(arena, spec, config, layer, group, members)
        found[name] = LoraGroup(
            down=arena.compute[stacked].view(-1, width),
            up=up,
            grad_down=arena.grads[stacked].view(-1, width),
            parts=parts,
            scale=scaling(config),
        )
    return found


def _diagonal(
    arena: Arena, spec: ModelSpec, config: LoraConfig, layer: int, group: Sequence[str], members: Sequence[str]
) -> tuple[torch.Tensor, list[Part]]:
    """The group's B's as one matrix: a lone B is the arena's own view, several are copied onto a diagonal."""
    ends = list(itertools.accumulate(spec.projections[p][0] for p in group))
    columns = {p: slice(end - spec.projections[p][0], end) for p, end in zip(group, ends, strict=True)}
    parts = []
    for index, projection in enumerate(members):
        ranks = slice(index * config.rank, (index + 1) * config.rank)
        name = adapter_name(layer, projection, "B")
        parts.append(Part(columns[projection], ranks, arena.view(name, arena.grads)))
    sources = [arena.view(adapter_name(layer, p, "B"), arena.compute) for p in members]
    if len(group) == 1:
        return sources[0], parts
    up = torch.zeros(ends[-1], len(members) * config.rank, dtype=arena.compute_dtype, device=arena.device)
    arena.diagonals.append(up)
    for part, source in zip(parts, sources, strict=True):
        arena.copies.append((up[part.columns, part.ranks].copy_(source), source))
    return up, parts
