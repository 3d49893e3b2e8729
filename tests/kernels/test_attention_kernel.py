"""Our packed attention kernel against the reference in fp32: output and every gradient, packed views, empty slots,
documents shorter and longer than a tile, windows, soft caps, buffers full of NaN."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from graftune.errors import GraftuneError
from graftune.kernels import attention, rehearsal
from graftune.kernels.attention import Documents, reference
from graftune.kernels.rope.reference import added_up

pytestmark = pytest.mark.usefixtures("honest_rounding")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def documents(lengths: tuple[int, ...], longest: int, device: str) -> Documents:
    return Documents(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), lengths, longest)


def packed(tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """q, k and v as column ranges of one buffer [T, (N + 2K) H]."""
    n, k, h = heads
    return spread(torch.randn(tokens, n + 2 * k, h, device=device).to(dtype)).split([n, k, k], 1)


def spread(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, H] in a buffer with 16 more values behind each token, full of NaN."""
    buffer = torch.full((len(x), x[0].numel() + 16), float("nan"), dtype=x.dtype, device=x.device)
    view = buffer[:, :-16].unflatten(1, x.shape[1:])
    return view.copy_(x)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    got, want = got.float(), want.float()
    assert got.shape == want.shape and torch.isfinite(got).all()
    assert (got - want).norm() <= TOLERANCE[dtype] * (want.norm() + 1.0), ((got - want).abs().max(), want.abs().max())


def check(lengths, heads, dtype, device, window=0, longest=None, backend="triton", cap=0.0, sunk=False):
    """Forward and backward of the backend against the reference in fp32 on the same values."""
    tokens, scale = sum(lengths), 1.3 * heads[2] ** -0.5
    docs = documents(lengths, longest or max(lengths), device)
    q, k, v = packed(tokens, heads, dtype, device)
    grad = spread(torch.randn(tokens, *q.shape[1:], device=device).to(dtype))
    nan = torch.full((tokens, heads[0] + 2 * heads[1], heads[2]), float("nan"), dtype=dtype, device=device)
    views = attention.grad_buffers(q, k, backend) or spread(nan).split([heads[0], heads[1], heads[1]], 1)
    given = spread(nan[:, : heads[0]])
    sinks = torch.randn(heads[0], device=device) * 3 if sunk else None
    sums = [torch.full((heads[0],), 2.0, device=device) if sunk else None for _ in range(2)]
    out, stats = attention.forward(q, k, v, docs, scale, window, backend, given, cap, sinks)
    attention.backward(grad, q, k, v, out, stats, docs, scale, window, views, backend, cap, sinks, sums[0])
    wide = [x.float() for x in (q, k, v)]
    want = reference.forward(*wide, lengths, scale, window, None, cap, sinks)
    expected = [torch.empty_like(x) for x in wide]
    reference.backward(grad.float(), *wide, want, lengths, scale, window, tuple(expected), cap, sinks, sums[1])
    if sunk:
        close(sums[0] - 2, sums[1] - 2, dtype)
    assert out is given
    close(out, want, dtype)
    for got, right in zip(views, expected, strict=True):
        close(added_up(got, right.shape[1]), right, dtype)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of unequal sides, so that short documents already cross them; on a GPU the real ones are tested too."""
    from graftune.kernels.attention import kernel

    monkeypatch.setattr(kernel, "forward_tile", lambda width, dtype: kernel.Tile(32, 16, 4, 1))
    monkeypatch.setattr(kernel, "backward_tile", lambda width, dtype: kernel.Tile(16, 32, 4, 1))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("heads", "dtype", "window", "cap"),
    [((4, 2, 16), DTYPES[0], 0, 0.0), ((2, 1, 40), DTYPES[0], 5, 2.0), ((4, 1, 64), DTYPES[2], 7, 0.0)],
)
def test_sinks(heads, dtype, window, cap, device):
    check((5, 1, 37, 0), heads, dtype, device, window=window, longest=40, cap=cap, sunk=True)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((1, 1, 16), DTYPES[0]), ((4, 2, 40), DTYPES[0]), ((2, 1, 40), DTYPES[1]), ((4, 1, 64), DTYPES[2])],
)
def test_grouped_heads_and_widths(heads, dtype, device):
    check((5, 1, 17, 0), heads, dtype, device, longest=20)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [
        ((1,), torch.float32),
        ((1, 0, 2), torch.bfloat16),
        ((33, 1, 49, 0), torch.float32),
        ((16, 32, 48), torch.float32),
        ((0, 65, 0, 15), torch.bfloat16),
    ],
)
def test_documents_across_tiles(lengths, dtype, device, small_tiles):
    check(lengths, (2, 1, 16), dtype, device, longest=max(lengths) + 20)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_longer_than_the_real_tiles(dtype, device):
    check((130 if dtype != torch.float32 else 66, 3), (2, 1, 16), dtype, device)


@pytest.mark.few(3)
@pytest.mark.parametrize("window", [1, 3, 16, 20, 1000])
def test_windows(window, device, small_tiles):
    check((50, 1, 0), (2, 1, 16), torch.float32, device, window=window)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("heads", "wanted"), [((4, 2, 40), 0), ((4, 2, 40), 1000), ((3, 1, 16), 0), ((3, 3, 16), 1000)]
)
def test_query_heads_together_or_apart(heads, wanted, device, small_tiles, monkeypatch):
    from graftune.kernels.attention import kernel

    monkeypatch.setattr(kernel, "programs_wanted", lambda device: wanted)
    check((5, 33, 0), heads, torch.float32, device)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("heads", "dtype"), [((2, 1, 136), DTYPES[0]), ((2, 1, 512), DTYPES[0]), ((3, 1, 512), DTYPES[2])]
)
def test_wide_heads(heads, dtype, device):
    check((34, 0, 3) if heads[2] == 512 else (20, 3), heads, dtype, device)


def test_heads_that_are_too_wide_are_refused():
    device = rehearsal.Device("cuda", "H200", (9, 0), 132, 50 << 20)
    with rehearsal.rehearsing(rehearsal.Rehearsal(device)):
        assert attention.choose(rehearsal.META, torch.bfloat16, 512, False, False).backend == "triton"
        with pytest.raises(GraftuneError, match="heads of 640 values are wider than the 512"):
            attention.choose(rehearsal.META, torch.bfloat16, 640, False, False)


def test_large_scores_do_not_overflow(device):
    """Scores of hundreds: the exponentials are taken against the row's highest."""
    docs = documents((40,), 40, device)
    q, k, v = (100 * x if i < 2 else x for i, x in enumerate(packed(40, (2, 1, 16), torch.float32, device)))
    out, _ = attention.forward(q, k, v, docs, 0.25, 0, "triton")
    assert out.is_contiguous()
    close(out, reference.forward(q, k, v, (40,), 0.25), torch.float32)


