"""Scales that make the weighted squared error of a block small.

With codes c fixed, the error is a quadratic form in the scale (and the minimum), so the best ones are known in closed
form from a few sums over the block; with the scales fixed, the best codes are the nearest ones. So: try step widths
around the obvious one, solve each, keep the best, and then go back and forth between the two, since the formats round
scales as well (to fp16, or to six or eight bits beside a common fp16 scale). A value weighs its magnitude plus the
block's own: large weights matter more, small ones still count.

Shapes: [g, ...] is one value of each of many blocks at a time; a sum over dimension 0 is a sum over a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

# How far from the obvious step width to look, in steps. A grid four times as fine shrinks the error by under half a
# percent (Q8_0: two) and takes four times as long.
NEAR = torch.linspace(-1.8, 0.6, 9).tolist()
REPEATS = 2  # of going back and forth
TINY = 1e-30


def importance(x: torch.Tensor) -> torch.Tensor:
    size = x.abs()
    return size.add_(x.square().mean(0).sqrt_()).add_(TINY)


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 for a block without values."""
    return torch.where(scale.abs() > TINY, scale.reciprocal(), 0)


def as_half(scale: torch.Tensor) -> torch.Tensor:
    """Rounded to what fp16 can hold, in fp32."""
    return scale.half().float()


