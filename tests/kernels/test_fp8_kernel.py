"""FP8: the kernels against the reference, most of them to the code; the adapters' share against what it should be; and
the weight's interface against the same values in fp32."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import fp8, lora_linear, rms_norm, rope, swiglu
from graftune.kernels.augmented_weight import Adapters
from graftune.kernels.fp8 import E4M3, AdapterCodes, Rows, reference
from graftune.kernels.lora_linear import LowRank
from tests.kernels.harness import DTYPES, NAN, close
from tests.kernels.test_rope_kernel import by_part
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("honest_rounding")

SIZES = [(1, 16), (3, 48), (5, 144), (2, 1040), (7, 4112)]
# Of h and g, one rounding to their dtype (and, in bf16, another of A times the norm's weight).
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def poisoned(rows: int, width: int, device: str, beside: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes full of NaN with columns beside and a row below, and their corner."""
    wide = torch.full((rows + 1, fp8.aligned(width + beside)), 0x7F, dtype=torch.uint8, device=device).view(E4M3)
    return wide, wide[:rows, :width]


def untouched(wide: torch.Tensor, inner: torch.Tensor) -> bool:
    bits = wide.view(torch.uint8)
    return bool((bits[len(inner) :] == 0x7F).all() and (bits[: len(inner), inner.shape[1] :] == 0x7F).all())


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.cpu().view(torch.uint8), want.cpu().view(torch.uint8))


def neighbours(got: torch.Tensor, want: torch.Tensor, share: float = 0.01) -> None:
    """The same codes, but for a few that a scale's last bit moved to the next one."""
    a, b = (c.cpu().contiguous().view(torch.uint8).to(torch.int16) for c in (got, want))
    a, b = (torch.where(c > 127, 128 - c, c) for c in (a, b))  # in order of what they mean
    assert (a - b).abs().max() <= 1 and (a != b).float().mean() <= share


def coded(stored: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, wide: torch.Tensor, factor, bound) -> None:
    """`codes` and `scale` are the reference's of what was stored, and nothing beside them is written."""
    want = torch.empty(codes.shape, dtype=E4M3)
    given = [None if x is None else x.cpu() for x in (factor, bound)]
    wanted = reference.quantise(stored.cpu(), want, *given)
    torch.testing.assert_close(scale.cpu(), wanted, rtol=1e-5, atol=0)
    neighbours(codes, want)
    assert untouched(wide, codes)


