"""The kernels of the delta rule's forward; kernel.py launches them, reference.py has the formulas.

q and k are read unnormalised: the inverse lengths of their rows are multiplied into small tiles or into results.

w = (I + A)^-1 b exp(G) k and u = (I + A)^-1 b v; the scan overwrites u with W = u - w S.

Legend: C tokens of a chunk, D width of a key head (BD: rounded up to a power of two), E width of a value head (BE of
its columns at a time), K key heads, V value heads, GROUP = V / K.
"""
# mypy: disallow-untyped-defs=False
# The parameters of a kernel are pointers and numbers on the device, which have no Python type.

from __future__ import annotations

import triton
import triton.language as tl

from graftune.kernels import launch


@triton.jit
def chunk_rows(bounds_ptr, chunk, C: tl.constexpr):
    """The tokens of a chunk, which of them exist, and the token after the last one."""
    end = tl.load(bounds_ptr + chunk * 3 + 1)
    rows = tl.load(bounds_ptr + chunk * 3).to(tl.int64) + tl.arange(0, C)
    return rows, rows < end, end


@triton.jit
def is_empty(bounds_ptr, chunk):
    return tl.load(bounds_ptr + chunk * 3 + 1) <= tl.load(bounds_ptr + chunk * 3)


@triton.jit
def load_rows(ptr, rows, live, stride, column, width, B: tl.constexpr):
    """[C, B]: columns from `column` on of these rows, zero beyond `width` columns."""
    inner = tl.arange(0, B)
    place = ptr + rows[:, None] * stride + (column + inner)[None, :]
    return tl.load(place, live[:, None] & (inner < width)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, x, rows, live, stride, column, width, B: tl.constexpr):
    inner = tl.arange(0, B)
    place = ptr + rows[:, None] * stride + (column + inner)[None, :]
    tl.store(place, x.to(ptr.dtype.element_ty), live[:, None] & (inner < width)[None, :])


@triton.jit
def state_place(ptr, index, head, V, column, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr):
    """Addresses [BD, BE] in states [..., V, D, E], and which of them exist."""
    inner, columns = tl.arange(0, BD), column + tl.arange(0, BE)
    place = (tl.cast(index, tl.int64) * V + head) * (D * E) + inner[:, None] * E + columns[None, :]
    return ptr + place, (inner < D)[:, None] & (columns < E)[None, :]


@triton.jit
def key_head(head, K, GROUP: tl.constexpr, TILED: tl.constexpr):
    return head % K if TILED else head // GROUP


@triton.jit
def value_head(head, member, K, GROUP: tl.constexpr, TILED: tl.constexpr):
    """The value head that is this member of a key head's group."""
    return member * K + head if TILED else head * GROUP + member


@triton.jit
def decay_between(total, live, C: tl.constexpr):
    """M [C, C]: the decay from token j to token i >= j, else zero."""
    at = tl.arange(0, C)
    kept = (at[:, None] >= at[None, :]) & live[:, None]
    return tl.where(kept, tl.exp(total[:, None] - total[None, :]), 0.0)


