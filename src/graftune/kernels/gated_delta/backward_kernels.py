"""The kernels of the delta rule's backward; kernel.py launches them, reference.py has the formulas.

dW is complete only when the scan has passed a chunk: `local` writes the part from the outputs of the same chunk,
`scan_back` adds the part from later chunks. `grad_values` also writes two tiles [C, C] of each chunk and value head,
with the norms of q and k in them:

    read        row i, column j <= i: the gradient of the product of q_i and k_j
    corrected   row i, column j < i: the gradient of the product of k_i and k_j

The last two kernels have one program for all value heads of a key head, which adds up their gradients of q and k in a
fixed order; the gradients of the decay are sums over rows of tiles that they hold anyway. In one kernel all these tiles
would not fit the registers.

No result of a product is transposed in registers: Triton 3.4 to 3.7.0 compiles a product of such a tile wrongly on
Hopper. A tile that is needed both ways is stored and loaded.

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
    is_empty,
    key_head,
    load_rows,
    state_place,
    store_rows,
    value_head,
)


@triton.jit
def _decay_by(total, live, C: tl.constexpr):
    """[j, i]: the decay from token j to token i >= j, else zero."""
    at = tl.arange(0, C)
    kept = (at[:, None] <= at[None, :]) & live[None, :]
    return tl.where(kept, tl.exp(total[None, :] - total[:, None]), 0.0)


@launch.kernel
def local(
    q_ptr, k_ptr, grad_ptr, bounds_ptr, total_ptr, norms_ptr, grad_w_ptr, scale, T, K, V, q_stride, k_stride,
    grad_stride, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr,
    TILED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a chunk of one value head: the part of dW [T, V, E] from the outputs of the chunk."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    if is_empty(bounds_ptr, chunk):
        return
    rows, live, _ = chunk_rows(bounds_ptr, chunk, C)
    source = key_head(head, K, GROUP, TILED)
    q = load_rows(q_ptr, rows, live, q_stride, source * D, D, BD)
    k = load_rows(k_ptr, rows, live, k_stride, source * D, D, BD)
    total = tl.load(total_ptr + head * T + rows, live, other=0.0)
    q_norm = scale * tl.load(norms_ptr + source * T + rows, live, other=0.0)
    k_norm = tl.load(norms_ptr + (K + source) * T + rows, live, other=0.0)
    # Row j, column i: what token i >= j reads of what token j has written.
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * k_norm[:, None] * q_norm[None, :]
    scores = (scores * _decay_by(total, live, C)).to(q.dtype)
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
        rows, live, stop = chunk_rows(bounds_ptr, chunk, C)
        whole = tl.load(total_ptr + head * T + stop - 1)
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


@launch.kernel
def grad_values(
    grad_ptr, v_ptr, beta_ptr, bounds_ptr, total_ptr, norms_ptr, inverse_ptr, w_ptr, grad_w_ptr, tiles_ptr, grad_v_ptr,
    grad_decay_ptr, grad_beta_ptr, scale, T, K, V, grad_stride, v_stride, grad_v_stride, D: tl.constexpr,
    E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a chunk of one value head: the gradients of v and beta, the part of the decay's gradient that belongs to v,
    and the tiles `read` and `corrected` [T, V, 2, C]. Here w_ptr is W [T, V, E]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    if is_empty(bounds_ptr, chunk):
        return
    rows, live, _ = chunk_rows(bounds_ptr, chunk, C)
    source = key_head(head, K, GROUP, TILED)
    at = tl.arange(0, C)
    kind = grad_ptr.dtype.element_ty
    beta = tl.load(beta_ptr + rows * V + head, live, other=0.0)
    read, corrected = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    grad_total, grad_beta = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for column in range(0, E, BE):
        width = E - column
        inverse = load_rows(inverse_ptr, rows, live, V * C, head * C, C, C)
        grad_w = load_rows(grad_w_ptr, rows, live, V * E, head * E + column, width, BE)
        written = load_rows(w_ptr, rows, live, V * E, head * E + column, width, BE)
        solved = tl.dot(tl.trans(inverse), grad_w, input_precision=PRECISION)
        grad_beta += tl.sum(solved * written.to(tl.float32), 1)
        solved *= beta[:, None]
        v = load_rows(v_ptr, rows, live, v_stride, head * E + column, width, BE)
        grad_total -= tl.sum(solved * v.to(tl.float32), 1)
        store_rows(grad_v_ptr, solved, rows, live, grad_v_stride, head * E + column, width, BE)
        corrected = tl.dot(solved.to(kind), tl.trans(written), corrected, input_precision=PRECISION)
        grad = load_rows(grad_ptr, rows, live, grad_stride, head * E + column, width, BE)
        read = tl.dot(grad, tl.trans(written), read, input_precision=PRECISION)
    total = tl.load(total_ptr + head * T + rows, live, other=0.0)
    k_norm = tl.load(norms_ptr + (K + source) * T + rows, live, other=0.0)
    q_norm = scale * tl.load(norms_ptr + source * T + rows, live, other=0.0)
    between = decay_between(total, live, C) * k_norm[None, :]
    store_rows(tiles_ptr, read * between * q_norm[:, None], rows, live, V * 2 * C, head * 2 * C, C, C)
    corrected = tl.where(at[:, None] > at[None, :], corrected * between * -k_norm[:, None], 0.0)
    store_rows(tiles_ptr, corrected, rows, live, V * 2 * C, head * 2 * C + C, C, C)
    tl.store(grad_decay_ptr + rows * V + head, tl.cumsum(grad_total, 0, reverse=True), live)
    tl.store(grad_beta_ptr + rows * V + head, grad_beta / tl.where(beta > 0.0, beta, 1.0), live)  # W is 0 there too


@triton.jit
def _through_norm(grad, x, norm):
    """The gradient of x, for the gradient of its normed value n = x norm, which is given times norm."""
    n = x.to(tl.float32) * norm[:, None]
    return grad - n * tl.sum(n * grad, 1)[:, None]


@launch.kernel
def grad_queries(
    grad_ptr, q_ptr, k_ptr, bounds_ptr, total_ptr, norms_ptr, tiles_ptr, states_ptr, grad_q_ptr, grad_decay_ptr, scale,
    T, K, V, grad_stride, q_stride, k_stride, grad_q_stride, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a chunk of one key head: the gradient of q, and the part of the decay's gradient from the output. A sum over
    grad_q of one value head is a difference: that needs no tile of its own."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    if is_empty(bounds_ptr, chunk):
        return
    rows, live, _ = chunk_rows(bounds_ptr, chunk, C)
    kind = k_ptr.dtype.element_ty
    q_norm = tl.load(norms_ptr + head * T + rows, live, other=0.0)
    grad_q = tl.zeros([C, BD], tl.float32)
    sum_before = tl.zeros([C], tl.float32)
    for member in range(GROUP):
        own = value_head(head, member, K, GROUP, TILED)
        total = tl.load(total_ptr + own * T + rows, live, other=0.0)
        read = load_rows(tiles_ptr, rows, live, V * 2 * C, own * 2 * C, C, C)
        k = load_rows(k_ptr, rows, live, k_stride, head * D, D, BD)
        grad_q = tl.dot(read, k, grad_q, input_precision=PRECISION)
        grown = scale * q_norm * tl.exp(total)
        for column in range(0, E, BE):
            grad = load_rows(grad_ptr, rows, live, grad_stride, own * E + column, E - column, BE)
            grad = (grad.to(tl.float32) * grown[:, None]).to(kind)
            place, exists = state_place(states_ptr, chunk, own, V, column, D, E, BD, BE)
            state = tl.load(place, exists, other=0.0)
            grad_q = tl.dot(grad, tl.trans(state), grad_q, input_precision=PRECISION)
        q = load_rows(q_ptr, rows, live, q_stride, head * D, D, BD)
        sum_after = tl.sum(grad_q * q.to(tl.float32), 1)
        decay_at = grad_decay_ptr + rows * V + own
        grad_decay = tl.cumsum(sum_after - sum_before, 0, reverse=True)
        tl.store(decay_at, grad_decay + tl.load(decay_at, live, other=0.0), live)
        sum_before = sum_after
    q = load_rows(q_ptr, rows, live, q_stride, head * D, D, BD)
    store_rows(grad_q_ptr, _through_norm(grad_q, q, q_norm), rows, live, grad_q_stride, head * D, D, BD)


@launch.kernel
def grad_keys(
    q_ptr, k_ptr, grad_v_ptr, bounds_ptr, total_ptr, norms_ptr, tiles_ptr, w_ptr, states_ptr, grad_states_ptr,
    grad_k_ptr, grad_decay_ptr, T, K, V, q_stride, k_stride, grad_v_stride, grad_k_stride, D: tl.constexpr,
    E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a chunk of one key head: the gradient of k, and the rest of the decay's. Here w_ptr is W."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    if is_empty(bounds_ptr, chunk):
        return
    rows, live, end = chunk_rows(bounds_ptr, chunk, C)
    followed = tl.load(bounds_ptr + chunk * 3 + 2)
    kind = k_ptr.dtype.element_ty
    k_norm = tl.load(norms_ptr + (K + head) * T + rows, live, other=0.0)
    grad_k = tl.zeros([C, BD], tl.float32)
    for member in range(GROUP):
        own = value_head(head, member, K, GROUP, TILED)
        whole = tl.load(total_ptr + own * T + end - 1)
        total = tl.load(total_ptr + own * T + rows, live, other=0.0)
        read = load_rows(tiles_ptr, rows, live, V * 2 * C, own * 2 * C, C, C)
        q = load_rows(q_ptr, rows, live, q_stride, head * D, D, BD)
        grad_k = tl.dot(tl.trans(read), q, grad_k, input_precision=PRECISION)
        corrected = load_rows(tiles_ptr, rows, live, V * 2 * C, own * 2 * C + C, C, C)
        k = load_rows(k_ptr, rows, live, k_stride, head * D, D, BD)
        grad_k = tl.dot(corrected, k, grad_k, input_precision=PRECISION)
        grad_k = tl.dot(tl.trans(corrected), k, grad_k, input_precision=PRECISION)
        after = tl.zeros([BD], tl.float32)
        for column in range(0, E, BE):
            place, exists = state_place(states_ptr, chunk, own, V, column, D, E, BD, BE)
            state = tl.load(place, exists, other=0.0)
            seen = load_rows(grad_v_ptr, rows, live, grad_v_stride, own * E + column, E - column, BE)
            seen = (seen.to(tl.float32) * -(k_norm * tl.exp(total))[:, None]).to(kind)
            grad_k = tl.dot(seen, tl.trans(state), grad_k, input_precision=PRECISION)
            place, exists = state_place(grad_states_ptr, chunk, own, V, column, D, E, BD, BE)
            grad_state = tl.load(place, exists, other=0.0)
            written = load_rows(w_ptr, rows, live, V * E, own * E + column, E - column, BE)
            write = (written.to(tl.float32) * (k_norm * tl.exp(whole - total))[:, None]).to(kind)
            grad_k = tl.dot(write, tl.trans(grad_state), grad_k, input_precision=PRECISION)
            if followed > 0:  # the state after the chunk is the next chunk's; behind a document its gradient is zero
                place, exists = state_place(states_ptr, chunk + 1, own, V, column, D, E, BD, BE)
                ahead = tl.load(place, exists, other=0.0).to(tl.float32)
                after += tl.sum(ahead * grad_state.to(tl.float32), 1)
        decay_at = grad_decay_ptr + rows * V + own
        tl.store(decay_at, tl.load(decay_at, live, other=0.0) + tl.sum(after, 0), live)
    k = load_rows(k_ptr, rows, live, k_stride, head * D, D, BD)
    store_rows(grad_k_ptr, _through_norm(grad_k, k, k_norm), rows, live, grad_k_stride, head * D, D, BD)
