"""Plans a run: turns its settings into a rehearsal for a device, and the rehearsal's result into a `Plan`.

A plan has two totals. `expected` is what will be measured after the first step: the peak of torch's allocator on a GPU,
of the resident set on a CPU. `needed` is what has to be free before anything is loaded. It has a margin for what cannot
be predicted: code that CUDA loads during the run, rounding and fragmentation of the allocator's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graftune.arithmetic import ceil_div, power_of_two
from graftune.batch import PLAIN, BatchLayout, Example
from graftune.data.pack import TILE, Capacities, ahead_capacities, whole_tiles
from graftune.errors import GraftuneError
from graftune.infer.cache import CacheShape, Request, cache_capacity
from graftune.kernels.rehearsal import META, Device, Launched, Rehearsal, rehearsing
from graftune.losses import Loss, choose
from graftune.model.spec import ModelSpec
from graftune.observe.memory import available_bytes, free_bytes, human_bytes, resident_bytes
from graftune.plan import cards, libraries
from graftune.plan.cards import Card
from graftune.plan.counting import MIB
from graftune.plan.rehearse import POOLS, Bytes, Setup, rehearse, sampling_cache
from graftune.runtime import DTYPES, Runtime, resolve
from graftune.session import attention_for
from graftune.settings.config import Config
from graftune.weights.base import Base, with_new_tokens
from graftune.weights.placement import Placement, choose_placement, nothing_frozen, places

CONTEXT_BYTES = 600 * MIB  # CUDA's context, for a GPU of another machine, where it cannot be measured
CONTEXT, PROCESS, FILES = "CUDA context", "interpreter and libraries", "pages of the file"
# Share of a step's temporary memory that the C library's heap loses in holes between tensors. Measured: 0 to a half, on
# SmolLM2 and models of its width. Returning every tensor to the system instead takes a third more time.
HEAP, HEAP_SHARE = "holes in the heap", 0.2
OTHERS = "CUDA context, other processes"  # if more is used than MOST_CONTEXT
MOST_CONTEXT = 2048 * MIB
FAULT_BYTES = 64 << 10  # bytes that Linux maps when one byte of a file is read
# From four layers on (the first, the last and two between, since offloading prefetches one), each further layer adds
# the same. Two are added, because the arena's buffers are rounded up to 2 MiB, which a single layer may not reach.
FEW_LAYERS, MORE_LAYERS = 4, 6


@dataclass(frozen=True)
class Plan:
    """The predicted memory of a run with certain settings, and whether it fits."""

    device: str  # cuda | cpu
    where: str  # the device in words
    settings: dict[str, Any]
    bytes: Bytes
    free: int
    rest: dict[str, int]  # measured, not planned: the CUDA context, or the present process and its heap
    host_free: int | None = None  # if the device is a GPU of this machine
    transfer: str = ""  # a sentence on the time to fetch the frozen weights

    @property
    def recompute(self) -> str:
        return str(self.settings["recompute"])

    @property
    def capacity(self) -> int:
        """Tokens of a micro-batch."""
        return int(self.settings["tokens_per_micro_batch"])

    @property
    def expected(self) -> int:
        return self.bytes.peak + (sum(self.rest.values()) if self.device == "cpu" else 0)

    @property
    def needed(self) -> int:
        share, fixed = (0.02, 256 * MIB) if self.device == "cuda" else (0.05, 64 * MIB)
        whole = self.bytes.peak + self.bytes.pools + self.rest.get(HEAP, 0)
        return whole + int(share * whole) + fixed

    @property
    def fits(self) -> bool:
        """Whether both device and host memory suffice. Host memory is pinned, so it cannot be swapped out."""
        return self.fits_device and (self.host_free is None or self.bytes.host <= self.host_free)

    @property
    def fits_device(self) -> bool:
        return self.needed <= self.free

    def owners(self) -> dict[str, int]:
        pools = {POOLS: self.bytes.pools} if self.bytes.pools else {}
        return {**self.bytes.owners, **pools, **self.rest}

    @property
    def notes(self) -> list[str]:
        """Remarks to show with the plan."""
        named = ", ".join(sorted(self.bytes.without_rule))
        if not named:
            return []
        return [
            f"the plan has no rule for the memory of {named}: torch's own references were asked, which takes seconds "
            "more at every start (a rule is one line of plan/shapes.py)"
        ]

    def document(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "where": self.where,
            "settings": self.settings,
            "owners": self.owners(),
            "expected": self.expected,
            "needed": self.needed,
            "free": self.free,
            "fits": self.fits,
            "host": self.bytes.host,
            "host_free": self.host_free,
            "transfer": self.transfer,
            "phases": {name: sum(owners.values()) for name, owners in self.bytes.phases.items()},
            "notes": self.notes,
        }


@dataclass
class Job:
    """A run to plan. `shapes` gives the shape of the micro-batches for a capacity: that of the data, or (`any_data`)
    the worst case."""

    config: Config
    base: Base
    runtime: Runtime
    longest: int  # the fewest tokens that a micro-batch must hold
    shapes: Callable[[int], Capacities]
    card: Card | None = None
    memory: int = 0  # a requested limit, in place of the free memory
    evaluates: bool = True
    evaluated: Callable[[int], Capacities] | None = None  # `shapes` of the validation data; None: the training data's
    asked: tuple[int, ...] = ()  # tokens of each prompt that is answered before and after training
    sampled: tuple[Request, ...] = ()  # the longest samples of a round of reinforcement learning
    at_once: int = 0  # how many of `sampled` are drawn at the same time
    process: int = 0  # resident bytes on a CPU before anything was loaded; 0: measured now
    tokens: int = 0  # distinct tokens in the data; 0: unknown
    resuming: bool = False  # the run's earlier choices must stay
    loss: Loss | None = None  # None: the loss of the settings
    launched: Launched | None = None  # called for every Triton kernel that the run will launch
    layout: BatchLayout = PLAIN  # the loss's fields of a batch
    longest_ahead: int = 0  # tokens of the longest example that the layout's `ahead` makes
    ranks: int = 0  # ranks that a launcher has started; 0: no launcher
    training: Sequence[Example] | None = None  # the data, where it is known
    validation: Sequence[Example] = ()
    _made: dict[tuple[str, int, int, Placement, ModelSpec], Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.config.train.method == "lora":
            self.base = with_new_tokens(self.base, self.config.lora.new_tokens)
        self.free = self.card.free if self.card else self.memory or free_bytes(self.runtime.device)
        self.places = self._places()
        self.placement = self.place(self.config.base.base_dtype).placed_at(*self.places[0])
        with self._as_there() as runtime:
            self.attention = attention_for(self.base, runtime, self.config.data.longest(self.base.spec.max_positions))
        self.host_free = available_bytes() if self.card is not None and self.card.device.here else None

    def place(self, asked: str) -> Placement:
        with self._as_there() as runtime:
            if self.config.train.method != "lora":
                return nothing_frozen(self.base, asked, runtime, self.free)
            return choose_placement(self.base, asked, runtime, self.free, self.config.base.embedding_on)

    def _places(self) -> list[tuple[bool, int]]:
        """Places for the frozen weights, as arguments of Placement.placed_at; the best one first."""
        if self.config.train.method != "lora":
            return [(False, 0)]
        asked = self.config.base
        with self._as_there() as runtime:
            return places(asked.base_on, asked.shard_base, self.ranks, runtime.device)

    def can_place(self, asked: str) -> bool:
        try:
            self.place(asked)
        except GraftuneError:
            return False
        return True

    def plan(self, recompute: str, capacity: int, placement: Placement | None = None, *, whole: bool = False) -> Plan:
        """Plan from a few layers and the increase per further layer; `whole`: rehearse all layers."""
        placement = placement or self.placement
        setup = self.setup(recompute, capacity, placement)
        if not whole and len(self.base.spec.layers) > MORE_LAYERS:
            found = from_few_layers(setup, lambda smaller: self._bytes(smaller, capacity))
        else:
            found = self._bytes(setup, capacity)
        settings = {
            "base_dtype": placement.base_dtype,
            "base_on": "host" if placement.on_host else "device",
            "embedding_on": "host" if placement.embedding_on_host else "device",
            "shard_base": "yes" if placement.ranks else "no",
            "compute_dtype": self.runtime.compute_name,
            "attention": self.attention.backend,
            "recompute": recompute,
            "tokens_per_micro_batch": max(capacity, self.longest),
            "response_rows": setup.shape.max_rows,
            "longest": setup.shape.longest,
            "graph": setup.config.train.graph,
            "ranks": self.ranks,
        }
        if self.sampled:
            settings["samples_at_once"] = self.at_once
        runtime, card = self.runtime, self.card
        fetching = cards.transfer_note(self.base, placement, runtime.compute, setup.shape.capacity, card)
        where = card.device.name if card else str(runtime.device)
        return Plan(
            runtime.device.type, where, settings, found, self.free, self._rest(setup, found), self.host_free, fetching
        )

    def setup(self, recompute: str, capacity: int, placement: Placement) -> Setup:
        config, kind, shape = self.config, self.runtime.device.type, self.shapes(capacity)
        most = self.base.spec.max_positions
        return Setup(
            base=self.base,
            lora=config.lora,
            runtime=self.runtime,
            placement=placement,
            shape=shape,
            config=Config().replace(
                recompute=recompute,
                method=config.train.method,
                clip_mode=config.optim.clip_mode,
                deterministic=self.runtime.deterministic,
                graph=kind == "cuda" and config.train.graph,
            ),
            loss=self.loss or choose(config.train),
            layout=self.layout,
            ahead=ahead_capacities(shape, self.longest_ahead) if self.layout.ahead else None,
            backend=self.attention.backend,
            others=self.attention.others,
            evaluates=self.evaluates,
            evaluated=self.evaluated(max(capacity, self.longest)) if self.evaluated else None,
            asked=tuple(Request(n, min(n + config.run.sample_tokens, most)) for n in self.asked),
            cache_capacity=cache_capacity(max(capacity, self.longest), recompute),
            sampled=self.sampled,
            at_once=self.at_once,
            copies=kind == "cpu" and libraries.copies_operand(self.runtime.compute),
            card=self.card,
        )

    @property
    def cache(self) -> CacheShape | None:
        """The cache that sampling keeps beside training; None if the run samples nothing while it trains."""
        if not self.sampled:
            return None
        return sampling_cache(self.base.spec, self.runtime.compute, self.sampled, self.at_once)

    def _bytes(self, setup: Setup, capacity: int) -> Bytes:
        key = (
            setup.config.train.recompute,
            capacity,
            self.at_once,
            replace(setup.placement, reason=""),
            setup.base.spec,
        )
        if key not in self._made:
            self._made[key] = rehearse(setup, launched=self.launched)
        return self._made[key]

    def _rest(self, setup: Setup, found: Bytes) -> dict[str, int]:
        if self.card is not None:
            taken = self.card.total - self.card.free
            return {CONTEXT if taken <= MOST_CONTEXT else OTHERS: taken}
        heap, pages, process = int(HEAP_SHARE * found.temporary), self._pages(setup), resident_bytes()
        if self.process:  # the base is loaded; libraries may have been, too
            process = max(self.process, process - sum(found.phases["load"].values()) - pages)
        return {HEAP: heap, FILES: pages, PROCESS: process}

    def _pages(self, setup: Setup) -> int:
        """Bytes of the file that are read and stay mapped: all of it; but of an embedding that stays in the file and is
        not also the head, only the rows of tokens that occur."""
        pages, spec = sum(source.nbytes for source in self.base.tensors.values()), self.base.spec
        table = self.base.tensors.get("embed_tokens.weight")
        if setup.placement.base_dtype != "keep" or spec.tied or table is None or not self.tokens:
            return pages
        return pages - max(0, table.nbytes - self.tokens * FAULT_BYTES)

    @contextmanager
    def _as_there(self) -> Iterator[Runtime]:
        """Inside, the runtime's device has the properties of the card that the plan is for."""
        if self.card is None:
            yield self.runtime
            return
        with rehearsing(Rehearsal(self.card.device)):
            yield replace(self.runtime, device=META)


