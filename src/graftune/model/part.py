"""The interface of a layer's parts: mixers (attention and the like) and feed-forwards.

A part has two objects. Its spec states its tensors by name and shape, and which of them are projections that adapters
may be attached to: the arena, the loader, exports and the plan use the spec and contain no code for a kind of layer.
The part itself computes: forward, backward, what it saves and what it recomputes. block.py adds what all parts have in
common: norms before and after them and the residual stream.

To add a kind of layer, write both in one file of mixers/ or feed_forward/, and put the spec into the layers of a family
(docs/extending.md).

Legend: T tokens, D width of the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from graftune import spans
from graftune.kernels import rms_norm
from graftune.model.context import LayerCache, PassContext
from graftune.model.feed_forward.expert_projection import ExpertProjection
from graftune.model.projection import Normed, Projection, ReadyGrad
from graftune.model.rotary import RopeSpec

Saved = TypeVar("Saved")


@dataclass
class NormWeight:
    """A norm's weight, fp32. When it trains, `value` is a view into the arena and `frozen` is the base's weight."""

    value: torch.Tensor
    frozen: torch.Tensor
    grad: torch.Tensor | None = None

    def of(self, adapted: bool) -> torch.Tensor:
        return self.value if adapted else self.frozen


@dataclass
class Bias:
    """The bias of a group of projections, in the compute dtype."""

    value: torch.Tensor
    grad: torch.Tensor | None = None


class FileOrder(NamedTuple):
    """Files hold the rows (dim 0) or columns (dim 1) of a tensor in another order than the engine: the file's row i is
    the engine's row indices[i]."""

    dim: int
    indices: torch.Tensor

    def inverse(self) -> FileOrder:
        return FileOrder(self.dim, self.indices.argsort())


class AttentionShape(NamedTuple):
    heads: int
    kv_heads: int
    head_width: int
    window: int = 0  # 0: none
    capped: bool = False
    sinks: bool = False


