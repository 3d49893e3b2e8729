"""Codes by what a weight multiplies: against the formula in double precision, against rounding to nearest, and where
there is nothing to know about what comes."""

from __future__ import annotations

import pytest
import torch

from graftune.errors import GraftuneError
from graftune.kernels import fp8
from graftune.kernels.fp8 import E4M3, reference
from graftune.model.frozen import calibrate, mapped
from graftune.model.frozen.calibrate import Sample
from graftune.model.frozen.fp8 import Fp8, Turned
from tests.kernels.test_fp8_weight import Source

CPU = torch.device("cpu")
OUT, INTO = 48, 304  # columns: two whole blocks and a part


def tokens(count: int, seed: int, width: int = INTO) -> torch.Tensor:
    """A few directions and a common mean carry most, channels are of very different size: as activations are."""
    shape, drawn = torch.Generator().manual_seed(5), torch.Generator().manual_seed(seed)
    directions = torch.randn(8, width, generator=shape)
    loud = torch.exp(torch.randn(width, generator=shape))
    mean = torch.randn(width, generator=shape)
    few = torch.randn(count, 8, generator=drawn) @ directions
    return (few + mean + 0.3 * torch.randn(count, width, generator=drawn)) * loud


def values() -> torch.Tensor:
    return torch.randn(OUT, INTO, generator=torch.Generator().manual_seed(1)) * 0.02


def weight_of(w: torch.Tensor, *, room: int = 0, both: bool = False) -> Fp8:
    turned = Turned(Turned.size(*w.shape, room), w.shape[1], CPU)
    return Fp8.of([Source(w)], CPU, torch.float32, turned, room=room, both=both)


def sampled(x: torch.Tensor) -> Sample:
    sample = Sample(x.shape[1], CPU)
    sample.add(x)
    return sample


def calibrated(w: torch.Tensor, x: torch.Tensor, **how: object) -> Fp8:
    weight = weight_of(w, **how)  # type: ignore[arg-type]
    weight.calibrate([Source(w)], sampled(x))
    return weight


def dequantised(weight: Fp8) -> torch.Tensor:
    return weight.weight.float() * weight.scale.unsqueeze(1)


def error(weight: Fp8, w: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (dequantised(weight) - w).t()).norm() / (x @ w.t()).norm())


def same(a: Fp8, b: Fp8) -> bool:
    return torch.equal(a.weight.view(torch.uint8), b.weight.view(torch.uint8)) and torch.equal(a.scale, b.scale)


def test_the_error_over_other_tokens_is_a_fraction() -> None:
    w, x, other = values(), tokens(2000, 1), tokens(500, 2)
    nearest, by_data = weight_of(w), calibrated(w, x)
    assert error(by_data, w, other) < 0.35 * error(nearest, w, other)
    # Single values pay little for it: what reads the weight across its rows, dX, sees that.
    off, before = ((dequantised(weight) - w).norm() for weight in (by_data, nearest))
    assert off < 1.3 * before


def test_it_is_the_formula() -> None:
    """Column after column in double precision, without blocks."""
    w, x = values(), tokens(600, 3)
    made, factor = calibrated(w, x), sampled(x).factor()
    units = (w / made.scale.unsqueeze(1)).double()[:, factor.columns]
    feedback, left = factor.feedback.double(), torch.zeros_like(units)
    want = torch.empty(OUT, INTO, dtype=E4M3)
    for k in reversed(range(INTO)):
        aim = units[:, k] + left[:, k + 1 :] @ feedback[k + 1 :, k]
        code = aim.clamp(-448, 448).float().to(E4M3)
        left[:, k] = units[:, k] - code.double()
        want[:, factor.columns[k]] = code
    # An aim between two codes may fall to either side, and all that follow answer for it.
    assert (made.weight.view(torch.uint8) == want.view(torch.uint8)).float().mean() > 0.97
    again = weight_of(w)
    again.weight.copy_(want)
    again.scale.copy_(made.scale)
    assert error(made, w, x) == pytest.approx(error(again, w, x), rel=0.01)


def test_the_factor_is_that_of_the_damped_sums() -> None:
    x = tokens(300, 4, 32)
    h = x.double().t() @ x.double()
    h.diagonal().add_(calibrate.DAMPING * h.diagonal().mean())
    columns, diagonal, feedback = sampled(x).factor()
    assert columns.sort().values.tolist() == list(range(32)) and (h.diagonal()[columns].diff() >= 0).all()
    ordered, unit = h[columns][:, columns], feedback.double()
    torch.testing.assert_close(diagonal.double(), ordered.diagonal(), rtol=1e-4, atol=0)
    assert (unit.diagonal() == 1).all() and not unit.triu(1).any()
    within = torch.linalg.solve_triangular(unit, ordered, upper=False)
    within = torch.linalg.solve_triangular(unit, within.t(), upper=False)
    assert (within - torch.diag(within.diagonal())).norm() < 1e-4 * ordered.norm() and (within.diagonal() > 0).all()


