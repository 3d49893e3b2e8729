"""From an opened base to a decoder on the device: each weight is placed as the run wants it, tensor by tensor.

placement.py has the ways and chooses among them. However a weight is placed, beside the result no more than a few of
its rows exist at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch

from graftune.errors import GraftuneError
from graftune.kernels import launch
from graftune.model.block import Block, Branch, FeedForwardBranch
from graftune.model.bundles import EMBEDDING, HEAD, Bundles, Home, Key
from graftune.model.decoder import Decoder
from graftune.model.feed_forward.expert_projection import ExpertProjection, ExpertWeights, Several, Stacked
from graftune.model.feed_forward.experts import PARAMETERS, ExpertsSpec
from graftune.model.frozen import (
    BlockSource,
    Dense,
    Fetched,
    FloatRows,
    Frozen,
    GgufRows,
    Mapped,
    Nf4Rows,
    Packed,
    RowSource,
    Scratch,
    Table,
    Trained,
    Unpacked,
    fill,
)
from graftune.model.head import Head, NewRows
from graftune.model.lora import Arena, adapter_columns_of, expert_lora, lora_group, targets_of
from graftune.model.part import Bias, FeedForwardSpec, NormWeight, PartSpec
from graftune.model.projection import Projection
from graftune.model.spec import ModelSpec
from graftune.runtime import DTYPES, Runtime
from graftune.settings.config import LoraConfig
from graftune.weights.base import Base, FirstRows
from graftune.weights.bnb_io import Nf4Tensor, is_quantised
from graftune.weights.divided import divided
from graftune.weights.finite import FiniteCheck
from graftune.weights.placement import Placement
from graftune.weights.way import Projections

TABLE_VALUES = 1 << 26  # of an embedding or head that products may have in the scratch at once
STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # floats of files


def scratch_values(spec: ModelSpec, lora: LoraConfig, tables: bool) -> int:
    """Values of the scratch: the largest projection with its adapters, or what is dequantised of a table at once."""
    largest = max(Scratch.size(*product) for product in _products(spec, lora))
    return max(largest, min(spec.vocab * spec.width, TABLE_VALUES)) if tables else largest


def _products(spec: ModelSpec, lora: LoraConfig) -> Iterator[tuple[int, int, int]]:
    """(out, in, adapter_columns) of the products of all kinds of layers."""
    targets = targets_of(spec, lora)
    for part in (part for kind in spec.kinds for part in kind.parts):
        for name, (out, width) in part.products.items():
            yield out, width, adapter_columns_of(part.groups.get(name, ()), targets, lora.rank)


def build_decoder(
    base: Base, arena: Arena, lora: LoraConfig, runtime: Runtime, placement: Placement, home: Home | None = None
) -> Decoder:
    """`home`: where the frozen weights lie and are fetched from; None: on the device."""
    if home is not None and home.reading is not None:
        base = replace(base, tensors=divided(base.tensors, home.reading))
    return _Placer(base, arena, lora, runtime, placement, home).decoder()


def _in_memory(source: RowSource) -> RowSource:
    """A prequantised weight, which is read as a whole, is read once."""
    return source.load(torch.device("cpu")) if isinstance(source, Nf4Tensor) else source


class _Placer:
    """Takes tensors out of the base by name, checks their shapes and puts them where the placement says."""

    def __init__(
        self, base: Base, arena: Arena, lora: LoraConfig, runtime: Runtime, placement: Placement, home: Home | None
    ):
        self.base, self.arena, self.lora, self.placement = base, arena, lora, placement
        self.spec, self.device, self.compute = base.spec, runtime.device, runtime.compute
        self.on_gpu = launch.augments(runtime.device)
        self.quantised = is_quantised(base.tensors)
        self.bundles = None if home is None else Bundles(home, runtime.device)
        self.made: list[Any] = []  # frozen weights of the bundle that is being made
        self.finite = FiniteCheck(base, f"{placement.base_dtype} {runtime.compute}")

    def decoder(self) -> Decoder:
        spec = self.spec
        with self.bundle(None if spec.tied else EMBEDDING):  # a tied table is used at both ends: it stays
            embedding = self.table("embed_tokens.weight")
            head, head_rows = embedding, embed_rows = embedding, self.new_rows("embed_tokens.rows", embedding)
        if not spec.tied:
            with self.bundle(HEAD):
                head = self.table("lm_head.weight")
                head_rows = self.new_rows("lm_head.rows", head)
        decoder = Decoder(
            spec=spec,
            embedding=embedding,
            blocks=[self.block(i) for i in range(spec.layers)],
            norm=self.norm(f"{spec.names.final_norm}.weight", spec.width),
            head=Head(head, head_rows),
            ropes=tuple(rope.to(self.device) for rope in spec.ropes(self.base.rope_factors)),
            device=self.device,
            compute=self.compute,
            added=embed_rows,
        )
        self.finite.passed()
        if self.bundles is not None:
            self.bundles.finish()
            decoder.bundles = self.bundles
        return decoder

    @contextmanager
    def bundle(self, key: Key | None) -> Iterator[None]:
        """Frozen weights that are made inside belong together, and go to their home when all of them are there."""
        self.made = []
        yield
        self.finite.settle()
        if self.bundles is not None and key is not None:
            self.bundles.add(key, self.made)

    def block(self, index: int) -> Block:
        with self.bundle(index):
            return self._block(index)

    def _block(self, index: int) -> Block:
        layer = self.spec.layer(index)
        first = 0
        branches: list[Branch[Any]] = []
        for branch in layer.branches:
            (only,) = branch.parts
            part: Any = only.part.build(_PartMaker(self, only.part, index, first))
            first += len(only.part.groups)
            norm, out_norm = (
                None if each is None else self.norm(f"layers.{index}.{each.name}.weight", each.width)
                for each in (only.norm, only.out_norm)
            )
            kind = FeedForwardBranch if isinstance(only.part, FeedForwardSpec) else Branch
            branches.append(kind(part, norm, out_norm, self.spec.norm_eps, branch.scale))
        mixing, feeding = branches
        assert isinstance(feeding, FeedForwardBranch)
        return Block(index, mixing, feeding)

    def source(self, name: str, shape: tuple[int, ...]) -> RowSource:
        found = self.base.tensors.get(name)
        if found is None:
            raise GraftuneError(f"tensor {name} is missing", where=str(self.base.path), fix="download the model again")
        if tuple(found.shape) != shape:
            raise GraftuneError(
                f"tensor {name} is {list(found.shape)} where the configuration says {list(shape)}",
                where=str(self.base.path),
                fix="the weights and the configuration belong to different models",
            )
        return found

    def projection(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], adapter_columns: int) -> Frozen:
        """One weight, whose rows are those of its members one behind the other."""
        if names[0] in self.arena.slots:
            return self.trained(names, shapes[0][1])
        sources = [self.source(n, s) for n, s in zip(names, shapes, strict=True)]
        if self.placement.base_dtype == "nf4" and not self.quantised:
            with self.finite.naming(names):
                members = [Nf4Rows.quantised(source, self.device) for source in sources]
            return self.unpacked(members, adapter_columns)
        made = self.frozen(sources, adapter_columns)
        self.finite.note(names, made)
        return made

    @cached_property
    def own(self) -> Projections | None:
        """Makes the projections, where the base is held in a way that has its own."""
        way = self.placement.way
        if way is None or self.arena.full:
            return None
        return way.projections(
            self.placement.option,
            _products(self.spec, self.lora),
            self.device,
            self.compute,
            dropout=self.lora.dropout,
            fetched=self.bundles is not None,
        )

    def table(self, name: str) -> Frozen:
        """An embedding or head. Where projections are quantised here it is in the compute dtype, unless the
        checkpoint's own is quantised."""
        if name in self.arena.slots:
            return self.trained([name], self.spec.width)
        source = self.source(name, (self.spec.vocab, self.spec.width))
        if (self.own or self.placement.base_dtype == "nf4") and not isinstance(source, Nf4Tensor):
            made = self.resident([source], self.compute, 0)
        else:
            made = self.frozen([source], 0)
        self.finite.note([name], made)
        return made

    def trained(self, names: Sequence[str], width: int) -> Trained:
        for name in names:
            self.start(name)
        place = self.arena.span(names[0], names[-1])
        return Trained(self.arena.compute[place].view(-1, width), self.arena.grads[place].view(-1, width))

    def frozen(self, sources: Sequence[RowSource], adapter_columns: int) -> Frozen:
        asked = self.placement.base_dtype
        if asked in DTYPES:
            return self.resident(sources, DTYPES[asked], adapter_columns)
        return self.kept(
            sources, adapter_columns
        )  # nf4 too, of a checkpoint that is: what it left unquantised stays so

    def resident(self, sources: Sequence[RowSource], dtype: torch.dtype, adapter_columns: int) -> Frozen:
        sources = [_in_memory(source) for source in sources]
        if self.on_gpu and dtype != self.compute:
            return self.unpacked([FloatRows.loaded(source, dtype, self.device) for source in sources], adapter_columns)
        kind = Dense if self.bundles is None else Fetched
        return self.noted(kind.of(sources, self.device, dtype, self.compute, adapter_columns))

    def kept(self, sources: Sequence[RowSource], adapter_columns: int) -> Frozen:
        """As the file has them."""
        if not self.on_gpu and self.bundles is None:
            return Mapped([_in_memory(source) for source in sources], self.device, self.compute)
        if self.on_gpu and all(self.float_of(source) == self.compute for source in sources):
            return self.resident(sources, self.compute, adapter_columns)
        return self.unpacked([self.uploaded(source) for source in sources], adapter_columns)

    def uploaded(self, source: RowSource) -> Packed:
        if isinstance(source, Nf4Tensor):
            return source.load(self.device)
        dtype = self.float_of(source)
        if dtype is not None:
            return FloatRows.loaded(source, dtype, self.device)
        file = source.source if isinstance(source, FirstRows) else source
        return GgufRows.uploaded(cast(BlockSource, file), source.shape[0], self.device)

    def unpacked(self, members: Sequence[Packed], adapter_columns: int) -> Frozen:
        """Weights in memory that products dequantise: as a whole into the scratch, or on a CPU by pieces."""
        return self.noted(self._unpacked(members, adapter_columns))

    def noted(self, weight: Frozen) -> Frozen:
        self.made.append(weight)
        return weight

    def _unpacked(self, members: Sequence[Packed], adapter_columns: int) -> Frozen:
        if not self.on_gpu:
            return Mapped(members, self.device, self.compute)
        rows, width = sum(member.shape[0] for member in members), members[0].shape[1]
        if Scratch.size(rows, width, adapter_columns) <= len(self.scratch.flat):
            return Unpacked(members, self.scratch, adapter_columns)
        assert len(members) == 1 and not adapter_columns, "the scratch holds every projection"
        return Table(members[0], self.scratch)

    @cached_property
    def scratch(self) -> Scratch:
        """Made for the first weight that needs it, and shared by all."""
        values = scratch_values(self.spec, self.lora, tables=self.placement.base_dtype != "nf4")
        return Scratch(values, self.device, self.compute)

    def float_of(self, source: RowSource) -> torch.dtype | None:
        """What the file's floats are; None where they are blocks."""
        if isinstance(source, Nf4Tensor) or (self.base.kind == "gguf" and source.dtype_name not in STORED):
            return None
        return STORED.get(source.dtype_name, self.compute)

    def start(self, name: str) -> None:
        """A weight that trains begins as the base has it; one without weights is filled by `start_from_scratch`."""
        if not self.base.tensors:
            return
        value = self.arena.view(name, self.arena.weights)
        source = self.source(name, tuple(value.shape))
        if value.dim() != 2:
            value.copy_(source.values())
        else:
            fill(value, source)
        self.finite.note([name], value)

    def bias(self, names: dict[str, int]) -> Bias:
        first, *_, last = names
        if first not in self.arena.slots:
            return Bias(torch.cat([self.vector(n, width) for n, width in names.items()]).to(self.compute))
        for name in names:
            self.start(name)
        place = self.arena.span(first, last)
        return Bias(self.arena.compute[place], self.arena.grads[place])

    def vector(self, name: str, width: int) -> torch.Tensor:
        found = self.source(name, (width,)).values().float().to(self.device)
        self.finite.note([name], found)
        return found

    def norm(self, name: str, width: int) -> NormWeight:
        if name not in self.arena.slots:
            frozen = self.vector(name, width)
            return NormWeight(frozen, frozen)
        self.start(name)
        value = self.arena.view(name, self.arena.weights)
        # Beside adapters the base's own is kept, for answers without them; where everything trains there is no base.
        before = value if self.arena.full else value.clone()
        return NormWeight(value, before, self.arena.view(name, self.arena.grads))

    def new_rows(self, name: str, table: Frozen) -> NewRows | None:
        """Rows of added tokens start at the mean of the base's own: a neutral place, the same on every machine."""
        if name not in self.arena.slots:
            return None
        total = torch.zeros(table.in_features, dtype=torch.float64)
        for start in range(0, table.out_features, 4096):
            ids = torch.arange(start, min(start + 4096, table.out_features), device=self.device)
            total += table.rows(ids).cpu().double().sum(0)
        value = self.arena.view(name, self.arena.weights).copy_((total / table.out_features).float())
        before = value.to(self.compute).clone()
        return NewRows(self.arena.view(name, self.arena.compute), self.arena.view(name, self.arena.grads), before)


