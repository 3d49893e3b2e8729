"""The decay and the step size of the gated delta rule, from two products of the stream:

    decay = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b)

a and b [T, V] may have any row stride; A_log and dt_bias [V] are fp32; decay and beta [T, V] are fp32 and contiguous.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.delta_gates import reference

__all__ = ["backward", "forward"]


@launch.operation("delta gates")
def forward(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, decay: torch.Tensor,
    beta: torch.Tensor,
) -> None:  # fmt: skip
    """Write decay and beta."""
    _check(a, b, a_log, dt_bias, decay, beta)
    launch.implementation(reference, a).forward(a, b, a_log, dt_bias, decay, beta)


@launch.operation("delta gates")
def backward(
    grad_decay: torch.Tensor,
    grad_beta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    grad_a: torch.Tensor,
    grad_b: torch.Tensor,
    grad_a_log: torch.Tensor | None = None,
    grad_dt_bias: torch.Tensor | None = None,
) -> None:
    """Write the gradients of a and b. Add those of A_log and dt_bias to `grad_a_log` and `grad_dt_bias` if given (both
    or neither); the reference does this, since only full training needs it."""
    _check(a, b, a_log, dt_bias, grad_decay, grad_beta)
    assert grad_a.shape == grad_b.shape == a.shape and grad_a.stride(1) == grad_b.stride(1) == 1
    assert (grad_a_log is None) == (grad_dt_bias is None)
    if launch.fused(a) and grad_a_log is None:
        from graftune.kernels.delta_gates import kernel

        kernel.backward(grad_decay, grad_beta, a, b, a_log, dt_bias, grad_a, grad_b)
    else:
        reference.backward(
            grad_decay, grad_beta, a, b, a_log, dt_bias, grad_a, grad_b, grad_a_log, grad_dt_bias
        )  # fmt: skip


def _check(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, decay: torch.Tensor,
    beta: torch.Tensor,
) -> None:  # fmt: skip
    assert a.shape == b.shape == decay.shape == beta.shape and a_log.shape == dt_bias.shape == a.shape[1:]
    assert a.stride(1) == b.stride(1) == 1 and decay.is_contiguous() and beta.is_contiguous()
    assert a_log.dtype == dt_bias.dtype == decay.dtype == beta.dtype == torch.float32
