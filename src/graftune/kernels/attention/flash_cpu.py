"""The CPU's attention: torch's fused forward, and a backward that keeps one head of one document in cache.

The fused forward never writes its scores out and leaves their log-sum-exp behind. Its own backward is slow in bf16
(18 ms where this takes 7, 4x256 tokens, two AMX cores; docs/log.md), so the probabilities are rebuilt from that
log-sum-exp, one key head at a time: the working set is a few hundred KiB and every pass over it stays in the cache.
"""

from __future__ import annotations

import torch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, N, H], k and v [T, K, H] -> (out [T, N, H], log-sum-exp of the scores [T, N])."""
    out, stats = torch.empty_like(q), torch.empty(q.shape[:2])
    group = q.shape[1] // k.shape[1]
    start = 0
    for length in lengths:
        place = slice(start, start + length)
        wide = (x[place].transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0) for x in (k, v))
        part, lse = _forward(q[place].transpose(0, 1).unsqueeze(0), *wide, 0.0, True, scale=scale)
        out[place], stats[place] = part[0].transpose(0, 1), lse[0].view(q.shape[1], -1).t()
        start += length
    return out, stats


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    lengths: tuple[int, ...],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference's formulas; G query heads that share a key head are one [G * L, H] matrix."""
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    key_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    correction = (grad_out * out).sum(-1, dtype=torch.float32)
    start = 0
    for length in lengths:
        place = slice(start, start + length)
        hidden = torch.ones(length, length, dtype=torch.bool).triu_(1)
        for head in range(key_heads):
            mine = slice(head * group, (head + 1) * group)
            q_, do = (x[place, mine].transpose(0, 1).reshape(group * length, -1) for x in (q, grad_out))
            lse, fix = (x[place, mine].t().reshape(-1, 1) for x in (stats, correction))
            k_, v_ = k[place, head].contiguous(), v[place, head].contiguous()
            p = (q_ @ k_.t()).float().mul_(scale).sub_(lse).exp_()
            p.view(group, length, length).masked_fill_(hidden, 0.0)
            grads[2][place, head] = p.to(do.dtype).t() @ do
            ds = (do @ v_.t()).float().sub_(fix).mul_(p).mul_(scale).to(q.dtype)
            grads[0][place, mine] = (ds @ k_).view(group, length, -1).transpose(0, 1)
            grads[1][place, head] = ds.t() @ q_
        start += length
    return grads
