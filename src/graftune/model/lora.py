"""Lays out the trainable tensors: adapters, trained norms and rows of added tokens, or every weight of a model.

A layer's adapters are adjacent in the arena, and so are the A's of projections that share an input, so that the
stacked A is itself a view. Tensors without weight decay (norms) come last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.kernels import launch, lora_linear
from graftune.kernels.augmented_weight import Adapters
from graftune.kernels.lora_linear import Copy
from graftune.model.arena import Arena, LoraGroup, Slot
from graftune.model.feed_forward.expert_projection import ExpertLora
from graftune.model.feed_forward.experts import PARAMETERS
from graftune.model.part import PartSpec
from graftune.model.spec import ModelSpec
from graftune.settings.sections import LoraConfig
from graftune.settings.targets import FUSED, PARTS, expand_targets


def norm_names(spec: ModelSpec) -> list[tuple[int, str, int]]:
    """(layer, name, width) of every norm weight."""
    blocks = [
        (index, f"layers.{index}.{name}.weight", width)
        for index, layer in enumerate(spec.layers)
        for name, width in layer.norm_widths.items()
    ]
    return [*blocks, (-1, f"{spec.head.norm.name}.weight", spec.head.norm.width)]


def scaling(config: LoraConfig) -> float:
    return config.resolved().alpha / (math.sqrt(config.rank) if config.rslora else config.rank)


def targets_of(spec: ModelSpec, config: LoraConfig) -> tuple[str, ...]:
    """The paths of the projections that get adapters. A target is a path, or a name that stands for all paths that end
    in it."""
    wanted = {path for kind in spec.kinds for target in config.targets for path in kind.expand_target(target)}
    named = tuple(one for target in config.targets if target not in PARTS for one in _expert_projections(spec, target))
    asked = expand_targets(named) if named else ()
    matching = {target: [path for path in spec.projections if _ends_in(path, target)] for target in (*asked, *FUSED)}
    wanted |= {path for target in asked for path in matching[target]}
    for fused, parts in FUSED.items():
        given = [p for p in parts if p in asked]
        if not matching[fused] or not given:
            continue
        if len(given) < len(parts):
            raise GraftuneError(
                f"targets: {spec.family} has no {given[0]}, it is a part of {fused}", fix=f"use {fused} or all_linear"
            )
        wanted.update(matching[fused])
    known = {part for fused, parts in FUSED.items() if matching[fused] for part in parts}
    unknown = [p for p in asked if not matching[p] and p not in known]
    if unknown:
        names = dict.fromkeys(path.rpartition(".")[2] for path in spec.projections)
        raise GraftuneError(f"targets: {spec.family} has no {unknown[0]}", fix=f"use {', '.join(names)} or all_linear")
    return tuple(p for p in spec.projections if p in wanted)


def _expert_projections(spec: ModelSpec, target: str) -> tuple[str, ...]:
    """The projections that PEFT's name for a parameter of experts stands for (such as experts.gate_up_proj); any other
    target unchanged."""
    modules, _, name = target.rpartition(".")
    stem = modules or "experts"
    if stem.rpartition(".")[2] != "experts" or any(_ends_in(path, target) for path in spec.projections):
        return (target,)
    wanted = [f"{stem}.{member}" for member in PARAMETERS.get(name, ())]
    return tuple(path for path in spec.projections if any(_ends_in(path, one) for one in wanted)) or (target,)


def _ends_in(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def target_names(spec: ModelSpec, paths: Collection[str]) -> tuple[str, ...]:
    """The names of these projections for PEFT's configuration: the last word, where no other projection has it."""
    chosen = [path for path in spec.projections if path in paths]
    matching = {path: [p for p in spec.projections if _ends_in(p, path.rpartition(".")[2])] for path in chosen}
    short = {path: path.rpartition(".")[2] for path in chosen if set(matching[path]) <= set(chosen)}
    return tuple(dict.fromkeys(short.get(path, path) for path in chosen))


def adapter_columns_of(members: Sequence[str], targets: Collection[str], rank: int) -> int:
    """Columns and rows that a group's adapters add to its weight: a multiple of eight, for aligned rows."""
    return ceil_div(sum(member in targets for member in members) * rank, 8) * 8


def build_arena(
    spec: ModelSpec, config: LoraConfig, device: torch.device, compute: torch.dtype, *, full: bool = False
) -> Arena:
    """Makes the arena of the adapters, trained norms and added rows, or (`full`) of every weight of the model."""
    if full and spec.experts:
        raise GraftuneError("training every weight of a mixture of experts is not supported", fix="use method lora")
    slots: dict[str, Slot] = {}
    at = 0
    for name, shape, layer, decay in _all_weights(spec) if full else _adapters(spec, config):
        slots[name] = Slot(name, shape, at, layer, decay)
        at = slots[name].stop
    return Arena(slots, device, compute)


# Name, shape, layer (-1: none) and whether weight decay applies, in the arena's order.
Placed = Iterator[tuple[str, tuple[int, ...], int, bool]]


def _adapters(spec: ModelSpec, config: LoraConfig) -> Placed:
    """The adapters, and on request the rows of added tokens and the norms."""
    targets = targets_of(spec, config)
    for layer, kind in enumerate(spec.layers):
        for part in kind.parts:
            for name, shape in part.adapters(targets, config.rank, config.dropout):
                yield f"layers.{layer}.{name}", shape, layer, True
    if config.new_tokens:
        yield "embed_tokens.rows", (len(config.new_tokens), spec.width), -1, True
        if not spec.tied:
            yield "lm_head.rows", (len(config.new_tokens), spec.width), -1, True
    if config.train_norms:
        yield from _norms(spec)


