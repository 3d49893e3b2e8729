"""The kernel against the reference and against autograd: loss, gradient, chunks, hard rows."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import linear_cross_entropy
from graftune.kernels.linear_cross_entropy import reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


class Table:
    """A head; what `matmul` hands out is watched, so that a test sees chunks and may ask what was overwritten."""

    def __init__(self, weight: torch.Tensor):
        self.weight, self.out_features = weight, len(weight)
        self.handed: list[torch.Tensor] = []

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        self.handed.append(x @ self.weight.t())
        return self.handed[-1]

    def input_grad(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return grad @ self.weight


def problem(rows, width, vocabulary, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[-1] = vocabulary - 1
    labels[1::4] = -1
    return x.to(device), Table(weight.to(device)), labels.to(device)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    got, want = got.float(), want.float()
    assert got.shape == want.shape
    assert (got - want).norm() <= TOLERANCE[dtype] * (want.norm() + 1e-6), ((got - want).abs().max(), want.abs().max())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (5, 2), (9, 37), (6, 1000), (3, 20011)])
def test_like_the_reference(kernels_on, device, rows, vocabulary, dtype, scaled):
    x, head, labels = problem(rows, 8, vocabulary, dtype, device, seed=rows)
    scale = torch.tensor(12.0, device=device) if scaled else None
    total, grad = linear_cross_entropy.forward(x, head, labels, scale=scale)
    want_total, want_grad = reference.forward(x, head, labels, scale=scale)
    assert total.dtype == torch.float32 and total.shape == ()
    close(total, want_total, torch.float32)
    close(grad, want_grad, dtype)
    close(head.handed[0], head.handed[1], dtype)  # the logits' own gradient, row by row
    assert not head.handed[0][labels < 0].any()
    alone, nothing = linear_cross_entropy.forward(x, head, labels, need_grad=False)
    assert nothing is None
    close(alone, total, torch.float32)
    close(head.handed[-1], x @ head.weight.t(), dtype)  # they were not overwritten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hard_rows(kernels_on, device, dtype, monkeypatch):
    """Huge values, equal values, one value far above the rest in the last block, a single candidate."""
    from graftune.kernels.linear_cross_entropy import kernel

    monkeypatch.setattr(kernel, "LONGEST_BLOCK", 16)
    logits = torch.zeros(8, 50)
    logits[0] = torch.linspace(-1e4, 1e4, 50)
    logits[1] = 1e4
    logits[2] = -1e4
    logits[3, 49] = 1e4
    logits[4, 0] = 1e4
    logits[5, 1:] = float("-inf")
    logits[6, :33] = float("-inf")  # whole blocks are
    labels = torch.tensor([49, 49, 0, 0, 0, 0, 40, 49])
    logits, labels = logits.to(dtype).to(device), labels.to(device)
    losses = torch.full((8,), float("nan"), device=device)
    want = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    soft = logits.float().softmax(1) - torch.nn.functional.one_hot(labels, 50)
    kernel.to_gradient_(logits, labels, losses)
    assert torch.allclose(losses, want, rtol=1e-6, atol=1e-5)
    close(logits, soft, dtype)


@pytest.mark.filterwarnings("ignore:invalid value")  # inf - inf, on purpose
def test_what_is_not_finite_shows_in_the_loss(kernels_on, device):
    for bad in (float("nan"), float("inf")):
        x, head, labels = problem(4, 3, 11, torch.float32, device, seed=0)
        x[0, 0] = bad
        assert not linear_cross_entropy.forward(x, head, labels)[0].isfinite()
        labels[0] = -1  # a row that is not counted may hold anything
        total, _ = linear_cross_entropy.forward(x, head, labels)
        assert total.isfinite() and not head.handed[-1][0].any()


def test_no_rows(kernels_on, device):
    head = Table(torch.randn(5, 4, device=device))
    total, grad = linear_cross_entropy.forward(torch.empty(0, 4, device=device), head, torch.empty(0).long().to(device))
    assert total == 0 and grad.shape == (0, 4)
    x, labels = torch.empty(0, 4, device=device), torch.empty(0).long().to(device)
    assert linear_cross_entropy.log_probs(x, head, labels).shape == (0,)


def test_chunks_are_few_equal_and_within_the_limit():
    from graftune.kernels.linear_cross_entropy.kernel import chunk_rows

    assert chunk_rows(4096, 128256 * 2) == 2048
    assert chunk_rows(8192, 128256 * 2) == 2048
    assert chunk_rows(100, 49152 * 2) == 128
    assert chunk_rows(4100, 128256 * 2) == 1408  # three chunks, not two and a rest of four rows
    for rows in (1, 127, 128, 1000, 5555):
        for width in (100, 49152, 128256, 262144):
            for size in (2, 4):
                assert chunk_rows(rows, width * size) * width * size <= 512 << 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_beyond_what_32_bits_address(device):
    """The last rows of a chunk with more than 2^31 logits are written too."""
    from graftune.kernels.linear_cross_entropy import kernel

    logits = torch.zeros(8300, 262144, dtype=torch.bfloat16, device=device)
    labels = torch.full((8300,), 262143, device=device)
    losses = torch.full((8300,), float("nan"), device=device)
    kernel.to_gradient_(logits, labels, losses)
    assert torch.allclose(losses, torch.tensor(262144.0, device=device).log())
    assert (logits[:, -1] == -1).all() and (logits[-1, :-1] == 2.0**-18).all()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 2), (9, 37), (6, 1000)])
def test_weights_like_the_reference(kernels_on, device, rows, vocabulary, dtype, scaled):
    """Any sign, zero among them; rows that are not counted may have any weight."""
    x, head, labels = problem(rows, 8, vocabulary, dtype, device, seed=rows)
    weights = torch.randn(rows, generator=torch.Generator().manual_seed(1)).to(device)
    weights[labels < 0], weights[0] = float("nan"), 0.0
    scale = torch.tensor(12.0, device=device) if scaled else None
    total, grad = linear_cross_entropy.forward(x, head, labels, scale=scale, weights=weights)
    want_total, want_grad = reference.forward(x, head, labels, scale=scale, weights=weights)
    close(total, want_total, torch.float32)
    close(grad, want_grad, dtype)
    assert not head.handed[0][labels < 0].any() and not head.handed[0][0].any()
    close(linear_cross_entropy.forward(x, head, labels, need_grad=False, weights=weights)[0], total, torch.float32)
    ones = torch.ones(rows, device=device)
    for one, plain in zip(
        linear_cross_entropy.forward(x, head, labels, weights=ones), linear_cross_entropy.forward(x, head, labels),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(one, plain), "a weight of 1 is none, to the bit"


@pytest.mark.parametrize("fused", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize(("factor", "cap"), [(1.0, 0.0), (0.5, 1.2)])
def test_two_passes_are_autograds(device, fused, factor, cap, monkeypatch):
    """Any function of the log-probabilities: its slopes are the second pass's weights, with the other sign."""
    from graftune.kernels import launch
    from graftune.kernels.linear_cross_entropy import kernel

    monkeypatch.setattr(launch, "fused", lambda x: fused)
    monkeypatch.setattr(kernel, "CHUNK_STEP", 4)
    monkeypatch.setattr(kernel, "CHUNK_BYTES", 4 * 37 * 4)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 4 * 37 * 4)
    x, head, labels = problem(9, 8, 37, torch.float32, device, seed=4)
    counted = labels >= 0
    leaf = x.clone().requires_grad_()
    logits = leaf @ head.weight.t() * factor
    if cap:
        logits = cap * torch.tanh(logits / cap)
    want = torch.zeros(9, device=device)
    want[counted] = logits.log_softmax(1)[counted].gather(1, labels[counted].unsqueeze(1)).squeeze(1)
    got = linear_cross_entropy.log_probs(x, head, labels, factor=factor, cap=cap)
    assert got.dtype == torch.float32 and [len(part) for part in head.handed] == [4, 4, 1]
    close(got, want.detach(), torch.float32)
    (want.sin() + want.square()).sum().backward()
    slopes = got.cos() + 2 * got
    grad = linear_cross_entropy.forward(x, head, labels, weights=-slopes, factor=factor, cap=cap)[1]
    assert grad is not None and leaf.grad is not None
    close(grad, leaf.grad, torch.float32)
