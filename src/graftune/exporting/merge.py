"""Merges adapters into a base: W + s B A, computed in fp32 for the rows that are read.

A merged model is a `Base` whose tensors are row sources over the original ones; it is written like any base, and no
weight exists twice. The changes of several adapters are added, each times its weight. (PEFT's "linear" mixes A's and
B's instead, which adds products of one adapter's A with another's B.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from graftune import tokenizer as tok
from graftune.errors import GraftuneError
from graftune.model.families import short_targets
from graftune.model.frozen import RowSource
from graftune.model.frozen.interface import DTYPES, TensorRows
from graftune.model.lora import scaling
from graftune.settings.sections import LoraConfig
from graftune.weights import experts
from graftune.weights.adapter_fit import TABLES as MODULES
from graftune.weights.adapter_fit import Adapter, check_fits
from graftune.weights.base import Base, with_new_tokens
from graftune.weights.rows import DerivedRows, Joined, Reordered, RowRange
from graftune.weights.safetensors_io import CarriedTensor
from graftune.weights.streamed import OutputTensor

SAMPLED = 128  # rows of a piece that Survival looks at
TABLES = tuple(f"{module}.weight" for module in MODULES)


class Weighted(NamedTuple):
    """An adapter and the factor of its change."""

    adapter: Adapter
    weight: float = 1.0


class LowRankChange(NamedTuple):
    """scale * B A, one adapter's change of one weight."""

    scale: float
    down: torch.Tensor  # A [R, in]
    up: torch.Tensor  # B [out, R]


@dataclass(frozen=True)
class Changed(DerivedRows):
    """A weight with the adapters' changes added."""

    products: tuple[LowRankChange, ...]

    def change(self, start: int, stop: int) -> torch.Tensor:
        return sum((p.up[start:stop] @ p.down).mul_(p.scale) for p in self.products)  # type: ignore[return-value]

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.change(start, stop).add_(self.source.read(start, stop).float())


def merge(base: Base, adapters: Sequence[Weighted]) -> Base:
    """The base with the adapters' changes added. `base` is without their new tokens; the adapters are fitted to it."""
    if not adapters:
        return base
    for adapter, _ in adapters:
        check_fits(_without_whole_tables(adapter), base)
    base = _with_tables(base, [a for a, _ in adapters])
    tensors: dict[str, RowSource] = dict(base.tensors)
    products: dict[str, list[LowRankChange]] = {}
    norms: dict[str, torch.Tensor] = {}
    for adapter, weight in adapters:
        for name, product in adapter_products(adapter, weight).items():
            products.setdefault(name, []).append(product)
        for name, value in adapter.tensors.items():
            if name.endswith("norm.weight"):
                own = tensors[name].values().float()
                norms[name] = norms.get(name, own) + weight * (value - own)
    for name, found in products.items():
        tensors[name] = Changed(tensors[name], tuple(found))
    tensors |= {name: TensorRows(value) for name, value in norms.items()}
    return dataclasses.replace(base, tensors=tensors)


def adapter_products(adapter: Adapter, weight: float = 1.0) -> dict[str, LowRankChange]:
    found: dict[str, LowRankChange] = {}
    for name, down in adapter.tensors.items():
        if not name.endswith("lora_A.weight"):
            continue
        if experts.is_expert_adapter(name):
            parts = experts.by_expert(adapter.tensors, name)
            found |= {n: LowRankChange(weight * scaling(adapter.lora), a, b) for n, (a, b) in parts.items()}
            continue
        stem = name.removesuffix("lora_A.weight")
        up = adapter.tensors[stem + "lora_B.weight"]
        found[stem + "weight"] = LowRankChange(weight * scaling(adapter.lora), down, up)
    return found


def _with_tables(base: Base, adapters: Sequence[Adapter]) -> Base:
    """The base with the rows of added tokens, or with fully trained embeddings. At most one adapter may have them,
    since rows of different adapters cannot be added."""
    bringing = [a for a in adapters if any(table in a.tensors for table in TABLES)]
    if not bringing:
        return base
    if len(bringing) > 1:
        raise GraftuneError(
            "two of the adapters have their own embeddings", where=str(bringing[1].folder), fix="merge only one"
        )
    adapter = bringing[0]
    if not adapter.lora.new_tokens:
        return _with_whole_tables(base, adapter)
    base = with_new_tokens(base, adapter.lora.new_tokens)
    count, new = base.spec.vocab, len(adapter.lora.new_tokens)
    tensors = dict(base.tensors)
    for name in TABLES[: 1 if base.spec.tied else 2]:
        tensors[name] = Joined((tensors[name], TensorRows(adapter.tensors[name][count:])))
    if base.spec.tied:
        tensors.pop("lm_head.weight", None)
    return dataclasses.replace(base, spec=base.spec.with_vocab(count + new), tensors=tensors)


def _without_whole_tables(adapter: Adapter) -> Adapter:
    """The adapter without an embedding or head that was trained whole: these replace the base's own."""
    if adapter.lora.new_tokens:
        return adapter
    kept = {name: t for name, t in adapter.tensors.items() if name.partition(".")[0] not in MODULES}
    return dataclasses.replace(adapter, tensors=kept)


