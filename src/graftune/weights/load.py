"""Builds a decoder on the device from an opened base, tensor by tensor.

placement.py chooses the format of the weights, and the table of formats (model/frozen/formats) defines how each is read
and multiplied. In every format, only a few rows of a weight exist beside the result at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from graftune.errors import GraftuneError
from graftune.kernels import launch
from graftune.model.arena import Arena
from graftune.model.block import Block, Branch, ParallelBranch
from graftune.model.bundles import EMBEDDING, HEAD, Bundles, BundleStorage, Key
from graftune.model.decoder import Decoder
from graftune.model.feed_forward.expert_projection import ExpertProjection, ExpertWeights, PerExpert, Stacked
from graftune.model.feed_forward.experts import PARAMETERS, ExpertsSpec
from graftune.model.frozen import Augmented, Frozen, RowSource, Scratch, Trained, fill
from graftune.model.frozen.builder import WeightBuilder
from graftune.model.frozen.formats import FORMATS, checkpoint_format, stored_format
from graftune.model.frozen.formats.floats import FloatFormat
from graftune.model.frozen.formats.gguf import GgufFormat
from graftune.model.frozen.host_table import HostTable
from graftune.model.frozen.interface import CheckpointWeight
from graftune.model.frozen.weight_format import WeightFormat
from graftune.model.head import Head, NewRows
from graftune.model.layer_inputs import NORM, PROJECTION, TABLE, LayerInputMaker, LayerInputSpec
from graftune.model.layer_spec import NormSpec
from graftune.model.lora import adapter_columns_of, expert_lora, lora_group, targets_of
from graftune.model.part import Bias, NormWeight, PartSpec
from graftune.model.projection import Projection
from graftune.model.rotary import RopeSpec
from graftune.model.spec import ModelSpec
from graftune.runtime import Runtime
from graftune.settings.sections import LoraConfig
from graftune.weights.base import Base
from graftune.weights.finite import check_loaded, naming_nonfinite
from graftune.weights.placement import Placement
from graftune.weights.rows import Joined

TABLE_VALUES = 1 << 26  # most values of an embedding or head that a product dequantises into the scratch at once


def scratch_values(spec: ModelSpec, lora: LoraConfig, tables: bool) -> int:
    """The scratch's size in values: the largest projection with its adapters, or the largest piece of a table."""
    largest = max(Scratch.size(*product) for product in _products(spec, lora))
    return max(largest, min(spec.vocab * spec.width, TABLE_VALUES)) if tables else largest


def _products(spec: ModelSpec, lora: LoraConfig) -> Iterator[tuple[int, int, int]]:
    """(out, in, adapter_columns) of the products of all kinds of layers."""
    targets = targets_of(spec, lora)
    for part in (part for kind in spec.kinds for part in kind.parts):
        for name, (out, width) in part.products.items():
            paths = [part.path(member) for member in part.groups.get(name, ())]
            yield out, width, adapter_columns_of(paths, targets, lora.rank)


def build_decoder(
    base: Base,
    arena: Arena,
    lora: LoraConfig,
    runtime: Runtime,
    placement: Placement,
    storage: BundleStorage | None = None,
) -> Decoder:
    """Builds the decoder. `storage`: where frozen weights are kept and fetched from; None: they stay on the device."""
    with naming_nonfinite(base):
        return _Placer(base, arena, lora, runtime, placement, storage).decoder()


