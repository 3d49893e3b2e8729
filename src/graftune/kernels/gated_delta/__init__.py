"""The gated delta rule of Qwen3.5 over packed documents, see reference.py for the formulas.

q and k [T, K, D] have K key heads, v [T, V, E] has V value heads; V is a multiple of K. Value head h reads key head
h // (V / K), or h % K if `tiled` (the order of GGUF). q and k are normed inside. q, k, v, their gradients and the
output may have any row stride, with the heads of a token adjacent: they may be column ranges of one buffer. decay (the
logarithm, at most 0) and beta [T, V] are fp32 and contiguous. The state [S, V, D, E] of each document is fp32; it is
zero at the start of a document unless one is given, and it never passes a document boundary.

    forward    writes the output; returns what the backward needs, and the states after the documents if wanted
    backward   writes all gradients; documents started from a zero state
    step_      one new token of each sequence, for generation

Legend: T tokens, S documents, K key heads, V value heads, D width of a key head, E width of a value head.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.attention import Documents
from graftune.kernels.gated_delta import reference

__all__ = ["backward", "forward", "step_"]

Saved = tuple[torch.Tensor, ...]


@launch.operation("delta rule")
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    docs: Documents,
    scale: float,
    out: torch.Tensor,
    state: torch.Tensor | None = None,
    final_state: bool = False,
    tiled: bool = False,
) -> tuple[Saved, torch.Tensor | None]:
    """Write the output [T, V, E] to `out`. `state`: the state before each document, zero if not given. Returns what
    the backward needs and, with `final_state`, the state after each document; an empty document keeps its state."""
    _check(q, k, v, decay, beta)
    assert out.shape == v.shape and _adjacent(out), (out.shape, out.stride())
    assert state is None or (state.shape == _state_shape(k, v, docs) and state.is_contiguous()), state.shape
    implementation = launch.implementation(reference, q)
    return implementation.forward(q, k, v, decay, beta, docs, scale, out, state, final_state, tiled)


@launch.operation("delta rule")
def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    docs: Documents,
    scale: float,
    saved: Saved,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_decay: torch.Tensor,
    grad_beta: torch.Tensor,
    tiled: bool = False,
) -> None:
    """Write the gradients of q, k and v to `grads`, and those of decay and beta. `saved` is the forward's."""
    _check(q, k, v, decay, beta)
    _check(*grads, grad_decay, grad_beta)
    assert grad_out.shape == v.shape and _adjacent(grad_out), (grad_out.shape, grad_out.stride())
    implementation = launch.implementation(reference, q)
    implementation.backward(
        grad_out, q, k, v, decay, beta, docs, scale, saved, grads, grad_decay, grad_beta, tiled
    )  # fmt: skip


@launch.operation("delta rule")
def step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tiled: bool = False,
) -> None:
    """Write the output of one new token of each sequence, [S, V, E], to `out`; update `state` in place."""
    _check(q, k, v, decay, beta)
    assert state.shape == (len(q), v.shape[1], k.shape[2], v.shape[2]) and state.is_contiguous(), state.shape
    launch.implementation(reference, q).step_(q, k, v, decay, beta, state, scale, out, tiled)


def _state_shape(k: torch.Tensor, v: torch.Tensor, docs: Documents) -> tuple[int, int, int, int]:
    return len(docs.cu_seqlens) - 1, v.shape[1], k.shape[2], v.shape[2]


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> None:
    assert q.shape == k.shape and len(q) == len(v) and v.shape[1] % k.shape[1] == 0, (q.shape, k.shape, v.shape)
    assert decay.shape == beta.shape == v.shape[:2], (decay.shape, beta.shape, v.shape)
    assert decay.is_contiguous() and beta.is_contiguous()
    assert all(map(_adjacent, (q, k, v))), (q.stride(), k.stride(), v.stride())


def _adjacent(x: torch.Tensor) -> bool:
    """The layout contract: any row stride between tokens, the heads of a token adjacent."""
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)
