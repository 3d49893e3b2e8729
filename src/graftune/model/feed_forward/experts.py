"""A mixture of experts: a router picks k of E small MLPs for each token and adds up their weighted outputs.

    out[t] = sum over j of w[t, j] * expert[chosen[t, j]](n[t])     n: the normed stream; w, chosen: router.py
    expert(x) = down(unit(gate_up(x))), with a bias on both where the family has one

Every choice becomes a row; rows are sorted by expert, so that each expert's are neighbours and its product is one over
neighbouring rows (kernels/experts). There are always S = T k rows, whatever the router picks: shapes never depend on
data, on a GPU no count goes to the host, and the step is captured like any other. (The usual loop over the experts that
were hit asks the device how many rows each has: a wait a layer. Giving every expert a fixed capacity avoids the wait
and drops tokens.)

The experts' gate and up are one product with one adapter, as transformers holds them and PEFT adapts them: A [E, R, D]
and B [E, 2F, R]. An expert's output is not saved for the router, since <dy, act W' + b> = <dy W, act> + <dy, b>: the
backward goes through `down` before it multiplies by the routing weight w, and the inner product of that result with the
activation is w's gradient.

A shared expert, which reads every token, is a part of its own beside the mixture (gated.py).

Legend: T tokens, D width, E experts, k chosen a token, S = T k rows, F an expert's feed-forward width, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from graftune import spans
from graftune.errors import GraftuneError
from graftune.kernels import launch, rms_norm, swiglu
from graftune.kernels.experts import combine
from graftune.model.context import PassContext
from graftune.model.feed_forward.expert_projection import ExpertProjection
from graftune.model.feed_forward.router import Routed, Router, RouterSpec
from graftune.model.part import FeedForward, FeedForwardSpec, FileOrder, NormWeight, PartInput, PartPlacer, SavedInput
from graftune.model.projection import ReadyGrad

# transformers' two parameters, which stack the weights of all experts, and their projections. An expert has one adapter
# for each parameter.
PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class ExpertsSpec(FeedForwardSpec):
    width: int
    ffn: int  # of one expert
    experts: int
    chosen: int  # for each token
    router: RouterSpec = field(default_factory=RouterSpec)
    module: str = "mlp"
    unit: str = "silu"  # silu | gelu | clamped
    bias: bool = False  # of the experts' projections
    interleaved: bool = False  # folders hold the experts in one tensor [E, in, out], with gate and up in turns
    stacked: bool = False  # folders hold them in one tensor [E, out, in], gate before up
    own_norm: str = ""  # a norm inside the part, which then reads the plain stream, as the router does; "": none
    norm_eps: float = 0.0

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(out, in) of one expert's projections."""
        inner = (self.ffn, self.width)
        return {"gate_proj": inner, "up_proj": inner, "down_proj": (self.width, self.ffn)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        found = self.router.tensors(self.experts, self.width)
        if self.bias:
            found |= {f"experts.{name}.bias": (self.experts, out) for name, (out, _) in self.projections.items()}
        return found

    @property
    def norms(self) -> dict[str, int]:
        return {self.own_norm: self.width} if self.own_norm else {}

    @cached_property  # it has thousands of names and is read for every tensor
    def weights(self) -> dict[str, tuple[int, ...]]:
        found = {self.named(name): shape for name, shape in self.tensors.items()}
        for parameter, members in PARAMETERS.items():
            for expert in range(self.experts):
                names = self.names_of(expert, parameter)
                found |= {name: self.projections[member] for name, member in zip(names, members, strict=True)}
        return found

    @property
    def parameters(self) -> int:
        return self.experts * (self.width + sum(out * into for out, into in self.projections.values()))

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        shapes = {parameter: self.shape_of(parameter) for parameter in PARAMETERS}
        return {parameter: (self.experts * out, width) for parameter, (out, width) in shapes.items()}

    @property
    def expert_counts(self) -> tuple[int, int]:
        return self.experts, self.chosen

    @property
    def active_values(self) -> int:
        return self.chosen * sum(out * into for out, into in self.projections.values())

    def path(self, projection: str) -> str:
        return self.named(f"experts.{projection}")

    def shape_of(self, parameter: str) -> tuple[int, int]:
        """(out, in) of one expert's share of a parameter."""
        shapes = [self.projections[member] for member in PARAMETERS[parameter]]
        return sum(out for out, _ in shapes), shapes[0][1]

    def names_of(self, expert: int, parameter: str) -> list[str]:
        """The names of one expert's tensors in a parameter."""
        return [self.named(f"experts.{expert}.{member}.weight") for member in PARAMETERS[parameter]]

    def adapters(self, targets: Collection[str], rank: int, dropout: float) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Gate and up share one adapter. Dropout is refused: PEFT could not load an adapter with dropout on experts."""
        paths = {parameter: {self.path(member) for member in members} for parameter, members in PARAMETERS.items()}
        found = [parameter for parameter in PARAMETERS if paths[parameter] & set(targets)]
        if "gate_up_proj" in found and not paths["gate_up_proj"] <= set(targets):
            raise GraftuneError(
                "the experts hold gate and up as one weight, and only one of the two is a target",
                fix="target gate_proj and up_proj, or neither",
            )
        if found and dropout:
            raise GraftuneError("adapters on experts have no dropout", fix="set dropout to 0, or target attention")
        for parameter in found:
            out, width = self.shape_of(parameter)
            yield self.named(f"experts.{parameter}.lora_A.weight"), (self.experts * rank, width)
            yield self.named(f"experts.{parameter}.lora_B.weight"), (self.experts, out, rank)

    def adapter_order_in(self, file: str, name: str) -> FileOrder | None:
        if file != "folder" or not self.interleaved or name != "experts.gate_up_proj.lora_B.weight":
            return None
        return FileOrder(1, torch.arange(2 * self.ffn).view(2, -1).t().reshape(-1))

    @property
    def checks(self) -> dict[str, bool]:
        return {"router": 0 < self.router.scale < math.inf and 0 <= self.router.eps < 1}

    def build(self, place: PartPlacer) -> Experts:
        gate_up, down = place.experts("gate_up_proj"), place.experts("down_proj")
        if self.bias:
            biases = {name: place.tensor(f"experts.{name}.bias")[0] for name in self.projections}
            gate_up.bias = torch.cat([biases[member] for member in PARAMETERS["gate_up_proj"]], 1)
            down.bias = biases["down_proj"]
        router, norm = self.router.build(place, self.chosen), None
        if self.own_norm:
            norm = StreamNorm(place.norm(self.own_norm), place.unit_norm(self.width), self.norm_eps)
        return Experts(place.layer, router, gate_up, down, self.unit, norm)


class StreamNorm(NamedTuple):
    """The norms of a mixture that reads the stream: the experts' and the router's, which has no weight."""

    experts: NormWeight
    router: NormWeight
    eps: float


class ExpertsSaved(NamedTuple):
    gate_up: torch.Tensor  # [S, 2F]; its gradient may take its place
    h_gate_up: torch.Tensor | None
    h_down: torch.Tensor | None
    routed: Routed
    rstd: torch.Tensor | None = None  # [T] fp32, of a norm inside the part


@dataclass
class Experts(FeedForward[ExpertsSaved]):
    layer: int
    router: Router
    gate_up: ExpertProjection
    down: ExpertProjection
    unit: str
    norm: StreamNorm | None = None

    def _route(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, Routed, torch.Tensor | None]:
        """What the experts read [T, D], where the tokens go, and the rstd of a norm inside the part."""
        read = entry.tensor()
        if self.norm is None:
            return read, self.router.forward(read), None
        normed = torch.empty_like(read)
        _, rstd = rms_norm.add_forward(read, None, self.norm.experts.of(ctx.adapted), self.norm.eps, normed)
        return normed, self.router.forward(read.float() * rstd.unsqueeze(1)), rstd

    def _normed(self, read: SavedInput, rstd: torch.Tensor | None, ctx: PassContext) -> torch.Tensor:
        if self.norm is None or rstd is None:
            return read.tensor()
        return rms_norm.apply(read.x, rstd, self.norm.experts.of(ctx.adapted))

    def forward(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, ExpertsSaved]:
        normed, routed, rstd = self._route(entry, ctx)
        if ctx.routing is not None:
            ctx.routing.add(self.layer, routed.scores, routed.chosen, ctx.rows is not None)
        gate_up, h_gate_up = self._first(normed, routed, ctx)
        act = self._act(gate_up)
        if ctx.inputs_only:
            gate_up = gate_up.new_empty(0)
        del normed
        expert_out, h_down = self.down.forward(act, routed.starts, ctx.adapted)
        del act
        out = combine(expert_out, routed.places, routed.weights)
        return out, ExpertsSaved(gate_up, h_gate_up, h_down, routed, rstd)

    def recompute(self, entry: PartInput, ctx: PassContext) -> ExpertsSaved:
        normed, routed, rstd = self._route(entry, ctx)
        gate_up, h_gate_up = self._first(normed, routed, ctx)
        adapts = self.down.lora is not None and ctx.adapted
        h_down = self.down.low(self._act(gate_up), routed.starts, ctx.adapted) if adapts else None
        return ExpertsSaved(gate_up, h_gate_up, h_down, routed, rstd)

    def drop_recomputable(self, saved: ExpertsSaved) -> ExpertsSaved:
        return saved._replace(gate_up=saved.gate_up.new_empty(0))

    def recompute_dropped(self, saved: ExpertsSaved, read: SavedInput, ctx: PassContext) -> ExpertsSaved:
        return saved._replace(gate_up=self._first(self._normed(read, saved.rstd, ctx), saved.routed, ctx)[0])

    def _act(self, gate_up: torch.Tensor) -> torch.Tensor:
        act = gate_up.new_empty(len(gate_up), self.down.weights.in_features)
        swiglu.forward(gate_up, act, self.unit)
        return act

    def _first(
        self, normed: torch.Tensor, routed: Routed, ctx: PassContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """gate_up [S, 2F] and its h."""
        x, rows = _rows_of(normed, routed)
        return self.gate_up.forward(x, routed.starts, ctx.adapted, rows)

    def backward(
        self,
        grad: torch.Tensor,
        ready: ReadyGrad | None,
        read: SavedInput,
        saved: ExpertsSaved,
        ctx: PassContext,
        need_input: bool,
    ) -> torch.Tensor:
        gate_up, h_gate_up, h_down, routed, rstd = saved
        del saved  # so that gate_up is released after its last use
        grad, starts = grad[:, : read.x.shape[1]], routed.starts
        weights = _by_row(routed.weights, routed)
        grad_out, rows = _rows_of(grad, routed)
        grad_act, g = self.down.backward(grad_out, h_down, starts, rows)
        in_place = launch.fused(grad_act)  # the kernel reads each value before it overwrites it
        grad_gate_up, act = (gate_up, grad_act) if in_place else (torch.empty_like(gate_up), torch.empty_like(grad_act))
        grad_weights = swiglu.backward(grad_act, gate_up, grad_gate_up, act, self.unit, weights)
        assert grad_weights is not None
        del grad_act, gate_up
        weights = weights.to(grad.dtype).unsqueeze(1)
        if h_down is not None and g is not None:
            self.down.accumulate_grad(grad_out, h_down * weights, g * weights, act, starts, grad_rows=rows)
        del grad_out, act, g

        grad_rows, g = self.gate_up.backward(grad_gate_up, h_gate_up, starts)
        if h_gate_up is not None and g is not None:
            x, rows = _rows_of(self._normed(read, rstd, ctx), routed)
            self.gate_up.accumulate_grad(grad_gate_up, h_gate_up, g, x, starts, x_rows=rows)
            del x, rows
        del grad_gate_up
        grad_normed = combine(grad_rows, routed.places)
        del grad_rows
        spans.operation("router")
        grad_choices = grad_weights[routed.places]
        if self.down.bias is not None:
            grad_choices += (grad.float() @ self.down.bias.t()).gather(1, routed.chosen)
        grad_router = self.router.backward(grad_choices, routed).to(grad.dtype)
        if self.norm is None or rstd is None:
            return grad_normed.add_(grad_router)
        weight, trained = self.norm.experts.of(ctx.adapted), self.norm.experts.grad
        grad_x = rms_norm.add_backward(grad_normed, read.x, rstd, weight, None, trained, grad_normed)
        return rms_norm.add_backward(grad_router, read.x, rstd, self.norm.router.value, grad_x)


def _by_row(values: torch.Tensor, routed: Routed) -> torch.Tensor:
    """[T, k] -> [S], in the rows' order."""
    return torch.empty_like(values).view(-1).scatter_(0, routed.places.flatten(), values.flatten())


def _rows_of(x: torch.Tensor, routed: Routed) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sorted rows of x [T, D]. Kernels gather them while they load; elsewhere they are copied."""
    if launch.fused(x):
        return x, routed.tokens
    return x.index_select(0, routed.tokens), None
