"""FP8 on the card: the units' product against the same codes multiplied in fp32, the adapters' share in it, captured
against eager, and a run that learns as bf16 does."""

from __future__ import annotations

import json

import pytest
import torch

from graftune import api
from graftune.kernels import fp8, lora_linear, matmul
from graftune.kernels.augmented_weight import Adapters
from graftune.kernels.fp8 import E4M3, Rows, reference
from graftune.kernels.lora_linear import LowRank
from graftune.model.frozen.fp8 import Fp8, Workspace
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.settings.config import Config
from tests.gpu import test_quantised
from tests.support import oracle, quantised, tiny

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _needs_fp8(_needs_cuda) -> None:
    reason = fp8.refusal(GPU)
    if reason is not None:
        pytest.skip(reason)


def random(*size: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(size, device=GPU).normal_(0.0, scale).bfloat16()


def weight_of(out: int, into: int, columns, rank: int = 16, *, both: bool = False) -> tuple[Fp8, Adapters]:
    torch.manual_seed(out)
    ranks = rank * len(columns)
    workspace = Workspace(Workspace.size(out, into, ranks), into, GPU)
    weight = Fp8(out, into, GPU, torch.bfloat16, workspace, adapter_columns=ranks, both=both)
    weight.fill(0, random(out, into, scale=0.02))
    weight.finish()
    given = Adapters(random(ranks, into, scale=1 / rank), random(out, rank, scale=0.01), columns, 2.0)
    weight.place_adapters(given)
    fp8.quantise_adapters([weight.adapter_codes], {})
    return weight, given


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("padding", [0, 48, 144])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (333, 576, 1536), (2048, 4096, 4096), (511, 6144, 4096)])
def test_the_product_is_that_of_the_codes(m, n, k, padding, tuned):
    """Rows of both operands lie apart, the number of tokens is any."""
    torch.manual_seed(m)
    a, b = fp8.buffer(m, k + padding, GPU), fp8.buffer(n, k + padding, GPU)
    for codes in (a, b):
        codes.copy_(torch.randn(codes.shape, device=GPU).mul_(60).clamp_(-448, 448).to(E4M3))
    x, w = Rows(a, torch.rand(m, device=GPU) + 0.1), Rows(b, torch.rand(n, device=GPU) + 0.1)
    with matmul.tuned(tuned):
        for _ in range(2):  # other scales at every call
            assert off(fp8.mm(x, w, torch.bfloat16), reference.mm(x, w, torch.float32)) < 0.01
            x, w = Rows(a, x.scale + torch.rand(m, device=GPU)), Rows(b, w.scale + torch.rand(n, device=GPU))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    ("out", "into", "columns"),
    [
        (6144, 4096, ((0, 4096), (4096, 5120), (5120, 6144))),
        (4096, 14336, ((0, 4096),)),
        (3072, 576, ((0, 1536), (1536, 3072))),
    ],
)
def test_the_adapters_share(out, into, columns, both):
    weight, given = weight_of(out, into, columns, both=both)
    assert weight.adapter_codes is not None
    x, grad = random(700, into), random(700, out, scale=1e-3)
    y, h = weight.forward(x)
    want = torch.cat(
        [2.0 * h[:, r].float() @ given.up[rows].float().t() for _, rows, r in lora_linear.members(columns, 16)], 1
    )
    rows = weight._rows(x, None, weight.adapter_codes.forward.reach)
    base = reference.mm(Rows(rows.codes[:, :into], rows.scale), Rows(weight.weight, weight.scale), torch.float32)
    read = rows.codes[:, :into].float() * rows.scale[:, None]  # by the adapters as by the weight
    assert off(h, read @ given.down.float().t()) < 8e-3
    assert off(h, x.float() @ given.down.float().t()) < 0.04
    # The product rounds to bf16 and sums in the units' own way: the share is judged by what it adds in the mean.
    assert off(y, base + want) < 0.006
    along = ((y.float() - base) * want).sum() / want.square().sum()
    assert abs(along - 1) < 0.01
    low = LowRank(h, given.up, columns, 2.0)
    grad_x, g = weight.backward(grad, low)
    want = g.float() @ given.down.float()
    rows = weight._rows(grad, weight.scale, weight.adapter_codes.backward.reach)
    base = (rows.codes[:, :out].float() * rows.scale[:, None]) @ weight.weight.float()
    assert off(g, lora_linear.up_backward(grad, low)) < 8e-3
    assert off(grad_x, base + want) < 0.006
    assert abs(((grad_x.float() - base) * want).sum() / want.square().sum() - 1) < 0.01


def test_what_is_not_finite_comes_through():
    weight, _ = weight_of(64, 64, ((0, 64),))
    for bad in (float("nan"), float("inf")):
        x = random(32, 64)
        x[5, 7] = bad
        for y in (weight.matmul(x), weight.forward(x)[0], weight.input_grad(x)):
            assert not y[5].isfinite().any() and y[:5].isfinite().all() and y[6:].isfinite().all()
    assert weight.matmul(torch.zeros(32, 64, dtype=torch.bfloat16, device=GPU)).abs().max() == 0