@pytest.mark.parametrize("apart", ["uncorrelated", "nothing but zeros"])
def test_without_correlations_it_is_the_nearest_code(apart: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SCALES", (1.0,))
    loud = torch.exp(torch.randn(INTO)) if apart == "uncorrelated" else torch.zeros(INTO)
    assert same(calibrated(values(), torch.diag(loud)), weight_of(values()))


def test_scales_are_chosen_among_those_that_hold_the_row() -> None:
    w, x = values(), tokens(2000, 1)
    w[3] = 0
    made, least = calibrated(w, x), reference.scale_of(w)
    times = made.scale / least
    assert times.min() == 1 and 1 < times.max() <= max(calibrate.SCALES) and len(times.unique()) > 4
    assert made.scale[3] == least[3] and not made.weight[3].float().any()
    factor = sampled(x).factor()

    def cost(scale: torch.Tensor) -> torch.Tensor:
        units = w[:, factor.columns] / scale.unsqueeze(1)
        return (units - units.to(E4M3).float()).square() @ factor.diagonal * scale.square()

    assert (cost(made.scale) <= cost(least) * (1 + 1e-5)).all() and cost(made.scale).sum() < 0.95 * cost(least).sum()


def test_channels_that_were_never_used_are_rounded_to_nearest() -> None:
    w, x = values(), tokens(500, 1)
    dead = torch.arange(0, INTO, 7)
    x[:, dead] = 0
    made = calibrated(w, x)
    want = reference.encode(w, made.scale.reciprocal().unsqueeze(1))
    assert torch.equal(made.weight[:, dead].view(torch.uint8), want[:, dead].view(torch.uint8))
    alive = torch.ones(INTO, dtype=torch.bool).index_fill(0, dead, False)
    assert not torch.equal(made.weight[:, alive].view(torch.uint8), want[:, alive].view(torch.uint8))
    assert error(made, w, x) < 0.35 * error(weight_of(w), w, x)


def test_the_same_sample_makes_the_same_codes_and_shows_in_the_checksum() -> None:
    w, x = values(), tokens(700, 1)
    one, two, other = calibrated(w, x), calibrated(w, x), calibrated(w, tokens(700, 2))
    assert same(one, two) and not same(one, other)
    assert torch.equal(one.checksum, two.checksum) and one.checksum[0] != other.checksum[0]
    codes, scale = two.weight.view(torch.uint8), two.scale.clone()
    codes[[0, 1]] = codes[[1, 0]]
    assert one.checksum[0] != two.checksum[0] and one.checksum[1] == two.checksum[1]
    two.scale.copy_(scale[[1, 0, *range(2, OUT)]])
    assert one.checksum[1] != two.checksum[1]


def test_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sources, few rows of them at a time, and a part of the rows rounded at once; tokens in parts too."""
    w, x = values(), tokens(700, 1)
    whole = calibrated(w, x)
    monkeypatch.setattr(mapped, "MAPPED_ROWS_BYTES", 4 * INTO * 5)
    monkeypatch.setattr(calibrate, "ROWS_BYTES", 4 * INTO * 20)
    monkeypatch.setattr(calibrate, "SAMPLE_BYTES", 4 * INTO * 33)
    parts = weight_of(w)
    sources = [Source(w[:16]), Source(w[16:18]), Source(w[18:])]
    sample = Sample(INTO, CPU)
    for some in x.split(150):
        sample.add(some.to(torch.float32))
    parts.calibrate(sources, sample)  # type: ignore[arg-type]
    assert max(s.most for s in sources) == 5
    torch.testing.assert_close(parts.scale, whole.scale, rtol=0, atol=0)
    assert error(parts, w, x) == pytest.approx(error(whole, w, x), rel=0.02)
    assert (parts.weight.view(torch.uint8) == whole.weight.view(torch.uint8)).float().mean() > 0.9


def test_what_lies_around_the_weight_stays_and_its_transpose_follows() -> None:
    w, x = values(), tokens(700, 1)
    weight = weight_of(w, room=16, both=True)
    weight.whole.view(torch.uint8)[OUT:].fill_(0x11)
    weight.beside.view(torch.uint8).fill_(0x22)
    weight.calibrate([Source(w)], sampled(x))  # type: ignore[list-item]
    assert (weight.whole.view(torch.uint8)[OUT:] == 0x11).all() and (weight.beside.view(torch.uint8) == 0x22).all()
    assert weight.kept is not None
    assert torch.equal(weight.kept[:, :OUT].view(torch.uint8), weight.weight.t().contiguous().view(torch.uint8))
    assert same(weight, calibrated(w, x))


def test_values_that_are_not_finite_are_refused() -> None:
    x = tokens(50, 1)
    x[3, 5] = float("nan")
    with pytest.raises(GraftuneError, match=r"not finite.*calibrate to false"):
        calibrated(values(), x)


def test_codes_that_were_exact_stay_exact() -> None:
    """A checkpoint whose rows are e4m3 at one scale loses nothing."""
    codes = torch.randn(OUT, INTO).mul_(60).clamp_(-448, 448).to(E4M3)
    codes[:, 0] = 448
    w = codes.float() * 2.0**-12
    made = calibrated(w, tokens(400, 1))
    assert torch.equal(dequantised(made), w) and made.kind == "fp8" and fp8.LARGEST == 448