def _with_whole_tables(base: Base, adapter: Adapter) -> Base:
    """Replaces an embedding or head by that of PEFT's modules_to_save, which may have another number of rows."""
    tables = {name: adapter.tensors[name] for name in TABLES if name in adapter.tensors}
    rows = {len(table) for table in tables.values()}
    size, spec, tokenizer = rows.pop(), base.spec, base.tokenizer
    if rows or any(table.shape[1:] != (spec.width,) for table in tables.values()):
        raise GraftuneError("its tables are not those of this base", where=str(adapter.folder), fix="give its own base")
    if size != spec.vocab:
        if not (adapter.folder / "tokenizer.json").is_file():
            raise GraftuneError(
                f"its table has {size} rows, the base {spec.vocab}, and no tokenizer is beside it",
                where=str(adapter.folder),
                fix="put its tokenizer.json there",
            )
        tokenizer = dataclasses.replace(
            tok.from_folder(adapter.folder), template=tokenizer.template, template_fault=tokenizer.template_fault
        )
        if tokenizer.vocab_size > size or len(tables) < 2:
            raise GraftuneError("its tables do not fit its tokenizer", where=str(adapter.folder), fix="copy it again")
    tensors = dict(base.tensors) | {name: TensorRows(table) for name, table in tables.items()}
    if spec.tied and len(tables) == 2 and torch.equal(*tables.values()):
        del tensors["lm_head.weight"]
    elif spec.tied:  # one was trained without the other, so that they are no longer tied
        tensors.setdefault("lm_head.weight", base.tensors["embed_tokens.weight"])
        spec = dataclasses.replace(spec, head=dataclasses.replace(spec.head, tied=False))
    return dataclasses.replace(base, spec=spec.with_vocab(size), tensors=tensors, tokenizer=tokenizer)


def combine(adapters: Sequence[Weighted]) -> Adapter:
    """One adapter with the changes of several: A's above each other, B's side by side, scales and weights multiplied
    into the B's. Exact, at the sum of the ranks."""
    if len(adapters) == 1 and adapters[0].weight == 1:
        return adapters[0].adapter
    first = adapters[0].adapter
    changes = [adapter_products(adapter, weight) for adapter, weight in adapters]
    if any(experts.is_expert_adapter(name) for adapter, _ in adapters for name in adapter.tensors):
        raise GraftuneError("adapters on experts cannot be made one", fix="export to merged or gguf")
    for adapter, _ in adapters:
        extra = [n for n in adapter.tensors if ".lora_" not in n]
        if extra:
            raise GraftuneError(
                f"the adapter also holds {extra[0]}, which cannot be added up in one adapter",
                where=str(adapter.folder),
                fix="export to merged or gguf",
            )
    ranks = [adapter.lora.rank for adapter, _ in adapters]
    tensors: dict[str, torch.Tensor] = {}
    every = dict.fromkeys(name for change in changes for name in change)
    for name in every:
        shape = next(change[name] for change in changes if name in change)
        width, out = shape.down.shape[1], len(shape.up)
        parts = [
            change.get(name) or LowRankChange(0.0, torch.zeros(rank, width), torch.zeros(out, rank))
            for change, rank in zip(changes, ranks, strict=True)
        ]
        stem = name.removesuffix("weight")
        tensors[stem + "lora_A.weight"] = torch.cat([p.down for p in parts])
        tensors[stem + "lora_B.weight"] = torch.cat([p.scale * p.up for p in parts], 1)
    paths = {name.removesuffix(".weight").split(".", 2)[2] for name in every}
    rank = sum(ranks)
    lora = LoraConfig(rank=rank, alpha=float(rank), targets=short_targets(paths))
    return dataclasses.replace(first, lora=lora, tensors=tensors)


@dataclass
class Survival:
    """Measures how much of the adapters' change d remains after the merged weights were rounded.

    The change that remains is round(W + d) - round(W); its share is 1 - |remaining - d|^2 / |d|^2. Weights are
    thousands of times larger than their change, so a dtype with few digits can lose it: then the share is 0, and the
    merged model is the base with noise. Some rows of each weight are measured."""

    change: float = 0.0
    error: float = 0.0
    noise: float = 0.0  # |stored - (W + d)|^2, for types whose rounding of W alone is larger than d

    def on_piece(self, tensor: OutputTensor, start: int, stop: int, stored: Callable[[int], torch.Tensor]) -> None:
        """Adds a piece of a tensor to the sums. `stored(n)`: the first n rows of the piece, as they were stored."""
        assert not isinstance(tensor.source, CarriedTensor)  # these are copied whole
        self._measure(tensor.source, start, stop, stored, DTYPES.get(tensor.kind))

    def _measure(
        self,
        source: RowSource,
        start: int,
        stop: int,
        stored: Callable[[int], torch.Tensor],
        dtype: torch.dtype | None,
    ) -> None:
        """`dtype`: the dtype rounded to; None for a quantised type (W is not quantised a second time)."""
        ordered = None
        if isinstance(source, RowRange):
            start, stop, source = start + source.first, stop + source.first, source.source
        if isinstance(source, Reordered):
            ordered, source = source, source.source
        if isinstance(source, experts.Stack) and any(isinstance(expert, Changed) for expert in source.parts):
            for expert, values in source.divided(start, stored(stop - start)):
                self._measure(expert, 0, expert.shape[0], partial(_first, values), dtype)
        if not isinstance(source, Changed):
            return
        stop = min(stop, start + SAMPLED)
        if ordered is None:
            rows, change = source.source.read(start, stop), source.change(start, stop)
        else:
            rows, change = ordered.of(source.source.read, start, stop), ordered.of(source.change, start, stop)
        rows, arrived = rows.float(), stored(stop - start)
        self.change += _squares(change)
        self.noise += _squares(arrived - rows - change)
        if dtype is not None:
            self.error += _squares(arrived - rows.to(dtype).float() - change)

    @property
    def share(self) -> float:
        return max(0.0, 1 - self.error / self.change) if self.change else 1.0

    @property
    def ratio(self) -> float:
        """The noise of quantisation relative to the change."""
        return math.sqrt(self.noise / self.change) if self.change else 0.0


def _first(values: torch.Tensor, rows: int) -> torch.Tensor:
    return values[:rows]


def _squares(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2
