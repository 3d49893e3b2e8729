"""The adapters' thin products: the kernels against the references on the same numbers in fp32.

Buffers lie as in a step: the room for h or g beside x or dY, NaN wherever nothing may be read, columns of projections
without an adapter among them.
"""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import launch, lora_linear, rms_norm
from graftune.kernels.lora_linear import Copy, Low, reference

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # one rounding of the result
DTYPES = list(TOLERANCE)
SUMMED = 5e-6  # what is summed over tokens stays fp32, whatever the dtype
NAN = float("nan")
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
}
OUT = 130
RANKS = [("lone", 1), ("q and v", 3), ("qkv", 8), ("gate", 16), ("up", 17), ("gate and up", 33), ("k", 40), ("lone", 64)]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    got, want = got.float(), want.float()
    assert got.shape == want.shape and got.isfinite().all()
    off = (got - want).norm() / (want.norm() + 1e-6)
    assert off <= tolerance, (off, (got - want).abs().max(), want.abs().max())


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """What the kernels allocate for themselves is full of NaN until they write it."""
    make = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: make(*a, **k).fill_(NAN))


@pytest.fixture
def splits(monkeypatch):
    """How many parts each product was split into and added up from; a product in one piece is not in the list."""
    from graftune.kernels.lora_linear import kernel

    found, add_up = [], kernel._add_up

    def spy(parts, *a, **k):
        found.append(len(parts))
        add_up(parts, *a, **k)

    monkeypatch.setattr(kernel, "_add_up", spy)
    return found


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request, device):
    if request.param == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bf16 matrices, not their values; fp16 goes the same way")
    return request.param


def beside(values: torch.Tensor, dtype: torch.dtype, device: str, room: int) -> torch.Tensor:
    """[T + 2, width + room]: values in the corner, NaN around them."""
    wide = torch.full((len(values) + 2, values.shape[1] + room), NAN)
    wide[: len(values), : values.shape[1]] = values
    return wide.to(dtype).to(device)


