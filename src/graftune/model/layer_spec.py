"""The spec of one layer: branches of the residual stream, each with the specs of its parts and norms.

A branch reads the stream x, computes one or several parts in parallel and adds the result to the stream:

    x + scale * out_norm(sum over parts of part.out_norm(part(part.norm(x))))

Most families have two branches, a mixer and a feed-forward, with one part each. Gemma 4 has layers with a dense MLP
beside experts (two parallel parts with norms of their own and one norm over their sum), a third branch that reads a
per-layer input, and a stored scalar that multiplies the whole stream after the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from graftune.model.part import FeedForwardSpec, MixerSpec, PartSpec


@dataclass(frozen=True)
class NormSpec:
    """An RMSNorm. `name` is the part of its name after `layers.N.`, and the whole name of the head's norm."""

    name: str
    width: int
    eps: float
    offset: float = 0.0  # subtracted from the weight in Hugging Face's checkpoints (Gemma stores weight - 1)


@dataclass(frozen=True)
class BranchPart:
    """One part of a branch, the norm that it reads through and the norm over its output."""

    part: PartSpec
    norm: NormSpec | None = None
    out_norm: NormSpec | None = None


@dataclass(frozen=True)
class BranchSpec:
    parts: tuple[BranchPart, ...]  # computed in parallel from the same stream, then summed
    out_norm: NormSpec | None = None  # over the sum of several parts
    scale: float = 1.0  # of what the branch adds to the stream


@dataclass(frozen=True)
class LayerSpec:
    """The spec of a layer. Layers of the same kind have equal specs."""

    branches: tuple[BranchSpec, ...]
    stream_scale: str | None = None  # name of a stored scalar that multiplies the stream after the last branch

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        return tuple(each.part for branch in self.branches for each in branch.parts)

    def moved(self, places: Mapping[int, int]) -> LayerSpec:
        """The same layer in a model whose layers have other numbers (PartSpec.moved)."""

        def branch(spec: BranchSpec) -> BranchSpec:
            return replace(spec, parts=tuple(replace(each, part=each.part.moved(places)) for each in spec.parts))

        return replace(self, branches=tuple(map(branch, self.branches)))

    @property
    def mixer(self) -> MixerSpec:
        return next(part for part in self.parts if isinstance(part, MixerSpec))

    @property
    def feed_forward(self) -> FeedForwardSpec:
        return next(part for part in self.parts if isinstance(part, FeedForwardSpec))

    @property
    def norms(self) -> Iterator[NormSpec]:
        """The norms of the branches, in the order of the forward pass; those inside parts are the parts' own."""
        for branch in self.branches:
            for each in branch.parts:
                yield from (norm for norm in (each.norm, each.out_norm) if norm is not None)
            if branch.out_norm is not None:
                yield branch.out_norm

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each projection that adapters may be attached to, by its path after `layers.N.`; in a mixture,
        those of one expert."""
        return {part.path(name): shape for part in self.parts for name, shape in part.projections.items()}

    def expand_target(self, target: str) -> tuple[str, ...]:
        """The projections that all_linear, attention or mlp stands for."""
        kinds = {"all_linear": PartSpec, "attention": MixerSpec, "mlp": FeedForwardSpec}
        kind = kinds.get(target)
        parts = () if kind is None else (part for part in self.parts if isinstance(part, kind))
        return tuple(part.path(name) for part in parts for name in part.projections)

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor but the norms, by its name after `layers.N.`."""
        found = {name: shape for part in self.parts for name, shape in part.weights.items()}
        return found if self.stream_scale is None else found | {self.stream_scale: (1,)}

    @property
    def norm_widths(self) -> dict[str, int]:
        found = {norm.name: norm.width for norm in self.norms}
        return found | {part.named(name): width for part in self.parts for name, width in part.norms.items()}

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)
