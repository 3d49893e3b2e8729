"""The gated delta rule: the reference against a loop over tokens and its autograd in fp64 and against transformers' two
forms; the kernels against the reference; and for both that documents do not see each other."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from graftune.kernels import gated_delta, launch
from graftune.kernels.attention import Documents

SCALE = 0.7


class Case(NamedTuple):
    documents: tuple[int, ...]
    key_heads: int = 1
    value_heads: int = 1
    width: int = 16
    value_width: int = 16
    tiled: bool = False


# Empty slots, documents shorter and longer than a chunk, both orders of heads, value heads of another width.
CASES = [
    Case((1,)),
    Case((63, 0, 65), 1, 2),
    Case((64, 1), 2, 4, tiled=True),
    Case((0, 200, 3), 1, 2, width=32, value_width=16),
    Case((5, 130, 0, 2), 2, 2, width=24, value_width=40),
    Case((130,), width=64, value_width=16),
    Case((70, 130), width=128, value_width=16),
]


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    grad: torch.Tensor


def inputs(case: Case, dtype=torch.float32, device="cpu", seed=0, slow=False) -> Inputs:
    """`slow`: a decay as with A_log = -3, so that a state is visible hundreds of tokens later."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = sum(case.documents)
    q, k = (normal(tokens, case.key_heads, case.width) for _ in range(2))
    v, grad = (normal(tokens, case.value_heads, case.value_width) for _ in range(2))
    rate = torch.tensor(-3.0 if slow else 0.0).exp()
    decay = -rate * torch.nn.functional.softplus(normal(tokens, case.value_heads) - 1)
    beta = torch.sigmoid(normal(tokens, case.value_heads))
    exact = dtype if dtype == torch.float64 else torch.float32
    given = [x.to(device, dtype) for x in (q, k, v)]
    return Inputs(*given, decay.to(device, exact), beta.to(device, exact), grad.to(device, dtype))


def by_token(case: Case, x: Inputs, state=None) -> tuple[torch.Tensor, torch.Tensor]:
    """One token after the other, as the formula says it: the output and the states after the documents."""
    share = case.value_heads // case.key_heads
    heads = [h % case.key_heads if case.tiled else h // share for h in range(case.value_heads)]
    q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (x.q[:, heads], x.k[:, heads]))
    out, finals, token = [], [], 0
    for document, length in enumerate(case.documents):
        shape = case.value_heads, case.width, case.value_width
        s = x.v.new_zeros(shape) if state is None else state[document]
        for _ in range(length):
            s = s * x.decay[token].exp()[:, None, None]
            seen = (s * k[token].unsqueeze(-1)).sum(1)
            s = s + k[token].unsqueeze(-1) * (x.beta[token].unsqueeze(-1) * (x.v[token] - seen)).unsqueeze(1)
            out.append(SCALE * (s * q[token].unsqueeze(-1)).sum(1))
            token += 1
        finals.append(s)
    return torch.stack(out), torch.stack(finals)


def run(case: Case, x: Inputs, state=None, backward=True):
    """The output, the final states, and the gradients of q, k, v, decay and beta."""
    docs = Documents.of(case.documents, x.q.device)
    out = torch.full_like(x.v, torch.nan)
    saved, final = gated_delta.forward(
        *x[:5], docs, SCALE, out, state=state, final_state=True, tiled=case.tiled
    )  # fmt: skip
    grads = [torch.full_like(y, torch.nan) for y in x[:5]]
    if backward:
        gated_delta.backward(
            x.grad, *x[:5], docs, SCALE, saved, (grads[0], grads[1], grads[2]), grads[3], grads[4], case.tiled
        )  # fmt: skip
    return out, final, grads


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference, relative; the gradient of a first token's decay is zero, so there is a floor."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert got.shape == want.shape and got.isfinite().all()
    return float((got - want).norm() / (want.norm() + 0.1))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("slow", [False, True])
def test_reference_is_a_loop_over_tokens(case, slow):
    exact = inputs(case, torch.float64, slow=slow)
    leaves = Inputs(*(y.requires_grad_() for y in exact[:5]), exact.grad)
    want, finals = by_token(case, leaves)
    want.backward(exact.grad)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        with torch.no_grad():
            got, final, grads = run(case, inputs(case, dtype, slow=slow))
        assert off(got, want) < tolerance and off(final, finals) < tolerance
        for name, ours, leaf in zip(Inputs._fields, grads, leaves, strict=False):
            assert off(ours, leaf.grad) < tolerance, (dtype, name)


def test_reference_is_transformers():
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    case = Case((130,), 2, 4, 16, 24)
    x = inputs(case)
    out, final, _ = run(case, x, backward=False)
    for rule in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
        rule = getattr(rule, "__wrapped__", rule)
        args = [y.unsqueeze(0) for y in x[:5]]
        args[:2] = (y.repeat_interleave(2, 2) for y in args[:2])  # older versions of both take as many key heads
        want, state = rule(*args, output_final_state=True, use_qk_l2norm_in_kernel=True)
        assert off(out / SCALE * case.width**-0.5, want[0]) < 1e-5
        assert off(final, state) < 1e-5


@pytest.fixture(params=["reference", "kernels"])
def both(request, monkeypatch):
    """Everything below holds for the reference and for the kernels."""
    monkeypatch.setattr(launch, "fused", lambda x: request.param == "kernels")
    return request.param


