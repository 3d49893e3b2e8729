"""The gated delta rule: the reference against a loop over tokens and its autograd in fp64 and against transformers' two
forms; the kernels against the reference; and for both that documents do not see each other."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from graftune.kernels import gated_delta
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
    return float((got - want).norm() / (want.norm() + 0.01))


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
        if rule.__name__.startswith("torch_recurrent"):
            args[:2] = (y.repeat_interleave(2, 2) for y in args[:2])
        want, state = rule(*args, output_final_state=True, use_qk_l2norm_in_kernel=True)
        assert off(out / SCALE * case.width**-0.5, want[0]) < 1e-5
        assert off(final, state) < 1e-5


def test_a_step_is_the_next_token():
    for case in (Case((9,), 2, 4), Case((9,), 2, 4, 16, 24, True)):
        x = inputs(case)
        want, final, _ = run(case, x, backward=False)
        state, got = torch.zeros_like(final), torch.empty_like(want[:1])
        for token in range(9):
            gated_delta.step_(*(y[token : token + 1] for y in x[:5]), state, SCALE, got, case.tiled)
            assert off(got[0], want[token]) < 1e-5
        assert off(state, final) < 1e-5


@pytest.mark.parametrize("cut", [64, 70])
def test_a_document_in_two_parts_is_the_whole(cut):
    case = Case((100,), 1, 2)
    x = inputs(case, slow=True)
    want, want_final, _ = run(case, x, backward=False)
    first = Inputs(*(y[:cut] for y in x))
    rest = Inputs(*(y[cut:] for y in x))
    head, between, _ = run(case._replace(documents=(cut,)), first, backward=False)
    tail, final, _ = run(case._replace(documents=(100 - cut,)), rest, state=between, backward=False)
    assert off(torch.cat((head, tail)), want) < 1e-5 and off(final, want_final) < 1e-5
