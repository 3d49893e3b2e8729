"""Every reference against autograd of the plain formula: outputs and all gradients, odd and tiny sizes, two dtypes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from graftune.kernels import attention, linear_cross_entropy, lora_linear, rms_norm, swiglu
from graftune.kernels.attention import reference as attention_reference
from tests.kernels.test_cross_entropy_kernel import Table

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5, torch.bfloat16: 2e-2}
SIZES = [(1, 2), (3, 8), (17, 30), (64, 96)]
DTYPES = [torch.float32, torch.bfloat16]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    got, want = got.float(), want.float()
    assert got.shape == want.shape
    assert (got - want).norm() <= TOLERANCE[dtype] * (want.norm() + 0.1), ((got - want).abs().max(), want.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size, dtype):
    x, w, g = torch.randn(size), torch.rand(size[1]) + 0.5, torch.randn(size)
    x_, w_ = x.to(dtype).float().clone().requires_grad_(), w.clone().requires_grad_()
    want = x_ / (x_.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w_
    want.backward(g.to(dtype).float())
    close(rms_norm.forward(x.to(dtype), w, 1e-5), want, dtype)
    grad_w = torch.full_like(w, 3.0)  # accumulated into, not overwritten
    close(rms_norm.backward(g.to(dtype), x.to(dtype), w, 1e-5, grad_w), x_.grad, dtype)
    close(grad_w - 3.0, w_.grad, dtype)


def apart(x: torch.Tensor, padding: int = 3) -> torch.Tensor:
    """x in rows that lie apart, NaN between them."""
    wide = torch.full((len(x), x.shape[1] + padding), float("nan"), dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def nothing(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that lie apart, to be written."""
    return apart(torch.full((rows, width), float("nan"), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_in_a_block(size, added, residual, dtype):
    """The sum is normed; its gradient is the norm's and what came along the stream."""
    x, y, g, along = (torch.randn(size).to(dtype) for _ in range(4))
    w, before = torch.rand(size[1]) + 0.5, x.clone()
    stream = (x + y if added else x).float().requires_grad_()
    w_ = w.clone().requires_grad_()
    want = stream / (stream.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w_
    torch.autograd.backward([want, stream], [g.float(), along.float() if residual else torch.zeros(size)])

    out = nothing(*size, dtype)
    total, rstd = rms_norm.add_forward(x, y if added else None, w, 1e-5, out)
    assert total is (y if added else x) and torch.equal(x, before) and torch.equal(total.float(), stream)
    close(out, want, dtype)
    close(rstd, stream.pow(2).mean(-1).add(1e-5).rsqrt(), torch.float32)
    assert torch.equal(rms_norm.apply(total, rstd, w), out), "the norm again, bit for bit"

    grad_w, given = torch.full_like(w, 3.0), apart(along) if residual else None
    grad = rms_norm.add_backward(apart(g), total, rstd, w, given, grad_w)
    assert grad is given or not residual
    close(grad, stream.grad, dtype)
    close(grad_w - 3.0, w_.grad, dtype)
    frozen = rms_norm.add_backward(g, total, rstd, w, apart(along) if residual else None)
    assert torch.equal(frozen, grad), "whether the weight learns is all the same to x"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", swiglu.KINDS)
def test_gated_units(size, dtype, kind):
    tokens, width = size
    gate_up, g = torch.randn(tokens, 2 * width).to(dtype), torch.randn(size).to(dtype)
    leaf = gate_up.float().clone().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    if kind == "clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        act = gate * torch.sigmoid(1.702 * gate)
    else:
        act = torch.nn.functional.silu(gate) if kind == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    want = act * up
    want.backward(g.float())
    act, before = nothing(tokens, width, dtype), gate_up.clone()
    swiglu.forward(gate_up, act, kind)
    close(act, want, dtype)
    act, grad = nothing(tokens, width, dtype), nothing(tokens, 2 * width, dtype)
    swiglu.backward(apart(g), gate_up, grad, act, kind)
    close(grad, leaf.grad, dtype)
    close(act, want, dtype)
    assert torch.equal(gate_up, before)


def documents(lengths: tuple[int, ...]) -> attention.Documents:
    return attention.Documents(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), lengths, max(lengths))


def packed_grads(tokens: int, heads: int, key_heads: int, width: int, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv as column ranges of one buffer, full of NaN."""
    buffer = torch.full((tokens, heads + 2 * key_heads, width), float("nan"), dtype=dtype)
    return buffer.split([heads, key_heads, key_heads], 1)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 4)])
@pytest.mark.parametrize("lengths", [(1,), (5, 1, 9, 0, 0), (33,)])
@pytest.mark.parametrize("path", ["public", "reference"])
def test_attention(path, lengths, heads, window):
    total, width = sum(lengths), 8
    q, k, v = (torch.randn(total, n, width) for n in (heads[0], heads[1], heads[1]))
    g = torch.randn_like(q)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    group, outs, start = heads[0] // heads[1], [], 0
    for length in lengths:
        qs, ks, vs = (x[start : start + length].transpose(0, 1) for x in leaves)
        ks, vs = ks.repeat_interleave(group, 0), vs.repeat_interleave(group, 0)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        seen = (distance >= 0) & ((distance < window) if window else (distance >= 0))
        scores = (qs @ ks.transpose(1, 2) * 0.3).masked_fill(~seen, float("-inf"))
        outs.append((scores.softmax(-1) @ vs).transpose(0, 1))
        start += length
    want = torch.cat(outs)
    want.backward(g)
    grads = packed_grads(total, *heads, width)
    if path == "public":
        docs = documents(lengths)
        buffer = torch.full((total, heads[0] * width + 3), float("nan"))
        out, stats = attention.forward(q, k, v, docs, 0.3, window, out=buffer[:, :-3].unflatten(1, (-1, width)))
        attention.backward(g, q, k, v, out, stats, docs, 0.3, window, grads)
        assert buffer[:, -3:].isnan().all()
    else:
        out = attention_reference.forward(q, k, v, lengths, 0.3, window)
        attention_reference.backward(g, q, k, v, out, lengths, 0.3, window, grads)
    close(out, want, torch.float32)
    for got, leaf in zip(grads, leaves, strict=True):
        close(got, leaf.grad, torch.float32)


@pytest.mark.parametrize("lengths", [(5, 1, 9), (150,)], ids=["textbook", "fused"])
def test_attention_in_bf16(lengths):
    """Short documents and long ones take different backwards in bf16; both are the fp32 one within bf16 noise."""
    total = sum(lengths)
    q, k, v, g = (torch.randn(total, n, 16).bfloat16() for n in (4, 2, 2, 4))
    docs, grads = documents(lengths), packed_grads(total, 4, 2, 16, torch.bfloat16)
    out, stats = attention.forward(q, k, v, docs, 0.25)
    attention.backward(g, q, k, v, out, stats, docs, 0.25, 0, grads)
    wide, right = [x.float() for x in (q, k, v)], packed_grads(total, 4, 2, 16)
    want = attention_reference.forward(*wide, lengths, 0.25)
    attention_reference.backward(g.float(), *wide, want, lengths, 0.25, 0, right)
    close(out, want, torch.bfloat16)
    for got, expected in zip(grads, right, strict=True):
        close(got, expected, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_lora_group(normed, diagonal, dtype):
    """Stacked A's, B's on their own columns, one projection of the fused output without an adapter."""
    columns, scale = ((0, 4), (6, 11)), 0.7
    x, down, up = (torch.randn(size).to(dtype) for size in ((9, 10), (6, 10), (9, 3)))
    y, g = torch.randn(9, 11).to(dtype), torch.randn(9, 11).to(dtype)
    rstd, weight = torch.rand(9) + 0.5, torch.rand(10) + 0.5
    read = rms_norm.apply(x, rstd, weight) if normed else x
    leaves = [t.float().clone().requires_grad_() for t in (read, down, up)]
    wide = leaves[0] @ leaves[1].t()
    parts = wide[:, :3] @ leaves[2][:4].t(), torch.zeros(9, 2), wide[:, 3:] @ leaves[2][4:].t()
    want = y.float() + torch.cat(parts, 1) * scale
    want.backward(g.float())

    tail = nothing(9, 8, dtype)
    h = lora_linear.down(apart(read), down, tail)
    assert torch.equal(tail[:, :6], h) and not tail[:, 6:].any()
    joined = torch.block_diag(up[:4], up[4:])
    joined = torch.cat((joined[:4], torch.zeros(2, 6, dtype=dtype), joined[4:]))
    low = lora_linear.LowRank(h, up, columns, scale, joined if diagonal else None)
    assert low.rank == 3
    got = y.clone()
    assert lora_linear.add_(got, low) is got
    close(got, want, dtype)

    grad_down, grad_up = torch.ones(6, 10), torch.ones(9, 3)  # accumulated into, not overwritten
    tail = nothing(9, 8, dtype)
    out = lora_linear.up_backward(apart(g), low, tail)
    assert torch.equal(tail[:, :6], out) and not tail[:, 6:].any()
    assert torch.equal(lora_linear.up_backward(g, low), out)
    lora_linear.up_grad(apart(g), low, grad_up)
    lora_linear.down_backward(out, x, grad_down, **({"rstd": rstd, "weight": weight} if normed else {}))
    close(out @ down, leaves[0].grad, dtype)
    close(grad_down - 1, leaves[1].grad, dtype)
    close(grad_up - 1, leaves[2].grad, dtype)


@pytest.mark.parametrize(("chunk", "cached"), [(1, 1), (3, 2), (1000, 4), (1000, 1000)])
def test_linear_cross_entropy(chunk, cached, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy.reference, "CHUNK_BYTES", chunk * 4 * 29)
    monkeypatch.setattr(linear_cross_entropy.reference, "CACHE_BYTES", cached * 4 * 29)
    x, weight = torch.randn(11, 6), torch.randn(29, 6) * 2
    labels = torch.randint(0, 29, (11,))
    labels[[2, 10]] = -1
    leaf = x.clone().requires_grad_()
    want = torch.nn.functional.cross_entropy(leaf @ weight.t(), labels, reduction="sum", ignore_index=-1)
    want.backward()
    total, grad = linear_cross_entropy.forward(x, Table(weight), labels)
    assert total.dtype == torch.float32
    close(total, want, torch.float32)
    close(grad, leaf.grad, torch.float32)
    same, scaled = linear_cross_entropy.forward(x, Table(weight), labels, scale=torch.tensor(8.0))
    close(same, want, torch.float32)
    close(scaled, 8 * leaf.grad, torch.float32)
    alone, nothing = linear_cross_entropy.forward(x, Table(weight), labels, need_grad=False)
    close(alone, want, torch.float32)
    assert nothing is None
