"""From the raw qkv product to what attention takes and back: the kernel against the reference, the reference against
autograd of the plain formula."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import rope
from graftune.kernels.rope import reference
from tests.kernels import harness
from tests.kernels.harness import DTYPES, NAN
from tests.support.pairwise import pairwise

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}

SHAPES = [(1, (1, 1, 2)), (37, (3, 1, 20)), (34, (2, 1, 64)), (19, (2, 2, 96)), (5, (2, 1, 256))]


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    harness.close(got, want, CLOSE[dtype] * slack)


def table(tokens: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(tokens, device=device) % 29 * 7
    return rope.tables(positions, 10000.0 ** -(torch.arange(0, width, 2) / width), 1.1)


def inputs(tokens, heads, dtype, device, seed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv, bias and the two norms' weights."""
    torch.manual_seed(seed)
    columns, width = (heads[0] + 2 * heads[1]) * heads[2], heads[2]
    qkv, bias = torch.randn(tokens, columns).to(dtype), torch.randn(columns).to(dtype)
    return qkv.to(device), bias.to(device), *(torch.rand(width).add(0.5).to(device) for _ in range(2))


def by_part(qkv: torch.Tensor, heads: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv as views of one buffer."""
    return qkv.unflatten(1, (-1, heads[2])).split([heads[0], heads[1], heads[1]], 1)


@pairwise(
    ("tokens, heads", SHAPES),
    ("biased, normed", [(False, False), (True, False), (False, True), (True, True)]),
    ("dtype", DTYPES),
)
def test_forward(kernels_on, device, tokens, heads, biased, normed, dtype):
    qkv, bias, q_norm, k_norm = inputs(tokens, heads, dtype, device, seed=tokens)
    cos, sin = table(tokens, heads[2], device)
    options = {
        "bias": bias if biased else None,
        "q_norm": q_norm if normed else None,
        "k_norm": k_norm if normed else None,
        "eps": 1e-5,
    }
    got, want = qkv.clone(), qkv.clone()
    raw, want_raw = rope.finish_(got, cos, sin, heads, **options), reference.finish_(want, cos, sin, heads, **options)
    close(got, want, dtype)
    assert raw.dtype == want_raw.dtype and raw.shape == want_raw.shape
    if normed:
        close(raw, want_raw, dtype)
    if not biased:
        assert torch.equal(got[:, -heads[1] * heads[2] :], qkv[:, -heads[1] * heads[2] :])


@pytest.mark.parametrize(
    ("normed", "dtype"),
    [(("q", "k"), DTYPES[0]), (("q", "k"), DTYPES[2]), (None, DTYPES[1]), ((), DTYPES[0]), (("k",), DTYPES[1])],
)
@pytest.mark.parametrize(("tokens", "heads"), SHAPES)
def test_backward(kernels_on, device, tokens, heads, normed, dtype):
    """normed: None without norms, else those whose weights learn."""
    grad, _, q_norm, k_norm = inputs(tokens, heads, dtype, device, seed=tokens + 1)
    cos, sin = table(tokens, heads[2], device)
    raw = torch.randn(tokens, heads[0] + heads[1], heads[2]).to(dtype).to(device)
    options: dict[str, object] = {"eps": 1e-5}
    if normed is not None:
        options |= {"q_norm": q_norm, "k_norm": k_norm}
    else:
        raw = raw.new_empty(0)
    sums = [{f"grad_{n}_norm": torch.full_like(q_norm, 3.0) for n in normed or ()} for _ in range(2)]
    got, want, elsewhere = grad.clone(), grad.clone(), torch.full_like(grad, NAN)
    rope.finish_backward(by_part(got, heads), got, cos, sin, heads, raw, **options, **sums[0])
    reference.finish_backward(by_part(want, heads), want, cos, sin, heads, raw, **options, **sums[1])
    close(got, want, dtype)
    plain = tuple(part.contiguous() for part in by_part(grad, heads))
    rope.finish_backward(plain, elsewhere, cos, sin, heads, raw, **options)
    assert torch.equal(elsewhere, got)
    from_plain = torch.full_like(grad, NAN)
    reference.finish_backward(plain, from_plain, cos, sin, heads, raw, **options)
    assert torch.equal(from_plain, want)
    assert torch.equal(got[:, -heads[1] * heads[2] :], grad[:, -heads[1] * heads[2] :])
    for name, total in sums[0].items():  # accumulated into, not overwritten
        close(total - 3, sums[1][name] - 3, dtype, slack=3)


@pytest.mark.parametrize("turning", [16, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_query_heads_that_share_a_key_head_are_added_up(kernels_on, device, dtype, turning):
    """dk and dv of every query head, fp32: as if their sums had come, and the sums are not rounded before."""
    tokens, heads = 37, (6, 2, 16)
    cos, sin = table(tokens, turning, device)
    parts = torch.randn(2, tokens, 6, 16, device=device)
    dq = torch.randn(tokens, 6, 16, device=device).to(dtype)
    got, want = (torch.full((tokens, 10 * 16), NAN, dtype=d, device=device) for d in (dtype, torch.float32))
    rope.finish_backward((dq, *parts), got, cos, sin, heads, got.new_empty(0))
    sums = [part.unflatten(1, (2, 3)).sum(2) for part in parts]
    reference.finish_backward((dq.float(), *sums), want, cos, sin, heads, want.new_empty(0))
    close(got, want.to(dtype), dtype)
    again = torch.full_like(got, NAN)
    reference.finish_backward((dq, *parts), again, cos, sin, heads, got.new_empty(0))
    close(again, want.to(dtype), dtype)


def test_nothing_beyond_the_tokens_is_written(kernels_on, device):
    tokens, heads = 35, (2, 1, 20)
    columns = 4 * 20
    buffer = torch.full((64, columns), NAN, device=device)
    buffer[:tokens] = torch.randn(tokens, columns, device=device)
    cos, sin = table(tokens, 20, device)
    bias = torch.ones(columns, device=device)
    rope.finish_(buffer[:tokens], cos, sin, heads, bias=bias)
    rope.finish_backward(by_part(buffer[:tokens], heads), buffer[:tokens], cos, sin, heads, buffer.new_empty(0))
    assert buffer[:tokens].isfinite().all() and buffer[tokens:].isnan().all()
    wide = torch.full((tokens, columns + 8), NAN, device=device)  # rows apart, padding behind each
    wide[:, :columns] = buffer[:tokens]
    rope.finish_backward(by_part(wide[:, :columns], heads), wide[:, :columns], cos, sin, heads, buffer.new_empty(0))
    rope.finish_backward(by_part(buffer[:tokens], heads), buffer[:tokens], cos, sin, heads, buffer.new_empty(0))
    assert torch.equal(wide[:, :columns], buffer[:tokens]) and wide[:, columns:].isnan().all()


@pytest.mark.parametrize("fused", [False, True], ids=["reference", "kernel"])
def test_norms_over_all_heads_equal_autograds(device, fused, monkeypatch):
    from graftune.kernels import launch

    monkeypatch.setattr(launch, "fused", lambda x: fused)
    tokens, heads = 13, (4, 2, 6)
    torch.manual_seed(2)
    leaf = torch.randn(tokens, 8 * 6, device=device, requires_grad=True)
    weights = [torch.rand(n * 6, device=device).add(0.5).requires_grad_() for n in heads[:2]]
    cos, sin = table(tokens, 6, device)
    q, k, v = leaf.split([24, 12, 12], 1)
    normed = [
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w for x, w in zip((q, k), weights, strict=True)
    ]

    def turned(x):
        a, b = x.unflatten(1, (-1, 6)).chunk(2, -1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((a * c - b * s, b * c + a * s), -1).flatten(1)

    want, grad = torch.cat([*map(turned, normed), v], 1), torch.randn(tokens, 48, device=device)
    want.backward(grad)
    values = [w.detach() for w in weights]
    got = leaf.detach().clone()
    raw = rope.finish_(got, cos, sin, heads, q_norm=values[0], k_norm=values[1], eps=1e-5)
    close(got, want.detach(), torch.float32)
    back, sums = grad.clone(), [torch.full_like(w, 3.0) for w in values]
    rope.finish_backward(
        by_part(back, heads), back, cos, sin, heads, raw, q_norm=values[0], k_norm=values[1], eps=1e-5,
        grad_q_norm=sums[0], grad_k_norm=sums[1],
    )  # fmt: skip
    close(back, leaf.grad, torch.float32, slack=3)
    for total, weight in zip(sums, weights, strict=True):
        close(total - 3.0, weight.grad, torch.float32, slack=3)


OPTIONS = {
    "bias": ({"bias": True}, 16),
    "a part alone is turned": ({"normed": False}, 6),
    "gated": ({"gated": True}, 16),
    "gated, a part is turned": ({"gated": True}, 6),
    "a part is turned": ({}, 6),
    "after": ({"norm_after": True}, 16),
    "after, a part is turned": ({"norm_after": True}, 6),
    "of v": ({"v_norm": True}, 16),
    "of v, after, a part is turned": ({"v_norm": True, "norm_after": True}, 6),
    "bias, a part is turned": ({"bias": True}, 6),
    "bias alone, a part is turned": ({"bias": True, "normed": False}, 6),
    "scaled": ({"q_scale": True}, 16),
    "scaled alone, a part is turned": ({"q_scale": True, "normed": False}, 6),
    "scaled alone, gated": ({"q_scale": True, "normed": False, "gated": True}, 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_both_ways(kernels_on, device, option, dtype):
    """The kernel against the reference, and in fp32 the reference against autograd."""
    asked, turned = OPTIONS[option]
    tokens, heads = 21, (3, 1, 16)
    queries, keys, width = heads
    gated, normed = asked.get("gated", False), asked.get("normed", True)
    torch.manual_seed(len(option))
    columns = ((2 if gated else 1) * queries + 2 * keys) * width
    wide = torch.full((tokens, columns + 5), NAN, dtype=dtype, device=device)  # rows apart
    qkv = wide[:, :columns].copy_(torch.randn(tokens, columns))
    weights = [torch.rand(width, device=device).add(0.5) for _ in range(3 if asked.get("v_norm") else 2)]
    options = {"eps": 1e-5, "gated": gated, "norm_after": asked.get("norm_after", False)}
    if normed:
        options |= dict(zip(("q_norm", "k_norm", "v_norm"), weights, strict=False))
    if asked.get("q_scale"):
        options["q_scale"] = torch.rand(tokens, device=device).add(0.5)
    bias = {"bias": torch.randn(columns, device=device).to(dtype)} if asked.get("bias") else {}
    cos, sin = table(tokens, turned, device)

    results = []
    for ops in (rope, reference):
        buffer = wide.clone()
        product = buffer[:, :columns]
        kept = ops.finish_(product, cos, sin, heads, **bias, **options)
        assert buffer[:, columns:].isnan().all()
        finished = rope.parts(product, heads, gated)
        if gated:
            assert torch.equal(product, qkv)
            finished = (*kept.split([queries, keys], 1), finished[2])
        results.append((finished, product if gated else kept))
    for got, want in zip(results[0][0], results[1][0], strict=True):
        close(got, want, dtype)
    close(results[0][1], results[1][1], dtype) if results[0][1].numel() else None

    grads = [torch.randn(part.shape, device=device).to(dtype) for part in results[1][0]]
    back = []
    for ops in (rope, reference):
        sums = [torch.full_like(w, 3.0) for w in weights]
        names = ("grad_q_norm", "grad_k_norm", "grad_v_norm")
        buffer = torch.full_like(wide, NAN)
        place = buffer[:, :columns]
        totals = dict(zip(names, sums, strict=False)) if normed else {}
        ops.finish_backward(tuple(grads), place, cos, sin, heads, results[1][1], **options, **totals)
        if gated:
            assert place.unflatten(1, (-1, width))[:, 1 : 2 * queries : 2].isnan().all(), "gates are left alone"
        back.append(([*rope.parts(place, heads, gated)], sums))
    for got, want in zip(back[0][0], back[1][0], strict=True):
        close(got, want, dtype)
    for got, want in zip(back[0][1], back[1][1], strict=True):
        close(got - 3, want - 3, dtype, slack=3) if normed else None

    if dtype == torch.float32:
        leaf = qkv.clone().requires_grad_()
        leaves = [w.clone().requires_grad_() for w in weights]
        parts = [*rope.parts(leaf + bias["bias"] if bias else leaf, heads, gated)]
        norm = lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w  # noqa: E731
        half = turned // 2
        c, s = cos[:, None], sin[:, None]
        if normed and not options["norm_after"]:
            parts[: len(leaves)] = [norm(x, w) for x, w in zip(parts, leaves, strict=False)]
        for i in range(2):
            a, b, rest = parts[i].split([half, half, width - turned], -1)
            parts[i] = torch.cat((a * c - b * s, b * c + a * s, rest), -1)
        if normed and options["norm_after"]:
            parts[: len(leaves)] = [norm(x, w) for x, w in zip(parts, leaves, strict=False)]
        if "q_scale" in options:
            parts[0] = parts[0] * options["q_scale"][:, None, None]
        torch.autograd.backward(parts, grads)
        for got, want in zip(results[1][0], parts, strict=True):
            close(got, want, dtype)
        for got, want in zip(back[1][0], rope.parts(leaf.grad, heads, gated), strict=True):
            close(got, want, dtype)
        for got, want in zip(back[1][1], leaves, strict=True):
            close(got - 3, want.grad, dtype, slack=3) if normed else None


@pytest.mark.parametrize(
    ("tokens", "heads", "turning", "dtype"),
    [(37, (3, 1, 20), 20, DTYPES[0]), (34, (4, 2, 64), 32, DTYPES[2]), (5, (2, 1, 512), 512, DTYPES[0])],
)
@pytest.mark.parametrize("apart", [False, True])
def test_keys_as_values(kernels_on, device, tokens, heads, turning, dtype, apart):
    """v is k's product through a norm of its own: forward and backward of kernel and reference against autograd."""
    queries, keys, width = heads
    torch.manual_seed(3)
    product = torch.randn(tokens, (queries + keys) * width).to(dtype).to(device)
    q_norm, k_norm = (torch.rand(width, device=device) + 0.5 for _ in range(2))
    ones, (cos, sin) = torch.ones(width, device=device), table(tokens, turning, device)
    options = {"q_norm": q_norm, "k_norm": k_norm, "v_norm": ones, "eps": 1e-5, "v_from_k": True}
    kept = product.clone()
    got, ours = rope.finish_(product, cos, sin, heads, **options), reference.finish_(kept, cos, sin, heads, **options)
    assert torch.equal(product, kept), "the product stays as it is"
    leaves = [x.clone().float().requires_grad_() for x in (product, q_norm, k_norm)]
    by_head = leaves[0].view(tokens, -1, width)
    normed = by_head / (by_head.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    parts = []
    for x, weight in ((normed[:, :queries], leaves[1]), (normed[:, queries:], leaves[2])):
        a, b, rest = (x * weight).split([turning // 2, turning // 2, width - turning], -1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        parts.append(torch.cat((a * c - b * s, b * c + a * s, rest), -1))
    want = torch.cat((*parts, normed[:, queries:]), 1)
    close(got, want.detach().to(dtype), dtype)
    close(ours, want.detach().to(dtype), dtype)

    grad = torch.randn(tokens, queries + 2 * keys, width).to(dtype).to(device)
    want.backward(grad.float())
    dq, dk, dv = (x.contiguous() for x in grad.split([queries, keys, keys], 1))
    if apart:  # one of each query head, in fp32
        group = queries // keys
        dk, dv = (x.float().repeat_interleave(group, 1) / group for x in (dk, dv))
    for ops in (rope, reference):
        place, sums = torch.full_like(product, NAN), [torch.full_like(q_norm, 3.0) for _ in range(2)]
        more = {"grad_q_norm": sums[0], "grad_k_norm": sums[1]}
        ops.finish_backward((dq, dk, dv), place, cos, sin, heads, product, **options, **more)
        close(place, leaves[0].grad.to(dtype), dtype, slack=2)
        for total, leaf in zip(sums, leaves[1:], strict=True):
            close(total - 3, leaf.grad, dtype, slack=3)


def test_queries_alone(kernels_on, device):
    """A layer that uses the keys of another: as if there were keys, and they were left out."""
    tokens, width, eps = 21, 12, 1e-6
    q_norm, (cos, sin) = torch.rand(width, device=device) + 0.5, table(tokens, width, device)
    product = torch.randn(tokens, 4 * width, device=device)
    whole = torch.cat((product, torch.randn(tokens, 4 * width, device=device)), 1)
    norms = {"q_norm": q_norm, "k_norm": q_norm, "eps": eps}
    got = product.clone()
    raw, want_raw = (
        rope.finish_(got, cos, sin, (4, 0, width), **norms),
        reference.finish_(whole, cos, sin, (4, 2, width), **norms),
    )
    close(got, whole[:, : 4 * width], torch.float32)
    assert torch.equal(raw, product.view(tokens, 4, width))
    grad = torch.randn(tokens, 8 * width, device=device)
    dq, none = grad[:, : 4 * width].clone(), grad.new_empty(tokens, 0, width)
    rope.finish_backward((dq.view(tokens, 4, width), none, none), dq, cos, sin, (4, 0, width), raw, **norms)
    reference.finish_backward(by_part(grad, (4, 2, width)), grad, cos, sin, (4, 2, width), want_raw, **norms)
    close(dq, grad[:, : 4 * width], torch.float32)
