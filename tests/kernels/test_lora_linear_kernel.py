"""The adapters' thin products: the kernels against the references on the same numbers in fp32.

Buffers lie as in a step: adapter columns for h or g beside x or dY, NaN wherever nothing may be read, columns of
projections without an adapter among them.
"""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import augmented_weight, launch, lora_linear, rms_norm
from graftune.kernels.lora_linear import Copy, LowRank, reference
from tests.kernels.harness import NAN, close

pytestmark = pytest.mark.usefixtures("poison")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # one rounding of the result
DTYPES = list(TOLERANCE)
SUMMED = 2e-5  # what is summed over tokens stays fp32, whatever the dtype
SCALE = 0.7
# Columns of the members in a product of 130: blocks of 64 or 128 columns, whole, one more, one less.
GROUPS = {
    "lone": ((0, 130),),
    "q and v": ((0, 64), (97, 130)),
    "k": ((64, 97),),
    "qkv": ((0, 64), (64, 97), (97, 130)),
    "gate": ((0, 65),),
    "up": ((65, 130),),
    "gate and up": ((0, 65), (65, 130)),
    "four": ((0, 31), (31, 32), (40, 105), (106, 130)),
}
OUT = 130
RANKS = [
    ("lone", 1),
    ("q and v", 3),
    ("qkv", 8),
    ("gate", 16),
    ("up", 17),
    ("gate and up", 33),
    ("k", 40),
    ("lone", 64),
    ("four", 7),
]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request, device):
    if request.param == torch.bfloat16 and device == "cpu":
        pytest.skip(
            "Triton's interpreter multiplies the bits of bf16 matrices, not their values; fp16 goes the same way"
        )
    return request.param


def beside(values: torch.Tensor, dtype: torch.dtype, device: str, padding: int) -> torch.Tensor:
    """[T + 2, width + padding]: values in the corner, NaN around them."""
    wide = torch.full((len(values) + 2, values.shape[1] + padding), NAN)
    wide[: len(values), : values.shape[1]] = values
    return wide.to(dtype).to(device)


