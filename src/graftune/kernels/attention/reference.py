"""Causal attention inside each document of a packed batch, by the textbook formula, one document at a time.

    P = softmax(scale * Q K' + mask)      O = P V
    dV = P' dO      dP = dO V'      dS = P * (dP - rowsum(dO * O))      dQ = scale * dS K      dK = scale * dS' Q

A sink s of a head is one more score of each of its rows: P = softmax([S, s]) without its last column. The formulas
above hold, and ds = -sum over rows of p_s rowsum(dO * O), with p_s the last column.

With a soft cap c the scores S = scale * Q K' become c tanh(S / c) before the mask, and dS gains the factor
1 - tanh(S / c)^2.

Each document has its own products, so no mask between documents is needed. The backward recomputes the probabilities.
Query heads that share a key head are concatenated, so that grouped-query attention is one product for each key head
and no key is repeated in memory.
"""

from __future__ import annotations

import torch

from graftune.kernels import rehearsal


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    window: int = 0,
    out: torch.Tensor | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, N, H], k and v [T, K, H] -> out [T, N, H]; `window` > 0 limits how far back a token attends."""
    out = q.new_empty(q.shape) if out is None else out
    for start, stop in documents(lengths):
        grouped = _grouped(q[start:stop], k.shape[1])
        probabilities, _ = _probabilities(_scores(grouped, k[start:stop].transpose(0, 1), scale, cap), window, sinks)
        out[start:stop] = _ungrouped(probabilities.to(v.dtype) @ v[start:stop].transpose(0, 1), q.shape[1])
    return out


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
    window: int,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    grad_sinks: torch.Tensor | None = None,
) -> None:
    """Write dq, dk and dv to `grads`, of the shapes of q, k and v; add the sinks' gradient to `grad_sinks`."""
    key_heads, heads = k.shape[1], q.shape[1]
    for start, stop in documents(lengths):
        q_, do, o = (_grouped(x[start:stop], key_heads) for x in (q, grad_out, out))
        k_, v_ = k[start:stop].transpose(0, 1), v[start:stop].transpose(0, 1)
        scores = _scores(q_, k_, scale, cap)
        slope = scores.div(cap).square_().neg_().add_(1) if cap else None
        p, p_sink = _probabilities(scores, window, sinks)
        grads[2][start:stop] = (p.to(do.dtype).transpose(1, 2) @ do).transpose(0, 1)
        correction = (do.float() * o.float()).sum(-1, keepdim=True)
        if p_sink is not None and grad_sinks is not None:
            grad_sinks.sub_((p_sink * correction).view(heads, -1).sum(1))
        ds32 = (do @ v_.transpose(1, 2)).float().sub_(correction).mul_(p).mul_(scale)
        ds = (ds32 if slope is None else ds32.mul_(slope)).to(q.dtype)
        grads[0][start:stop] = _ungrouped(ds @ k_, heads)
        grads[1][start:stop] = (ds.transpose(1, 2) @ q_).transpose(0, 1)


def documents(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first token, one past the last) of every document that is not empty."""
    found, start = [], 0
    for length in lengths:
        if length:
            found.append((start, start + length))
        start += length
    return rehearsal.few(found)


def _grouped(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[L, N, H] -> [K, N/K * L, H]."""
    length, heads, width = x.shape
    return x.view(length, key_heads, heads // key_heads, width).permute(1, 2, 0, 3).reshape(key_heads, -1, width)


def _ungrouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[K, N/K * L, H] -> [L, N, H]."""
    key_heads, rows, width = x.shape
    group = heads // key_heads
    return x.view(key_heads, group, rows // group, width).permute(2, 0, 1, 3).reshape(-1, heads, width)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """scale q k' in fp32, soft-capped; q [K, G*L, H], k [K, L, H] -> [K, G*L, L]."""
    scores = (q @ k.transpose(1, 2)).float().mul_(scale)
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


def _probabilities(
    scores: torch.Tensor, window: int, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax with the causal mask over scores [K, G*L, L], and the share of the sinks [K, G*L, 1]. Overwrites the
    scores."""
    length = scores.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu_(1)
    if window:
        hidden |= torch.ones_like(hidden).tril_(-window)
    scores.view(len(scores), -1, length, length).masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, -1), None
    column = sinks.view(len(scores), -1, 1).expand(-1, -1, length).reshape(len(scores), -1, 1)
    shares = torch.softmax(torch.cat((scores, column), -1), -1)
    return shares[..., :-1], shares[..., -1:]