class PartSpec:
    """The tensors of a part. Names are Hugging Face's without the prefix `layers.N.` and the part's own `module`."""

    module: str  # "": none

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each projection that adapters may be attached to; the output projection is the last."""
        raise NotImplementedError

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The projections that share an input and are computed as one product, by the group's name."""
        raise NotImplementedError

    @property
    def biased(self) -> tuple[str, ...]:
        return ()

    @property
    def norms(self) -> dict[str, int]:
        """Norms inside the part, and their widths."""
        return {}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """All other tensors, by their whole names after `module`: frozen where only adapters train."""
        return {}

    def order_in(self, file: str, name: str) -> FileOrder | None:
        """The order in which a file ("folder": Hugging Face's, or "gguf") stores a projection or another tensor, given
        by the first word of its name. None: the engine's order."""
        return None

    def adapter_order_in(self, file: str, name: str) -> FileOrder | None:
        """The same for an adapter's A or B, by its name after `module`: B has the rows of its weight, A the columns."""
        order = self.order_in(file, name.partition(".")[0])
        return order if order is not None and name.endswith("AB"[1 - order.dim] + ".weight") else None

    @property
    def gguf_rows(self) -> dict[str, tuple[int, ...]]:
        """The row counts of the GGUF tensors into which a projection is divided, where they are not equal."""
        return {}

    @property
    def log_decays(self) -> tuple[str, ...]:
        """Those of `tensors` that a GGUF stores as -exp of the value."""
        return ()

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return ()

    @property
    def attention(self) -> AttentionShape | None:
        """The shape of its attention over the tokens of a document, if it has any."""
        return None

    @property
    def state_values(self) -> int:
        """Values of the state that a recurrent part updates with every token; 0: it has none."""
        return 0

    @property
    def expert_counts(self) -> tuple[int, int]:
        """The number of experts, and how many of them are chosen for a token; zeros: the part is dense."""
        return 0, 0

    @property
    def active_values(self) -> int:
        """The number of weight values that one token is multiplied by."""
        return sum(math.prod(shape) for shape in self.products.values())

    @property
    def checks(self) -> dict[str, bool]:
        """Whether each group of values is possible in a model; a damaged file may state anything."""
        return {}

    def moved(self, places: Mapping[int, int]) -> PartSpec:
        """The same part in a model with renumbered layers: `places` maps old numbers of earlier layers to new ones."""
        return self

    def norm_offset_of(self, name: str) -> float:
        """What Hugging Face's checkpoints subtract from one of `norms`."""
        return 0.0

    @property
    def output(self) -> str:
        """The projection whose product goes into the residual stream: the last one."""
        return list(self.projections)[-1]

    def build(self, make: PartPlacer) -> Part[Any]:
        raise NotImplementedError

    def start_of(self, name: str, generator: torch.Generator) -> torch.Tensor | None:
        """The initial value of one of `tensors` in a model that was never trained; None: Gaussian, as projections."""
        return None

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the base except norms, by its name after `layers.N.`."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self.projections.items():
            found[f"{self.path(name)}.weight"] = shape
            if name in self.biased:
                found[f"{self.path(name)}.bias"] = shape[:1]
        return found | {self.named(name): shape for name, shape in self.tensors.items()}

    @property
    def parameters(self) -> int:
        """The number of parameters in matrices; vectors are not counted."""
        return sum(math.prod(shape) for shape in self.weights.values() if len(shape) > 1)

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each product: the size of its weight in the scratch, if the base is dequantised for products."""
        shapes = {name: [self.projections[member] for member in members] for name, members in self.groups.items()}
        return {name: (sum(out for out, _ in found), found[0][1]) for name, found in shapes.items()}

    def named(self, name: str) -> str:
        """The name after `layers.N.` of one of the part's tensors."""
        return f"{self.module}.{name}" if self.module else name

    def own_name(self, name: str) -> str | None:
        """The reverse of `named`, also for adapters; None: the tensor is not in the part."""
        if self.module:
            return name.removeprefix(f"{self.module}.") if name.startswith(f"{self.module}.") else None
        own = {each.partition(".")[0] for each in (*self.tensors, *map(self.path, self.projections))}
        return name if name.partition(".")[0] in own else None

    def path(self, projection: str) -> str:
        """The path of a projection after `layers.N.`. Its name alone may occur in several parts of a layer."""
        return self.named(projection)

    def adapters(self, targets: Collection[str], rank: int, dropout: float) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name, after `layers.N.`, and shape of every A and B on the paths `targets`, in the arena's order: the A's of
        a group together, so that the stacked A is a view."""
        for members in self.groups.values():
            adapted = [member for member in members if self.path(member) in targets]
            for member in adapted:
                yield f"{self.path(member)}.lora_A.weight", (rank, self.projections[member][1])
            for member in adapted:
                yield f"{self.path(member)}.lora_B.weight", (self.projections[member][0], rank)


class CacheBytes(NamedTuple):
    per_sequence: int  # independent of its length
    per_token: int
    window: int = 0  # tokens that are kept at most, beside those of a pass; 0: all


class MixerSpec(PartSpec):
    def new_cache(
        self, slots: int, rows: Mapping[int, int], device: torch.device, dtype: torch.dtype
    ) -> LayerCache | None:
        """The cache in which generation keeps a layer's past: states of `slots` sequences, and rows[window] rows of
        keys and values. None: the layer has no cache of its own, because it reads another layer's."""
        raise NotImplementedError

    def cache_bytes(self, dtype: torch.dtype) -> CacheBytes:
        """The memory that `new_cache` allocates for each slot and for each row."""
        raise NotImplementedError


class FeedForwardSpec(PartSpec):
    """The spec of a feed-forward."""