class Sums(NamedTuple):
    """Of a block: everything that its error depends on once the codes are fixed."""

    w: torch.Tensor
    wx: torch.Tensor
    wc: torch.Tensor
    wcc: torch.Tensor
    wxc: torch.Tensor

    def error(self, scale: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        """Of scale * c + least, less what no choice changes (the sum of w x x)."""
        by_scale = scale * (scale * self.wcc - 2 * self.wxc)
        return by_scale + least * (least * self.w + 2 * scale * self.wc - 2 * self.wx)

    def best(self, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and minimum of least error; the minimum is at most 0 unless `signed`."""
        det = self.w * self.wcc - self.wc * self.wc
        sound = det > 1e-6 * self.w * self.wcc
        safe = torch.where(sound, det, 1)
        scale = torch.where(sound, (self.w * self.wxc - self.wx * self.wc) / safe, 0)
        least = torch.where(sound, (self.wcc * self.wx - self.wc * self.wxc) / safe, self.wx / self.w)
        if not signed:
            above = least > 0
            scale = torch.where(above, self.wxc / self.wcc.clamp(min=TINY), scale)
            least = least.clamp(max=0)
        return scale, least


class Range(NamedTuple):
    """Of the codes."""

    low: int
    high: int


def scaled(x: torch.Tensor, codes: Range) -> tuple[torch.Tensor, torch.Tensor]:
    """x [g, n] ~ scale c: (scale [n] fp16, c [g, n])."""
    scale = _best_scale(x, importance(x), codes, as_half).half()
    return scale, _codes(x, inverse(scale.float()), codes)


def _codes(x: torch.Tensor, per_step: torch.Tensor, within: Range) -> torch.Tensor:
    return (x * per_step).round_().clamp_(*within)


def _best_scale(
    x: torch.Tensor, w: torch.Tensor, within: Range, stored: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Over step widths near largest value / largest code, with the largest value on either side of the range. `stored`
    is what becomes of a scale in the block: between scales that fit alike, one that is stored exactly is better."""
    low, high = x.amin(0), x.amax(0)
    per_peak = inverse(torch.where(-low > high, low, high))
    xw = x * w
    best, gain = torch.zeros_like(low), torch.zeros_like(low)
    for end in within if within.high != -within.low else within[1:]:
        for near in NEAR:
            codes = _codes(x, (end + (near if end > 0 else -near)) * per_peak, within)
            wxc = (xw * codes).sum(0)
            wcc = codes.square_().mul_(w).sum(0).clamp_(min=TINY)
            scale = wxc / wcc if stored is None else stored(wxc / wcc)
            new = scale * (2 * wxc - scale * wcc)
            better = new > gain
            best, gain = torch.where(better, scale, best), torch.where(better, new, gain)
    return best


def shifted(x: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [g, n] ~ scale c + least with c in 0..top: (scale [n] fp16, least [n] fp16, codes [g, n])."""
    w = importance(x)
    scale, least = _best_pair(x, w, top, signed=True)
    scale, least = scale.half(), least.half()
    return scale, least, _shifted_codes(x, scale.float(), least.float(), top)


def _shifted_codes(x: torch.Tensor, scale: torch.Tensor, least: torch.Tensor, top: int) -> torch.Tensor:
    return (x - least).mul_(inverse(scale)).round_().clamp_(0, top)


def _sums(x: torch.Tensor, w: torch.Tensor, codes: torch.Tensor, w_sum: torch.Tensor, wx_sum: torch.Tensor) -> Sums:
    wc = w * codes
    return Sums(w_sum, wx_sum, wc.sum(0), codes.mul_(wc).sum(0), wc.mul_(x).sum(0))


def _best_pair(x: torch.Tensor, w: torch.Tensor, top: int, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = x.amin(0), x.amax(0)
    if not signed:
        low = low.clamp(max=0)
    per_range = inverse(high - low)
    w_sum, wx_sum = w.sum(0), (w * x).sum(0)
    scale = (high - low) / top
    least = low
    error = torch.full_like(low, torch.inf)
    for near in [*NEAR, None]:
        # The last round starts from the best pair so far instead of from the range.
        start, per_step = (low, (top + near) * per_range) if near is not None else (least, inverse(scale))
        sums = _sums(x, w, (x - start).mul_(per_step).round_().clamp_(0, top), w_sum, wx_sum)
        new_scale, new_least = sums.best(signed)
        new_error = sums.error(new_scale, new_least)
        better = new_error < error
        scale, least = torch.where(better, new_scale, scale), torch.where(better, new_least, least)
        error = torch.where(better, new_error, error)
    return scale, least


def scaled_groups(x: torch.Tensor, within: Range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [g, groups, n] ~ (scale s) c with s in -128..127: (scale [n] fp16, s [groups, n], c [g, groups, n])."""
    w = importance(x)
    wanted = _best_scale(x, w, within)
    low, high = wanted.amin(0), wanted.amax(0)
    scale = as_half(torch.where(-low > high, low, high) / -128)
    small = _small(wanted, scale, -128, 127)
    best_error = torch.full_like(scale, torch.inf)
    best_scale, best_small = scale, small
    for _ in range(REPEATS + 1):
        codes = _codes(x, inverse(scale * small), within)
        wc = w * codes
        wcc, wxc = codes.mul_(wc).sum(0), wc.mul_(x).sum(0)
        step = scale * small
        error = (step * (step * wcc - 2 * wxc)).sum(0)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale, best_small = torch.where(better, scale, best_scale), torch.where(better, small, best_small)
        small = _small(wxc / wcc.clamp(min=TINY), scale, -128, 127)
        scale = as_half((small * wxc).sum(0) / (small * small * wcc).sum(0).clamp(min=TINY))
    return best_scale.half(), best_small, _codes(x, inverse(best_scale * best_small), within)


def _small(wanted: torch.Tensor, scale: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return (wanted * inverse(scale)).round_().clamp_(low, high)


class Shifted(NamedTuple):
    """x ~ (scale s) c - (least m), with s and m in 0..63."""

    scale: torch.Tensor  # [n] fp16
    least: torch.Tensor  # [n] fp16
    scales: torch.Tensor  # [groups, n]
    minima: torch.Tensor  # [groups, n]
    codes: torch.Tensor  # [g, groups, n]


def shifted_groups(x: torch.Tensor, top: int) -> Shifted:
    """x [g, groups, n]."""
    w = importance(x)
    w_sum, wx_sum = w.sum(0), (w * x).sum(0)
    wanted, least_wanted = _best_pair(x, w, top, signed=False)
    wanted = wanted.clamp(min=0)
    scale, least = as_half(wanted.amax(0) / 63), as_half(-least_wanted.amin(0) / 63)
    s, m = _small(wanted, scale, 0, 63), _small(-least_wanted, least, 0, 63)
    best = [torch.full_like(scale, torch.inf), scale, least, s, m]
    for _ in range(REPEATS + 1):
        sums = _sums(x, w, _shifted_codes(x, scale * s, -(least * m), top), w_sum, wx_sum)
        error = sums.error(scale * s, -(least * m)).sum(0)
        better = error < best[0]
        best = [torch.where(better, new, old) for new, old in zip((error, scale, least, s, m), best, strict=True)]
        s, m = _small_pair(sums, scale, least)
        scale, least = _common_pair(sums, s, m)
    _, scale, least, s, m = best
    return Shifted(scale.half(), least.half(), s, m, _shifted_codes(x, scale * s, -(least * m), top))


def _small_pair(sums: Sums, scale: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The six-bit scale and minimum of each group: the scale's neighbours are tried, each with the minimum it wants."""
    middle = _small(sums.best(signed=False)[0], scale, 0, 63)
    error = torch.full_like(middle, torch.inf)
    best_s = best_m = torch.zeros_like(middle)
    for offset in (-1, 0, 1):
        s = (middle + offset).clamp_(0, 63)
        m = _small((scale * s * sums.wc - sums.wx) / sums.w, least, 0, 63)
        new = sums.error(scale * s, -(least * m))
        better = new < error
        best_s, best_m, error = (torch.where(better, a, b) for a, b in ((s, best_s), (m, best_m), (new, error)))
    return best_s, best_m


def _common_pair(sums: Sums, s: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two fp16 scales of a superblock, given everything else."""
    a, b, c = (s * s * sums.wcc).sum(0), (s * m * sums.wc).sum(0), (m * m * sums.w).sum(0)
    p, q = (s * sums.wxc).sum(0), (m * sums.wx).sum(0)
    det = a * c - b * b
    sound = det > 1e-6 * a * c
    safe = torch.where(sound, det, 1)
    scale = torch.where(sound, (p * c - b * q) / safe, p / a.clamp(min=TINY))
    least = torch.where(sound, (b * p - a * q) / safe, 0)
    return as_half(scale.clamp(min=0)), as_half(least.clamp(min=0))
