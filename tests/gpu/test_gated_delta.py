"""The delta rule on this GPU: the kernels against the reference in fp32, captured passes that follow changed lengths,
no host synchronisation, and the same bits in every run and beside any other document.

Triton has compiled such kernels wrongly on Hopper, in some tiles only, so none is trusted untested.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from graftune.kernels import gated_delta, launch
from graftune.kernels.attention import Documents
from tests.kernels.test_gated_delta_kernel import SCALE, Case, Inputs, inputs, off, run

pytestmark = pytest.mark.gpu
LENGTHS = (300, 1, 77, 0, 128, 63, 64, 65, 513, 0)
HEADS = Case(LENGTHS, 2, 4, 128, 128)
CLOSE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
CLOSE_GRADS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
# A token's decay is a sum over the tokens behind it, whose terms nearly cancel: rounding counts several times. Products
# in fp16 on a CPU show the same factor.
CLOSE_DECAY = {torch.bfloat16: 6e-2, torch.float16: 8e-3, torch.float32: 4e-5}


def check(monkeypatch: pytest.MonkeyPatch, case: Case, dtype: torch.dtype = torch.bfloat16, slow: bool = True) -> None:
    """Three passes on other values; each twice, with the same bits."""
    for seed in range(3):
        x = inputs(case, dtype, "cuda", seed=seed, slow=slow)
        got, final, grads = run(case, x)
        got2, final2, grads2 = run(case, x)
        with monkeypatch.context() as patch:
            patch.setattr(launch, "fused", lambda x: False)
            want, want_final, want_grads = run(case, Inputs(*(y.float() for y in x)))
        assert off(got, want) < CLOSE[dtype] and off(final, want_final) < CLOSE[dtype]
        for name, ours, right in zip(Inputs._fields, grads, want_grads, strict=False):
            assert off(ours, right) < (CLOSE_DECAY if name == "decay" else CLOSE_GRADS)[dtype], (seed, name)
        for first, second in zip((got, final, *grads), (got2, final2, *grads2), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_kernels_are_the_reference(monkeypatch, dtype):
    check(monkeypatch, HEADS, dtype)


def test_keys_that_are_nearly_the_same(monkeypatch):
    """Their systems are the worst."""
    x = inputs(HEADS, torch.bfloat16, "cuda", slow=True)
    x = x._replace(k=(x.k[:1].float() + 0.1 * x.k.float()).to(x.k.dtype))
    got, _, _ = run(HEADS, x)
    monkeypatch.setattr(launch, "fused", lambda x: False)
    want, _, _ = run(HEADS, Inputs(*(y.float() for y in x)))
    assert off(got, want) < 5e-2


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case((2048, 1000), 16, 32, 128, 128),
        Case((500, 12), 2, 4, 128, 128, tiled=True),
        Case((500, 12), 2, 2, 64, 64),
        Case((200,), 1, 4, 128, 64),
        Case((200,), 2, 2, 64, 128),
        Case((100, 30), 1, 2, 96, 200),
        Case((1,), 1, 1, 16, 16),
    ],
)
def test_shapes(monkeypatch, case, slow):
    check(monkeypatch, case, slow=slow)


def test_documents_do_not_see_each_other():
    starts = [0, *accumulate(LENGTHS)]
    x, other = (inputs(HEADS, torch.bfloat16, "cuda", seed=seed, slow=True) for seed in (0, 1))
    out, final, grads = run(HEADS, x)
    for document in (0, 4, 8):
        inside = slice(starts[document], starts[document + 1])
        changed = Inputs(*(y.clone() for y in x))
        for to, value in zip(changed, other, strict=True):
            to[inside] = value[inside]
        out2, final2, grads2 = run(HEADS, changed)
        outside = torch.ones(len(out), dtype=torch.bool, device="cuda")
        outside[inside] = False
        for first, second in zip((out, *grads), (out2, *grads2), strict=True):
            assert torch.equal(first[outside], second[outside]) and not torch.equal(first[inside], second[inside])
        others = [slot for slot in range(len(LENGTHS)) if slot != document]
        assert torch.equal(final[others], final2[others])


class Pass:
    """Two layers' delta rule over one set of documents, in buffers that stay where they are."""

    def __init__(self, tokens: int):
        self.x = inputs(HEADS._replace(documents=(tokens,)), torch.bfloat16, "cuda", slow=True)
        self.outs = [torch.empty_like(self.x.v) for _ in range(2)]
        self.grads = [[torch.empty_like(y) for y in self.x[:5]] for _ in range(2)]

    def run(self, cu_seqlens: torch.Tensor) -> None:
        docs = Documents(cu_seqlens, None, len(self.x.q))
        for out, (dq, dk, dv, ddecay, dbeta) in zip(self.outs, self.grads, strict=True):
            saved, _ = gated_delta.forward(*self.x[:5], docs, SCALE, out)
            gated_delta.backward(self.x.grad, *self.x[:5], docs, SCALE, saved, (dq, dk, dv), ddecay, dbeta)

    def results(self) -> list[torch.Tensor]:
        return [*self.outs, *(x for grads in self.grads for x in grads)]


MIXES = [(200, 56, 255, 1, 0, 0), (1, 130, 256, 60, 65, 0), (512, 0, 0, 0, 0, 0), (64, 64, 64, 64, 128, 128)]


def seqlens(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


def test_a_captured_pass_follows_changed_lengths():
    work, static = Pass(512), seqlens(MIXES[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work.run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.run(static)
    for lengths in (*MIXES[1:], MIXES[0]):
        static.copy_(seqlens(lengths))
        for result in work.results():
            result.fill_(float("nan"))
        graph.replay()
        replayed = [result.clone() for result in work.results()]
        work.run(seqlens(lengths))
        assert all(map(torch.equal, replayed, work.results())), lengths


def test_a_pass_never_waits_for_the_device():
    work, cu_seqlens = Pass(512), seqlens(MIXES[0])
    work.run(cu_seqlens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work.run(cu_seqlens.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
