"""A configuration -> a Session: the base opened, the adapters laid out, the weights placed, the decoder built.

Training, evaluation, answers, the Python API and the benchmarks all start here, so an adapter means the same in each of
them. `auto` devices and dtypes are resolved here, from the machine, and the learning rate, from the model; `auto`
settings of memory (recompute and the size of a micro-batch) are resolved by the plan, which is a layer above.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections import Counter
from pathlib import Path

import torch

from graftune.data.template import template_from_file
from graftune.dist.shard import shards_of
from graftune.dist.world import World
from graftune.errors import GraftuneError
from graftune.io.files import check_inside
from graftune.kernels import attention
from graftune.losses import LOSSES, choose
from graftune.model.bundles import BundleStorage, HostMemory
from graftune.model.lora import initialise, start_from_scratch
from graftune.observe.memory import free_bytes
from graftune.runtime import Runtime, resolve
from graftune.session.parts import SessionParts
from graftune.session.session import Session
from graftune.settings import auto
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.tokenizer import Tokenizer
from graftune.weights.adapter import load_adapter
from graftune.weights.adapter_fit import Adapter, place_adapter
from graftune.weights.base import Base, open_base, with_new_tokens
from graftune.weights.model import hf_config
from graftune.weights.placement import (
    Placement,
    check_blocks,
    choose_placement,
    held_bytes,
    nothing_frozen,
    places,
)


def open_session(
    config: Config, *, base: Base | None = None, placement: Placement | None = None, world: World | None = None
) -> Session:
    """Open the base unless it is given, resolve what is `auto`, lay out the adapters and place the weights (as was
    planned, or as fits now). `world`: the ranks of the run, where a launcher has started it."""
    runtime = resolve(
        config.base.device,
        config.base.compute_dtype,
        threads=config.base.threads,
        deterministic=config.train.deterministic,
    )
    check_recompute(config.train.recompute, runtime.device)
    check_method(config)
    method = config.train.method
    base = base or open_base(config.base.base, config.base.revision, weights=method != "scratch")
    adapter = load_adapter(Path(config.lora.adapter)) if config.lora.adapter else None
    if adapter is None:
        lora = config.lora.resolved()
    else:  # rank, alpha and targets are the adapter's
        check_base(base, adapter.base_sha256, config.base.any_base, adapter.folder)
        lora = dataclasses.replace(adapter.lora, dropout=config.lora.dropout, adapter=config.lora.adapter)
    base = with_template(with_new_tokens(base, lora.new_tokens), config, adapter)
    config = config.replace(max_seq_len=config.data.longest(base.spec.max_positions))
    attend = attention_for(base, runtime, config.data.max_seq_len)
    whole = hf_config(base) if method != "lora" else None
    placement = placement or _placed(config, base, runtime, world)
    resolved = auto.with_lr(config, base.spec.parameters, LOSSES[config.train.loss].lr).replace(
        device=str(runtime.device),
        compute_dtype=runtime.compute_name,
        base_dtype=placement.base_dtype,
        alpha=lora.alpha if method == "lora" else config.lora.alpha,
    )
    parts = SessionParts(
        resolved,
        base,
        runtime,
        placement,
        lora,
        attend,
        choose(config.train),
        world=world,
        whole=whole,
        storage=storage_of(placement, base, runtime, world),
    )
    arena = parts.arena
    if method == "scratch":
        start_from_scratch(arena, base.spec, config.train.seed)
    elif method == "full":
        arena.publish()
    elif adapter is None:
        initialise(arena, lora, config.train.seed)
    else:
        place_adapter(adapter, arena, base)
    if parts.start is not None:
        parts.start.take()
    return Session(parts)


def _placed(config: Config, base: Base, runtime: Runtime, world: World | None) -> Placement:
    """The placement without a plan: the first one in which the weights alone fit."""
    if config.train.method != "lora":
        return nothing_frozen(base, config.base.base_dtype, runtime)
    placement = choose_placement(base, config.base.base_dtype, runtime, embedding_on=config.base.embedding_on)
    found = places(config.base.base_on, config.base.shard_base, world.size if world else 0, runtime.device)
    if len(found) > 1:
        held, free = held_bytes(base, placement.base_dtype, runtime.compute), free_bytes(runtime.device)
        found = [(on_host, ranks) for on_host, ranks in found if on_host or held < free * max(1, ranks)] or found[-1:]
    return placement.placed_at(*found[0])


def storage_of(placement: Placement, base: Base, runtime: Runtime, world: World | None) -> BundleStorage | None:
    """Where frozen weights are fetched from; None: they are on the device."""
    if not placement.fetched:
        return None
    if placement.base_dtype == "keep":
        check_blocks(base)  # also on a CPU: they are not read from the file any more
    if not placement.ranks:
        return HostMemory(runtime.device)
    assert world is not None and world.size == placement.ranks, "a divided base needs its ranks"
    world.attach(runtime.device)
    if runtime.device.type == "cuda" and not world.captured:
        raise GraftuneError(
            "a base in equal parts on ranks is gathered by NCCL, and here several ranks share a GPU",
            fix="give each rank a GPU of its own, or set shard_base to no",
        )
    return shards_of(world, runtime.device, on_host=placement.on_host)


def check_method(config: Config) -> None:
    """Refuse settings of adapters if the method trains none, and a loss that does not work with the method."""
    choose(config.train)
    method, default = config.train.method, LoraConfig()
    whereabouts = {"base_on": ("auto", "device"), "embedding_on": ("device",), "shard_base": ("auto", "no")}
    for name, unset in whereabouts.items():
        if method != "lora" and getattr(config.base, name) not in unset:
            raise GraftuneError(
                f"{name} is {getattr(config.base, name)} and method is {method}, which freezes no weight",
                fix=f"leave {name} out, or set method to lora",
            )
    for name, value in vars(config.lora).items() if method != "lora" else ():
        if value != getattr(default, name):
            raise GraftuneError(
                f"{name} is set and method is {method}, which trains no adapter",
                fix=f"leave {name} out, or set method to lora",
            )


def check_recompute(asked: str, device: torch.device) -> None:
    if asked == "offload" and device.type != "cuda":
        raise GraftuneError(
            f"recompute is offload, which needs a CUDA device, and this is {device}", fix="use none, selective or full"
        )


def attention_for(base: Base, runtime: Runtime, longest: int) -> attention.Choice:
    """The choice for the most common kind of attention heads; the reason also names those of the other kinds. Layers
    with a window that documents reach use our own kernels, whatever is chosen for their heads."""
    counts, windows = Counter[attention.HeadKind](), dict[attention.HeadKind, list[int]]()
    for layer, count in base.spec.kinds.items():
        for shape in (part.attention for part in layer.parts if part.attention is not None):
            kind = attention.HeadKind(shape.head_width, shape.capped, shape.sinks)
            counts[kind] += count
            windows.setdefault(kind, []).append(shape.window)
    if not counts:
        return attention.choose(runtime.device, runtime.compute, 64, runtime.deterministic, False)
    chosen = {}
    for kind, _ in counts.most_common():
        windowed = all(0 < window < longest for window in windows[kind])
        how = runtime.device, runtime.compute, kind.width, runtime.deterministic, windowed
        chosen[kind] = attention.choose(*how, capped=kind.capped, sinks=kind.sinks)
    main, *others = chosen
    rest = [f"heads of {kind.width}: {chosen[kind].backend}, {chosen[kind].why}" for kind in others]
    return chosen[main]._replace(why="; ".join([chosen[main].why, *rest]))


def with_template(base: Base, config: Config, adapter: Adapter | None) -> Base:
    """The base with the chat template that the run uses: a file of the user's, or the one saved with the adapter. It is
    saved again with the next adapter. A template that prints a date prints the run's."""
    file, date = config.data.template, config.data.date
    saved = adapter.folder / "chat_template.jinja" if adapter else None
    if file == "auto" and saved is not None and os.path.lexists(saved):
        check_inside(saved)
        file = str(saved)
    if file in ("auto", "none") and not date:
        return base
    template = base.tokenizer.template if file in ("auto", "none") else template_from_file(file, base.tokenizer)
    if date and template is not None:
        template = template.dated(datetime.datetime.fromisoformat(date))
    if template is base.tokenizer.template:
        return base
    return dataclasses.replace(base, tokenizer=dataclasses.replace(base.tokenizer, template=template))


def reader_of(config: Config, base: Base, adapter: Adapter | None) -> Tokenizer:
    """The tokenizer that data is read with: with the added tokens and the chat template."""
    return with_template(with_new_tokens(base, config.lora.new_tokens), config, adapter).tokenizer


def check_base(base: Base, trained_on: str, any_base: bool, where: Path | str) -> None:
    """Refuse an adapter of another base (`trained_on`: the digest of its own): if the shapes are equal, no other check
    would notice it."""
    if not any_base and trained_on and trained_on != base.sha256:
        raise GraftuneError(
            f"was trained on another base than {base.path}",
            where=str(where),
            fix="set base to its own, or any_base if this is the same model in another file",
        )