def rows_of(tokens: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows of every size, one of zeros among them, some values far larger than the others."""
    torch.manual_seed(seed + tokens * width)
    x = torch.randn(tokens, width) * torch.exp(torch.randn(tokens, 1))
    x[:, 0] *= 30 if dtype != torch.float16 else 4
    if tokens > 2:
        x[1] = 0
    return x.to(dtype)


@pairwise(("tokens, width", SIZES), ("dtype", DTYPES), ("factor", [False, True]))
def test_quantise(kernels_on, device, tokens, width, dtype, factor):
    x = rows_of(tokens, width, dtype)
    by = torch.rand(width).add(0.01) if factor else None
    want = torch.empty(tokens, width, dtype=E4M3)
    scale = reference.quantise(x, want, by, None)
    wide, codes = poisoned(tokens, width, device)
    apart = torch.full((tokens, width + 3), NAN, dtype=dtype)
    apart[:, :width] = x
    got = fp8.quantise(apart.to(device)[:, :width], codes, factor=None if by is None else by.to(device))
    assert torch.equal(got.cpu(), scale) and same(codes, want) and untouched(wide, codes)
    exact = x.float() if by is None else x.float() * by
    assert ((codes.cpu().float() * scale[:, None] - exact).abs() <= exact.abs() / 16 + scale[:, None] / 512).all()
    assert (codes.float().abs().amax(1)[exact.to(device).abs().amax(1) > 0] == fp8.LARGEST).all()


def test_rows_too_long_for_one_program(kernels_on, device, monkeypatch):
    from graftune.kernels.fp8 import kernel

    monkeypatch.setattr(kernel, "ONE", 64)
    x = rows_of(4, 208)
    for reach in (None, torch.tensor(0.7)):
        wide, codes = poisoned(4, 208, device)
        scale = fp8.quantise(x.to(device), codes, reach=None if reach is None else reach.to(device))
        coded(x, codes, scale, wide, None, reach)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(request, device, bad, fused):
    if fused:
        request.getfixturevalue("kernels_on")
    x = torch.ones(3, 32)
    x[1, 5] = bad
    codes = fp8.buffer(3, 32, torch.device(device))
    weight = Rows(torch.ones(16, 32, device=device).to(E4M3), torch.ones(16, device=device))
    for reach in (None, torch.ones((), device=device)):
        scale = fp8.quantise(x.to(device), codes, reach=reach)
        y = reference.mm(Rows(codes, scale), weight, torch.float32)
        assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("shape", [(4, 4), (16, 48), (260, 516), (272, 16), (64, 1024)], ids=str)
def test_transpose(kernels_on, device, shape):
    torch.manual_seed(1)
    codes = torch.randint(0, 256, (shape[0], fp8.aligned(shape[1])), dtype=torch.uint8).to(device)
    wide = torch.full((shape[1] + 1, fp8.aligned(shape[0] + 4)), 0x7F, dtype=torch.uint8, device=device)
    fp8.transpose(codes.view(E4M3)[:, : shape[1]], wide.view(E4M3)[: shape[1], : shape[0]])
    assert torch.equal(wide[: shape[1], : shape[0]], codes[:, : shape[1]].t())
    assert (wide[shape[1] :] == 0x7F).all() and (wide[:, shape[0] :] == 0x7F).all()


def adapters(
    out: int, into: int, rank: int, columns, dtype=torch.bfloat16, size: float = 0.01, device: str = "cpu"
) -> Adapters:
    torch.manual_seed(out + into + rank)
    down = torch.randn(len(columns) * rank, into) / rank
    up = torch.randn(sum(b - a for a, b in columns), rank) * size
    return Adapters(down.to(dtype).to(device), up.to(dtype).to(device), columns, 2.0)


def share_of(given: Adapters, out: int, device: str, *, turned: bool = False) -> AdapterCodes:
    """With columns for its codes, and scales as a weight has them."""
    into, code_columns = given.down.shape[1], fp8.adapter_code_columns(len(given.down))
    scale = torch.rand(out, generator=torch.Generator().manual_seed(3)).add(0.3).mul(2e-4).to(device)
    beside = fp8.buffer(out, code_columns, torch.device(device), zero=True)
    below = fp8.buffer(
        into if turned else code_columns, code_columns if turned else into, torch.device(device), zero=True
    )
    return AdapterCodes(*given, scale, beside, below.t() if turned else below, torch.zeros(4, device=device))


GROUPS = [
    (8, ((0, 48), (48, 64), (64, 80)), 80, 96),
    (16, ((0, 32),), 32, 144),
    (4, ((0, 16), (48, 64)), 64, 32),  # one member of three has no adapter
    (5, ((0, 16),), 16, 48),
]
PARTS = (4, ((0, 304), (304, 320)), 320, 16)  # the wider member's columns are split


@pytest.mark.parametrize(("size", "turned"), [(0.0, False), (1e-5, False), (1e-2, True), (1.0, False)])
def test_quantise_adapters(request, device, size, turned):
    """All groups at once: figures and codes as the reference's."""
    groups = GROUPS if size == 1.0 else GROUPS[2:]
    want = [share_of(adapters(o, i, r, c, size=size), o, "cpu", turned=turned) for r, c, o, i in groups]
    reference.quantise_adapters(want, {})
    request.getfixturevalue("kernels_on")
    got = [share_of(adapters(o, i, r, c, size=size, device=device), o, device, turned=turned) for r, c, o, i in groups]
    tables: dict[str, torch.Tensor] = {}
    fp8.quantise_adapters(got, tables)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.figures.cpu(), b.figures, rtol=1e-5, atol=0)
        neighbours(a.beside, b.beside)
        neighbours(a.below, b.below)


def test_codes_follow_the_adapters(kernels_on, device):
    """The tables of the first call outlive a change of values."""
    rank, columns, out, into = GROUPS[3]
    got, want = (share_of(adapters(out, into, rank, columns, device=d), out, d) for d in (device, "cpu"))
    tables: dict[str, torch.Tensor] = {}
    fp8.quantise_adapters([got], tables)
    before, kept = got.beside.clone(), dict(tables)
    for share in (got, want):
        share.up.mul_(-5)
    fp8.quantise_adapters([got], tables)
    reference.quantise_adapters([want], {})
    assert not same(got.beside, before) and all(tables[name] is table for name, table in kept.items())
    neighbours(got.beside, want.beside)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [4, 16, 33])
