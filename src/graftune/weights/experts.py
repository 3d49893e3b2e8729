"""The experts of a mixture under the names and in the layouts of other programs. M is the mixture's module, `mlp` or
`feed_forward`.

    ours, the Hub's    layers.N.M.experts.E.gate_proj.weight [F, D], up_proj, down_proj [D, F]
    transformers       layers.N.M.experts.gate_up_proj [E, 2F, D], down_proj [E, D, F]
    interleaved        layers.N.M.experts.gate_up_proj [E, D, 2F], whose columns alternate between gate and up,
                       down_proj [E, F, D], gate_up_proj_bias [E, 2F], down_proj_bias [E, D]  (gpt-oss)
    its MXFP4          gate_up_proj_blocks and _scales, of [E, 2F, D] with alternating rows (formats/mxfp4.py)
    GGUF               blk.N.ffn_gate_exps.weight [E, F, D], ffn_up_exps, ffn_down_exps, or ffn_gate_up_exps [E, 2F, D]

An expert's weights are row sources over the stored tensors; nothing is copied. Our adapters are stored by projection, A
[E R, in] and B [E, out, R]; PEFT stores B as [out, R E] with the expert fastest, under names that do not state the
parameter but the order in which the parameters were wrapped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch

from graftune.errors import GraftuneError
from graftune.kernels import gguf_dequant
from graftune.model.feed_forward.experts import PARAMETERS, ExpertsSpec
from graftune.model.frozen import ReadBlocks, RowSource
from graftune.model.frozen.formats import mxfp4
from graftune.model.spec import ModelSpec
from graftune.weights.rows import CombinedRows, Converted, DerivedRows, RowsByReading

if TYPE_CHECKING:
    from graftune.weights.gguf_io import GgufTensor

_GGUF = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
PROJECTIONS = tuple(_GGUF)
_GGUF_BACK = {gguf: (ours,) for ours, gguf in _GGUF.items()} | {"ffn_gate_up_exps": PARAMETERS["gate_up_proj"]}


@dataclass(frozen=True)
class ExpertRows(DerivedRows):
    """`count` rows of one expert of a stacked tensor [E, rows, in], or [E, in, rows] (`transposed`): from `first` on,
    every `step`-th row."""

    expert: int
    first: int
    count: int
    step: int = 1
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.count, self.source.shape[1 if self.transposed else 2])

    def read(self, start: int, stop: int) -> torch.Tensor:
        if self.raw is not None:
            blocks = self._rows(start, stop)
            out = torch.empty(len(blocks), self.shape[1])
            gguf_dequant.dequantise(blocks, self.dtype_name, out)
            return out
        whole = self.source.read(self.expert, self.expert + 1)[0]
        return self._rows_of_projection(whole.t() if self.transposed else whole)[start:stop].contiguous()

    @property
    def raw(self) -> ReadBlocks | None:
        return None if self.source.raw is None else self._rows

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        return self._rows_of_projection(_blocks_of(cast(Any, self.source), self.expert))[start:stop].contiguous()

    def _rows_of_projection(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.first : self.first + self.step * self.count : self.step]


@lru_cache(maxsize=1)
def _blocks_of(source: Any, expert: int) -> torch.Tensor:
    """Reads one expert's blocks, [rows, bytes of a row]. The latest are cached: rows are read a few at a time."""
    found: torch.Tensor = source.raw(expert, expert + 1)
    return found