def _all_weights(spec: ModelSpec) -> Placed:
    """Every weight by its name. Projections that share an input are adjacent: one product computes them."""
    blocks = [
        (f"layers.{layer}.{name}", shape, layer, len(shape) > 1)
        for layer, kind in enumerate(spec.layers)
        for name, shape in kind.weights.items()
    ]
    yield "embed_tokens.weight", (spec.vocab, spec.width), -1, True
    for name, shape in spec.layer_inputs.tensors.items() if spec.layer_inputs else ():
        yield name, shape, -1, len(shape) > 1
    yield from (placed for placed in blocks if placed[3])
    if not spec.tied:
        yield "lm_head.weight", (spec.vocab, spec.width), -1, True
    yield from (placed for placed in blocks if not placed[3])
    yield from _norms(spec)


def _norms(spec: ModelSpec) -> Placed:
    return ((name, (width,), layer, False) for layer, name, width in norm_names(spec))


def start_from_scratch(arena: Arena, spec: ModelSpec, seed: int) -> None:
    """Initialises an untrained model: Gaussian weights of std 0.02, divided by sqrt(2 * layers) for projections that
    write to the residual stream; norms are one and biases zero; a part initialises its own tensors.
    Values are drawn on the CPU, so that they are the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    for slot in arena.slots.values():
        value = arena.view(slot.name, arena.weights)
        part, name = spec.part_of(slot.name)
        own = part.start_of(name, generator) if part is not None and name in part.tensors else None
        if own is not None:
            value.copy_(own)
        elif len(slot.shape) == 1:
            value.fill_(0.0 if slot.name.endswith("bias") else 1.0)
        else:
            residual_output = part is not None and name.removesuffix(".weight") == part.output
            std = 0.02 / math.sqrt(2 * len(spec.layers)) if residual_output else 0.02
            value.copy_(torch.empty(slot.shape).normal_(0.0, std, generator=generator))
    arena.publish()


def initialise(arena: Arena, config: LoraConfig, seed: int) -> None:
    """Initialises A as PEFT does, Kaiming uniform or Gaussian (std init_scale/rank). B is zero, so the adapted model
    starts equal to the base. Values are drawn on the CPU, so that they are the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    for slot in arena.slots.values():
        if not slot.name.endswith("lora_A.weight"):
            continue
        start = torch.empty(slot.shape)
        if config.init == "gaussian":
            start.normal_(0.0, config.init_scale / config.rank, generator=generator)
        else:  # the bound of kaiming_uniform(a=sqrt(5)) is 1/sqrt(in)
            bound = config.init_scale / math.sqrt(slot.shape[1])
            start.uniform_(-bound, bound, generator=generator)
        arena.view(slot.name, arena.weights).copy_(start)
    arena.publish()


def lora_group(arena: Arena, part: PartSpec, group: str, config: LoraConfig, layer: int) -> LoraGroup | None:
    """The adapters of a group of projections as views into the arena; None if the group has no adapters."""

    def name(member: str, matrix: str) -> str:
        return f"layers.{layer}.{part.path(member)}.lora_{matrix}.weight"

    members = part.groups[group]
    adapted = [member for member in members if name(member, "A") in arena.slots]
    if not adapted:
        return None
    downs, ups = (arena.span(name(adapted[0], matrix), name(adapted[-1], matrix)) for matrix in "AB")
    outs = [part.projections[member][0] for member in members]
    ends = list(itertools.accumulate(outs))
    columns = tuple((ends[i] - outs[i], ends[i]) for i, member in enumerate(members) if member in adapted)
    width, rank = part.projections[adapted[0]][1], config.rank
    # On a CPU one product with zeros off the diagonal is faster than several products.
    one_product = len(members) > 1 and not launch.on_gpu(arena.device)
    return LoraGroup(
        Adapters(arena.compute[downs].view(-1, width), arena.compute[ups].view(-1, rank), columns, scaling(config)),
        grad_down=arena.grads[downs].view(-1, width),
        grad_up=arena.grads[ups].view(-1, rank),
        arena=arena,
        diagonal=_diagonal(arena, ends[-1], columns, ups, rank) if one_product else None,
    )


def expert_lora(arena: Arena, stem: str, config: LoraConfig) -> ExpertLora | None:
    """The adapters of one parameter of all experts, named `stem`, as views into the arena."""
    a, b = (f"{stem}.lora_{matrix}.weight" for matrix in "AB")
    if a not in arena.slots:
        return None
    split = (-1, config.rank)
    return ExpertLora(
        down=arena.view(a, arena.compute).unflatten(0, split),
        up=arena.view(b, arena.compute),
        grad_down=arena.view(a, arena.grads).unflatten(0, split),
        grad_up=arena.view(b, arena.grads),
        scale=scaling(config),
    )


def _diagonal(arena: Arena, out: int, columns: Sequence[tuple[int, int]], ups: slice, rank: int) -> torch.Tensor:
    """The group's B's as one [out, R * members] matrix, kept up to date by `publish`."""
    matrix = torch.zeros(out, len(columns) * rank, dtype=arena.compute_dtype, device=arena.device)
    stacked = arena.compute[ups].view(-1, rank)
    for place, rows, ranks in lora_linear.members(columns, rank):
        arena.copies.append(Copy(stacked[rows], matrix[place, ranks], 1.0))
        matrix[place, ranks] = stacked[rows]
    arena.own_bytes += matrix.nbytes
    return matrix
