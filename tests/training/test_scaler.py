"""fp16's loss scale and the gradient accumulator, each on its own."""

from __future__ import annotations

import pytest
import torch

from graftune.errors import GraftuneError
from graftune.step.accumulator import Accumulator
from graftune.step.scaler import LossScaler

YES, NO = torch.tensor(True), torch.tensor(False)


def test_the_scale_halves_at_once_and_doubles_after_2000_good_updates():
    scaler = LossScaler()
    for good, count, state in (
        (YES, 2000, [65536.0, 0.0]),  # its upper end
        (NO, 4, [4096.0, 0.0]),
        (YES, 1999, [4096.0, 1999.0]),
        (YES, 1, [8192.0, 0.0]),
        (YES, 49, [8192.0, 49.0]),
        (NO, 20, [1.0, 0.0]),
    ):
        for _ in range(count):
            scaler.update(good)
        assert scaler.state.tolist() == state
    with pytest.raises(GraftuneError, match="out of range"):
        LossScaler(start=65537.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scaling_there_and_back(dtype):
    scaler = LossScaler()
    small = torch.tensor([1e-6, -0.25, 0.0]).to(dtype)
    scaled = scaler.scaled(small)  # 65536 itself does not fit fp16
    assert scaled.dtype == dtype and torch.equal(scaled.float(), small.float() * 65536)
    assert scaler.scaled(torch.tensor(0.5, dtype=dtype)).dtype == dtype
    ok = scaler.unscale_([scaled])
    assert ok.shape == () and ok and torch.equal(scaled, small)
    one = scaler.scaled(small)
    assert scaler.unscale_(one) and torch.equal(one, small)


def test_the_scale_is_saved_and_put_back_in_place():
    scaler, other = LossScaler(), LossScaler()
    scaler.update(NO)
    scaler.update(YES)
    saved = scaler.state_dict()
    scaler.update(NO)
    place = other.state.data_ptr()
    other.load_state_dict(saved)
    assert other.state.tolist() == [32768.0, 1.0] and other.state.data_ptr() == place
    view = other.scale
    other.update(NO)
    assert view == 16384
    for bad in ({}, {"loss_scale": torch.ones(3)}, {"loss_scale": torch.tensor([float("nan"), 0.0])}):
        with pytest.raises(GraftuneError, match="not a saved loss scale"):
            other.load_state_dict(bad)


@pytest.mark.parametrize("fixed", [True, False])
def test_sums_are_fp32_whatever_comes_in(fixed):
    shapes = {"a": (3, 5), "norm": (), "b": (2, 2, 2)}
    sums = Accumulator(shapes) if fixed else Accumulator()
    want = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        grads = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
        sums.accumulate(grads)
        for name, grad in grads.items():
            want[name] += grad.float()
    assert sums.count == 4 and len(sums) == 3
    sums.scale_all(0.5)
    sums.scale_all(torch.tensor(0.5))
    with pytest.raises(GraftuneError, match="not a number"):
        sums.scale_all(torch.ones(5))
    got = sums.get_and_reset()
    for name, sum_ in want.items():
        assert got[name].dtype == torch.float32 and got[name].shape == sum_.shape
        torch.testing.assert_close(got[name], sum_ / 4)
    assert sums.count == 0
    kept = {name: x.clone() for name, x in got.items()}
    sums.accumulate("a", torch.ones(3, 5))
    assert all(torch.equal(kept[name], got[name]) for name in kept), "what was handed out is the caller's"
    assert (sums["a"] == 1).all() and not sums["b"].any()
    sums.clear()
    assert not any(x.any() for x in sums.get_and_reset().values())


def test_sums_stay_in_one_place():
    sums = Accumulator({"a": (2,), "b": (3,)})
    place = sums["b"].data_ptr()
    sums.accumulate({"b": torch.ones(3)})
    sums.get_and_reset()
    sums.clear()
    assert sums["b"].data_ptr() == place and sums.counts == {}


def test_what_does_not_fit_is_refused_and_leaves_the_sums():
    sums = Accumulator({"a": (2,), "b": (3,)})
    for bad, where in (
        ({"a": torch.ones(2), "b": torch.ones(4)}, "b: .*shape"),
        ({"a": torch.ones(2), "c": torch.ones(4)}, "c: no gradient has this name"),
        ({"a": torch.ones(1, 2)}, "a: .*shape"),
        ({"a": torch.ones(2, device="meta")}, "a: .*meta"),
    ):
        with pytest.raises(GraftuneError, match=where):
            sums.accumulate(bad)
        assert not sums["a"].any() and sums.count == 0
    with pytest.raises(GraftuneError, match="no gradient to add"):
        sums.accumulate("a")
    free = Accumulator()
    free.accumulate("x", torch.ones(2))
    with pytest.raises(GraftuneError, match="does not fit"):
        free.accumulate("x", torch.ones(3))
    with pytest.raises(GraftuneError, match="y: no gradient"):
        free["y"]
    with pytest.raises(GraftuneError, match="on meta"):
        Accumulator(device="meta").accumulate("x", torch.ones(2))