def test_lay(request, device, n, dtype):
    h, scale, shift = torch.randn(7, n).to(dtype), torch.rand(7).add(0.01), torch.tensor(0.25)
    h[3] *= 1e-4
    code_columns, codes = (
        fp8.adapter_code_columns(n),
        torch.zeros(7, 32 + fp8.adapter_code_columns(n), dtype=torch.uint8).view(E4M3),
    )
    fp8.lay(h, Rows(codes, scale), 32, shift)
    hi, again, lo = (codes[:, 32 + i * n : 32 + (i + 1) * n].float() for i in range(3))
    exact = h.float() * shift / scale[:, None]
    assert torch.equal(hi, again) and ((hi + lo - exact).abs() <= exact.abs() / 256 + 2.0**-10).all()
    request.getfixturevalue("kernels_on")
    wide, got = poisoned(7, 32 + code_columns, device)
    apart = torch.full((7, n + 5), NAN, dtype=dtype, device=device)
    apart[:, :n] = h.to(device)
    fp8.lay(apart[:, :n], Rows(got, scale.to(device)), 32, shift.to(device))
    neighbours(got[:, 32:], codes[:, 32:])
    assert untouched(wide, got)
    assert (got[:, :32].view(torch.uint8) == 0x7F).all()


def test_both_codes_of_every_number(kernels_on, device):
    """Sixteen to a row, so that codes are written by words: all that bf16 has, at exact scales."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = torch.where(every.isfinite(), every, 0).view(-1, 16)
    codes, scale, shift = torch.empty(len(every), 48, dtype=E4M3), torch.ones(len(every)), torch.tensor(1.0)
    reference.lay(every, scale, shift, codes)
    got = torch.empty(len(every), 48, dtype=E4M3, device=device)
    fp8.lay(every.to(device), Rows(got, scale.to(device)), 0, shift.to(device))
    assert torch.equal(got.cpu().float(), codes.float())


def low_of(given: Adapters, tokens: int, device: str) -> LowRank:
    return LowRank(torch.zeros(tokens, len(given.down), device=device), given.up, given.columns, given.scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "n"), [(5, 48, 48), (66, 320, 5), (3, 4112, 16), (7, 96, 80)])
def test_down(kernels_on, device, tokens, width, n, dtype):
    """Every code there is is read; beyond 64 columns of h it is a matrix library's product."""
    weight, bits = (torch.randn(n, width) / 16).to(dtype), torch.arange(tokens * width).mul(37) % 254
    x = torch.where(bits >= 127, bits + 1, bits).to(torch.uint8).view(E4M3).view(tokens, width)  # neither is NaN
    scale, shift = torch.rand(tokens).add(0.1), torch.tensor(0.125)
    wide, codes = poisoned(tokens, width + fp8.adapter_code_columns(n), device)
    codes[:, :width] = x.to(device)
    h = fp8.down(Rows(codes, scale.to(device)), width, weight.to(device), shift.to(device))
    assert h.dtype == dtype
    close(h, x.float() * scale[:, None] @ weight.float().t(), CLOSE[dtype])
    want = torch.zeros(tokens, fp8.adapter_code_columns(n), dtype=torch.uint8).view(E4M3)
    reference.lay(h.cpu(), scale, shift, want)
    neighbours(codes[:, width:], want)  # a fused multiply-add may move a bit of lo
    assert untouched(wide, codes)
    assert torch.equal(codes[:, :width].view(torch.uint8).cpu(), x.view(torch.uint8))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    ("tokens", "group", "dtype"),
    [
        *((5, group, DTYPES[i % 2]) for i, group in enumerate([*GROUPS, PARTS])),
        *((5, group, DTYPES[1]) for group in (GROUPS[0], PARTS)),
        (260, GROUPS[3], DTYPES[1]),  # tokens are split
    ],
)
def test_up_backward(kernels_on, device, tokens, group, dtype, both):
    rank, columns, out, into = group
    given = adapters(out, into, rank, columns, dtype, size=1.0, device=device)
    grad = rows_of(tokens, out, dtype)
    scale = reference.scale_of(grad.float())
    code_columns, shift = fp8.adapter_code_columns(len(given.down)), torch.tensor(0.5)
    wide, codes = poisoned(tokens, out + code_columns, device)
    rows, low = Rows(codes, scale.to(device)), low_of(given, tokens, device)
    h = torch.randn(low.h.shape).to(dtype)
    low = low._replace(h=h.to(device))
    if both:
        total = torch.ones(given.up.shape, device=device)
        g = fp8.up_both(grad.to(device), low, total, rows, shift.to(device))
        sums = [
            2.0 * grad.float()[:, c].t() @ h.float()[:, i] for c, _, i in lora_linear.members(columns, rank)
        ]  # fmt: skip
        close(total, 1 + torch.cat(sums), 1e-4)
    else:
        g = fp8.up_backward(grad.to(device), low, rows, shift.to(device))
    exact = [grad.float()[:, a:b] @ given.up.float().cpu()[r] for (a, b), r in members_of(given)]
    close(g, 2.0 * torch.cat(exact, 1), CLOSE[dtype])
    tail = torch.zeros(tokens, code_columns, dtype=torch.uint8).view(E4M3)
    reference.lay(g.cpu(), scale, shift, tail)
    neighbours(codes[:, out:], tail)
    assert untouched(wide, codes)
    assert (codes[:, :out].view(torch.uint8) == 0x7F).all()