def _bias_columns(bias: RowSource, first: int, step: int) -> Converted:
    """Every `step`-th column, from `first` on, of a bias [E, out] of all experts."""
    experts, out = bias.shape
    return Converted(bias, lambda values: values[:, first::step].contiguous(), (experts, out // step))


@dataclass(frozen=True)
class Stack(CombinedRows):
    """Projections of all experts as a tensor [E, out, in]; a row of it is an expert. `parts` lists the sources expert
    by expert: each has `members` of them (gate and up, or down alone), whose rows are concatenated."""

    members: int = 1

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        out, width = self.parts[0].shape
        return (len(self.parts) // self.members, self.members * out, width)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._values(start, stop).flatten(1, 2)

    def _values(self, start: int, stop: int) -> torch.Tensor:
        """[experts, members, out, in]"""
        sources = self.parts[start * self.members : stop * self.members]
        return torch.stack([source.values() for source in sources]).unflatten(0, (-1, self.members))

    @property
    def raw(self) -> ReadBlocks | None:
        """The blocks of all experts, one after the other."""
        return None if any(part.raw is None for part in self.parts) else self.blocks

    def blocks(self, start: int, stop: int) -> torch.Tensor:
        sources: tuple[Any, ...] = self.parts[start * self.members : stop * self.members]
        return torch.cat([source.raw(0, source.shape[0]) for source in sources])

    def divided(self, start: int, stored: torch.Tensor) -> Iterator[tuple[RowSource, torch.Tensor]]:
        """Yields each source with its own values, cut out of `stored`: the experts from `start` on, as written."""
        rows = (part for values in stored for part in values.chunk(self.members))
        yield from zip(self.parts[start * self.members : (start + len(stored)) * self.members], rows, strict=True)


class InterleavedStack(Stack):
    """A stack stored as [E, in, out], whose columns alternate between the members."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        experts, out, width = super().shape
        return (experts, width, out)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._values(start, stop).transpose(1, 2).flatten(1, 2).transpose(1, 2).contiguous()

    def blocks(self, start: int, stop: int) -> torch.Tensor:
        """The blocks of [E, out, in], whose rows alternate between the members."""
        by_member = super().blocks(start, stop).unflatten(0, (stop - start, self.members, -1))
        return by_member.transpose(1, 2).flatten(0, 2)

    def divided(self, start: int, stored: torch.Tensor) -> Iterator[tuple[RowSource, torch.Tensor]]:
        for expert, values in enumerate(stored, start):
            for member in range(self.members):
                yield self.parts[expert * self.members + member], values.t()[member :: self.members]


@dataclass(frozen=True)
class Mxfp4Bytes(RowsByReading):
    """One of the two tensors in which a folder stores a stack in MXFP4: codes, or the exponents."""

    stack: InterleavedStack
    codes: bool
    dtype_name: str = "U8"

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        experts, width, out = self.stack.shape
        blocks = (experts, out, width // mxfp4.VALUES)
        return (*blocks, mxfp4.BYTES) if self.codes else blocks

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def read(self, start: int, stop: int) -> torch.Tensor:
        found = mxfp4.to_folder(self.stack.blocks(start, stop))[0 if self.codes else 1]
        return found.view(-1, *self.shape[1:])

    raw = read


class InterleavedBias(CombinedRows):
    """The biases [E, out] of several projections as one tensor whose columns alternate between them."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.parts[0].shape[0], len(self.parts) * self.parts[0].shape[1])

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.stack([part.read(start, stop) for part in self.parts], 2).flatten(1)


def mixtures(spec: ModelSpec) -> dict[int, ExpertsSpec]:
    found = ((index, part) for index, layer in enumerate(spec.layers) for part in layer.parts)
    return {index: part for index, part in found if isinstance(part, ExpertsSpec)}


def from_folder(tensors: Mapping[str, RowSource], spec: ModelSpec) -> dict[str, RowSource]:
    """A folder's tensors under our names, with one tensor for each projection of each expert."""
    layers, found = mixtures(spec), dict[str, RowSource]()
    for name, tensor in tensors.items():
        match = re.fullmatch(r"layers\.(\d+)\.(?:(.+)\.)?experts\.(gate_up_proj|down_proj)(_bias)?(?:\.weight)?", name)
        part = layers.get(int(match[1])) if match else None
        known = match is not None and part is not None and (match[2] or "") == part.module
        if match is None or part is None or not known or len(tensor.shape) != (2 if match[4] else 3):
            found[name] = tensor
            continue
        stem, members = f"layers.{match[1]}.{part.named('experts')}", PARAMETERS[match[3]]
        for place, member in enumerate(members):
            if match[4]:
                found[f"{stem}.{member}.bias"] = _bias_columns(tensor, place, len(members))
                continue
            transposed = part.interleaved and tensor.dtype_name != mxfp4.KIND
            for expert in range(tensor.shape[0]):
                rows = tensor.shape[2 if transposed else 1] // len(members)
                layout = (place, rows, len(members), transposed) if part.interleaved else (place * rows, rows)
                found[f"{stem}.{expert}.{member}.weight"] = ExpertRows(tensor, expert, *layout)
    return found


def is_mxfp4(tensors: Mapping[str, RowSource], spec: ModelSpec) -> bool:
    """Whether all experts are stored in MXFP4, unchanged by adapters, and their family's folders can hold MXFP4: a
    config.json declares it for all experts or for none."""
    names = [
        f"layers.{layer}.{name}"
        for layer, part in mixtures(spec).items() if part.interleaved
        for parameter in PARAMETERS for expert in range(part.experts) for name in part.names_of(expert, parameter)
    ]  # fmt: skip
    return bool(names) and all(
        tensors[name].dtype_name == mxfp4.KIND and tensors[name].raw is not None for name in names
    )


def to_folder(tensors: Mapping[str, RowSource], spec: ModelSpec, in_mxfp4: bool = False) -> dict[str, RowSource]:
    """A model's tensors as a Hugging Face folder holds them: experts are stacked, interleaved or not, if the family's
    folders stack them. `in_mxfp4`: their MXFP4 blocks are copied (`is_mxfp4`)."""
    found = dict(tensors)
    for layer, part in mixtures(spec).items():
        stem, kind = f"layers.{layer}.{part.named('experts')}", InterleavedStack if part.interleaved else Stack
        for parameter, members in PARAMETERS.items() if part.interleaved or part.stacked else ():
            names = [f"layers.{layer}.{n}" for e in range(part.experts) for n in part.names_of(e, parameter)]
            stack = kind(tuple(found.pop(name) for name in names), len(members))
            if in_mxfp4 and isinstance(stack, InterleavedStack):
                found[f"{stem}.{parameter}{mxfp4.BLOCKS}"] = Mxfp4Bytes(stack, codes=True)
                found[f"{stem}.{parameter}{mxfp4.SCALES}"] = Mxfp4Bytes(stack, codes=False)
            else:
                found[f"{stem}.{parameter}"] = stack
            biases = [found.pop(f"{stem}.{member}.bias") for member in members if part.bias]
            if biases:
                found[f"{stem}.{parameter}_bias"] = InterleavedBias(tuple(biases))
    return found


def member_of(name: str) -> str:
    """Our name of the first tensor that `to_folder` has put into the stack `name`; `name` itself if it is no stack."""
    match = re.fullmatch(r"(layers\.\d+\.(?:.+\.)?experts)\.(gate_up_proj|down_proj)(_bias)?", name)
    if match is None:
        return name
    member = PARAMETERS[match[2]][0]
    return f"{match[1]}.{member}.bias" if match[3] else f"{match[1]}.0.{member}.weight"


def from_gguf(name: str, tensor: GgufTensor, spec: ModelSpec) -> dict[str, GgufTensor] | None:
    """Splits a GGUF's stack of experts into one tensor per expert, by our names; None if `tensor` is no such stack."""
    match = re.fullmatch(r"blk\.(\d+)\.(ffn_\w+_exps)\.weight", name)
    part = mixtures(spec).get(int(match[1])) if match else None
    if match is None or part is None or match[2] not in _GGUF_BACK or len(tensor.shape) != 3:
        return None
    members, found = _GGUF_BACK[match[2]], {}
    count, rows, width = tensor.shape
    rows //= len(members)
    for expert in range(count):
        for place, member in enumerate(members):
            first = (expert * len(members) + place) * rows
            ours = f"layers.{match[1]}.{part.named('experts')}.{expert}.{member}.weight"
            found[ours] = replace(tensor, shape=(rows, width), blocks=tensor.blocks[first : first + rows])
    return found


def to_gguf(tensors: Mapping[str, RowSource], spec: ModelSpec) -> tuple[dict[str, RowSource], dict[str, RowSource]]:
    """(all tensors but the experts' weights, by our names; the experts' weights stacked, by GGUF's names)."""
    plain, stacks = dict(tensors), dict[str, RowSource]()
    for layer, part in mixtures(spec).items():
        stem = f"layers.{layer}.{part.named('experts')}"
        for projection, theirs in _GGUF.items():
            names = [f"{stem}.{expert}.{projection}.weight" for expert in range(part.experts)]
            stacks[f"blk.{layer}.{theirs}.weight"] = Stack(tuple(plain.pop(name) for name in names))
    return plain, stacks


def paths_of(parameter: str) -> set[str]:
    """The projections that one of transformers' parameters holds; both are given by their paths."""
    module, _, name = parameter.rpartition(".")
    return {f"{module}.{projection}" for projection in PARAMETERS[name]}


def target_parameters(spec: ModelSpec, targets: Collection[str]) -> list[str]:
    """The parameters of transformers all of whose projections are `targets` (paths), as PEFT's target_parameters."""
    found = []
    for part in dict.fromkeys(mixtures(spec).values()):
        for parameter, members in PARAMETERS.items():
            if {part.path(member) for member in members} <= set(targets):
                found.append(part.named(f"experts.{parameter}"))
    return list(dict.fromkeys(found))


def wrapped_parameters(names: list[str]) -> list[str] | None:
    """The experts' parameters that PEFT's target_parameters name, in the order in which PEFT wraps them; None if a name
    means something else. Weights of single projections are skipped: they are adapted like modules."""
    found: set[str] = set()
    for name in names:
        match = re.fullmatch(r"(?:(?:.*\.)?experts\.)?(gate_up_proj|down_proj)|(.*\.)?(\w+)\.weight", str(name))
        if match is None or (match[3] and match[3] not in PROJECTIONS):
            return None
        found |= {match[1]} - {None}
    return [parameter for parameter in PARAMETERS if parameter in found]


def adapters_to_peft(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A mixture's adapters under PEFT's names and in its layout. If both parameters have adapters, PEFT wraps
    gate_up_proj first, so that its adapter is inside down_proj's wrapper, at `.base_layer`."""
    matches = {name: match for name in tensors if (match := _adapter(name))}
    both = len({match[2] for match in matches.values()}) == 2
    found = {}
    for name, value in tensors.items():
        match = matches.get(name)
        if match is None:
            found[name] = value
            continue
        inner = ".base_layer" if both and match[2] == "gate_up_proj" else ""
        if match[3] == "B":  # [E, out, R] -> [out, R, E]
            value = value.permute(1, 2, 0).flatten(1)
        found[f"{match[1]}{inner}.lora_{match[3]}.weight"] = value.contiguous()
    return found


def adapters_from_peft(tensors: Mapping[str, torch.Tensor], wrapped: list[str], rank: int) -> dict[str, torch.Tensor]:
    """The reverse of `adapters_to_peft`. `wrapped`: the parameters that have adapters (`wrapped_parameters`)."""
    found = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(layers\.\d+\.(?:.+\.)?experts)(\.base_layer)?\.lora_([AB])\.weight", name)
        if match is None or not wrapped:
            found[name] = value
            continue
        if match[3] == "B" and value.dim() == 2 and value.shape[1] % rank == 0:  # else refused by its shape
            value = value.unflatten(1, (rank, -1)).permute(2, 0, 1).contiguous()
        parameter = wrapped[0] if match[2] else wrapped[-1]
        found[f"{match[1]}.{parameter}.lora_{match[3]}.weight"] = value
    return found


def _adapter(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"(layers\.\d+\.(?:.+\.)?experts)\.(gate_up_proj|down_proj)\.lora_([AB])\.weight", name)


def is_expert_adapter(name: str) -> bool:
    return _adapter(name) is not None


def by_expert(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(A [R, in], B [out, R]) for the weight of every expert and projection, given the name of an expert adapter's
    A."""
    match = _adapter(name)
    assert match is not None
    down, up = tensors[name], tensors[name.replace("lora_A", "lora_B")]
    projections, found = PARAMETERS[match[2]], {}
    for expert, (a, b) in enumerate(zip(down.unflatten(0, (len(up), -1)), up, strict=True)):
        for projection, part in zip(projections, b.chunk(len(projections)), strict=True):
            found[f"{match[1]}.{expert}.{projection}.weight"] = (a, part)
    return found


def adapters_to_gguf(name: str, value: torch.Tensor, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """One of our A's or B's as llama.cpp's stacks: the same A [E, R, in] for gate and up, and a B [E, out, R] for
    each."""
    match = _adapter(name)
    assert match is not None
    projections, layer = PARAMETERS[match[2]], match[1].split(".")[1]
    if match[3] == "A":
        parts = [value.unflatten(0, (mixtures(spec)[int(layer)].experts, -1))] * len(projections)
    else:
        parts = list(value.chunk(len(projections), 1))
    stems = [f"blk.{layer}.{_GGUF[p]}.weight.lora_{match[3].lower()}" for p in projections]
    return dict(zip(stems, parts, strict=True))


def scale_in_gguf(name: str, spec: ModelSpec, tensors: Mapping[str, RowSource]) -> torch.Tensor | None:
    """The factors [E, 1, 1] that multiply an adapter's tensor in a GGUF; None: there are none. llama.cpp scales each
    expert's output and then adds the adapter's, unscaled; here, and in PEFT, the expert's factor scales both."""
    match = _adapter(name)
    if match is None or (match[2], match[3]) != ("down_proj", "B"):
        return None
    layer = match[1].split(".")[1]
    part = mixtures(spec).get(int(layer))
    if part is None or not part.router.expert_scale:
        return None
    source = tensors.get(f"layers.{layer}.{part.named(part.router.expert_scale)}")
    return None if source is None else source.values().float().view(-1, 1, 1)


def is_stacked(name: str) -> bool:
    """Whether a tensor of a GGUF adapter belongs to experts."""
    return re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight\.lora_[ab]", name) is not None


def adapters_from_gguf(tensors: Mapping[str, GgufTensor], where: str, module: str) -> dict[str, torch.Tensor]:
    """Our A's and B's from llama.cpp's stacks. Gate and up share one A here, so that two different ones are refused.
    `module`: that of the family's mixtures."""
    found = {}
    layers = dict.fromkeys(name.split(".")[1] for name in tensors if is_stacked(name))
    for layer in layers:
        for parameter, projections in PARAMETERS.items():
            a, b = ([f"blk.{layer}.{_GGUF[p]}.weight.lora_{m}" for p in projections] for m in "ab")
            given = [name for name in (*a, *b) if name in tensors]
            if not given:
                continue
            whole = len(given) == len(a) + len(b) and all(len(tensors[name].shape) == 3 for name in given)
            downs = [tensors[name].values() for name in a] if whole else []
            if not whole or not all(torch.equal(down, downs[0]) for down in downs):
                raise GraftuneError(
                    f"the adapter uses {given[0]} otherwise than gate and up as one",
                    where=where,
                    fix="this cannot be loaded here",
                )
            stem = f"layers.{layer}.{module}{'.' if module else ''}experts.{parameter}"
            found[f"{stem}.lora_A.weight"] = downs[0].flatten(0, 1)
            found[f"{stem}.lora_B.weight"] = torch.cat([tensors[name].values() for name in b], 1)
    return found