@triton.jit
def _inverse(a, C: tl.constexpr, B: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for strictly lower a. The blocks of B on the diagonal are inverted together, row by row; of two
    neighbouring blocks that are inverted, the block below the diagonal then follows by two products. Powers of a would
    need fewer products, but they can overflow."""
    blocks: tl.constexpr = C // B
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    on_diagonal = (tl.arange(0, blocks)[:, None] == tl.arange(0, blocks)[None, :])[:, None, :, None]
    small = tl.sum(tl.where(on_diagonal, tl.reshape(a, [blocks, B, blocks, B]), 0.0), 2)
    row, column = tl.arange(0, B)[None, :, None], tl.arange(0, B)[None, None, :]
    inverted = tl.zeros([blocks, B, B], tl.float32) + tl.where(row == column, 1.0, 0.0)
    for index in range(1, B):
        factors = tl.sum(tl.where(row == index, small, 0.0), 1)  # zero from the diagonal on
        found = tl.sum(factors[:, :, None] * inverted, 1)
        inverted -= tl.where(row == index, found[:, None, :], 0.0)
    x = tl.reshape(tl.where(on_diagonal, inverted[:, :, None, :], 0.0), [C, C])
    for level in tl.static_range(LEVELS):  # blocks of B << level are joined
        below = tl.where(
            (i // (B << (level + 1)) == j // (B << (level + 1))) & (i // (B << level) != j // (B << level)), a, 0.0
        )
        x -= tl.dot(tl.dot(x, below, input_precision=PRECISION), x, input_precision=PRECISION)
    return x


@launch.kernel
def solve(
    q_ptr, k_ptr, decay_ptr, beta_ptr, bounds_ptr, total_ptr, norms_ptr, inverse_ptr, T, K, V, q_stride, k_stride, eps,
    D: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr, SOLVE: tl.constexpr,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a chunk of one key head: the norms [2, K, T] of q and k (their inverse lengths), and for each value head G
    [V, T] and the inverse [T, V, C]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    if is_empty(bounds_ptr, chunk):
        return
    rows, live, _ = chunk_rows(bounds_ptr, chunk, C)
    at = tl.arange(0, C)
    q = load_rows(q_ptr, rows, live, q_stride, head * D, D, BD).to(tl.float32)
    tl.store(norms_ptr + head * T + rows, tl.rsqrt(tl.sum(q * q, 1) + eps), live)
    k = load_rows(k_ptr, rows, live, k_stride, head * D, D, BD)
    k_norm = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + eps)
    tl.store(norms_ptr + (K + head) * T + rows, k_norm, live)
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION) * k_norm[:, None] * k_norm[None, :]
    products = tl.where(at[:, None] > at[None, :], products, 0.0)
    for member in range(GROUP):
        own = value_head(head, member, K, GROUP, TILED)
        beta = tl.load(beta_ptr + rows * V + own, live, other=0.0)
        total = tl.cumsum(tl.load(decay_ptr + rows * V + own, live, other=0.0), 0)
        tl.store(total_ptr + own * T + rows, total, live)
        inverse = _inverse(products * decay_between(total, live, C) * beta[:, None], C, BLOCK, LEVELS, SOLVE)
        store_rows(inverse_ptr, inverse, rows, live, V * C, own * C, C, C)


@launch.kernel
def factors(
    k_ptr, v_ptr, beta_ptr, bounds_ptr, total_ptr, norms_ptr, inverse_ptr, w_ptr, u_ptr, T, K, V, k_stride, v_stride,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a chunk of one value head: w [T, V, D] and u [T, V, E]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    if is_empty(bounds_ptr, chunk):
        return
    rows, live, _ = chunk_rows(bounds_ptr, chunk, C)
    source = key_head(head, K, GROUP, TILED)
    inverse = load_rows(inverse_ptr, rows, live, V * C, head * C, C, C)
    beta = tl.load(beta_ptr + rows * V + head, live, other=0.0)
    total = tl.load(total_ptr + head * T + rows, live, other=0.0)
    k_norm = tl.load(norms_ptr + (K + source) * T + rows, live, other=0.0)
    by_key = (inverse.to(tl.float32) * (beta * tl.exp(total) * k_norm)[None, :]).to(inverse.dtype)
    k = load_rows(k_ptr, rows, live, k_stride, source * D, D, BD)
    store_rows(w_ptr, tl.dot(by_key, k, input_precision=PRECISION), rows, live, V * D, head * D, D, BD)
    by_value = (inverse.to(tl.float32) * beta[None, :]).to(inverse.dtype)
    for column in range(0, E, BE):
        v = load_rows(v_ptr, rows, live, v_stride, head * E + column, E - column, BE)
        u = tl.dot(by_value, v, input_precision=PRECISION)
        store_rows(u_ptr, u, rows, live, V * E, head * E + column, E - column, BE)


@launch.kernel
def scan(
    k_ptr, w_ptr, u_ptr, bounds_ptr, first_ptr, total_ptr, norms_ptr, before_ptr, states_ptr, after_ptr, T, K, V,
    k_stride, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr,
    TILED: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a document, a value head and BE columns: the state before each chunk [N, V, D, E] and W over u. BEFORE and
    AFTER: the states [S, V, D, E] before and after the documents are given, and wanted."""
    document, head, column = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BE
    source = key_head(head, K, GROUP, TILED)
    state = tl.zeros([BD, BE], tl.float32)
    if BEFORE:
        place, exists = state_place(before_ptr, document, head, V, column, D, E, BD, BE)
        state += tl.load(place, exists, other=0.0)
    for chunk in range(tl.load(first_ptr + document), tl.load(first_ptr + document + 1)):
        place, exists = state_place(states_ptr, chunk, head, V, column, D, E, BD, BE)
        given = state.to(k_ptr.dtype.element_ty)
        tl.store(place, given, exists)
        rows, live, end = chunk_rows(bounds_ptr, chunk, C)
        w = load_rows(w_ptr, rows, live, V * D, head * D, D, BD)
        u = load_rows(u_ptr, rows, live, V * E, head * E + column, E - column, BE).to(tl.float32)
        written = u - tl.dot(w, given, input_precision=PRECISION)
        store_rows(u_ptr, written, rows, live, V * E, head * E + column, E - column, BE)
        whole = tl.load(total_ptr + head * T + end - 1)
        total = tl.load(total_ptr + head * T + rows, live, other=0.0)
        k_norm = tl.load(norms_ptr + (K + source) * T + rows, live, other=0.0)
        left = (written * (k_norm * tl.exp(whole - total))[:, None]).to(k_ptr.dtype.element_ty)
        k = load_rows(k_ptr, rows, live, k_stride, source * D, D, BD)
        state = tl.dot(tl.trans(k), left, state * tl.exp(whole), input_precision=PRECISION)
    if AFTER:
        place, exists = state_place(after_ptr, document, head, V, column, D, E, BD, BE)
        tl.store(place, state, exists)


@launch.kernel
def output(
    q_ptr, k_ptr, w_ptr, bounds_ptr, total_ptr, norms_ptr, states_ptr, out_ptr, scale, T, K, V, q_stride, k_stride,
    out_stride, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr,
    TILED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a chunk of one value head: the output [T, V, E]. Here w_ptr is W [T, V, E]."""
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
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * q_norm[:, None] * k_norm[None, :]
    scores = (scores * decay_between(total, live, C)).to(q.dtype)
    grown = (q_norm * tl.exp(total))[:, None]
    for column in range(0, E, BE):
        place, exists = state_place(states_ptr, chunk, head, V, column, D, E, BD, BE)
        out = tl.dot(q, tl.load(place, exists, other=0.0), input_precision=PRECISION) * grown
        written = load_rows(w_ptr, rows, live, V * E, head * E + column, E - column, BE)
        out = tl.dot(scores, written, out, input_precision=PRECISION)
        store_rows(out_ptr, out, rows, live, out_stride, head * E + column, E - column, BE)


@launch.kernel
def step(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, state_ptr, out_ptr, scale, eps, K, V, q_stride, k_stride, v_stride,
    out_stride, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, GROUP: tl.constexpr,
    TILED: tl.constexpr,
):  # fmt: skip
    """For one new token of a sequence, a value head and BE columns: the output, and the state in place."""
    row, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BE
    source = key_head(head, K, GROUP, TILED)
    inner, columns = tl.arange(0, BD), column + tl.arange(0, BE)
    q = tl.load(q_ptr + row * q_stride + source * D + inner, inner < D, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row * k_stride + source * D + inner, inner < D, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + row * v_stride + head * E + columns, columns < E, other=0.0).to(tl.float32)
    q *= scale * tl.rsqrt(tl.sum(q * q, 0) + eps)
    k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
    place, exists = state_place(state_ptr, row, head, V, column, D, E, BD, BE)
    state = tl.load(place, exists, other=0.0) * tl.exp(tl.load(decay_ptr + row * V + head))
    change = tl.load(beta_ptr + row * V + head) * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * change[None, :]
    tl.store(place, state, exists)
    out = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + row * out_stride + head * E + columns, out.to(out_ptr.dtype.element_ty), columns < E)
