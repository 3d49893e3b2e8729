"""From an opened base to a decoder on the device: each weight is placed as the run wants it, tensor by tensor.

placement.py has the ways and chooses among them. However a weight is placed, beside the result no more than a few of
its rows exist at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch

from graftune.config import LoraConfig
from graftune.errors import GraftuneError
from graftune.kernels import launch
from graftune.model.block import Bias, Block, NormWeight
from graftune.model.decoder import Decoder
from graftune.model.experts import ExpertProjection, Experts, ExpertWeights, Several, Stacked
from graftune.model.frozen import (
    BlockSource,
    Dense,
    FloatRows,
    Fp8,
    Frozen,
    GgufRows,
    Mapped,
    Nf4Rows,
    Packed,
    RowSource,
    Scratch,
    Table,
    Trained,
    Turned,
    Unpacked,
    fill,
)
from graftune.model.frozen.fp8 import MOST_RANK
from graftune.model.head import Head, NewRows
from graftune.model.lora import Arena, expert_groups, lora_groups, room_of, weight_name
from graftune.model.projection import Projection
from graftune.model.spec import NORMS, ModelSpec
from graftune.runtime import DTYPES, Runtime
from graftune.weights import experts as mixtures
from graftune.weights.base import Base, FirstRows
from graftune.weights.bnb_io import Nf4Tensor, is_quantised
from graftune.weights.placement import Placement

TABLE_VALUES = 1 << 26  # of an embedding or head that products may have in the scratch at once
STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # floats of files


def scratch_values(spec: ModelSpec, lora: LoraConfig, tables: bool) -> int:
    """How large the scratch is: the largest projection and its room, or what is dequantised of a table at once."""
    largest = 0
    for group, members in spec.groups.items():
        shapes, room = [spec.projections[p] for p in members], room_of(spec, lora, group)
        largest = max(largest, Scratch.size(sum(out for out, _ in shapes), shapes[0][1], room))
    if spec.experts:
        largest = max(largest, Scratch.size(2 * spec.experts * spec.ffn, spec.width))
    return max(largest, min(spec.vocab * spec.width, TABLE_VALUES)) if tables else largest


def build_decoder(base: Base, arena: Arena, lora: LoraConfig, runtime: Runtime, placement: Placement) -> Decoder:
    return _Placer(base, arena, lora, runtime, placement).decoder()


def _in_memory(source: RowSource) -> RowSource:
    """A prequantised weight, which is read as a whole, is read once."""
    return source.load(torch.device("cpu")) if isinstance(source, Nf4Tensor) else source


class _Placer:
    """Takes tensors out of the base by name, checks their shapes and puts them where the placement says."""

    def __init__(self, base: Base, arena: Arena, lora: LoraConfig, runtime: Runtime, placement: Placement):
        self.base, self.arena, self.lora, self.placement = base, arena, lora, placement
        self.spec, self.device, self.compute = base.spec, runtime.device, runtime.compute
        self.on_gpu = launch.roomy(runtime.device)
        self.quantised = is_quantised(base.tensors)

    def decoder(self) -> Decoder:
        spec = self.spec
        embedding = self.table("embed_tokens.weight")
        head = embedding if spec.tied else self.table("lm_head.weight")
        embed_rows = self.new_rows("embed_tokens.rows", embedding)
        head_rows = embed_rows if spec.tied else self.new_rows("lm_head.rows", head)
        return Decoder(
            spec=spec,
            embedding=embedding,
            blocks=[self.block(i) for i in range(spec.layers)],
            norm=self.norm("norm.weight", spec.width),
            head=Head(head, head_rows),
            ropes=tuple(rope.to(self.device) for rope in spec.ropes(self.base.rope_factors)),
            device=self.device,
            compute=self.compute,
            added=embed_rows,
        )

    def block(self, index: int) -> Block:
        spec, prefix = self.spec, f"layers.{index}."

        adapters = lora_groups(self.arena, spec, self.lora, index)

        def fused(group: str, number: int) -> Projection:
            members, adapter = spec.groups[group], adapters.get(group)
            room = room_of(spec, self.lora, group) if adapter is not None and self.on_gpu else 0
            names = [weight_name(index, p) for p in members]
            weight = self.projection(names, [spec.projections[p] for p in members], room)
            return Projection(weight, adapter, index * 8 + number)

        kinds = NORMS[spec.norms]
        norms = [None if kind is None else self.norm(f"{prefix}{kind}.weight", spec.width) for kind in kinds]
        q_width, k_width = spec.qk_norm_widths
        return Block(
            index=index,
            window=spec.window if index in spec.window_layers else 0,
            norm_eps=spec.norm_eps,
            heads=(spec.heads, spec.kv_heads, spec.head_width),
            attention_norm=norms[0],
            mlp_norm=norms[2],
            qkv=fused("qkv", 0),
            o=fused("o", 1),
            gate_up=None if spec.experts else fused("gate_up", 2),
            down=None if spec.experts else fused("down", 3),
            qkv_bias=self.bias(index) if spec.qkv_bias else None,
            q_norm=self.norm(f"{prefix}self_attn.q_norm.weight", q_width) if spec.qk_norm else None,
            k_norm=self.norm(f"{prefix}self_attn.k_norm.weight", k_width) if spec.qk_norm else None,
            attention_out_norm=norms[1],
            mlp_out_norm=norms[3],
            rope=spec.rope_of(index),
            score_scale=spec.score_scale,
            score_cap=spec.attention_cap,
            residual_scale=spec.residual_scale,
            activation=spec.activation,
            experts=self.experts(index) if spec.experts else None,
        )

    def experts(self, index: int) -> Experts:
        spec, adapters = self.spec, expert_groups(self.arena, self.spec, self.lora, index)

        def group(name: str) -> ExpertProjection:
            return ExpertProjection(self.expert_weights(index, name), adapters.get(name))

        router = self.source(f"layers.{index}.mlp.gate.weight", (spec.experts, spec.width)).values()
        return Experts(
            router=router.float().to(self.device),
            chosen=spec.experts_chosen,
            normalised=spec.experts_normalised,
            gate_up=group("gate_up_proj"),
            down=group("down_proj"),
        )

    def expert_weights(self, index: int, group: str) -> ExpertWeights:
        """On a GPU one weight, all experts' rows one behind the other; on a CPU each by itself."""
        if self.placement.base_dtype == "fp8":
            raise GraftuneError("experts are not held in fp8 here", where=self.base.name, mend="use bf16, nf4 or keep")
        shapes = [self.spec.projections[p] for p in mixtures.PARAMETERS[group]]
        names = [mixtures.weight_names(index, expert, group) for expert in range(self.spec.experts)]
        if not self.on_gpu:
            return Several([self.projection(one, shapes, 0) for one in names])
        weight = self.projection([n for one in names for n in one], shapes * self.spec.experts, 0)
        assert isinstance(weight, Dense | Unpacked)
        return Stacked(weight, self.spec.experts)

    def source(self, name: str, shape: tuple[int, ...]) -> RowSource:
        found = self.base.tensors.get(name)
        if found is None:
            raise GraftuneError(f"tensor {name} is missing", where=str(self.base.path), mend="download the model again")
        if tuple(found.shape) != shape:
            raise GraftuneError(
                f"tensor {name} is {list(found.shape)} where the configuration says {list(shape)}",
                where=str(self.base.path),
                mend="the weights and the configuration belong to different models",
            )
        return found

    def projection(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], room: int) -> Frozen:
        """One weight, whose rows are those of its members one behind the other."""
        if names[0] in self.arena.slots:
            return self.trained(names, shapes[0][1])
        sources = [self.source(n, s) for n, s in zip(names, shapes, strict=True)]
        if self.placement.base_dtype == "nf4" and not self.quantised:
            quantised = [Nf4Rows.quantised(source, self.device) for source in sources]
            return self.unpacked(quantised, room) if self.on_gpu else Mapped(quantised, self.device, self.compute)
        if self.placement.base_dtype == "fp8":
            read = [_in_memory(source) for source in sources]
            room, slack = room if self.lora.rank <= MOST_RANK else 0, 1 / (1 - self.lora.dropout)
            both = self.placement.both
            return Fp8.of(read, self.device, self.compute, self.turned, room=room, slack=slack, both=both)
        return self.frozen(sources, room)

    @cached_property
    def turned(self) -> Turned:
        """Made for the first weight in fp8, and shared by all; where all are kept both ways, nothing is turned."""
        size, spec = 0, self.spec
        for group, members in spec.groups.items() if not self.placement.both else ():
            out, width = sum(spec.projections[p][0] for p in members), spec.projections[members[0]][1]
            size = max(size, Turned.size(out, width, room_of(spec, self.lora, group)))
        return Turned(size, max(width for _, width in spec.projections.values()), self.device)

    def table(self, name: str) -> Frozen:
        """An embedding or head. NF4 and FP8 have it in the compute dtype, unless the checkpoint's own is quantised."""
        if name in self.arena.slots:
            return self.trained([name], self.spec.width)
        source = self.source(name, (self.spec.vocab, self.spec.width))
        if self.placement.base_dtype in ("nf4", "fp8") and not isinstance(source, Nf4Tensor):
            return self.resident([source], self.compute, 0)
        return self.frozen([source], 0)

    def trained(self, names: Sequence[str], width: int) -> Trained:
        for name in names:
            self.start(name)
        place = self.arena.span(names[0], names[-1])
        return Trained(self.arena.compute[place].view(-1, width), self.arena.grads[place].view(-1, width))

    def frozen(self, sources: Sequence[RowSource], room: int) -> Frozen:
        asked = self.placement.base_dtype
        if asked in DTYPES:
            return self.resident(sources, DTYPES[asked], room)
        return self.kept(sources, room)  # nf4 too, of a checkpoint that is: what it left unquantised stays so

    def resident(self, sources: Sequence[RowSource], dtype: torch.dtype, room: int) -> Frozen:
        sources = [_in_memory(source) for source in sources]
        if self.on_gpu and dtype != self.compute:
            return self.unpacked([FloatRows.loaded(source, dtype, self.device) for source in sources], room)
        return Dense.of(sources, self.device, dtype, self.compute, room)

    def kept(self, sources: Sequence[RowSource], room: int) -> Frozen:
        """As the file has them."""
        if not self.on_gpu:
            return Mapped([_in_memory(source) for source in sources], self.device, self.compute)
        if all(self.float_of(source) == self.compute for source in sources):
            return self.resident(sources, self.compute, room)
        return self.unpacked([self.uploaded(source) for source in sources], room)

    def uploaded(self, source: RowSource) -> Packed:
        if isinstance(source, Nf4Tensor):
            return source.load(self.device)
        dtype = self.float_of(source)
        if dtype is not None:
            return FloatRows.loaded(source, dtype, self.device)
        file = source.source if isinstance(source, FirstRows) else source
        return GgufRows.uploaded(cast(BlockSource, file), source.shape[0], self.device)

    def unpacked(self, members: Sequence[Packed], room: int) -> Frozen:
        rows, width = sum(member.shape[0] for member in members), members[0].shape[1]
        if Scratch.size(rows, width, room) <= len(self.scratch.flat):
            return Unpacked(members, self.scratch, room)
        assert len(members) == 1 and not room, "the scratch holds every projection"
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
        if value.dim() == 1:
            value.copy_(source.values())
        else:
            fill(value, source)

    def bias(self, layer: int) -> Bias:
        names = {weight_name(layer, p, "bias"): self.spec.projections[p][0] for p in self.spec.groups["qkv"]}
        first, *_, last = names
        if first not in self.arena.slots:
            return Bias(torch.cat([self.vector(n, width) for n, width in names.items()]).to(self.compute))
        for name in names:
            self.start(name)
        place = self.arena.span(first, last)
        return Bias(self.arena.compute[place], self.arena.grads[place])

    def vector(self, name: str, width: int) -> torch.Tensor:
        return self.source(name, (width,)).values().float().to(self.device)

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