def tail_of(wide: torch.Tensor, tokens: int, width: int, thin: int) -> torch.Tensor:
    """The room as a step passes it: a multiple of eight, with padding behind the thin product."""
    return wide[:tokens, width : width + -(-thin // 8) * 8]


def filled(tail: torch.Tensor, thin: torch.Tensor) -> None:
    assert torch.equal(tail[:, : thin.shape[1]], thin) and not tail[:, thin.shape[1] :].any()


def room_for(thin: int) -> int:
    return -(-thin // 8) * 8 + 3


def gradient(tokens: int, columns, dtype, device, room: int, out: int = OUT) -> torch.Tensor:
    """A buffer of dY [T, out + room], NaN where no member has its columns."""
    grad = torch.full((tokens, out), NAN)
    for start, stop in columns:
        grad[:, start:stop] = torch.randn(tokens, stop - start)
    return beside(grad, dtype, device, room)


def adapters(tokens: int, columns, rank: int, dtype, device) -> Low:
    """h in a buffer of its own with NaN beside it."""
    h = beside(torch.randn(tokens, rank * len(columns)), dtype, device, 5)[:tokens, : rank * len(columns)]
    up = torch.randn(sum(stop - start for start, stop in columns), rank) / rank**0.5
    return Low(h, up.to(dtype).to(device), columns, SCALE)


def wide(low: Low) -> Low:
    return low._replace(h=low.h.float().contiguous(), up=low.up.float())


@pytest.mark.parametrize("tailed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "width", "thin", "parts"),
    [
        (1, 2, 1, 0),
        (3, 64, 3, 0),
        (65, 65, 17, 0),
        (64, 256, 24, 0),  # the widest that one program takes
        (65, 257, 24, 2),
        (1, 700, 40, 3),
        (7, 513, 64, 3),
        (4097, 130, 9, 0),  # larger tiles from here on
        (4097, 513, 5, 2),
    ],
)
def test_down(kernels_on, device, dtype, splits, tokens, width, thin, parts, tailed):
    torch.manual_seed(tokens + width)
    x = beside(torch.randn(tokens, width), dtype, device, room_for(thin))
    weight, before = (torch.randn(thin, width) / width**0.5).to(dtype).to(device), x.clone()
    tail = tail_of(x, tokens, width, thin) if tailed else None
    h = lora_linear.down(x[:tokens, :width], weight, tail)
    assert h.dtype == dtype and splits == ([parts] if parts else [])
    close(h, x[:tokens, :width].float() @ weight.float().t(), TOLERANCE[dtype])
    if tail is not None:
        filled(tail, h)
        tail.copy_(tail_of(before, tokens, width, thin))
    assert torch.equal(x.nan_to_num(9), before.nan_to_num(9)), "nothing but the tail is written"
    assert torch.equal(h, lora_linear.down(x[:tokens, :width], weight)), "the same bits every time"


@pytest.mark.parametrize("way", ["plain", "tail", "out", "both"])
@pytest.mark.parametrize(("group", "rank"), RANKS)
@pytest.mark.parametrize("tokens", [1, 65])
def test_up_backward(kernels_on, device, dtype, tokens, group, rank, way):
    torch.manual_seed(rank)
    columns = GROUPS[group]
    thin = rank * len(columns)
    low, grad = adapters(tokens, columns, rank, dtype, device), gradient(tokens, columns, dtype, device, room_for(thin))
    before, grad_y = grad.clone(), grad[:tokens, :OUT]
    tail = tail_of(grad, tokens, OUT, thin) if way in ("tail", "both") else None
    out = torch.full((tokens, thin), NAN, dtype=dtype, device=device) if way in ("out", "both") else None
    g = lora_linear.up_backward(grad_y, low, tail, out)
    assert g.dtype == dtype and (out is None or g is out)
    close(g, reference.up_backward(grad_y.float(), wide(low)), TOLERANCE[dtype])
    if tail is not None:
        filled(tail, g)
        tail.copy_(tail_of(before, tokens, OUT, thin))
    assert torch.equal(grad.nan_to_num(9), before.nan_to_num(9)), "nothing but the tail is written"


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


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "width", "thin"), [(1, 2, 1), (5, 64, 3), (128, 65, 16), (129, 30, 17), (33, 129, 40), (7, 100, 64)]
)
def test_down_backward(kernels_on, device, dtype, tokens, width, thin, normed):
    """With a norm, x is what it read; g * rstd is rounded before the product, so that one rounding is allowed then."""
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


@pytest.mark.parametrize(
    ("tokens", "columns", "rank", "parts"),
    [
        (512, ((0, 64), (97, 130)), 8, 0),  # the most tokens that one program sums
        (513, ((0, 64), (97, 130)), 8, 2),
        (1500, ((5, 70),), 3, 3),
        (4097, ((0, 129), (129, 130)), 16, 17),  # larger tiles from here on
        (4097, ((0, 65),), 33, 9),  # but not for large ranks
        (700, ((0, 8129),), 2, 0),  # columns enough for the chip
    ],
)
def test_sums_over_many_tokens(kernels_on, device, dtype, splits, tokens, columns, rank, parts):
    torch.manual_seed(tokens)
    out = columns[-1][1]
    low, grad = adapters(tokens, columns, rank, dtype, device), gradient(tokens, columns, dtype, device, 3, out)
    start = torch.randn(low.up.shape, device=device) * 10
    want, found = start.clone(), [start.clone() for _ in range(2)]
    for total in found:
        lora_linear.up_grad(grad[:tokens, :out], low, total)
    reference.up_grad(grad[:tokens, :out].float(), wide(low), want)
    assert splits == ([parts] * 2 if parts else [])
    close(found[0] - start, want - start, SUMMED)
    assert torch.equal(*found), "the same bits every time"


def test_the_same_of_the_other_side(kernels_on, device, dtype, splits):
    """dA, whose total lies the other way around, from 1100 tokens and with a norm."""
    torch.manual_seed(2)
    x, g = (torch.randn(1100, n).to(dtype).to(device) for n in (70, 6))
    rstd, weight = torch.rand(1100, device=device) + 0.2, torch.rand(70, device=device) + 0.5
    start = torch.randn(6, 70, device=device)
    want, found = start.clone(), [start.clone() for _ in range(2)]
    for total in found:
        lora_linear.down_backward(g, x, total, rstd=rstd, weight=weight)
    reference.down_backward(g.float(), rms_norm.reference.apply(x.float(), rstd, weight), want)
    assert splits == [3, 3]
    close(found[0], want, max(SUMMED, TOLERANCE[dtype]))
    assert torch.equal(*found), "the same bits every time"


@pytest.mark.parametrize("columns", [((0, 600), (700, 710)), ((0, 30), (40, 400), (400, 431))])
def test_members_of_unlike_width_in_parts(kernels_on, device, dtype, splits, columns):
    """A narrow member has nothing in the later parts."""
    torch.manual_seed(4)
    out, thin = columns[-1][1], 5 * len(columns)
    low, grad = adapters(9, columns, 5, dtype, device), gradient(9, columns, dtype, device, room_for(thin), out)
    tail = tail_of(grad, 9, out, thin)
    found = [lora_linear.up_backward(grad[:9, :out], low, tail) for _ in range(2)]
    assert len(splits) == 2 and splits[0] > 1
    close(found[0], reference.up_backward(grad[:9, :out].float(), wide(low)), TOLERANCE[dtype])
    filled(tail, found[0])
    assert torch.equal(*found), "the same bits every time"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_products_go_to_the_matrix_library(kernels_on, device, dtype, monkeypatch):
    from graftune.kernels.lora_linear import kernel

    def never(*a, **k):
        raise AssertionError("our kernels are for thin products")

    monkeypatch.setattr(kernel, "rows", never)
    monkeypatch.setattr(kernel, "sum_columns_", never)
    tokens, rank, columns = 9, lora_linear.THIN + 1, ((0, 64), (97, 130))
    rough = 4 * TOLERANCE[dtype]  # the library rounds every step
    grad = gradient(tokens, columns, dtype, device, 200)
    low, tail = adapters(tokens, columns, rank, dtype, device), tail_of(grad, tokens, OUT, 2 * rank)
    out = torch.full((tokens, 2 * rank), NAN, dtype=dtype, device=device)
    grad_y = grad[:tokens, :OUT]
    assert lora_linear.up_backward(grad_y, low, tail, out) is out
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spread(kernels_on, device, dtype):
    """A below two weights and s B beside them, from odd places of one arena; the tables outlive a change of values."""
    arena = torch.randn(9000).to(dtype).to(device)
    rooms = [torch.full((75, 139), NAN, dtype=dtype, device=device) for _ in range(2)]

    def source(at: int, rows: int, width: int) -> torch.Tensor:
        return arena[at : at + rows * width].view(rows, width)

    copies = [
        Copy(source(7, 5, 131), rooms[0][70:, :131], 1.0),
        Copy(source(700, 33, 5), rooms[0][:33, 131:136], 2.5),
        Copy(source(865, 1, 3), rooms[0][60:61, 136:], -1 / 3),
        Copy(source(870, 64, 33), rooms[1][1:65, 100:133], 1 / 3),  # more than a block
        Copy(source(3000, 1, 1), rooms[1][74:, :1], 0.1),
        Copy(source(3001, 16, 128), rooms[1][:16, :128], 2.0) if False else Copy(source(3001, 1, 139), rooms[1][66:67], 2),
    ]
    tables: dict[str, torch.Tensor] = {}
    for turn in range(2):
        want = [torch.full_like(room, NAN) for room in rooms]
        for piece, target, scale in copies:
            room = next(i for i, r in enumerate(rooms) if r.data_ptr() <= target.data_ptr() < r.data_ptr() + r.nbytes)
            value = (piece.float() * torch.tensor(scale, dtype=torch.float32, device=device)).to(dtype)
            want[room].as_strided(target.shape, target.stride(), target.storage_offset()).copy_(value)
        if turn:
            places = tables["places"]
        lora_linear.spread(copies, tables)
        if turn:
            assert tables["places"] is places
        for got, right in zip(rooms, want, strict=True):
            assert torch.equal(got.isnan(), right.isnan()), "nothing else is written"
            if dtype == torch.bfloat16 and device == "cpu":  # the interpreter cuts bf16 off instead of rounding it
                assert torch.allclose(got.nan_to_num(9), right.nan_to_num(9), rtol=2**-7)
            else:
                assert torch.equal(got.nan_to_num(9), right.nan_to_num(9))
        arena.copy_(torch.randn(9000))
    lora_linear.spread([], {})


@pytest.mark.parametrize("group", ["q and v", "gate", "qkv"])
def test_the_room_beside_the_weight_gives_the_whole_product(kernels_on, device, group, monkeypatch):
    """y = [x | h] [W | sB]' and dX = [dY | g] [W ; A], against the references' plain way."""
    tokens, into, rank, columns = 11, 30, 3, GROUPS[group]
    thin = rank * len(columns)
    room = -(-thin // 8) * 8
    torch.manual_seed(6)
    arena = torch.randn((into + OUT) * thin).to(device)
    down = arena[: thin * into].view(thin, into)
    up = arena[thin * into :][: sum(stop - start for start, stop in columns) * rank].view(-1, rank)
    storage = torch.zeros(OUT + room, into + room, device=device)
    storage[:OUT, :into] = torch.randn(OUT, into)
    weight = storage[:OUT, :into].clone()
    copies, row = [Copy(down, storage[OUT : OUT + thin, :into], 1.0)], 0
    for i, (start, stop) in enumerate(columns):
        target = storage[start:stop, into + i * rank : into + (i + 1) * rank]
        copies.append(Copy(up[row : row + stop - start], target, SCALE))
        row += stop - start
    lora_linear.spread(copies, {})

    x, grad = (beside(torch.randn(tokens, n), torch.float32, device, room)[:tokens] for n in (into, OUT))
    plain, grad_y = x[:, :into].clone(), grad[:, :OUT].clone()
    h = lora_linear.down(x[:, :into], down, x[:, into:])
    y = x @ storage[:OUT].t()
    low = Low(h, up, columns, SCALE)
    g = lora_linear.up_backward(grad[:, :OUT], low, grad[:, OUT:])
    grad_x = grad @ storage[:, :into]
    grad_up, grad_down = torch.zeros_like(up), torch.zeros_like(down)
    lora_linear.up_grad(grad_y, low, grad_up)
    lora_linear.down_backward(g, plain, grad_down)

    monkeypatch.setattr(launch, "fused", lambda x: False)
    leaves = [t.clone().requires_grad_() for t in (plain, down, up)]
    want, low_h = leaves[0] @ weight.t(), leaves[0] @ leaves[1].t()
    parts = []
    for at, rows, ranks in low.members():
        parts.append(torch.nn.functional.pad(low_h[:, ranks] @ leaves[2][rows].t(), (at.start, OUT - at.stop)))
    want = want + SCALE * sum(parts)
    want.backward(grad_y)
    close(y, want.detach(), SUMMED)
    for got, leaf in zip((grad_x, grad_down, grad_up), leaves, strict=True):
        close(got, leaf.grad, SUMMED)
    added = lora_linear.add_(plain @ weight.t(), low)
    close(added, want.detach(), SUMMED)
