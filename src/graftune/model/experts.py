"""The MLP half of a mixture of experts: a router picks k of E small MLPs for each token and weighs what they say.

    p = softmax(n R')         chosen, v = the k largest of p        w = v, or v / sum(v)
    out[t] = sum over j of w[t, j] * expert[chosen[t, j]](n[t])     n: the normed stream

Every choice becomes a row; rows are sorted by expert, so that each expert's lie together and its product is one over
neighbouring rows (kernels/experts). S = T k rows there always are, whatever the router says: shapes never depend on
data, on a GPU no count goes to the host, and the step is captured like any other. (The usual loop over the experts that
were hit asks the device how many rows each has: a wait a layer. Giving every expert a fixed capacity avoids the wait
and drops tokens.)

The experts' gate and up are one product with one adapter, as transformers holds them and PEFT adapts them: A [E, R, D]
and B [E, 2F, R]. The router is frozen; its gradient goes on to the stream. What an expert said is not kept for it,
since <dy, act W'> = <dy W, act>: the way back through `down` is taken before the row is weighed, and its product with
the activation is the weight's gradient.

Legend: T tokens, D width, E experts, k chosen a token, S = T k rows, F an expert's feed-forward width, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from graftune.kernels import experts as grouped
from graftune.kernels import launch, swiglu
from graftune.kernels.experts import Starts
from graftune.model.frozen import Dense, Frozen, Unpacked


class Routed(NamedTuple):
    """Which experts the tokens go to."""

    probs: torch.Tensor  # [T, E] fp32
    chosen: torch.Tensor  # [T, k]
    weights: torch.Tensor  # [T, k] fp32
    tokens: torch.Tensor  # [S] the token of each row
    places: torch.Tensor  # [T, k] the row of each choice
    starts: Starts


class ExpertWeights(Protocol):
    """The frozen weights of all experts, [E, out, in] if one could see them so."""

    kind: str
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int: ...
    def matmul(self, x: torch.Tensor, starts: Starts) -> torch.Tensor:
        """x [S, in] -> [S, out], a fresh tensor."""
        ...

    def input_grad(self, grad: torch.Tensor, starts: Starts) -> torch.Tensor:
        """grad [S, out] -> [S, in], a fresh tensor."""
        ...


class Several:
    """A weight for each expert, wherever it lies: only those with rows are read. For CPUs."""

    def __init__(self, weights: Sequence[Frozen]):
        self.weights, self.kind = list(weights), weights[0].kind
        self.out_features, self.in_features = weights[0].out_features, weights[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def matmul(self, x: torch.Tensor, starts: Starts) -> torch.Tensor:
        out = x.new_empty(len(x), self.out_features)
        for expert, rows in starts.groups():
            out[rows] = self.weights[expert].matmul(x[rows])
        return out

    def input_grad(self, grad: torch.Tensor, starts: Starts) -> torch.Tensor:
        out = grad.new_empty(len(grad), self.in_features)
        for expert, rows in starts.groups():
            out[rows] = self.weights[expert].input_grad(grad[rows])
        return out


class Stacked:
    """All experts' rows one behind the other in one weight [E out, in] on a GPU: resident, or dequantised together into
    the scratch for each product (a micro-batch of training reaches nearly all of them)."""

    def __init__(self, weight: Dense | Unpacked, experts: int):
        self.frozen, self.experts, self.kind = weight, experts, weight.kind
        self.out_features, self.in_features = weight.out_features // experts, weight.in_features

    @property
    def nbytes(self) -> int:
        return self.frozen.nbytes

    def matmul(self, x: torch.Tensor, starts: Starts) -> torch.Tensor:
        return grouped.multiply(x, self._weight(), starts)

    def input_grad(self, grad: torch.Tensor, starts: Starts) -> torch.Tensor:
        return grouped.multiply(grad, self._weight().transpose(1, 2), starts)

    def _weight(self) -> torch.Tensor:
        if isinstance(self.frozen, Unpacked):
            self.frozen.unpack()
        return self.frozen.weight.unflatten(0, (self.experts, self.out_features))


@dataclass(frozen=True)
class ExpertLora:
    """An adapter for each expert, as views into the arena."""

    down: torch.Tensor  # [E, R, in], compute dtype
    up: torch.Tensor  # [E, out, R], compute dtype
    grad_down: torch.Tensor  # fp32
    grad_up: torch.Tensor  # fp32
    scale: float


@dataclass
class ExpertProjection:
    """y = x W_e' + s (x A_e') B_e' for the rows of each expert e."""

    weights: ExpertWeights
    lora: ExpertLora | None = None

    def forward(self, x: torch.Tensor, starts: Starts, adapted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [S, in] -> (y [S, out], h [S, R] for the backward)."""
        y, h = self.weights.matmul(x, starts), self.low(x, starts, adapted)
        if self.lora is not None and h is not None:
            grouped.add_multiplied_(y, h, self.lora.up, starts, self.lora.scale)
        return y, h

    def low(self, x: torch.Tensor, starts: Starts, adapted: bool) -> torch.Tensor | None:
        """The h of `forward` without its product."""
        return grouped.multiply(x, self.lora.down, starts) if self.lora is not None and adapted else None

    def backward(
        self, grad: torch.Tensor, h: torch.Tensor | None, starts: Starts
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dY [S, out] -> (dX [S, in], g = s dY B [S, R] for `learn`)."""
        grad_x = self.weights.input_grad(grad, starts)
        if self.lora is None or h is None:
            return grad_x, None
        g = grouped.multiply(grad, self.lora.up.transpose(1, 2), starts).mul_(self.lora.scale)
        grouped.add_multiplied_(grad_x, g, self.lora.down.transpose(1, 2), starts, 1.0)
        return grad_x, g

    def learn(
        self, grad: torch.Tensor, h: torch.Tensor | None, g: torch.Tensor | None, x: torch.Tensor, starts: Starts
    ) -> None:
        """Adds dB = s dY' h and dA = g' x."""
        if self.lora is not None and h is not None and g is not None:
            grouped.add_products_(self.lora.grad_up, grad, h, starts, self.lora.scale)
            grouped.add_products_(self.lora.grad_down, g, x, starts)


@dataclass
class Experts:
    router: torch.Tensor  # [E, D] fp32
    chosen: int  # k
    normalised: bool  # whether the weights of a token's experts sum to one
    gate_up: ExpertProjection
    down: ExpertProjection

    @property
    def nbytes(self) -> int:
        return self.gate_up.weights.nbytes + self.down.weights.nbytes + self.router.nbytes

    def route(self, normed: torch.Tensor) -> Routed:
        """In fp32, so that the choice does not hang on how logits were rounded."""
        probs = torch.softmax(normed.float() @ self.router.t(), 1)
        weights, chosen = probs.topk(self.chosen, 1)
        if self.normalised:
            weights = weights / weights.sum(1, keepdim=True)
        ordered, rows = chosen.flatten().sort(stable=True)
        places = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows), device=rows.device))
        numbers = torch.arange(len(self.router) + 1, device=rows.device)
        at = torch.searchsorted(ordered, numbers, out_int32=True)
        host = tuple(int(n) for n in at) if at.device.type == "cpu" else None
        tokens = rows.div(self.chosen, rounding_mode="floor")
        return Routed(probs, chosen, weights, tokens, places.view_as(chosen), Starts(at, host))

    def forward(
        self, normed: torch.Tensor, routed: Routed, adapted: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The normed stream [T, D] -> (out [T, D], and for the backward gate_up [S, 2F] and both h's)."""
        gate_up, h_gate_up = self.first(normed, routed, adapted)
        said, h_down = self.down.forward(self._act(gate_up), routed.starts, adapted)
        return _weighed(said, routed), gate_up, h_gate_up, h_down

    def again(
        self, normed: torch.Tensor, routed: Routed, adapted: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What `forward` leaves for the backward, without what the experts say."""
        gate_up, h_gate_up = self.first(normed, routed, adapted)
        adapts = self.down.lora is not None and adapted
        h_down = self.down.low(self._act(gate_up), routed.starts, adapted) if adapts else None
        return gate_up, h_gate_up, h_down

    def _act(self, gate_up: torch.Tensor) -> torch.Tensor:
        act = gate_up.new_empty(len(gate_up), self.down.weights.in_features)
        swiglu.forward(gate_up, act)
        return act

    def first(self, normed: torch.Tensor, routed: Routed, adapted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """gate_up [S, 2F] and its h."""
        return self.gate_up.forward(normed.index_select(0, routed.tokens), routed.starts, adapted)

    def backward(
        self,
        grad: torch.Tensor,
        normed: torch.Tensor,
        routed: Routed,
        gate_up: torch.Tensor,
        h_gate_up: torch.Tensor | None,
        h_down: torch.Tensor | None,
    ) -> torch.Tensor:
        """grad [T, D] of the half's output -> that of the normed stream; adds the adapters' gradients."""
        starts, tokens = routed.starts, routed.tokens
        weights = _by_row(routed.weights, routed).to(grad.dtype).unsqueeze(1)
        rows = grad.index_select(0, tokens)
        grad_act, g = self.down.backward(rows, h_down, starts)
        heard = grad_act.mul(weights)
        in_place = launch.fused(heard)  # the kernel goes value by value
        grad_gate_up, act = (gate_up, heard) if in_place else (torch.empty_like(gate_up), torch.empty_like(heard))
        swiglu.backward(heard, gate_up, grad_gate_up, act)
        del heard
        grad_weights = (grad_act * act).sum(1, dtype=torch.float32)
        del grad_act
        if h_down is not None and g is not None:
            self.down.learn(rows, h_down * weights, g * weights, act, starts)
        del rows, act, g

        grad_rows, g = self.gate_up.backward(grad_gate_up, h_gate_up, starts)
        if h_gate_up is not None and g is not None:
            self.gate_up.learn(grad_gate_up, h_gate_up, g, normed.index_select(0, tokens), starts)
        del grad_gate_up
        grad_normed = grad_rows.index_select(0, routed.places.flatten()).view(*routed.places.shape, -1).sum(1)
        return grad_normed.add_(self._through_router(grad_weights[routed.places], routed).to(grad.dtype))

    def _through_router(self, grad_weights: torch.Tensor, routed: Routed) -> torch.Tensor:
        """d weights [T, k] -> d normed [T, D], fp32."""
        chosen = routed.probs.gather(1, routed.chosen)
        if self.normalised:
            mean = (grad_weights * routed.weights).sum(1, keepdim=True)
            grad_weights = (grad_weights - mean) / chosen.sum(1, keepdim=True)
        inner = (grad_weights * chosen).sum(1, keepdim=True)
        grad_logits = torch.zeros_like(routed.probs).scatter_(1, routed.chosen, grad_weights).sub_(inner)
        return grad_logits.mul_(routed.probs) @ self.router


def _by_row(values: torch.Tensor, routed: Routed) -> torch.Tensor:
    """[T, k] -> [S], in the rows' order."""
    return torch.empty_like(values).view(-1).scatter_(0, routed.places.flatten(), values.flatten())


def _weighed(said: torch.Tensor, routed: Routed) -> torch.Tensor:
    """[S, D] -> [T, D]: each token's rows, weighed and added in the order of its choices."""
    mine = said.index_select(0, routed.places.flatten()).view(*routed.places.shape, -1)
    return torch.einsum("tk,tkd->td", routed.weights.to(said.dtype), mine)
