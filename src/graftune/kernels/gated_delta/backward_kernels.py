"""The kernels of the delta rule's backward; kernel.py launches them, reference.py has the formulas.

dW is complete only when the scan has passed a chunk: `local` writes the part from the outputs of the same chunk,
`scan_back` adds the part from later chunks. The last kernel has one program for all value heads of a key head, which
adds up their gradients of q and k in a fixed order. It needs no product of q and k or of k and k: the gradients of the
decay are sums over rows of tiles that it holds anyway.

Legend as in forward_kernels.py.
"""
# mypy: disallow-untyped-defs=False
# The parameters of a kernel are pointers and numbers on the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.gated_delta.forward_kernels import (
    chunk_rows,
    decay_between,
    key_head,
    load_rows,
    state_place,
    store_rows,
    value_head,
)


@launch.kernel
def local(
    q_ptr, k_ptr, grad_ptr, bounds_ptr, total_ptr, norms_ptr, grad_w_ptr, scale, T, K, V, q_stride, k_stride,
    grad_stride, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr,
    TILED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a chunk of one value head: the part of dW [T, V, E] from the outputs of the chunk."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    rows, live = chunk_rows(bounds_ptr, chunk, C)
    if tl.load(bounds_ptr + chunk * 2 + 1) <= tl.load(bounds_ptr + chunk * 2):
        return
    source = key_head(head, K, GROUP, TILED)
    at = tl.arange(0, C)
    q = load_rows(q_ptr, rows, live, q_stride, source * D, D, BD)
    k = load_rows(k_ptr, rows, live, k_stride, source * D, D, BD)
    total = tl.load(total_ptr + head * T + rows, live, other=0.0)
    q_norm = scale * tl.load(norms_ptr + source * T + rows, live, other=0.0)
    k_norm = tl.load(norms_ptr + (K + source) * T + rows, live, other=0.0)
    # Row j, column i: what token i >= j reads of what token j has written.
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * k_norm[:, None] * q_norm[None, :]
    kept = (at[:, None] <= at[None, :]) & live[None, :]
    scores = tl.where(kept, scores * tl.exp(total[None, :] - total[:, None]), 0.0).to(q.dtype)
    for column in range(0, E, BE):
        grad = load_rows(grad_ptr, rows, live, grad_stride, head * E + column, E - column, BE)
        grad_w = tl.dot(scores, grad, input_precision=PRECISION)
        store_rows(grad_w_ptr, grad_w, rows, live, V * E, head * E + column, E - column, BE)


@launch.kernel
def scan_back(
    q_ptr, k_ptr, w_ptr, grad_ptr, grad_w_ptr, bounds_ptr, first_ptr, total_ptr, norms_ptr, grad_states_ptr, scale, T,
    K, V, q_stride, k_stride, grad_stride, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    GROUP: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a document, a value head and BE columns, from the last chunk to the first: the gradient of the state after
    each chunk [N, V, D, E], and the rest of dW."""
    document, head, column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BE
    source = key_head(head, K, GROUP, TILED)
    kind = k_ptr.dtype.element_ty
    state = tl.zeros([BD, BE], tl.float32)
    begin, end = tl.load(first_ptr + document), tl.load(first_ptr + document + 1)
    for step in range(end - begin):
        chunk = end - 1 - step
        place, exists = state_place(grad_states_ptr, chunk, head, V, column, D, E, BD, BE)
        given = state.to(kind)
        tl.store(place, given, exists)
        rows, live = chunk_rows(bounds_ptr, chunk, C)
        last = tl.load(bounds_ptr + chunk * 2 + 1) - 1
        whole = tl.load(total_ptr + head * T + last)
        total = tl.load(total_ptr + head * T + rows, live, other=0.0)
        q_norm = scale * tl.load(norms_ptr + source * T + rows, live, other=0.0)
        k_norm = tl.load(norms_ptr + (K + source) * T + rows, live, other=0.0)
        k = load_rows(k_ptr, rows, live, k_stride, source * D, D, BD)
        grad_w = load_rows(grad_w_ptr, rows, live, V * E, head * E + column, E - column, BE).to(tl.float32)
        grad_w += tl.dot(k, given, input_precision=PRECISION) * (k_norm * tl.exp(whole - total))[:, None]
        store_rows(grad_w_ptr, grad_w, rows, live, V * E, head * E + column, E - column, BE)
        q = load_rows(q_ptr, rows, live, q_stride, source * D, D, BD)
        grad = load_rows(grad_ptr, rows, live, grad_stride, head * E + column, E - column, BE).to(tl.float32)
        read = (grad * (q_norm * tl.exp(total))[:, None]).to(kind)
        state = tl.dot(tl.trans(q), read, state * tl.exp(whole), input_precision=PRECISION)
        w = load_rows(w_ptr, rows, live, V * D, head * D, D, BD)
        state = tl.dot(tl.trans(w), (-grad_w).to(kind), state, input_precision=PRECISION)


@triton.jit
def _through_norm(grad, x, norm):
    """The gradient of x, for the gradient of its normed value n = x norm."""
    n = x.to(tl.float32) * norm[:, None]
    return norm[:, None] * (grad - n * tl.sum(n * grad, 1)[:, None])


@launch.kernel
def grads(
    grad_ptr, q_ptr, k_ptr, v_ptr, beta_ptr, bounds_ptr, total_ptr, norms_ptr, inverse_ptr, w_ptr, grad_w_ptr,
    states_ptr, grad_states_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr, grad_decay_ptr, grad_beta_ptr, scale, T, K, V,
    grad_stride, q_stride, k_stride, v_stride, grad_q_stride, grad_k_stride, grad_v_stride, D: tl.constexpr,
    E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a chunk of one key head: all gradients. Here w_ptr is W [T, V, E]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    rows, live = chunk_rows(bounds_ptr, chunk, C)
    last = tl.load(bounds_ptr + chunk * 2 + 1) - 1
    if last < tl.load(bounds_ptr + chunk * 2):
        return
    at = tl.arange(0, C)
    kind = k_ptr.dtype.element_ty
    q = load_rows(q_ptr, rows, live, q_stride, head * D, D, BD)
    k = load_rows(k_ptr, rows, live, k_stride, head * D, D, BD)
    q_norm = tl.load(norms_ptr + head * T + rows, live, other=0.0)
    k_norm = tl.load(norms_ptr + (K + head) * T + rows, live, other=0.0)
    grad_q, grad_k = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
    for member in range(GROUP):
        own = value_head(head, member, K, GROUP, TILED)
        beta = tl.load(beta_ptr + rows * V + own, live, other=0.0)
        whole = tl.load(total_ptr + own * T + last)
        total = tl.load(total_ptr + own * T + rows, live, other=0.0)
        grown, left = scale * tl.exp(total), tl.exp(whole - total)
        inverse = tl.load(inverse_ptr + (rows * V + own)[:, None] * C + at[None, :], live[:, None], other=0.0)
        read, across = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        own_q = tl.zeros([C, BD], tl.float32)
        grad_beta, grad_total, kept = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), tl.zeros([BD], tl.float32)
        for column in range(0, E, BE):
            width = E - column
            grad = load_rows(grad_ptr, rows, live, grad_stride, own * E + column, width, BE)
            written = load_rows(w_ptr, rows, live, V * E, own * E + column, width, BE)
            grad_w = load_rows(grad_w_ptr, rows, live, V * E, own * E + column, width, BE)
            v = load_rows(v_ptr, rows, live, v_stride, own * E + column, width, BE).to(tl.float32)
            solved = tl.dot(tl.trans(inverse), grad_w, input_precision=PRECISION)
            grad_v = beta[:, None] * solved
            store_rows(grad_v_ptr, grad_v, rows, live, grad_v_stride, own * E + column, width, BE)
            grad_total -= tl.sum(grad_v * v, 1)
            grad_beta += tl.sum(solved * written.to(tl.float32), 1)
            place, exists = state_place(states_ptr, chunk, own, V, column, D, E, BD, BE)
            state = tl.load(place, exists, other=0.0)
            place, exists = state_place(grad_states_ptr, chunk, own, V, column, D, E, BD, BE)
            after = tl.load(place, exists, other=0.0)
            kept += tl.sum(state.to(tl.float32) * after.to(tl.float32), 1) * tl.exp(whole)
            own_q = tl.dot(grad, tl.trans(state), own_q, input_precision=PRECISION)
            read = tl.dot(grad, tl.trans(written), read, input_precision=PRECISION)
            across = tl.dot(solved.to(kind), tl.trans(written), across, input_precision=PRECISION)
            write = (written.to(tl.float32) * left[:, None]).to(kind)
            part = tl.dot(write, tl.trans(after), input_precision=PRECISION)
            kept += tl.sum(part * (k.to(tl.float32) * k_norm[:, None]), 0)
            seen = (solved * -(beta * tl.exp(total))[:, None]).to(kind)
            grad_k += tl.dot(seen, tl.trans(state), part, input_precision=PRECISION)
        decays = decay_between(total, live, C)
        read *= decays * scale
        across = tl.where(at[:, None] > at[None, :], across * decays * beta[:, None], 0.0)
        by_key = (read * k_norm[None, :]).to(kind)
        own_q = tl.dot(by_key, k, own_q * grown[:, None], input_precision=PRECISION)
        grad_total += tl.sum(own_q * (q.to(tl.float32) * q_norm[:, None]), 1)
        grad_q += own_q
        by_query = (tl.trans(read) * q_norm[None, :]).to(kind)
        grad_k = tl.dot(by_query, q, grad_k, input_precision=PRECISION)
        both = ((across + tl.trans(across)) * -k_norm[None, :]).to(kind)
        grad_k = tl.dot(both, k, grad_k, input_precision=PRECISION)
        grad_decay = tl.cumsum(grad_total, 0, reverse=True) + tl.sum(kept, 0)
        tl.store(grad_decay_ptr + rows * V + own, grad_decay, live)
        tl.store(grad_beta_ptr + rows * V + own, grad_beta / tl.where(beta > 0.0, beta, 1.0), live)  # W is 0 there too
    store_rows(grad_q_ptr, _through_norm(grad_q, q, q_norm), rows, live, grad_q_stride, head * D, D, BD)
    store_rows(grad_k_ptr, _through_norm(grad_k, k, k_norm), rows, live, grad_k_stride, head * D, D, BD)