def from_few_layers(setup: Setup, rehearsed: Callable[[Setup], Bytes] = rehearse) -> Bytes:
    """The memory of all layers, extrapolated from a few and from the increase by two more of each kind. Layers with the
    same tensors are of one kind here, since they need the same memory."""
    spec = setup.base.spec
    kinds: dict[frozenset[tuple[str, tuple[int, ...]]], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        kinds.setdefault(frozenset(layer.weights.items()), []).append(index)
    first = [*range(FEW_LAYERS - 1), len(spec.layers) - 1]
    # Include layers that differ in anything else, such as rope: a pass has tables for all of them.
    there = {spec.layers[index] for index in first}
    # In the order of the model: a layer may use the keys of an earlier one.
    first = sorted([*first, *(spec.layers.index(kind) for kind in spec.kinds if kind not in there)])
    few = found = rehearsed(setup.with_layers(first))
    for layers in kinds.values():
        missing = len(layers) - sum(index in layers for index in first)
        if missing:
            more = rehearsed(setup.with_layers(sorted([*first, *layers[:1] * (MORE_LAYERS - FEW_LAYERS)])))
            found = found.extended(few, more, MORE_LAYERS - FEW_LAYERS, missing)
    return found


def is_absent(config: Config) -> bool:
    """Whether the settings ask for a GPU that this machine does not have."""
    return config.base.device.startswith("cuda") and not torch.cuda.is_available()


def runtime_for(config: Config, memory: int, named: Card | None = None) -> tuple[Runtime, Card | None]:
    """The runtime and the card of a run. A plan for a GPU of another machine needs its card (`cards.find`) or its
    memory."""
    asked = config.base.device
    if named is None and not (memory and is_absent(config)):
        runtime = resolve(
            asked, config.base.compute_dtype, threads=config.base.threads, deterministic=config.train.deterministic
        )
        return runtime, card_here(runtime.device, memory) if runtime.device.type == "cuda" else None
    best = torch.bfloat16 if named is None or named.device.capability >= (8, 0) else torch.float16
    dtype = DTYPES.get(config.base.compute_dtype, best)
    runtime = Runtime(torch.device("cuda", 0), dtype, "planned for", config.train.deterministic)
    if named is None:
        name = f"a GPU of {human_bytes(memory)} (not here; its kernels are assumed to be an H100's: name it with --gpu)"
        named = Card(Device("cuda", name, (9, 0), 132, 60 * MIB, here=False), memory, memory)
    else:
        named = replace(named, device=replace(named.device, name=f"{named.device.name} (not here)"))
    total = memory or named.total
    return runtime, replace(named, free=max(0, total - CONTEXT_BYTES), total=total)


def card_here(device: torch.device, memory: int = 0) -> Card:
    """A GPU of this machine; `memory` limits it."""
    free, total = free_bytes(device), torch.cuda.mem_get_info(device)[1]
    taken = total - free
    if memory:
        free, total = max(0, memory - taken), memory
    about = torch.cuda.get_device_properties(device)
    capability, processors = (about.major, about.minor), about.multi_processor_count
    found = Card(Device("cuda", about.name, capability, processors, about.L2_cache_size), free, total)
    try:
        known = cards.find(about.name)
    except GraftuneError:  # the table does not have this card, so its rates are unknown
        return found
    return replace(found, rate=known.rate, link=known.link, peers=known.peers)


def any_data(longest: int) -> Callable[[int], Capacities]:
    """The worst case without data: documents of the largest length, every token trained."""

    def shape(capacity: int) -> Capacities:
        tokens = ceil_div(max(capacity, longest), TILE) * TILE
        bound = min(tokens, ceil_div(longest, TILE) * TILE)
        return Capacities(tokens, ceil_div(tokens, bound), tokens, bound)

    return shape


def round_data(sampled: Sequence[Request], longest: int) -> Callable[[int], Capacities]:
    """The worst case of a round of reinforcement learning: a micro-batch never has more tokens than all samples."""
    tokens = power_of_two(sum(one.samples * one.final for one in sampled))
    drawn = power_of_two(whole_tiles(sum(one.samples * (one.final - one.prompt) for one in sampled)))
    whole = any_data(longest)

    def shape(capacity: int) -> Capacities:
        found = whole(min(capacity, tokens))
        return found._replace(max_rows=min(found.max_rows, drawn))

    return shape