class PartPlacer(Protocol):
    """Places the tensors of one part on the device (weights/load.py)."""

    layer: int

    def projection(self, group: str) -> Projection:
        """A group's weight and the adapters on it."""

    def experts(self, group: str) -> ExpertProjection:
        """The weights of all experts for one parameter, and the adapters on them."""

    def bias(self, group: str) -> Bias:
        """The biases of a group's members that have one (`biased`)."""

    def norm(self, name: str) -> NormWeight: ...

    def unit_norm(self, width: int) -> NormWeight:
        """The weight of a norm that has none: ones, which never train."""

    def rope(self, spec: RopeSpec) -> int:
        """The index of a rope's tables in PassContext.tables."""

    def tensor(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One of the spec's `tensors`, in fp32, and its gradient where every weight trains."""


class SavedInput(NamedTuple):
    """A part's input as saved for the backward: the residual stream after the add, and the norm before the part."""

    x: torch.Tensor  # [T, D]
    rstd: torch.Tensor  # [T] fp32, empty without a norm
    weight: torch.Tensor | None  # the norm's
    eps: float

    @property
    def normed(self) -> Normed | None:
        return None if self.weight is None else Normed(self.rstd, self.weight)

    def part_input(self, ctx: PassContext) -> PartInput:
        """The input of the forward, for a part that recomputes something."""
        return PartInput(self.x, None, self.weight, self.eps, ctx)

    def tensor(self) -> torch.Tensor:
        """The input of the part's forward, [T, D]; recomputes the norm."""
        return self.x if self.normed is None else self.normed.of(self.x)


class PartInput:
    """The input of a part in the forward: norm(x + y), or the plain sum where the family has no norm there. A part
    calls `product` or `tensor`, once; after that, `x` is the sum, in the memory of y, and `rstd` is the norm's."""

    def __init__(
        self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor | None, eps: float, ctx: PassContext
    ):
        self.x, self.y, self.weight, self.eps, self.ctx = x, y, weight, eps, ctx
        self.rstd = x.new_empty(0, dtype=torch.float32)

    def product(
        self, projection: Projection, *, wide: bool = False, h: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The projection of the input, and h for the backward. `wide` and a known `h`: see Projection.forward."""
        if self.weight is not None:
            self.x, self.rstd, product, h = projection.after_norm(
                self.x, self.y, self.weight, self.eps, self.ctx, wide=wide, h=h
            )
            return product, h
        self._add()
        read = self.x
        if projection.adapter_columns:
            read = projection.input_buffer(self.x, len(self.x))
            read[:, : projection.width_in].copy_(self.x)
        return projection.forward(read, self.ctx, wide=wide, h=h)

    def tensor(self) -> torch.Tensor:
        """The input itself, [T, D]."""
        if self.weight is None:
            self._add()
            return self.x
        normed = torch.empty_like(self.x)
        self.x, self.rstd = rms_norm.add_forward(self.x, self.y, self.weight, self.eps, normed)
        return normed

    def _add(self) -> None:
        spans.operation("residual add")
        self.x = self.x if self.y is None else self.y.add_(self.x)


class Part(Generic[Saved]):
    """A mixer or a feed-forward: a dataclass whose fields include its projections, the output projection last. `Saved`
    is a NamedTuple of tensors: what its backward needs beside its input."""

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        return tuple(value for value in vars(self).values() if isinstance(value, Projection))

    @property
    def last(self) -> Projection | None:
        """The projection whose product the part returns; None where the output is no single product."""
        return self.projections[-1] if self.projections else None

    def forward(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, Saved]:
        """The part's output [T, D], which the caller may overwrite, and what to save."""
        raise NotImplementedError

    def recompute(self, entry: PartInput, ctx: PassContext) -> Saved:
        """What `forward` saves. A part may leave out the product that `forward` returns."""
        return self.forward(entry, ctx)[1]

    def backward(
        self,
        grad: torch.Tensor,
        ready: ReadyGrad | None,
        read: SavedInput,
        saved: Saved,
        ctx: PassContext,
        need_input: bool,
    ) -> torch.Tensor | None:
        """The output's gradient -> the input's gradient, or None if it is not needed. `grad` is a gradient buffer of
        `last`; `ready`: the same in the form that `last` multiplies. Adds gradients of adapters to the arena's."""
        raise NotImplementedError

    def drop_recomputable(self, saved: Saved) -> Saved:
        """What the policy `selective` keeps: `saved` without the tensors that are large and cheap to recompute."""
        return saved

    def recompute_dropped(self, saved: Saved, read: SavedInput, ctx: PassContext) -> Saved:
        return saved


class Mixer(Part[Saved]):
    """Moves information between the tokens of a document; `ctx.sequences` says which tokens those are. Its `forward`
    also serves generation: if there is a cache, it reads and writes the layer's entry."""


class FeedForward(Part[Saved]):
    """Works on every token by itself."""
