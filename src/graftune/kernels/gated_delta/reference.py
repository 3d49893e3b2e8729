"""The gated delta rule in plain torch, in chunks of tokens.

For every value head, with state S [D, E], key k, query q (both divided by their length), value v, decay g <= 0, beta b:

    S <- exp(g) S        S <- S + k (b (v - S^T k))^T        out = scale S^T q

A chunk of C tokens is computed at once. G is the sum of g from the start of the chunk, S the state before the chunk,
M_ij = exp(G_i - G_j) for i >= j, else 0. What the tokens write, W [C, E], solves a triangular system:

    (I + A) W = b v - b exp(G) (k S)                A = b (k k^T) M, strictly lower
    out = scale (exp(G) (q S) + ((q k^T) M) W)
    S'  = exp(G_C) S + (exp(G_C - G) k)^T W         the state after the chunk

Backward, from the last chunk to the first, with dS' the gradient of the state after the chunk:

    dW  = scale ((q k^T) M)^T dout + exp(G_C - G) (k dS')            Y = (I + A)^-T dW
    dS  = exp(G_C) dS' + scale (exp(G) q)^T dout - (b exp(G) k)^T Y
    dq  = scale (exp(G) (dout S^T) + ((dout W^T) M) k)
    dk  = scale ((dout W^T) M)^T q + exp(G_C - G) (W dS'^T) - b exp(G) (Y S^T) - (B + B^T) k,    B = b (Y W^T) M, strict
    dv  = b Y
    db  = sum over columns of Y (v - exp(G) (k S) - ((k k^T) M) W)   = Y W / b
    dG  = sum over columns of dout out - dv v;   dG_C += sum of S' dS'

The last line holds because exp(G_i) scales the whole row out_i and all of W_i but b v, and exp(-G_j) scales every use
of W_j after it was computed; most terms cancel. dg is the sum of dG from the token to the end of its chunk.

Saves nothing: the backward recomputes. Legend: N chunks, C tokens of a chunk, V value heads, D, E as in __init__.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graftune.kernels import launch
from graftune.kernels.attention import Documents

CHUNK, LEAST_CHUNK = 64, 16
EPS = 1e-6  # of the norm of q and k


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, docs: Documents,
    scale: float, out: torch.Tensor, state: torch.Tensor | None, final_state: bool, tiled: bool,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:  # fmt: skip
    layout = _layout(docs, q)
    chunks = DeltaChunks.of(q, k, v, decay, beta, layout, tiled)
    starts, written, last = _scan(chunks, layout, state)
    out.copy_(layout.tokens(_output(chunks, starts, written, scale)))
    return (), last if final_state else None


def backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
    docs: Documents, scale: float, saved: tuple[torch.Tensor, ...],
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], grad_decay: torch.Tensor, grad_beta: torch.Tensor,
    tiled: bool,
) -> None:  # fmt: skip
    layout = _layout(docs, q)
    c = DeltaChunks.of(q, k, v, decay, beta, layout, tiled)
    starts, written, _ = _scan(c, layout, None)
    grad = layout.chunks(grad_out).to(c.q.dtype)
    strict = c.mask.tril(-1)
    scores = scale * (c.q @ c.k.mT) * c.mask

    # The scan from the last chunk to the first.
    grad_written = scores.mT @ grad
    reads = scale * (c.q * c.grown).mT @ grad
    grad_after, solved = torch.zeros_like(starts), torch.empty_like(grad_written)
    state = starts.new_zeros(layout.documents, *starts.shape[1:])
    for documents, chunks in reversed(layout.steps):
        after = state[documents]
        grad_after[chunks] = after
        grad_written[chunks] += c.k_left[chunks] @ after
        solved[chunks] = c.inverse[chunks].mT @ grad_written[chunks]
        state[documents] = c.whole[chunks] * after + reads[chunks] - c.k_beta[chunks].mT @ solved[chunks]

    grad_scores = scale * (grad @ written.mT) * c.mask
    across = c.beta * (solved @ written.mT) * strict
    dq = scale * c.grown * (grad @ starts.mT) + grad_scores @ c.k
    dk = grad_scores.mT @ c.q + c.left * (written @ grad_after.mT) - c.beta * c.grown * (solved @ starts.mT)
    dk -= (across + across.mT) @ c.k
    seen = c.grown * (c.k @ starts) + ((c.k @ c.k.mT) * strict) @ written
    out = _output(c, starts, written, scale)
    cumulated = (grad * out).sum(-1) - (c.beta * solved * c.v).sum(-1)
    cumulated[..., -1] += (grad_after * (c.whole * starts + c.k_left.mT @ written)).sum((-1, -2))

    grads[0].copy_(_through_norm(layout.tokens(_per_key_head(dq, q, tiled)), q))
    grads[1].copy_(_through_norm(layout.tokens(_per_key_head(dk, k, tiled)), k))
    grads[2].copy_(layout.tokens(c.beta * solved))
    grad_decay.copy_(layout.tokens(cumulated.flip(-1).cumsum(-1).flip(-1).unsqueeze(-1)).squeeze(-1))
    grad_beta.copy_(layout.tokens((solved * (c.v - seen)).sum(-1, keepdim=True)).squeeze(-1))


def step_(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    scale: float, out: torch.Tensor, tiled: bool,
) -> None:  # fmt: skip
    heads = _key_heads(k, v, tiled)
    q, k = (_normed(x).index_select(1, heads) for x in (q, k))
    state.mul_(decay.exp()[..., None, None])
    seen = torch.einsum("svd,svde->sve", k, state)
    state.addcmul_(k.unsqueeze(-1), (beta.unsqueeze(-1) * (v.float() - seen)).unsqueeze(-2))
    out.copy_(torch.einsum("svd,svde->sve", scale * q, state))


class ChunkLayout(NamedTuple):
    """Where the tokens of the documents are in chunks; the last chunk of a document is filled up with zeros."""

    size: int  # C
    documents: int
    rows: torch.Tensor  # [N * C]: the token at each place of the chunks, T where there is none
    places: torch.Tensor  # [T]: the place of each token
    steps: list[tuple[torch.Tensor, torch.Tensor]]  # step i: the documents with more than i chunks, and their i-th ones

    def chunks(self, x: torch.Tensor) -> torch.Tensor:
        """[T, V, X] -> [N, V, C, X]."""
        padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
        chunked = padded.index_select(0, self.rows).unflatten(0, (len(self.rows) // self.size, self.size))
        return chunked.transpose(1, 2).contiguous()

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[N, V, C, X] -> [T, V, X]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


def _layout(docs: Documents, q: torch.Tensor) -> ChunkLayout:
    assert docs.lengths is not None and sum(docs.lengths) == len(q), (docs.lengths, len(q))
    size = min(CHUNK, launch.power_of_two(max(docs.lengths), LEAST_CHUNK))
    rows: list[int] = []
    places: list[int] = []
    steps: list[tuple[list[int], list[int]]] = []
    for document, length in enumerate(docs.lengths):
        start, chunk = len(places), len(rows) // size
        places += range(len(rows), len(rows) + length)
        rows += range(start, start + length)
        rows += [len(q)] * (-length % size)
        for index in range(len(rows) // size - chunk):
            if index == len(steps):
                steps.append(([], []))
            steps[index][0].append(document)
            steps[index][1].append(chunk + index)

    def table(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(q.device)

    found = [(table(documents), table(chunks)) for documents, chunks in steps]
    return ChunkLayout(size, len(docs.lengths), table(rows), table(places), found)


class DeltaChunks(NamedTuple):
    """The inputs in chunks, fp32 (fp64 for fp64 inputs), and what depends on them alone."""

    q: torch.Tensor  # [N, V, C, D], normed
    k: torch.Tensor
    v: torch.Tensor  # [N, V, C, E]
    beta: torch.Tensor  # [N, V, C, 1]
    grown: torch.Tensor  # exp(G)
    left: torch.Tensor  # exp(G_C - G)
    whole: torch.Tensor  # exp(G_C) [N, V, 1, 1]
    mask: torch.Tensor  # M [N, V, C, C]
    k_beta: torch.Tensor  # b exp(G) k
    k_left: torch.Tensor  # exp(G_C - G) k
    inverse: torch.Tensor  # (I + A)^-1

    @staticmethod
    def of(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, layout: ChunkLayout,
        tiled: bool,
    ) -> DeltaChunks:  # fmt: skip
        heads = _key_heads(k, v, tiled)
        q, k = (layout.chunks(_normed(x).index_select(1, heads)) for x in (q, k))
        v, decay, beta = (layout.chunks(x).to(q.dtype) for x in (v, decay.unsqueeze(-1), beta.unsqueeze(-1)))
        total = decay.cumsum(2)
        last = total[:, :, -1:]
        mask = (total - total.mT).tril().exp().tril()
        unit = torch.eye(layout.size, dtype=q.dtype, device=q.device)
        system = unit + (beta * (k @ k.mT) * mask).tril(-1)
        inverse = torch.linalg.solve_triangular(system, unit, upper=False, unitriangular=True)
        grown, left = total.exp(), (last - total).exp()
        return DeltaChunks(q, k, v, beta, grown, left, last.exp(), mask, beta * grown * k, left * k, inverse)


def _scan(
    c: DeltaChunks, layout: ChunkLayout, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The state before each chunk [N, V, D, E], what each chunk writes [N, V, C, E], the state after each document."""
    (count, heads, _, width), value_width = c.k.shape, c.v.shape[3]
    starts, written = c.k.new_zeros(count, heads, width, value_width), c.inverse @ (c.beta * c.v)
    reads = c.inverse @ c.k_beta
    current = c.k.new_zeros(layout.documents, heads, width, value_width)
    if state is not None:
        current.copy_(state)
    for documents, chunks in layout.steps:
        before = current[documents]
        starts[chunks] = before
        written[chunks] -= reads[chunks] @ before
        current[documents] = c.whole[chunks] * before + c.k_left[chunks].mT @ written[chunks]
    return starts, written, current


def _output(c: DeltaChunks, starts: torch.Tensor, written: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * (c.grown * (c.q @ starts) + ((c.q @ c.k.mT) * c.mask) @ written)


def _key_heads(k: torch.Tensor, v: torch.Tensor, tiled: bool) -> torch.Tensor:
    heads = torch.arange(v.shape[1], device=k.device)
    return heads % k.shape[1] if tiled else heads // (v.shape[1] // k.shape[1])


def _per_key_head(x: torch.Tensor, like: torch.Tensor, tiled: bool) -> torch.Tensor:
    """Sum over the value heads that share a key head: [N, V, C, D] -> [N, K, C, D]."""
    return x.unflatten(1, (-1, like.shape[1])).sum(1) if tiled else x.unflatten(1, (like.shape[1], -1)).sum(2)


def _inverse_length(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _normed(x: torch.Tensor) -> torch.Tensor:
    x = x if x.dtype == torch.float64 else x.float()
    return x * _inverse_length(x)


def _through_norm(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x, for the gradient of its normed value n = x r: r (grad - n (n grad))."""
    x = x.to(grad.dtype)
    inverse = _inverse_length(x)
    n = x * inverse
    return inverse * (grad - n * (n * grad).sum(-1, keepdim=True))