def members_of(given: Adapters) -> list[tuple[tuple[int, int], slice]]:
    found = lora_linear.members(given.columns, given.up.shape[1])
    return [((c.start, c.stop), r) for c, r, _ in found]


@pairwise(
    ("tokens, width", [(1, 16), (5, 144), (3, 1040)]),
    ("dtype", DTYPES[:2]),
    ("add", [False, True]),
    ("reach", [None, 0.3]),
)
def test_norm(kernels_on, device, tokens, width, dtype, add, reach):
    x, y = rows_of(tokens, width, dtype), rows_of(tokens, width, dtype, seed=1) if add else None
    weight, bound = torch.rand(width).add(0.5), None if reach is None else torch.tensor(reach)
    want = torch.empty(tokens, width, dtype=E4M3)
    expected = reference.norm(x, None if y is None else y.clone(), weight, 1e-5, want, bound)
    wide, codes = poisoned(tokens, width, device)
    got = fp8.norm(
        x.to(device), None if y is None else y.to(device), weight.to(device), 1e-5, codes,
        reach=None if bound is None else bound.to(device),
    )  # fmt: skip
    assert torch.equal(got[0].cpu(), expected[0]) and untouched(wide, codes)
    torch.testing.assert_close(got[1].cpu(), expected[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(got[2].cpu(), expected[2], rtol=1e-5, atol=0)
    neighbours(codes, want)


@pairwise(("tokens, width", [(1, 16), (5, 144), (3, 1040)]), ("dtype", DTYPES[:2]), ("reach", [None, 0.3]))
def test_norm_backward(kernels_on, device, tokens, width, dtype, reach):
    grad, x, residual = (rows_of(tokens, width, dtype, seed=i) for i in range(3))
    rstd, weight, factor = torch.rand(tokens).add(0.5), torch.rand(width).add(0.5), torch.rand(width).add(0.1)
    bound = None if reach is None else torch.tensor(reach)
    apart, aside = (torch.full((tokens, width + padding), NAN, dtype=dtype, device=device) for padding in (8, 3))
    apart[:, :width] = residual.to(device)
    exact = rms_norm.reference.add_backward(grad.float(), x.float(), rstd, weight, residual.float(), None)
    for out in (aside, apart):  # elsewhere, then in place
        wide, codes = poisoned(tokens, width, device)
        scale = fp8.norm_backward(
            grad.to(device), x.to(device), rstd.to(device), weight.to(device), apart[:, :width], out[:, :width], codes,
            factor.to(device), reach=None if bound is None else bound.to(device),
        )  # fmt: skip
        close(out[:, :width], exact, {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype])
        assert out[:, width:].isnan().all() and torch.equal(out[:, :width], aside[:, :width])
        coded(out[:, :width], codes, scale, wide, factor, bound)


@pairwise(
    ("tokens, width, one", [(1, 16, 1 << 14), (5, 144, 1 << 14), (3, 1040, 256)]),
    ("dtype", DTYPES),
    ("reach", [None, 0.3]),
)
def test_act(kernels_on, device, tokens, width, one, dtype, reach, monkeypatch):
    from graftune.kernels.fp8 import gated

    monkeypatch.setattr(gated, "ONE_ACT", one)
    gate_up = rows_of(tokens, 2 * width, dtype)
    bound = None if reach is None else torch.tensor(reach)
    wide, codes = poisoned(tokens, width, device)
    scale = fp8.act(gate_up.to(device), codes, reach=None if bound is None else bound.to(device))
    exact = torch.empty(tokens, width)
    swiglu.reference.forward(gate_up.float(), exact)
    coded(exact, codes, scale, wide, None, bound)


@pairwise(
    ("tokens, width, block", [(1, 16, 1 << 12), (5, 144, 64), (3, 2064, 1 << 12)]),
    ("dtype", DTYPES),
    ("reach", [None, 0.3]),
)
def test_act_backward(kernels_on, device, tokens, width, block, dtype, reach, monkeypatch):
    from graftune.kernels.fp8 import gated

    monkeypatch.setattr(gated, "ACT_BLOCK", block)
    gate_up, grad = rows_of(tokens, 2 * width, dtype).to(device), rows_of(tokens, width, dtype, seed=1).to(device)
    factor = torch.rand(2 * width).add(0.1).to(device)
    bound = None if reach is None else torch.tensor(reach).to(device)
    out, act = torch.full_like(gate_up, NAN), torch.full_like(grad, NAN)
    wide, codes = poisoned(tokens, 2 * width, device)
    scale = fp8.act_backward(grad, gate_up, out, act, codes, factor, reach=bound)
    want_out, want_act = (torch.empty(t.shape, device=device) for t in (out, act))
    swiglu.reference.backward(grad.float(), gate_up.float(), want_out, want_act)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    close(out, want_out, tolerance)
    close(act, want_act, tolerance)
    coded(out, codes, scale, wide, factor, bound)


HEADS = [
    (1, (1, 1, 16)),
    (5, (4, 2, 16)),
    (3, (3, 1, 80)),  # neither heads nor halves are powers of two
    (2, (16, 4, 128)),  # several warps, fewer of k and v than threads
]


@pairwise(("tokens, heads", HEADS), ("dtype", DTYPES), ("reach", [None, 0.3]))
def test_rope_backward(kernels_on, device, tokens, heads, dtype, reach, monkeypatch):
    """Elsewhere and, to the same bit, in place; the codes are those of what was stored."""
    width = (heads[0] + 2 * heads[1]) * heads[2]
    angles = rows_of(tokens, heads[2] // 2)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    given, factor = rows_of(tokens, width, dtype).to(device), torch.rand(width).add(0.1).to(device)
    exact = torch.empty_like(given)
    apart = tuple(part.contiguous() for part in by_part(given, heads))
    rope.finish_backward(apart, exact, cos, sin, heads, exact.new_empty(0))
    bound = None if reach is None else torch.tensor(reach).to(device)
    monkeypatch.setattr(rope, "finish_backward", None)  # one kernel does it all
    here, elsewhere = (torch.full((tokens, width + 8), NAN, dtype=dtype, device=device) for _ in range(2))
    here[:, :width] = given
    for grads, out in ((apart, elsewhere), (by_part(here[:, :width], heads), here)):
        wide, codes = poisoned(tokens, width, device)
        scale = fp8.rope_backward(grads, out[:, :width], cos, sin, heads, codes, factor, reach=bound)
        close(out[:, :width], exact, CLOSE[dtype])
        assert torch.equal(out[:, :width], elsewhere[:, :width]) and out[:, width:].isnan().all()
        coded(out[:, :width], codes, scale, wide, factor, bound)


@pytest.mark.parametrize(("turning", "added"), [(8, False), (16, True), (8, True)])
def test_rope_backward_of_what_one_program_does_not_hold(kernels_on, device, turning, added):
    """Heads that turn in part; dk and dv of every query head."""
    tokens, heads, width = 5, (4, 2, 16), 8 * 16
    angles = rows_of(tokens, turning // 2)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    factor, bound = torch.rand(width).add(0.1).to(device), torch.tensor(0.3).to(device)
    dq, dk, dv = (rows_of(tokens, n * 16, seed=n).view(tokens, n, 16).to(device) for n in (4, *[4 if added else 2] * 2))
    grads = dq.bfloat16(), *((dk, dv) if added else (dk.bfloat16(), dv.bfloat16()))
    out, exact = (torch.full((tokens, width), NAN, dtype=torch.bfloat16, device=device) for _ in range(2))
    rope.finish_backward(grads, exact, cos, sin, heads, exact.new_empty(0))
    wide, codes = poisoned(tokens, width, device)
    scale = fp8.rope_backward(grads, out, cos, sin, heads, codes, factor, reach=bound)
    assert torch.equal(out, exact)
    coded(out, codes, scale, wide, factor, bound)
