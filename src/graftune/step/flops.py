"""Counts the floating-point operations that a model needs for a step: products with its weights and attention, forward
and backward. Padding, recomputation, adapters and cheap operations are left out, so that programs can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graftune.model.spec import LayerSpec, ModelSpec

STATE_OPERATIONS = 3 * 2  # of each value of a delta net's state, for one token, in a forward pass


@dataclass(frozen=True)
class StepFlops:
    """Operations per token and per response token."""

    per_token: float
    per_response: float  # of the head, which reads only the rows that predict a response token

    @staticmethod
    def of(spec: ModelSpec, lengths: Sequence[int] | np.ndarray, *, full: bool = False, forwards: int = 0) -> StepFlops:
        """`lengths`: tokens of the documents, for attention. `full`: every weight has a gradient. `forwards`: further
        forward passes of the loss, as those of its reference model."""
        passes, tokens = (3 if full else 2), np.asarray(lengths, dtype=np.float64)
        pairs = float((tokens**2).sum() / (2 * tokens.sum()))  # tokens that a token attends to, on average
        layers = sum(
            count * (_layer(kind, passes, pairs) + forwards * _layer(kind, 1, pairs))
            for kind, count in spec.kinds.items()
        )
        return StepFlops(layers, 2.0 * (passes + forwards) * spec.vocab * spec.width)

    def __call__(self, tokens: int, responses: int) -> float:
        return self.per_token * tokens + self.per_response * responses


def _layer(kind: LayerSpec, passes: int, pairs: float) -> float:
    """Operations of a layer for one token; `passes` 1: the forward pass alone. Attention has two products forward and
    five backward. A delta rule reads its state twice and writes it once, and twice as often in the backward pass."""
    total = 2.0 * passes * sum(part.active_values for part in kind.parts)
    states, products = (3, 7) if passes > 1 else (1, 2)
    total += sum(states * STATE_OPERATIONS * part.state_values for part in kind.parts)
    for shape in (part.attention for part in kind.parts):
        if shape is not None:
            seen = min(pairs, shape.window) if shape.window else pairs
            total += products * 2 * seen * shape.heads * shape.head_width
    return total