class _PartMaker:
    """Makes what one part of a layer is built of (model/part.py's Maker)."""

    def __init__(self, placer: _Placer, part: PartSpec, layer: int, first: int):
        self.placer, self.part, self.layer, self.first = placer, part, layer, first
        self.stem = f"layers.{layer}.{part.module}"

    def projection(self, group: str) -> Projection:
        placer, members = self.placer, self.part.groups[group]
        adapter = lora_group(placer.arena, self.part, group, placer.lora, self.layer)
        adapted = targets_of(placer.spec, placer.lora) if adapter is not None and placer.on_gpu else ()
        adapter_columns = adapter_columns_of(members, adapted, placer.lora.rank)
        names = [f"{self.stem}.{member}.weight" for member in members]
        shapes = [self.part.projections[member] for member in members]
        mask_id = self.layer * 8 + self.first + list(self.part.groups).index(group)
        if placer.own:
            sources = [_in_memory(placer.source(name, shape)) for name, shape in zip(names, shapes, strict=True)]
            with placer.finite.naming(names):
                made = placer.own.make(sources, adapter_columns, adapter, mask_id, group)
            placer.noted(made.frozen)
            return made
        return Projection(placer.projection(names, shapes, adapter_columns), adapter, mask_id, group)

    def experts(self, group: str) -> ExpertProjection:
        adapter = expert_lora(self.placer.arena, f"{self.stem}.experts.{group}", self.placer.lora)
        return ExpertProjection(self._expert_weights(group), adapter, group.removesuffix("_proj"))

    def _expert_weights(self, group: str) -> ExpertWeights:
        """On a GPU one weight, all experts' rows one behind the other; on a CPU each by itself."""
        placer, part = self.placer, self.part
        assert isinstance(part, ExpertsSpec)
        if placer.own:
            held = placer.placement.base_dtype
            raise GraftuneError(
                f"experts are not held in {held} here", where=placer.base.name, fix="use bf16, nf4 or keep"
            )
        shapes = [part.projections[member] for member in PARAMETERS[group]]
        names = [[f"layers.{self.layer}.{n}" for n in part.names_of(e, group)] for e in range(part.experts)]
        if not placer.on_gpu:
            return Several([placer.projection(one, shapes, 0) for one in names])
        weight = placer.projection([n for one in names for n in one], shapes * part.experts, 0)
        assert isinstance(weight, Dense | Unpacked)
        return Stacked(weight, part.experts)

    def bias(self, group: str) -> Bias:
        members = self.part.groups[group]
        return self.placer.bias({f"{self.stem}.{member}.bias": self.part.projections[member][0] for member in members})

    def norm(self, name: str) -> NormWeight:
        return self.placer.norm(f"{self.stem}.{name}.weight", self.part.norms[name])

    def tensor(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        placer, stored = self.placer, f"{self.stem}.{name}"
        if stored in placer.arena.slots:
            placer.start(stored)
            return placer.arena.view(stored, placer.arena.weights), placer.arena.view(stored, placer.arena.grads)
        value = placer.source(stored, self.part.tensors[name]).values().float().to(placer.device)
        placer.finite.note([stored], value)
        return value, None