def test_what_is_not_finite_comes_through_the_backward():
    """dX, by the codes that SwiGLU's and rope's backward leave, and g and dB."""
    weight, given = weight_of(128, 64, ((0, 64), (64, 128)))
    low = LowRank(random(32, 32), given.up, given.columns, 2.0)
    angles = torch.rand(32, 16, device=GPU)
    for bad in (float("nan"), float("inf")):
        gate_up, grad = random(32, 128), random(32, 64)
        grad[5, 7] = bad
        dq, dk, dv = random(32, 2, 32), random(32, 1, 32), random(32, 1, 32)
        dk[5, 0, 3] = bad
        for of_rope in (False, True):
            out, sums = torch.empty_like(gate_up), torch.zeros(given.up.shape, device=GPU)
            if of_rope:
                rows = weight.rope_backward((dq, dk, dv), out, angles.cos(), angles.sin(), (2, 1, 32))
            else:
                rows = weight.act_backward(grad, gate_up, out, torch.empty_like(grad))
            grad_x, g = weight.backward(out, low, rows=rows, grad_up=sums)
            assert not grad_x[5].isfinite().any() and not g[5].isfinite().all() and not sums.isfinite().all()
            assert grad_x[:5].isfinite().all() and g[6:].isfinite().all()


def test_captured_is_eager_and_follows_the_adapters():
    weight, given = weight_of(256, 128, ((0, 128), (128, 256)))
    tables: dict[str, torch.Tensor] = {}
    x, grad = random(96, 128), random(96, 256, scale=1e-3)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        fp8.quantise_adapters([weight.adapter_codes], tables)
        y, h = weight.forward(x)
        return y, weight.backward(grad, LowRank(h, given.up, given.columns, 2.0))[0]

    both()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = both()
    for factor in (1.0, 8.0, 0.0):
        given.up.mul_(factor)
        graph.replay()
        got = [t.clone() for t in kept]
        assert all(torch.equal(a, b) for a, b in zip(got, both(), strict=True)), factor


def in_fp8() -> oracle.Ours:
    """Widths are multiples of 16."""
    base, _ = test_quantised.base_of("nf4")  # values in floats, to be quantised here
    ours = quantised.placed(base, test_quantised.LORA, "fp8", "cuda", torch.bfloat16)
    assert all(isinstance(p.frozen, Fp8) for block in ours.decoder.blocks for p in block.projections)
    return ours


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_captured_steps_are_the_eager_ones_bit_for_bit(dropout, deterministic):
    """With dropout the codes go another way. From its second step on nothing waits (`trained` sees to it)."""
    found = []
    for graph in (True, False):
        ours = in_fp8()
        figures, weights, loop = test_quantised.trained(ours, 6, graph=graph, deterministic=True, dropout=dropout)
        assert loop.captures == (1 if graph else 0)
        found.append((figures, weights))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("recompute", ["selective", "full", "offload"])
def test_what_is_computed_again_is_the_same(recompute):
    want, got = (test_quantised.trained(in_fp8(), 8, graph=True, recompute=policy)[0] for policy in ("none", recompute))
    assert [f[0] for f in got] == pytest.approx([f[0] for f in want], rel=1e-2)
    assert got[0][1] == pytest.approx(want[0][1], rel=2e-3)


def test_a_run_learns_as_bf16_does(tmp_path, monkeypatch):
    """Captured, through the whole command. The model's widths are multiples of 16, which tiny's are not."""
    config = {**tiny.config("llama"), "intermediate_size": 96}
    monkeypatch.setattr(tiny, "config", lambda variant: dict(config))
    tiny.make_folder("llama", tmp_path / "base")
    rows = [{"text": f"the {a} {b} by"} for a in ("cat", "dog", "fox") for b in ("sat", "ran", "hid")] * 12
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    losses = {}
    for kind in ("bf16", "fp8"):
        settings = {
            "base": str(tmp_path / "base"), "data": str(tmp_path / "data.jsonl"), "base_dtype": kind, "device": "cuda",
            "compute_dtype": "bf16", "lr": 1e-2, "tokens_per_step": 256, "epochs": 6, "out": str(tmp_path / kind),
        }  # fmt: skip
        api.train(Config.of(settings), console=Console(quiet=True))
        events = read_events(tmp_path / kind / "metrics.jsonl")
        losses[kind] = [e["loss"] for e in events if e["event"] == "step"]
    apart = [abs(a - b) / b for a, b in zip(losses["fp8"], losses["bf16"], strict=True)]
    # At the end, where next to nothing is left to learn, two runs part; not while the loss falls.
    assert max(apart[:6]) < 0.02 and all(kind[-1] < 0.05 * kind[0] for kind in losses.values())