def tail_of(wide: torch.Tensor, tokens: int, width: int, thin: int) -> torch.Tensor:
    """The adapter columns as a step passes them: a multiple of eight, with padding behind the thin product."""
    return wide[:tokens, width : width + -(-thin // 8) * 8]


def filled(tail: torch.Tensor, thin: torch.Tensor) -> None:
    assert torch.equal(tail[:, : thin.shape[1]], thin) and not tail[:, thin.shape[1] :].any()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, NaN where NaN was."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def padding_for(thin: int) -> int:
    return -(-thin // 8) * 8 + 3


def gradient(tokens: int, columns, dtype, device, padding: int, out: int = OUT) -> torch.Tensor:
    """A buffer of dY [T, out + padding], NaN where no member has its columns."""
    grad = torch.full((tokens, out), NAN)
    for start, stop in columns:
        grad[:, start:stop] = torch.randn(tokens, stop - start)
    return beside(grad, dtype, device, padding)


def adapters(tokens: int, columns, rank: int, dtype, device) -> LowRank:
    """h in a buffer of its own with NaN beside it."""
    h = beside(torch.randn(tokens, rank * len(columns)), dtype, device, 5)[:tokens, : rank * len(columns)]
    up = torch.randn(sum(stop - start for start, stop in columns), rank) / rank**0.5
    return LowRank(h, up.to(dtype).to(device), columns, SCALE)


def wide(low: LowRank) -> LowRank:
    return low._replace(h=low.h.float().contiguous(), up=low.up.float())


@pytest.mark.parametrize(
    ("tokens", "width", "thin", "tiles"),
    [
        (1, 2, 1, 0),
        (3, 64, 3, 0),
        (65, 65, 17, 0),
        (64, 256, 24, 0),  # the widest that one program takes
        (65, 257, 7, 0),
        (1, 700, 40, 0),
        (7, 513, 64, 0),
        (65, 513, 2, 4096),  # with the larger tiles that products have from 4096 tokens on
    ],
)
def test_down(kernels_on, device, dtype, tokens, width, thin, tiles, monkeypatch):
    from graftune.kernels.lora_linear import kernel

    tile = kernel._rows_tile
    assert tile(4095) == tile(0) != tile(4096)
    monkeypatch.setattr(kernel, "_rows_tile", lambda tokens: tile(tiles))
    torch.manual_seed(tokens + width)
    x = beside(torch.randn(tokens, width), dtype, device, padding_for(thin))
    weight = (torch.randn(thin, width) / width**0.5).to(dtype).to(device)
    read, tail, before = x[:tokens, :width], tail_of(x, tokens, width, thin), x.clone()
    h = lora_linear.down(read, weight)
    assert h.dtype == dtype
    want = read.float() @ weight.float().t()
    close(h, want, TOLERANCE[dtype])
    if dtype != torch.float32:
        assert (h == want.to(dtype)).float().mean() > 0.9, "rounded once, not in every part"
    assert same(x, before), "nothing else is written"
    assert torch.equal(h, lora_linear.down(read, weight, tail)), "the same bits every time, with a tail or without"
    filled(tail, h)
    tail.fill_(NAN)
    assert same(x, before), "nothing but the tail is written"


@pytest.mark.parametrize(("group", "rank"), RANKS)
@pytest.mark.parametrize("tokens", [1, 65])
def test_up_backward(kernels_on, device, dtype, tokens, group, rank):
    torch.manual_seed(rank)
    columns = GROUPS[group]
    thin = rank * len(columns)
    low, grad = (
        adapters(tokens, columns, rank, dtype, device),
        gradient(tokens, columns, dtype, device, padding_for(thin)),
    )
    read, tail, before = grad[:tokens, :OUT], tail_of(grad, tokens, OUT, thin), grad.clone()
    g = lora_linear.up_backward(read, low)
    assert g.dtype == dtype
    close(g, reference.up_backward(read.float(), wide(low)), TOLERANCE[dtype])
    assert same(grad, before), "nothing else is written"
    assert torch.equal(lora_linear.up_backward(read, low, tail), g), "the same bits every time, with a tail or without"
    filled(tail, g)
    tail.fill_(NAN)
    assert same(grad, before), "nothing but the tail is written"


@pytest.mark.parametrize(("group", "rank"), RANKS)
@pytest.mark.parametrize("tokens", [1, 129])
def test_up_grad(kernels_on, device, dtype, tokens, group, rank):
    torch.manual_seed(rank + 1)
    low = adapters(tokens, GROUPS[group], rank, dtype, device)
    grad_y = gradient(tokens, GROUPS[group], dtype, device, 8)[:tokens, :OUT]
    start = torch.randn(low.up.shape, device=device)  # accumulated into, not overwritten
    got, want = start.clone(), start.clone()
    lora_linear.up_grad(grad_y, low, got)
    reference.up_grad(grad_y.float(), wide(low), want)
    close(got, want, SUMMED)


@pytest.mark.parametrize(("tokens", "columns", "rank"), [
    (1, ((0, 7),), 3), (17, ((0, 300), (310, 600)), 16), (33, ((0, 530), (530, 540), (540, 600)), 5),
    (70, ((0, 40), (50, 400), (400, 410), (410, 700)), 4),
    (260, ((3, 40),), 33), (520, ((0, 40), (50, 90)), 2),
])  # fmt: skip
def test_both_in_one_pass(kernels_on, device, dtype, tokens, columns, rank):
    torch.manual_seed(rank)
    out, thin = columns[-1][1], rank * len(columns)
    low, grad = (
        adapters(tokens, columns, rank, dtype, device),
        gradient(tokens, columns, dtype, device, padding_for(thin), out),
    )
    read, tail, before = grad[:tokens, :out], tail_of(grad, tokens, out, thin), grad.clone()
    start = torch.randn(low.up.shape, device=device)
    got, want = start.clone(), start.clone()
    g = lora_linear.up_both(read, low, got, tail)
    reference.up_grad(read.float(), wide(low), want)
    close(got, want, SUMMED)
    close(g, reference.up_backward(read.float(), wide(low)), TOLERANCE[dtype])
    filled(tail, g)
    tail.fill_(NAN)
    assert same(grad, before), "nothing but the tail is written"
    again = start.clone()
    assert torch.equal(g, lora_linear.up_both(read, low, again)) and torch.equal(got, again), "the same bits every time"


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "width", "thin"), [(1, 2, 1), (5, 64, 3), (128, 65, 16), (129, 30, 17), (33, 129, 40), (7, 100, 64)]
)
def test_down_backward(kernels_on, device, dtype, tokens, width, thin, normed):
    """With a norm, x is what it read; g * rstd (in fp16 x * rstd) is rounded before the product: once, then."""
    torch.manual_seed(width)
    x = beside(torch.randn(tokens, width) * 3, dtype, device, 6)[:tokens, :width]
    g = beside(torch.randn(tokens, thin), dtype, device, 2)[:tokens, :thin]
    rstd, weight = torch.rand(tokens, device=device) + 0.2, torch.rand(width, device=device) + 0.5
    start = torch.randn(thin, width, device=device)
    got, want = start.clone(), start.clone()
    options = {"rstd": rstd, "weight": weight} if normed else {}
    lora_linear.down_backward(g, x, got, **options)
    read = rms_norm.reference.apply(x.float(), rstd, weight) if normed else x.float()
    reference.down_backward(g.float(), read, want)
    close(got, want, max(SUMMED, TOLERANCE[dtype]) if normed else SUMMED)


@pytest.mark.parametrize("large", [30.0, 1000.0])
def test_small_gradients_of_a_large_stream(kernels_on, device, dtype, large):
    """Streams grow to hundreds, so that rstd is small; in fp16 a gradient times that would have few digits or none."""
    torch.manual_seed(1)
    x, g = (torch.randn(128, 64) * large).to(dtype).to(device), (torch.randn(128, 16) * 1e-4).to(dtype).to(device)
    rstd, weight = x.float().square().mean(1).rsqrt(), torch.ones(64, device=device)
    got, want = torch.zeros(16, 64, device=device), torch.zeros(16, 64, device=device)
    lora_linear.down_backward(g, x, got, rstd=rstd, weight=weight)
    reference.down_backward(g.float(), x.float() * rstd[:, None], want)
    assert float((got - want).norm() / want.norm()) < (4e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize(
    ("tokens", "columns", "rank", "tiles"),
    [
        (512, ((0, 64), (97, 130)), 8, 0),  # the most tokens that one program sums
        (513, ((0, 64), (97, 130)), 8, 0),
        (1500, ((5, 70),), 3, 0),
        (600, ((0, 128), (129, 130)), 16, 4096),
        (600, ((0, 33),), 33, 4096),  # with the other tiles that large ranks have from 4096 tokens on
    ],
)
def test_sums_over_many_tokens(kernels_on, device, dtype, tokens, columns, rank, tiles, monkeypatch):
    from graftune.kernels.lora_linear import sums

    tile = sums._columns_tile
    monkeypatch.setattr(sums, "_columns_tile", lambda rank, tokens: tile(rank, tiles))
    torch.manual_seed(tokens)
    out = columns[-1][1]
    low, grad = adapters(tokens, columns, rank, dtype, device), gradient(tokens, columns, dtype, device, 3, out)
    start = torch.randn(low.up.shape, device=device) * 10
    want, found = start.clone(), [start.clone() for _ in range(2)]
    for total in found:
        lora_linear.up_grad(grad[:tokens, :out], low, total)
    reference.up_grad(grad[:tokens, :out].float(), wide(low), want)
    close(found[0] - start, want - start, SUMMED)
    assert torch.equal(*found), "the same bits every time"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_products_go_to_the_matrix_library(kernels_on, device, dtype, monkeypatch):
    from graftune.kernels.lora_linear import kernel, sums

    def never(*a, **k):
        raise AssertionError("our kernels are for thin products")

    monkeypatch.setattr(kernel, "rows", never)
    monkeypatch.setattr(sums, "sum_columns_", never)
    tokens, rank, columns = 9, lora_linear.THIN + 1, ((0, 64), (97, 130))
    rough = 4 * TOLERANCE[dtype]  # the library rounds every step
    grad = gradient(tokens, columns, dtype, device, 200)
    low, tail = adapters(tokens, columns, rank, dtype, device), tail_of(grad, tokens, OUT, 2 * rank)
    grad_y = grad[:tokens, :OUT]
    out = lora_linear.up_backward(grad_y, low, tail)
    close(out, reference.up_backward(grad_y.float(), wide(low)), rough)
    filled(tail, out)
    got, want = torch.ones(97, rank, device=device), torch.ones(97, rank, device=device)
    lora_linear.up_grad(grad_y, low, got)
    reference.up_grad(grad_y.float(), wide(low), want)
    close(got, want, rough)

    x, down = (torch.randn(n, 20).to(dtype).to(device) for n in (tokens, rank))
    tail.fill_(NAN)
    h = lora_linear.down(x, down, tail)
    close(h, x.float() @ down.float().t(), rough)
    filled(tail, h)
    rstd, weight = torch.rand(tokens, device=device) + 0.2, torch.rand(20, device=device) + 0.5
    got, want = torch.ones(rank, 20, device=device), torch.ones(rank, 20, device=device)
    lora_linear.down_backward(h, x, got, rstd=rstd, weight=weight)
    reference.down_backward(h.float(), rms_norm.reference.apply(x.float(), rstd, weight), want)
    close(got, want, 2 * rough)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_product(device, dtype):
    a, b = torch.randn(5, 40).to(dtype).to(device).t(), torch.randn(5, 33).to(dtype).to(device)
    total = torch.full((40, 33), 2.0, device=device)
    lora_linear.add_product_(total, a, b, 0.5)
    close(total - 2, 0.5 * a.float() @ b.float(), SUMMED if device == "cuda" else 2 * TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "fused"), [*((dtype, True) for dtype in DTYPES), (DTYPES[0], False)])
def test_spread(device, dtype, fused, monkeypatch):
    """A below two weights and s B beside them, from odd places of one arena; the table outlives a change of values."""
    monkeypatch.setattr(launch, "fused", lambda x: fused)
    arena = torch.empty(9000, dtype=dtype, device=device)
    buffers = [torch.full((75, 139), NAN, dtype=dtype, device=device) for _ in range(2)]
    places = [  # in the arena, rows, width, which buffer, row and column there, scale
        (7, 5, 131, 0, 70, 0, 1.0),
        (700, 33, 5, 0, 0, 131, 2.5),
        (865, 1, 3, 0, 60, 136, -1 / 3),
        (870, 64, 33, 1, 1, 100, 1 / 3),  # more than a block
        (2990, 1, 1, 1, 74, 0, 0.1),
        (2991, 41, 60, 1, 1, 3, 1.0),
    ]
    copies = [
        Copy(arena[at:][: rows * width].view(rows, width), buffers[i][row : row + rows, column : column + width], scale)
        for at, rows, width, i, row, column, scale in places
    ]
    tables: dict[str, torch.Tensor] = {}
    for turn in range(2):
        arena.copy_(torch.randn(9000, generator=torch.Generator().manual_seed(turn)))
        want = [torch.full_like(padding, NAN) for padding in buffers]
        for copy, (_, rows, width, i, row, column, scale) in zip(copies, places, strict=True):
            exact = copy.source.float() * torch.tensor(scale, dtype=torch.float32, device=device)
            want[i][row : row + rows, column : column + width] = exact.to(dtype)
        before = dict(tables)
        lora_linear.spread(copies, tables)
        assert all(tables[name] is table for name, table in before.items())
        for got, right in zip(buffers, want, strict=True):
            if dtype == torch.bfloat16 and device == "cpu":  # the interpreter cuts bf16 off instead of rounding it
                assert torch.allclose(got, right, rtol=2**-7, equal_nan=True)
            else:
                assert same(got, right)
    lora_linear.spread([], {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_add_up_in_fp32(dtype, device):
    """A thousand times the same small product: a sum in 16 bits would stop growing."""
    a, b = torch.randn(33, 24, device=device).to(dtype), torch.randn(33, 16, device=device).to(dtype)
    wide = torch.full((24, 16 + 5), 100.0, device=device)
    total = wide[:, :16].contiguous()
    for _ in range(1000):
        lora_linear.add_product_(total, a.t(), b, 1e-3)
    want = 100.0 + a.double().t() @ b.double()
    assert total.dtype == torch.float32
    assert (total - want).abs().max() < (1e-2 if dtype == torch.float32 or device == "cuda" else 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "out", "width", "rank", "size"),
    [
        (((0, 5),), 5, 7, 1, 8),
        (((0, 30), (40, 50)), 50, 24, 4, 8),
        (((0, 300), (300, 340), (340, 380)), 380, 130, 16, 48),
        (((10, 20), (20, 33)), 40, 5000, 3, 8),
        (((10, 20), (20, 33)), 40, 24, 70, 144),
        (((0, 9), (9, 10), (20, 30), (31, 40)), 40, 24, 5, 24),
    ],
)
def test_adapters_beside_and_below_a_weight(columns, out, width, rank, size, dtype, device, kernels_on):
    """All of the adapter columns or rows are written, whatever was in them; nothing else is."""
    rows = sum(stop - start for start, stop in columns)
    down = torch.randn(rank * len(columns), width, device=device).to(dtype)
    up = torch.randn(rows, rank, device=device).to(dtype)
    adapters = augmented_weight.Adapters(down, up, columns, 2.0)
    for place, side in (("beside", (slice(out), slice(width, None))), ("below", (slice(out, None), slice(width)))):
        storage, want = (torch.full((out + size, width + size), NAN, dtype=dtype, device=device) for _ in range(2))
        getattr(augmented_weight, place)(storage[side], adapters)
        getattr(augmented_weight.reference, place)(want[side], adapters)
        assert torch.equal(storage.nan_to_num(7e4), want.nan_to_num(7e4))
        assert not storage[side].isnan().any() and storage.isnan().sum() == storage.numel() - storage[side].numel()
