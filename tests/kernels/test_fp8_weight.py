"""Frozen weights in fp8 and steps over them: the adapters' share, the ways that must agree, streaming, refusals."""

from __future__ import annotations

import pytest
import torch

from graftune.errors import GraftuneError
from graftune.kernels import fp8, launch, lora_linear, rms_norm, swiglu
from graftune.kernels.augmented_weight import Adapters
from graftune.kernels.fp8 import E4M3, Rows, reference
from graftune.model.bundles import Bundles, HostMemory
from graftune.model.frozen.fp8 import FetchedFp8, Fp8, Workspace
from graftune.model.frozen.weight_format import Option
from graftune.settings.sections import LoraConfig
from graftune.step.step import Step
from graftune.weights.placement import Placement
from tests.kernels.harness import NAN, batch, close
from tests.kernels.test_fp8_kernel import adapters, low_of, members_of, rows_of, same
from tests.support import oracle

pytestmark = pytest.mark.usefixtures("honest_rounding")


def weight_of(out: int, into: int, columns, rank: int, *, size: float, device: str, both: bool = False, kind=Fp8):
    """A weight with quantised adapters, its values and the adapters'."""
    torch.manual_seed(out * into)
    values = torch.randn(out, into) * 0.02 * torch.exp(torch.randn(out, 1) * 0.3)
    adapter_columns = -(-rank * len(columns) // 8) * 8
    workspace = Workspace(Workspace.size(out, into, adapter_columns), into, torch.device(device))
    weight = kind(out, into, torch.device(device), torch.float32, workspace, adapter_columns=adapter_columns, both=both)
    for start in range(0, out, 24):
        weight.fill(start, values[start : start + 24])
    weight.finish()
    given = adapters(out, into, rank, columns, size=size, device=device)
    assert weight.place_adapters(given) == []
    fp8.quantise_adapters([weight.adapter_codes], {})
    return weight, (weight.weight.float() * weight.scale[:, None]).cpu(), given


def share(given: Adapters, x: torch.Tensor, out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """h in bf16, as it is laid, and s h B'."""
    h = (x.float() @ given.down.float().cpu().t()).bfloat16()
    y = torch.zeros(len(x), out)
    for columns, rows, ranks in lora_linear.members(given.columns, given.up.shape[1]):
        y[:, columns] = given.scale * h[:, ranks].float() @ given.up[rows].float().cpu().t()
    return h, y


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("size", "fused", "both"),
    [
        *((size, False, both) for size in (1e-5, 1e-2, 1.0) for both in (False, True)),
        (1e-5, True, False),
        (1e-2, True, True),
        (1.0, True, False),
    ],
)
def test_the_adapters_share_is_exact_to_a_percent(request, device, size, fused, both):
    """Forward and backward, from the smallest to absurdly large B; what is left is the product's own error."""
    if fused:
        request.getfixturevalue("kernels_on")
    device = device if fused else "cpu"
    columns, out, into, rank = ((0, 256), (256, 384)), 384, 256, 16
    weight, values, given = weight_of(out, into, columns, rank, size=size, device=device, both=both)
    x = rows_of(20, into, torch.bfloat16)
    x[2] *= 1000
    h, want = share(given, x, out)
    wide = torch.cat((x, h, torch.zeros(20, weight.adapter_columns - h.shape[1], dtype=h.dtype)), 1).to(device)
    with_, without = weight.matmul_augmented(wide).cpu(), weight.matmul(x.to(device)).cpu()
    rows = weight._rows(x.to(device), None, weight.adapter_codes.forward.reach)
    base = reference.mm(Rows(rows.codes[:, :into], rows.scale), Rows(weight.weight, weight.scale), torch.float32).cpu()
    # Of the units' sums: each of the 11 steps of 32 keeps 14 bits of what has added up, and cuts off the rest.
    alive, sums = want.norm(dim=1) > 0, 11 * 2.0**-14 if device == "cuda" else 0.0
    assert ((with_ - base - want).norm(dim=1) <= 0.01 * want.norm(dim=1) + sums * base.norm(dim=1))[alive].all()
    exact = x.float() @ values.t()
    for got in (without, base):  # widened scales cost the base no accuracy
        assert (got - exact).norm() <= 0.035 * exact.norm()

    grad = (torch.randn(20, out) * torch.exp(torch.randn(20, out)) * 1e-3).bfloat16()
    g = [given.scale * grad.float()[:, c] @ given.up[r].float().cpu() for c, r in
         ((c, r) for c, r, _ in lora_linear.members(columns, rank))]  # fmt: skip
    g = torch.cat(g, 1).bfloat16()
    want = g.float() @ given.down.float().cpu()
    wide = torch.cat((grad, g, torch.zeros(20, weight.adapter_columns - g.shape[1], dtype=g.dtype)), 1).to(device)
    with_ = weight.input_grad_augmented(wide).cpu()
    rows = weight._rows(grad.to(device), weight.scale, weight.adapter_codes.backward.reach)
    base = (rows.codes[:, :out].float() * rows.scale[:, None]).cpu() @ weight.weight.float().cpu()
    assert ((with_ - base - want).norm(dim=1) <= 0.01 * want.norm(dim=1) + sums * base.norm(dim=1)).all()
    exact = grad.float() @ values
    for got in (weight.input_grad(grad.to(device)).cpu(), base):
        assert (got - exact).norm() <= 0.035 * exact.norm()


@pytest.mark.few(1)
@pytest.mark.parametrize("fused", [False, True])
def test_fetched_codes_give_the_products_of_resident_ones(request, device, fused):
    """In a buffer that another block has used in between; the adapters' codes are copied beside them each time."""
    if fused:
        request.getfixturevalue("kernels_on")
    device = device if fused else "cpu"
    shape = 64, 128, ((0, 64),), 16
    (resident, _, given), (fetched, *_) = (
        weight_of(*shape, size=0.1, device=device, kind=kind) for kind in (Fp8, FetchedFp8)
    )
    bundles = Bundles(HostMemory(torch.device(device)), torch.device(device))
    for key in range(3):
        bundles.add(key, [weight_of(*shape, size=2.0, device=device, kind=FetchedFp8)[0] if key else fetched])
    bundles.finish()
    for _ in range(2):
        bundles.enter(2)
        bundles.enter(0)
        x, grad = rows_of(5, 128, torch.bfloat16).to(device), rows_of(5, 64, torch.bfloat16).to(device)
        low = low_of(given, 5, device)
        low = low._replace(h=low.h.bfloat16())
        for name, *how in (("forward", x), ("backward", grad, low), ("matmul", x), ("input_grad", grad)):
            got, want = (getattr(weight, name)(*how) for weight in (fetched, resident))
            assert all(same(one, other) for one, other in zip(got, want, strict=True)), name


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_saturates_where_adapters_read_the_very_direction(request, device, fused):
    """x along one of A's rows is the longest h there can be: it just fits."""
    if fused:
        request.getfixturevalue("kernels_on")
    device = device if fused else "cpu"
    weight, _, given = weight_of(64, 128, ((0, 64),), 16, size=0.5, device=device)
    x = given.down[3:4].cpu().float().mul(7.0).bfloat16()
    h, want = share(given, x, 64)
    with_, found = weight.forward(x.to(device))
    torch.testing.assert_close(found.cpu(), h, rtol=8e-3, atol=0.02)
    assert (with_.cpu() - x.float() @ weight_values(weight).t() - want).norm() <= 0.01 * want.norm()


def weight_values(weight: Fp8) -> torch.Tensor:
    return (weight.weight.float() * weight.scale[:, None]).cpu()


def test_the_ways_agree(kernels_on, device):
    """forward and backward, alone and behind the kernels that write their input, against the plain buffers."""
    rank, out, into, tokens = 16, 96, 64, 9
    columns = ((0, 48), (48, 96))
    weight, values, given = weight_of(out, into, columns, rank, size=0.01, device=device)
    x, y, norm = rows_of(tokens, into, torch.bfloat16), rows_of(tokens, into, torch.bfloat16, 1), torch.rand(into) + 0.5
    total, rstd, product, h = weight.after_norm(x.to(device), y.to(device).clone(), norm.to(device), 1e-5)
    normed = torch.empty(tokens, into)
    want_total, want_rstd = rms_norm.reference.add_forward(x, y.clone(), norm, 1e-5, normed)
    assert torch.equal(total.cpu(), want_total)
    torch.testing.assert_close(rstd.cpu(), want_rstd, rtol=1e-5, atol=0)
    exact = normed @ values.t() + share(given, normed, out)[1]
    close(product, exact, 0.05)
    close(h, share(given, normed, out)[0], 0.05)  # of codes, as the product
    alone, h_alone = weight.forward(normed.bfloat16().to(device))
    close(alone, product, 0.01)
    close(h_alone, h, 0.02)
    codes = weight._rows(normed.bfloat16().to(device), None, weight.adapter_codes.forward.reach)
    close(h_alone, (codes.codes[:, :into].float() * codes.scale[:, None]).cpu() @ given.down.float().cpu().t(), 8e-3)

    gate_up = rows_of(tokens, 2 * into, torch.bfloat16)
    product, h = weight.after_act(gate_up.to(device))
    act = torch.empty(tokens, into)
    swiglu.reference.forward(gate_up.float(), act)
    close(product, act @ values.t() + share(given, act, out)[1], 0.05)
    close(h, share(given, act, out)[0], 0.05)

    low = low_of(given, tokens, device)
    gate_up, grad_act = rows_of(tokens, out, torch.bfloat16), rows_of(tokens, out // 2, torch.bfloat16, 1)
    grad, act = torch.full((tokens, out), NAN), torch.full((tokens, out // 2), NAN)
    grad, act = grad.bfloat16().to(device), act.bfloat16().to(device)
    rows = weight.act_backward(grad_act.to(device), gate_up.to(device), grad, act)
    grad_x, g = weight.backward(grad, low, rows=rows)
    want_g = torch.cat(
        [2.0 * grad.cpu().float()[:, a:b] @ given.up.float().cpu()[r] for (a, b), r in members_of(given)], 1
    )
    close(g, want_g, 8e-3)
    close(grad_x, grad.cpu().float() @ values + want_g @ given.down.float().cpu(), 0.05)
    alone, g_alone = weight.backward(grad, low)
    close(alone, grad_x, 0.01)
    assert torch.equal(g_alone, g)
    sums = torch.zeros(given.up.shape, device=device)
    low = low._replace(h=torch.ones_like(low.h, dtype=torch.bfloat16))
    again, g_again = weight.backward(grad, low, rows=rows, grad_up=sums)
    close(again, grad_x, 0.01)
    close(g_again, g, 8e-3)
    close(sums[:, 0], 2.0 * grad.float().sum(0), 1e-3)

    # A square weight, whose output is the stream that a norm reads.
    weight, values, given = weight_of(64, 64, ((0, 64),), rank, size=0.01, device=device)
    grad_y, residual = rows_of(tokens, 64, torch.bfloat16), rows_of(tokens, 64, torch.bfloat16, 1).to(device)
    stream = x.to(device)
    rows = weight.norm_backward(grad_y.to(device), stream, rstd, norm.to(device), residual, residual)
    grad_x, g = weight.backward(residual, low_of(given, tokens, device), rows=rows)
    alone, g_alone = weight.backward(residual, low_of(given, tokens, device))
    assert torch.equal(g, g_alone)
    close(grad_x, alone, 0.01)


class Source:
    """Rows of a tensor, counting how many are asked for at once."""

    dtype_name = "F32"

    def __init__(self, values: torch.Tensor):
        self.tensor, self.shape, self.nbytes, self.most = values, tuple(values.shape), values.nbytes, 0

    def read(self, start: int, stop: int) -> torch.Tensor:
        self.most = max(self.most, stop - start)
        return self.tensor[start:stop]


def test_streamed(monkeypatch):
    """From sources, a few rows at a time; the same codes as of the whole."""
    from graftune.model.frozen import mapped

    monkeypatch.setattr(mapped, "MAPPED_ROWS_BYTES", 4 * 48 * 5)
    parts = [Source(rows_of(n, 48, seed=n)) for n in (32, 16)]
    workspace = Workspace(Workspace.size(48, 48, 0), 48, torch.device("cpu"))
    made = Fp8.of(parts, torch.device("cpu"), torch.bfloat16, workspace)
    assert max(p.most for p in parts) == 5
    values = torch.cat([p.tensor for p in parts])
    want = torch.empty(48, 48, dtype=E4M3)
    scale = reference.quantise(values, want, None, None)
    assert same(made.weight, want) and torch.equal(made.scale, scale)
    assert made.nbytes == 64 * 128 + 48 * 4 and made.kind == "fp8"
    ids = torch.tensor([3, 40, 3])
    assert torch.equal(made.rows(ids), (want.float() * scale[:, None])[ids].bfloat16())
    x = torch.randn(5, 48).bfloat16()
    exact = x.float() @ values.t()
    assert (made.matmul(x).float() - exact).norm() < 0.05 * exact.norm() and made.matmul(x).dtype == torch.bfloat16


def test_refused(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(GraftuneError, match=r"NVIDIA GPU of compute capability 8\.9"):
        fp8.require(cpu, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(GraftuneError, match=r"8\.9 or later, and A100 has 8\.0"):
        fp8.require(gpu, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8.require(gpu, torch.bfloat16)
    with pytest.raises(GraftuneError, match="compute_dtype is float16"):
        fp8.require(gpu, torch.float16)
    workspace = Workspace(16, 16, cpu)
    with pytest.raises(GraftuneError, match="multiples of 16"):
        Fp8(24, 16, cpu, torch.bfloat16, workspace)
    bad = Fp8(16, 16, cpu, torch.bfloat16, workspace)
    bad.fill(0, torch.full((16, 16), NAN))
    with pytest.raises(GraftuneError, match="NaN or infinity"):
        bad.finish()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("variant", "lora", "recompute", "long", "coded"),
    [
        ("llama", LoraConfig(rank=4, alpha=8.0), "none", False, 5),
        ("llama-both", LoraConfig(rank=4, alpha=8.0, targets=("qv", "down_proj")), "none", False, 2),
        ("qwen2", LoraConfig(rank=4, alpha=8.0, targets=("qv", "up_proj", "down_proj")), "full", True, 4),
        (
            "llama",
            LoraConfig(rank=4, alpha=8.0, dropout=0.2, targets=("q_proj", "up_proj")),
            "none",
            False,
            0,
        ),  # what adapters read is no code
    ],
)
@pytest.mark.thorough
def test_a_step(device, shallow_folder, monkeypatch, variant, lora, recompute, long, coded):
    """Loss and gradients of a whole model: by the references as by the kernels, and near those of the fp32 base.
    `coded`: to how many projections with adapters dY comes with its codes: all but the upper block's down, which a loss
    is before, its o, where rows that predict nothing are filled in, and the lower qkv, whose dX is not needed."""
    variant, _, both = variant.partition("-")
    folder, packed, calls = shallow_folder(variant, intermediate_size=96), batch(), []
    monkeypatch.setattr(oracle, "Placement", lambda kind, why: Placement(kind, why, (Option(both),)))
    plain = Fp8.backward

    def backward(self, *args, rows, **more):
        calls.append(rows is not None)
        return plain(self, *args, rows=rows, **more)

    monkeypatch.setattr(Fp8, "backward", backward)
    if long:
        monkeypatch.setattr("graftune.model.projection.LONG", 8)
    found, start = [], torch.empty(0)
    for kind, fused in (("fp32", False), ("fp8", False), ("fp8", True)):
        where = device if fused else "cpu"
        monkeypatch.setattr(launch, "augments", lambda device, kind=kind: kind == "fp8")
        monkeypatch.setattr(launch, "fused", lambda x: False)
        ours = oracle.ours(folder, lora, base_dtype=kind, device=where)
        monkeypatch.setattr(launch, "fused", lambda x, fused=fused: fused)
        assert {p.frozen.kind for b in ours.decoder.blocks for p in b.projections} == {kind}
        if kind == "fp8":
            assert {p.frozen.transposed is not None for b in ours.decoder.blocks for p in b.projections} == {bool(both)}
        assert kind == "fp32" or all(
            p.adapter_columns for b in ours.decoder.blocks for p in b.projections if p.lora is not None
        )
        start = ours.arena.weights.cpu().clone() if kind == "fp32" else start
        ours.arena.weights.copy_(start)
        ours.arena.publish()
        backend = "triton" if fused else "cpu"
        step = Step(
            ours.decoder, ours.arena, attention_backend=backend, recompute=recompute, dropout=lora.dropout, seed=3
        )
        step.set_dropout_seed(11)
        step.micro_step(packed.to(torch.device(where)))
        found.append((float(step.loss_sum), ours.arena.grads.cpu().clone()))
    (loss, grads), (by_reference, its), (by_kernels, theirs) = found
    assert sum(calls) == 2 * coded
    assert by_kernels == pytest.approx(by_reference, rel=0.01) and by_reference == pytest.approx(loss, rel=0.05)
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(its, theirs, 0) > 0.99 and cosine(its, grads, 0) > 0.95, (
        cosine(its, theirs, 0),
        cosine(its, grads, 0),
    )
