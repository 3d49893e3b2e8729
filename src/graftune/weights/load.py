"""From an opened base to a decoder on the device: each weight is placed as the run wants it, tensor by tensor.

`keep` leaves blocks in the file's map and dequantises projection by projection; bf16 and fp32 make them resident.
`auto` takes the compute dtype if that fits comfortably in the memory that is free, and `keep` if not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftune.config import LoraConfig
from graftune.errors import GraftuneError
from graftune.kernels import launch
from graftune.model.block import Bias, Block, NormWeight
from graftune.model.decoder import Decoder, Head, NewRows
from graftune.model.frozen import Dense, Frozen, Mapped, RowSource, Trained, fill
from graftune.model.lora import GROUPS, Arena, lora_groups, room_of, weight_name
from graftune.model.projection import Projection
from graftune.observe.memory import available_bytes, human_bytes
from graftune.runtime import DTYPES, Runtime
from graftune.weights.base import Base

COMFORTABLE = 0.6  # share of the free memory that a resident base may take


@dataclass(frozen=True)
class Placement:
    """How the frozen weights are held, and the sentence that says why."""

    base_dtype: str  # keep | bf16 | fp32
    why: str


def choose_placement(base: Base, asked: str, runtime: Runtime) -> Placement:
    if asked != "auto":
        return Placement(asked, "asked for")
    need, free = base.spec.parameters * runtime.compute.itemsize, _free_bytes(runtime.device)
    figures = f"{human_bytes(need)} of {human_bytes(free)} free"
    if need <= COMFORTABLE * free:
        return Placement(runtime.compute_name, f"resident: {figures}")
    return Placement("keep", f"left in the file: resident would take {figures}")


def nothing_frozen(base: Base, asked: str, runtime: Runtime) -> Placement:
    """Of a run that trains every weight: there is nothing to place, but the arena has to fit."""
    wide, narrow = 4 * 4, 0 if runtime.compute == torch.float32 else runtime.compute.itemsize
    need, free = base.spec.parameters * (wide + narrow), _free_bytes(runtime.device)
    if need > free:
        raise GraftuneError(
            f"training every weight takes {human_bytes(need)} and {human_bytes(free)} are free",
            where=base.name,
            mend="take a smaller model, or method lora",
        )
    return Placement(runtime.compute_name if asked == "auto" else asked, "none is frozen: every weight trains")


def build_decoder(base: Base, arena: Arena, lora: LoraConfig, runtime: Runtime, placement: Placement) -> Decoder:
    return _Placer(base, arena, lora, runtime, placement).decoder()


class _Placer:
    """Takes tensors out of the base by name, checks their shapes and puts them where the placement says."""

    def __init__(self, base: Base, arena: Arena, lora: LoraConfig, runtime: Runtime, placement: Placement):
        self.base, self.arena, self.lora, self.runtime, self.placement = base, arena, lora, runtime, placement
        self.spec = base.spec

    def decoder(self) -> Decoder:
        spec = self.spec
        embedding = self.weight(["embed_tokens.weight"], [(spec.vocab, spec.width)])
        head = embedding if spec.tied else self.weight(["lm_head.weight"], [(spec.vocab, spec.width)])
        frequencies, scaling = spec.inverse_frequencies()
        if self.base.rope_factors is not None:
            frequencies = frequencies / self.base.rope_factors
        embed_rows = self.new_rows("embed_tokens.rows", embedding)
        head_rows = embed_rows if spec.tied else self.new_rows("lm_head.rows", head)
        return Decoder(
            spec=spec,
            embedding=embedding,
            blocks=[self.block(i) for i in range(spec.layers)],
            norm=self.norm("norm.weight", spec.width),
            head=Head(head, head_rows),
            inverse_frequencies=frequencies.to(self.runtime.device),
            rope_scaling=scaling,
            device=self.runtime.device,
            compute=self.runtime.compute,
            added=embed_rows,
        )

    def block(self, index: int) -> Block:
        spec, prefix = self.spec, f"layers.{index}."

        adapters = lora_groups(self.arena, spec, self.lora, index)

        def fused(group: str, number: int) -> Projection:
            members, adapter = GROUPS[group], adapters.get(group)
            room = room_of(spec, self.lora, group) if adapter is not None and launch.roomy(self.runtime.device) else 0
            names = [weight_name(index, p) for p in members]
            weight = self.weight(names, [spec.projections[p] for p in members], room)
            return Projection(weight, adapter, index * 8 + number)

        return Block(
            index=index,
            window=spec.window if index in spec.window_layers else 0,
            norm_eps=spec.norm_eps,
            heads=(spec.heads, spec.kv_heads, spec.head_width),
            attention_norm=self.norm(f"{prefix}input_layernorm.weight", spec.width),
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm.weight", spec.width),
            qkv=fused("qkv", 0),
            o=fused("o", 1),
            gate_up=fused("gate_up", 2),
            down=fused("down", 3),
            qkv_bias=self.bias(index) if spec.qkv_bias else None,
            q_norm=self.norm(f"{prefix}self_attn.q_norm.weight", spec.head_width) if spec.qk_norm else None,
            k_norm=self.norm(f"{prefix}self_attn.k_norm.weight", spec.head_width) if spec.qk_norm else None,
        )

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

    def weight(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], room: int = 0) -> Frozen:
        runtime, arena = self.runtime, self.arena
        if names[0] in arena.slots:
            for name in names:
                self.start(name)
            place, width = arena.span(names[0], names[-1]), shapes[0][1]
            return Trained(arena.compute[place].view(-1, width), arena.grads[place].view(-1, width))
        sources = [self.source(n, s) for n, s in zip(names, shapes, strict=True)]
        if self.placement.base_dtype == "keep":
            return Mapped(sources, runtime.device, runtime.compute)
        dtype = DTYPES[self.placement.base_dtype]
        return Dense.of(sources, runtime.device, dtype, runtime.compute, room if dtype == runtime.compute else 0)

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
        names = {weight_name(layer, p, "bias"): self.spec.projections[p][0] for p in GROUPS["qkv"]}
        first, *_, last = names
        if first not in self.arena.slots:
            return Bias(torch.cat([self.vector(n, width) for n, width in names.items()]).to(self.runtime.compute))
        for name in names:
            self.start(name)
        place = self.arena.span(first, last)
        return Bias(self.arena.compute[place], self.arena.grads[place])

    def vector(self, name: str, width: int) -> torch.Tensor:
        return self.source(name, (width,)).values().float().to(self.runtime.device)

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
            ids = torch.arange(start, min(start + 4096, table.out_features), device=self.runtime.device)
            total += table.rows(ids).cpu().double().sum(0)
        value = self.arena.view(name, self.arena.weights).copy_((total / table.out_features).float())
        before = value.to(self.runtime.compute).clone()
        return NewRows(self.arena.view(name, self.arena.compute), self.arena.view(name, self.arena.grads), before)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