@pytest.mark.parametrize("case", [Case((5,), 2, 4), Case((5,), 1, 2, 16, 40, True)])
def test_a_step_is_the_next_token(both, device, case):
    x = inputs(case, device=device)
    want, final, _ = run(case, x, backward=False)
    state, got = torch.zeros_like(final), torch.empty_like(want[:1])
    for token in range(len(want)):
        gated_delta.step_(*(y[token : token + 1] for y in x[:5]), state, SCALE, got, case.tiled)
        assert off(got[0], want[token]) < 1e-5
    assert off(state, final) < 1e-5


@pytest.mark.parametrize("cut", [64, 70])
def test_a_document_in_two_parts_is_the_whole(both, device, cut):
    """Also beside an empty document, whose state stays as it is."""
    case = Case((100, 0))
    x = inputs(case, device=device, slow=True)
    given = torch.ones(2, 1, 16, 16, device=device)
    want, want_final, _ = run(case, x, state=given, backward=False)
    first, rest = Inputs(*(y[:cut] for y in x)), Inputs(*(y[cut:] for y in x))
    head, between, _ = run(case._replace(documents=(cut, 0)), first, state=given, backward=False)
    tail, final, _ = run(case._replace(documents=(100 - cut, 0)), rest, state=between, backward=False)
    assert off(torch.cat((head, tail)), want) < 1e-5 and off(final, want_final) < 1e-5
    assert torch.equal(final[1], given[1])


@pytest.mark.few(1)
def test_documents_do_not_see_each_other(both, device):
    """With slow decay, to the bit: another document in the middle changes nothing before and behind it. The kernels'
    results do not depend on the place of a document either; the reference's products may be divided differently."""
    documents = (3, 70, 64)
    case = Case(documents, 1, 2)
    x, other = (inputs(case, device=device, seed=seed, slow=True) for seed in (0, 1))
    middle = slice(3, 73)
    changed = Inputs(*(torch.cat((a[:3], b[middle], a[73:])) for a, b in zip(x, other, strict=True)))
    moved = Inputs(*(torch.cat((y[73:], y[:3], y[middle])) for y in x))
    results = [run(case, x), run(case, changed), run(case._replace(documents=(64, 3, 70)), moved)]
    (out, final, grads), (out2, final2, grads2), (out3, final3, grads3) = results
    assert not torch.equal(out[middle], out2[middle])
    for a, b, c in ((out, out2, out3), *zip(grads, grads2, grads3, strict=True)):
        assert torch.equal(a[:3], b[:3]) and torch.equal(a[73:], b[73:])
        if both == "kernels":
            assert torch.equal(a, torch.cat((c[64:67], c[67:], c[:64])))
        else:
            assert off(a, torch.cat((c[64:67], c[67:], c[:64]))) < 1e-5
    assert torch.equal(final[0], final2[0]) and torch.equal(final[2], final2[2]) and off(final3[0], final[2]) < 1e-5
    alone = Inputs(*(y[:3] for y in x))
    out4, final4, grads4 = run(case._replace(documents=(3,)), alone)
    for a, b in ((out, out4), *zip(grads, grads4, strict=True)):
        assert off(b, a[:3]) < 1e-5
    assert off(final4[0], final[0]) < 1e-5


def test_a_strong_decay_stays_finite(both, device):
    """G falls below -1000 in a chunk: exp(G_i - G_j) of pairs that are not used would be infinite."""
    case = Case((70,))
    x = inputs(case, device=device)
    x = x._replace(decay=x.decay * 60 - 15)
    want, _ = by_token(case, Inputs(*(y.double() for y in x)))
    out, _, grads = run(case, x)
    assert off(out, want) < 1e-5 and all(grad.isfinite().all() for grad in grads)


CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (CASES[0], torch.float32),
        (CASES[1], torch.bfloat16),
        (CASES[2], torch.float16),
        (CASES[3], torch.bfloat16),
        (CASES[4], torch.float32),
        (CASES[5], torch.bfloat16),
        (CASES[6], torch.bfloat16),
    ],
)
def test_kernels_are_the_references(monkeypatch, device, poison, honest_rounding, case, dtype):
    """With q, k and v as columns of one buffer, and their gradients of another, NaN around them."""
    x = inputs(case, dtype, device, slow=True)
    want, want_final, want_grads = run(case, Inputs(*(y.float() for y in x)))
    tokens, shapes = len(x.q), [y.shape[1:] for y in x[:3]]
    widths = [shape.numel() for shape in shapes]

    def columns():
        wide = torch.full((tokens + 1, sum(widths) + 8), torch.nan, dtype=dtype, device=device)
        parts = wide[:tokens, : sum(widths)].split(widths, 1)
        return wide, [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    _, given = columns()
    for to, value in zip(given, x[:3], strict=True):
        to.copy_(value)
    wide, grads = columns()
    out, grad_decay, grad_beta = (torch.full_like(y, torch.nan) for y in (x.v, x.decay, x.beta))
    docs = Documents.of(case.documents, device)
    monkeypatch.setattr(launch, "fused", lambda x: True)
    saved, final = gated_delta.forward(
        *given, x.decay, x.beta, docs, SCALE, out, final_state=True, tiled=case.tiled
    )  # fmt: skip
    gated_delta.backward(
        x.grad, *given, x.decay, x.beta, docs, SCALE, saved, tuple(grads), grad_decay, grad_beta, case.tiled
    )  # fmt: skip
    assert off(out, want) < CLOSE[dtype] and off(final, want_final) < CLOSE[dtype]
    for name, got, right in zip(Inputs._fields, (*grads, grad_decay, grad_beta), want_grads, strict=False):
        assert off(got, right) < CLOSE[dtype] * 2, name
    assert wide[tokens:].isnan().all() and wide[:, sum(widths) :].isnan().all()