class _Placer:
    """Takes tensors out of the base by name, checks their shapes and builds the weights that the placement asks for."""

    def __init__(
        self,
        base: Base,
        arena: Arena,
        lora: LoraConfig,
        runtime: Runtime,
        placement: Placement,
        storage: BundleStorage | None,
    ):
        self.base, self.arena, self.lora, self.placement = base, arena, lora, placement
        self.spec, self.device, self.compute = base.spec, runtime.device, runtime.compute
        self.augments = launch.augments(runtime.device)
        self.float_format = cast(FloatFormat, FORMATS[runtime.compute_name])
        self.wanted = placement.format
        # A checkpoint in the quantised format asked for is loaded as stored, also the tensors it left unquantised.
        self.as_stored = self.wanted is None or self.wanted is checkpoint_format(base.tensors)
        self.builder = WeightBuilder(
            runtime.device,
            runtime.compute,
            scratch_values(self.spec, lora, tables=self.wanted is None or not self.wanted.quantises),
            products=list(_products(self.spec, lora)),
            rank=lora.rank,
            dropout=lora.dropout,
            option=placement.option,
            fetched=storage is not None,
        )
        self.bundles = None if storage is None else Bundles(storage, runtime.device)
        self.made: list[Any] = []  # frozen weights of the bundle that is being built
        self.unchecked: list[Any] = []  # weights and tensors that may have NaN or Inf

    def decoder(self) -> Decoder:
        spec = self.spec
        with self.bundle(None if spec.tied else EMBEDDING):  # the head needs a tied table too: it stays
            embedding = self.table("embed_tokens.weight", looked_up=not spec.tied)
            head, head_rows = embedding, embed_rows = embedding, self.new_rows("embed_tokens.rows", embedding)
        if not spec.tied:
            with self.bundle(HEAD):
                head = self.table("lm_head.weight")
                head_rows = self.new_rows("lm_head.rows", head)
        decoder = Decoder(
            spec=spec,
            embedding=embedding,
            blocks=[self.block(i) for i in range(len(spec.layers))],
            norm=self.norm(f"{spec.head.norm.name}.weight", spec.width),
            head=Head(head, head_rows),
            ropes=tuple(rope.build().to(self.device) for rope in spec.ropes),
            device=self.device,
            compute=self.compute,
            new_rows=embed_rows,
            scratch=vars(self.builder).get("scratch"),
            layer_inputs=None if spec.layer_inputs is None else self.layer_inputs(spec.layer_inputs),
            embedding_norm=None if spec.embedding.norm_eps is None else self.unit_norm(spec.width),
        )
        self.check_finite()
        if self.bundles is not None:
            self.bundles.finish()
            decoder.bundles = self.bundles
        return decoder

    @contextmanager
    def bundle(self, key: Key | None) -> Iterator[None]:
        """Frozen weights built inside form one bundle, which is moved at the end; None: they stay on the device."""
        self.made = []
        yield
        self.check_finite()
        if self.bundles is not None and key is not None:
            self.bundles.add(key, self.made)

    def check_finite(self) -> None:
        check_loaded(self.unchecked, self.base)
        self.unchecked = []

    def block(self, index: int) -> Block:
        with self.bundle(index):
            return self._block(index)

    def _block(self, index: int) -> Block:
        layer, first = self.spec.layers[index], 0
        branches: list[Branch | ParallelBranch] = []
        for spec in layer.branches:
            made: list[Branch] = []
            for each in spec.parts:
                part = each.part.build(_PartPlacer(self, each.part, index, first))
                first += len(each.part.groups)
                norm, out_norm = self._layer_norm(index, each.norm), self._layer_norm(index, each.out_norm)
                eps, out_eps = (0.0 if one is None else one.eps for one in (each.norm, each.out_norm))
                made.append(Branch(part=part, norm=norm, norm_eps=eps, out_norm=out_norm, out_eps=out_eps))
            if len(made) == 1 and spec.out_norm is None:
                branches += made
                made[0].scale = spec.scale
            else:
                norm, eps = self._layer_norm(index, spec.out_norm), 0.0 if spec.out_norm is None else spec.out_norm.eps
                branches.append(ParallelBranch(branches=tuple(made), out_norm=norm, out_eps=eps, scale=spec.scale))
        return Block(index, tuple(branches), self._stream_scale(index, layer.stream_scale))

    def _layer_norm(self, index: int, norm: NormSpec | None) -> NormWeight | None:
        return None if norm is None else self.norm(f"layers.{index}.{norm.name}.weight", norm.width)

    def _stream_scale(self, index: int, name: str | None) -> torch.Tensor | None:
        """The scalar that multiplies the residual stream. Never trained: in full training it has a place in the arena,
        but no gradient is computed."""
        if name is None:
            return None
        stored = f"layers.{index}.{name}"
        value, grad = self.tensor(stored, (1,))
        return value.to(self.compute) if grad is None else self.arena.view(stored, self.arena.compute)

    def source(self, name: str, shape: tuple[int, ...]) -> RowSource:
        """A tensor of the base, whose names and shapes `open_base` has checked."""
        found = self.base.tensors[name]
        assert tuple(found.shape) == shape, f"{name} is {list(found.shape)}, not {list(shape)}"
        return found

    def format_of(self, source: RowSource) -> WeightFormat:
        if self.as_stored or self.wanted is None:
            return stored_format(source) or self.float_format
        return self.wanted

    def projection(
        self, names: Sequence[str], shapes: Sequence[tuple[int, int]], adapter_columns: int
    ) -> tuple[Frozen, WeightFormat]:
        """Builds one weight from the rows of all members; also returns the format that joins it with its adapters."""
        if names[0] in self.arena.slots:
            return self.trained(names, shapes[0][1]), self.float_format
        stored = [self.source(n, s) for n, s in zip(names, shapes, strict=True)]
        sources = [part for one in stored for part in (one.parts if isinstance(one, Joined) else (one,))]
        formats = [self.format_of(source) for source in sources]
        weight = self.builder.weight(sources, formats, adapter_columns, as_stored=self.as_stored)
        self.made.append(weight)
        if self.as_stored or not formats[0].quantises:  # what quantises a weight also refuses NaN and Inf
            self.unchecked.append(weight)
        return weight, formats[0]

    def layer_inputs(self, spec: LayerInputSpec) -> LayerInputMaker:
        """Builds the per-layer inputs, on the device even if blocks are fetched."""
        with self.bundle(None):
            table = self.table(f"{TABLE}.weight", looked_up=True)
            projection = self.table(f"{PROJECTION}.weight")
            return LayerInputMaker(spec, table, projection, self.norm(f"{NORM}.weight", spec.inner))

    def table(self, name: str, *, looked_up: bool = False) -> Frozen:
        """Builds an embedding or head. If projections are quantised while loading, it has the compute dtype, unless the
        checkpoint stores it quantised. `looked_up`: no product reads it, so that it may be in host memory."""
        if name in self.arena.slots:
            return self.trained([name], self.arena.slots[name].shape[1])
        source = self.base.tensors[name]
        form, as_stored = self.format_of(source), self.as_stored
        if self.wanted is not None and self.wanted.quantises:
            as_stored = isinstance(source, CheckpointWeight)
            form = (stored_format(source) if as_stored else None) or self.float_format
        if looked_up and self.placement.embedding_on_host:
            form = form if isinstance(form, (FloatFormat, GgufFormat)) else self.float_format
            table = HostTable(source, form, self.device, self.compute)
            check_loaded([table], self.base)
            return table
        weight = self.builder.weight([source], [form], as_stored=as_stored)
        self.made.append(weight)
        self.unchecked.append(weight)
        return weight

    def trained(self, names: Sequence[str], width: int) -> Trained:
        for name in names:
            self.copy_base_values(name)
        place = self.arena.span(names[0], names[-1])
        return Trained(self.arena.compute[place].view(-1, width), self.arena.grads[place].view(-1, width))

    def copy_base_values(self, name: str) -> None:
        """Copies the base's values into a weight that trains; without weights, `start_from_scratch` fills it."""
        if not self.base.tensors:
            return
        value = self.arena.view(name, self.arena.weights)
        source = self.source(name, tuple(value.shape))
        if value.dim() != 2:
            value.copy_(source.values())
        else:
            fill(value, source)
        self.unchecked.append(value)

    def bias(self, names: dict[str, int]) -> Bias:
        first, last = next(iter(names)), next(reversed(names))
        if first not in self.arena.slots:
            return Bias(torch.cat([self.tensor(n, (width,))[0] for n, width in names.items()]).to(self.compute))
        for name in names:
            self.copy_base_values(name)
        place = self.arena.span(first, last)
        return Bias(self.arena.compute[place], self.arena.grads[place])

    def tensor(self, name: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A small tensor in fp32, and its gradient where it trains."""
        if name in self.arena.slots:
            self.copy_base_values(name)
            return self.arena.view(name, self.arena.weights), self.arena.view(name, self.arena.grads)
        value = self.source(name, shape).values().float().to(self.device)
        self.unchecked.append(value)
        return value, None

    def norm(self, name: str, width: int) -> NormWeight:
        value, grad = self.tensor(name, (width,))
        # With adapters, the base's values are kept for passes without them; full training never returns to the base.
        before = value if grad is None or self.arena.full else value.clone()
        return NormWeight(value, before, grad)

    def unit_norm(self, width: int) -> NormWeight:
        ones = torch.ones(width, device=self.device)
        return NormWeight(ones, ones)

    def new_rows(self, name: str, table: Frozen) -> NewRows | None:
        """Rows of added tokens start at the mean of the base's rows, which is the same on every machine."""
        if name not in self.arena.slots:
            return None
        total = torch.zeros(table.in_features, dtype=torch.float64)
        for start in range(0, table.out_features, 4096):
            ids = torch.arange(start, min(start + 4096, table.out_features), device=self.device)
            total += table.rows(ids).cpu().double().sum(0)
        value = self.arena.view(name, self.arena.weights).copy_((total / table.out_features).float())
        before = value.to(self.compute).clone()
        return NewRows(self.arena.view(name, self.arena.compute), self.arena.view(name, self.arena.grads), before)


class _PartPlacer:
    """Places the tensors of one part of a layer (model/part.py's PartPlacer)."""

    def __init__(self, placer: _Placer, part: PartSpec, layer: int, first: int):
        self.placer, self.part, self.layer, self.first = placer, part, layer, first
        self.stem = f"layers.{layer}"

    def projection(self, group: str) -> Projection:
        placer, members = self.placer, self.part.groups[group]
        adapter = lora_group(placer.arena, self.part, group, placer.lora, self.layer)
        adapted = targets_of(placer.spec, placer.lora) if adapter is not None and placer.augments else ()
        paths = [self.part.path(member) for member in members]
        adapter_columns = adapter_columns_of(paths, adapted, placer.lora.rank)
        names = [f"{self.stem}.{path}.weight" for path in paths]
        shapes = [self.part.projections[member] for member in members]
        # Every projection of a model has a dropout mask of its own; no layer has more than 8 groups of them.
        mask_id = self.layer * 8 + self.first + list(self.part.groups).index(group)
        weight, form = placer.projection(names, shapes, adapter_columns)
        return form.projection(weight, adapter, mask_id, group)

    def experts(self, group: str) -> ExpertProjection:
        adapter = expert_lora(self.placer.arena, f"{self.stem}.{self.part.named('experts')}.{group}", self.placer.lora)
        return ExpertProjection(self._expert_weights(group), adapter, group.removesuffix("_proj"))

    def _expert_weights(self, group: str) -> ExpertWeights:
        """On a GPU one weight with the rows of all experts; on a CPU one for each expert."""
        placer, part = self.placer, self.part
        assert isinstance(part, ExpertsSpec)
        shapes = [part.projections[member] for member in PARAMETERS[group]]
        names = [[f"layers.{self.layer}.{n}" for n in part.names_of(e, group)] for e in range(part.experts)]
        form = placer.format_of(placer.source(names[0][0], shapes[0]))
        if not form.experts:
            raise GraftuneError(
                f"experts are not held in {form.name} here", where=placer.base.name, fix="use bf16, nf4 or keep"
            )
        if not placer.augments:
            return PerExpert([placer.projection(one, shapes, 0)[0] for one in names])
        weight, _ = placer.projection([n for one in names for n in one], shapes * part.experts, 0)
        assert isinstance(weight, Augmented)
        return Stacked(weight, part.experts)

    def bias(self, group: str) -> Bias:
        members = [member for member in self.part.groups[group] if member in self.part.biased]
        paths = {member: f"{self.stem}.{self.part.named(member)}.bias" for member in members}
        return self.placer.bias({path: self.part.projections[member][0] for member, path in paths.items()})

    def norm(self, name: str) -> NormWeight:
        return self.placer.norm(f"{self.stem}.{self.part.named(name)}.weight", self.part.norms[name])

    def unit_norm(self, width: int) -> NormWeight:
        return self.placer.unit_norm(width)

    def rope(self, spec: RopeSpec) -> int:
        return self.placer.spec.ropes.index(spec)

    def tensor(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.placer.tensor(f"{self.stem}.{self.part.named(name)}", self.part.tensors[name])
