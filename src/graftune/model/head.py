"""The end of the decoder: the final norm and the LM head, over the rows that a loss asks for.

The decoder does not depend on the loss. `Decoder.read_out` ends a forward pass with an `Output`, which a loss calls:
`cross_entropy` computes loss and gradient in one pass over the head; `log_probs` and `grad_of` are the two passes of a
loss whose gradient depends on the log-probabilities. `backward` continues through the final norm to the gradient of the
stream, from which the backward of the blocks starts. The alternative, a `loss` method of the decoder with a branch per
loss, would grow with every loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from graftune import spans
from graftune.kernels import linear_cross_entropy, rms_norm
from graftune.kernels.lora_linear import add_product_
from graftune.model.frozen import Dense, Frozen, Scratch, Trained
from graftune.model.projection import augmented_buffer


@dataclass
class NewRows:
    """Embedding or head rows of added tokens: trained, in the arena, after the base's own vocabulary."""

    value: torch.Tensor  # [added, D], compute dtype
    grad: torch.Tensor  # fp32
    start: torch.Tensor  # their values before training


@dataclass
class Head:
    """The LM head: the base's frozen rows, followed by the rows of added tokens."""

    frozen: Frozen
    new_rows: NewRows | None = None
    # The buffer for dequantised weights. A dense head does not need it, so the logits of a loss are written to it, if
    # they fit, and are valid until the next product of a block.
    scratch: Scratch | None = None

    @property
    def out_features(self) -> int:
        return self.frozen.out_features + (len(self.new_rows.value) if self.new_rows else 0)

    def of(self, adapted: bool) -> Head:
        if adapted or self.new_rows is None:
            return self
        return replace(self, new_rows=replace(self.new_rows, value=self.new_rows.start))

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        spans.product("head")
        scratch, size = self.scratch, (len(x), self.frozen.out_features)
        if scratch is not None and isinstance(self.frozen, Dense) and Scratch.size(*size) <= len(scratch.flat):
            logits = self.frozen.matmul(x, scratch.matrix(*size))
        else:
            logits = self.frozen.matmul(x)
        if self.new_rows is not None:
            logits = torch.cat((logits, x @ self.new_rows.value.t()), 1)
        return logits

    def input_grad(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        spans.product("head")
        if isinstance(self.frozen, Trained):
            self.frozen.accumulate_grad(grad, x)
        if self.new_rows is None:
            return self.frozen.input_grad(grad)
        base, extra = grad.split([self.frozen.out_features, len(self.new_rows.value)], 1)
        add_product_(self.new_rows.grad, extra.t(), x)
        return self.frozen.input_grad(base).addmm_(extra, self.new_rows.value)


@dataclass
class Output:
    """Rows [R, D] of one forward pass after the final norm, and the head that reads them.

    `labels` are the tokens that the rows should predict; -1 marks padding, which does not enter the loss.
    """

    head: Head
    normed: torch.Tensor  # [R, D]
    x: torch.Tensor  # [R, D]: the residual stream before the norm
    rstd: torch.Tensor  # [R]
    weight: torch.Tensor  # of the norm
    weight_grad: torch.Tensor | None
    adapter_columns: int  # extra columns of the stream's gradient, for the adapters of the last block
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    def cross_entropy(
        self,
        labels: torch.Tensor,
        *,
        weights: torch.Tensor | None = None,
        need_grad: bool = True,
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sum of the rows' losses, multiplied by `weights` [R] if given, and the gradient of the normed rows."""
        return linear_cross_entropy.forward(
            self.normed,
            self.head,
            labels,
            weights=weights,
            need_grad=need_grad,
            scale=scale,
            factor=self.logit_scale,
            cap=self.logit_cap,
        )

    def log_probs(self, labels: torch.Tensor) -> torch.Tensor:
        """The first of two passes: log p(label) [R] in fp32, 0 where a row is padding."""
        return linear_cross_entropy.log_probs(
            self.normed, self.head, labels, factor=self.logit_scale, cap=self.logit_cap
        )

    def grad_of(self, labels: torch.Tensor, slopes: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The second of two passes: the gradient of the normed rows, given that of every log p(label) [R]."""
        grad = self.cross_entropy(labels, weights=-slopes, scale=scale)[1]
        assert grad is not None
        return grad

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Turns the gradient of the normed rows into the stream's, in a buffer that `Decoder.backward` overwrites."""
        width = self.x.shape[1]
        out = augmented_buffer(self.x, len(self.x), width, self.adapter_columns)
        with spans.covering("final norm"):
            rms_norm.add_backward(grad, self.x, self.rstd, self.weight, None, self.weight_grad, out[:, :width])
        return out