def test_the_gradients_are_the_same_bits_every_time(device):
    docs, scale = documents((30, 11), 32, device), 0.25
    q, k, v = packed(41, (4, 2, 16), torch.float32, device)
    grad = torch.randn(41, 4, 16, device=device)
    runs = []
    for _ in range(2):
        grads = tuple(torch.full(x.shape, float("nan"), device=device) for x in (q, k, v))
        out, stats = attention.forward(q, k, v, docs, scale, 0, "triton")
        attention.backward(grad, q, k, v, out, stats, docs, scale, 0, grads, "triton")
        runs.append((out, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("window", "cap", "dtype"), [(0, 1.5, DTYPES[0]), (9, 0.7, DTYPES[0]), (9, 50.0, DTYPES[1]), (0, 0.7, DTYPES[2])]
)
def test_soft_caps(small_tiles, device, window, cap, dtype):
    check((37, 0, 5), (2, 1, 24), dtype, device, window=window, cap=cap)


def test_a_soft_cap_of_the_reference_equals_autograds():
    q, k, v = (torch.randn(23, n, 6, requires_grad=True) for n in (4, 2, 2))
    lengths, cap, window = (14, 9), 0.8, 5
    parts = []
    for start, stop in ((0, 14), (14, 23)):
        keys, values = (x[start:stop].repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        scores = cap * torch.tanh(q[start:stop].transpose(0, 1) @ keys.transpose(1, 2) * 0.9 / cap)
        back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        seen = (back >= 0) & (back < window)
        parts.append((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values).transpose(0, 1))
    want, grad = torch.cat(parts), torch.randn(23, 4, 6)
    want.backward(grad)
    plain = [x.detach() for x in (q, k, v)]
    out = reference.forward(*plain, lengths, 0.9, window, None, cap)
    grads = tuple(torch.full_like(x, float("nan")) for x in plain)
    reference.backward(grad, *plain, out, lengths, 0.9, window, grads, cap)
    assert (out - want).abs().max() < 1e-5
    for got, x in zip(grads, (q, k, v), strict=True):
        assert (got - x.grad).abs().max() < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("heads", [(4, 2, 16), (1, 1, 32)])
def test_stats_of_another_forward(heads, device, small_tiles):
    """[T, N] in natural logarithms, as cuDNN leaves them: the same gradients but for how logarithms are rounded."""
    from graftune.kernels.attention import kernel

    lengths = (5, 0, 40, 1)
    docs = documents(lengths, 64, device)
    q, k, v = packed(sum(lengths), heads, torch.float32, device)
    out, grad = torch.empty_like(q), torch.randn(q.shape, device=device)
    stats = kernel.forward(q, k, v, docs, 0.3, 0, out)
    got, want = ([torch.full(x.shape, float("nan"), device=device) for x in (q, k, v)] for _ in range(2))
    kernel.backward(grad, q, k, v, out, stats, docs, 0.3, 0, tuple(want))
    theirs = stats.t().contiguous() / kernel.LOG2E
    kernel.backward(grad, q, k, v, out, theirs, docs, 0.3, 0, tuple(got), by_token=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
