"""Finds scales that give a block a small weighted squared error.

With fixed codes c, the error is a quadratic form in the scale (and the minimum), so that a few sums over the block give
the best ones in closed form; with fixed scales, the best codes are the nearest ones. So several step widths around the
simple one are tried and solved, the best is kept, and codes and scales are then improved in turn, since the formats
round scales as well (to fp16, or to four to eight bits beside a common fp16 scale). The weight of a value is its
magnitude plus the root mean square of its group: large values matter more, small ones still count.

Speed: each try passes over the values in a handful of in-place operations and leaves only its sums behind. The sums of
all tries are then solved at once; solving each try by itself took longer than the passes, in the overhead of small
operations. A finer search (llama.cpp tries 15 to 36 step widths) gains under half a percent here.

Shapes: [g, ...] is one value of each of many groups at a time, so that a sum over dimension 0 is a sum over a group and
an addition of whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from graftune.kernels.gguf_dequant.reference import CURVE

# The step widths to try: they put the largest value so many steps beyond the largest code.
NEAR = (-1.7, -1.4, -1.05, -0.7, -0.4, -0.1, 0.25, 0.6)
REPEATS = 1  # of improving codes and scales in turn: a second one gains a tenth of a percent
TINY = 1e-30


def importance(x: torch.Tensor) -> torch.Tensor:
    size = x.abs()
    return size.add_(x.square().mean(0).sqrt_().add_(TINY))


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 where the scale is 0, as for a group of zeros."""
    return scale.reciprocal().masked_fill_(scale.abs() <= TINY, 0)


def as_half(scale: torch.Tensor) -> torch.Tensor:
    """Rounded to what fp16 can hold, in fp32."""
    return scale.half().float()


def picked(gain: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The largest gain of each group over all tries, and the values of `tensors` at that try; all are [tries, ...] with
    a power of two of tries. Compares halves, which takes a fraction of the time of argmax and gather."""
    found = [gain, *tensors]
    while len(found[0]) > 1:
        first, second = zip(*(tensor.chunk(2) for tensor in found), strict=True)
        found = better(second, first)
    return [tensor[0] for tensor in found]


def better(new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each group, the values of the list with the larger gain; the first tensor of each list is the gain."""
    more = new[0] > old[0]
    return [torch.where(more, a, b) for a, b in zip(new, old, strict=True)]


class Range(NamedTuple):
    """Levels: whole numbers from low, below 0, to high."""

    low: int
    high: int

    @property
    def tries(self) -> Sequence[float]:
        """The levels at which each try puts the largest value of a group; their number is a power of two."""
        return [self.low - near for near in NEAR]

    def nearest(self, x: torch.Tensor, per_step: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The level nearest to x * per_step, into `out`."""
        return torch.mul(x, per_step, out=out).round_().clamp_(self.low, self.high)

    def codes(self, x: torch.Tensor, per_step: torch.Tensor) -> torch.Tensor:
        """The codes of the nearest levels, counted from the lowest. Overwrites x."""
        return self.nearest(x, per_step, x).sub_(self.low)


class Curve:
    """The sixteen uneven levels of IQ4_NL and IQ4_XS. Borders between them lie on halves, so a table over half steps
    finds the nearest one exactly; searching the borders for each value takes several times as long."""

    tries = (-110.0, -117.0, -125.0, -132.0, 96.0, 103.0, 111.0, 118.0)  # near either end, mostly inside it
    _REACH = 128

    def __init__(self) -> None:
        middles = torch.arange(-2 * self._REACH, 2 * self._REACH) / 2 + 0.25
        levels = torch.tensor(CURVE, dtype=torch.float32)
        codes = (middles[:, None] - levels).abs_().argmin(1)
        self._levels, self._codes = levels[codes], codes.to(torch.uint8)

    def _places(self, x: torch.Tensor, per_step: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.mul(x, 2 * per_step, out=out).add_(2 * self._REACH).clamp_(0, 4 * self._REACH - 1)
        return out.to(torch.int32).view(-1)

    def nearest(self, x: torch.Tensor, per_step: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.index_select(self._levels, 0, self._places(x, per_step, out), out=out.view(-1))
        return out

    def codes(self, x: torch.Tensor, per_step: torch.Tensor) -> torch.Tensor:
        return self._codes.index_select(0, self._places(x, per_step, torch.empty_like(x))).view(x.shape)


Levels = Range | Curve  # the values that a code stands for, before scales


@cache
def curve() -> Curve:
    return Curve()


# One scale for each group


def best_scale(
    x: torch.Tensor, w: torch.Tensor, levels: Levels, stored: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """The best scale in x [g, ...] ~ scale * level. `stored` rounds a scale as the block stores it: of scales that fit
    alike, one that is stored exactly is better."""
    low, high = x.amin(0), x.amax(0)
    per_peak = inverse(torch.where(-low > high, low, high))
    steps = _times(levels.tries, per_peak)
    xw, codes, product = x * w, torch.empty_like(x), torch.empty_like(x)
    wxc, wcc = x.new_empty(2, len(steps), *low.shape)
    for per_step, by_x, by_itself in zip(steps, wxc.unbind(), wcc.unbind(), strict=True):
        levels.nearest(x, per_step, codes)
        torch.sum(torch.mul(codes, xw, out=product), 0, out=by_x)
        torch.sum(codes.square_().mul_(w), 0, out=by_itself)
    scale = wxc / wcc.clamp_(min=TINY)
    if stored is not None:
        scale = stored(scale)
    return picked(_gain(scale, wxc, wcc), scale)[1]


def _times(numbers: Sequence[float], scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    factors = torch.tensor(numbers, device=scale.device).view(-1, *[1] * scale.dim())
    return (factors * scale).unbind()


def _gain(scale: torch.Tensor, wxc: torch.Tensor, wcc: torch.Tensor) -> torch.Tensor:
    """Half of the decrease of the squared error, from all zeros to scale * c."""
    return torch.addcmul(wxc, scale, wcc, value=-0.5).mul_(scale)


def scaled(x: torch.Tensor, levels: Levels) -> torch.Tensor:
    """x [g, n] -> scale [n] fp16."""
    return best_scale(x, importance(x), levels, as_half).half()


def scaled_groups(x: torch.Tensor, levels: Levels, small: Range) -> tuple[torch.Tensor, torch.Tensor]:
    """x [g, groups, n] ~ (scale s) level: (scale [n] fp16, s [groups, n] within `small`)."""
    w = importance(x)
    wanted = best_scale(x, w, levels)
    low, high = wanted.amin(0), wanted.amax(0)
    scale = as_half(torch.where(-low > high, low, high) / small.low)
    s = _small(wanted, scale, small)
    codes, product = torch.empty_like(x), torch.empty_like(x)
    best: list[torch.Tensor] = []
    for left in reversed(range(REPEATS + 1)):
        step = scale * s
        levels.nearest(x, inverse(step), codes)
        wxc = torch.mul(w, codes, out=product).mul_(x).sum(0)
        wcc = codes.mul_(codes).mul_(w).sum(0)
        new = [_gain(step, wxc, wcc).sum(0), scale, s]
        best = better(new, best) if best else new
        if left:
            s = _small(wxc / wcc.clamp_(min=TINY), scale, small)
            scale = as_half((s * wxc).sum(0) / (s * s * wcc).sum(0).clamp_(min=TINY))
    return best[1].half(), best[2]


def _small(wanted: torch.Tensor, scale: torch.Tensor, within: Range) -> torch.Tensor:
    return (wanted * inverse(scale)).round_().clamp_(*within)


# A scale and a minimum for each group


class Sums(NamedTuple):
    """Weighted means over a group: everything that its error depends on once the codes are fixed."""

    x: torch.Tensor
    c: torch.Tensor
    cc: torch.Tensor
    xc: torch.Tensor

    def gain(self, scale: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        """Half of the decrease of the mean squared error, from all zeros to scale * c + least."""
        by_least = torch.addcmul(self.x, scale, self.c, value=-1).sub_(least, alpha=0.5).mul_(least)
        return by_least.add_(_gain(scale, self.xc, self.cc))

    def best(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and minimum of least error; the minimum is at most 0."""
        variance = torch.addcmul(self.cc, self.c, self.c, value=-1)
        scale = torch.addcmul(self.xc, self.x, self.c, value=-1).div_(variance)
        scale.masked_fill_(variance <= 1e-6 * self.cc, 0)  # all codes alike: the minimum alone decides
        least = torch.addcmul(self.x, scale, self.c, value=-1)
        scale = torch.where(least > 0, self.xc / self.cc.clamp(min=TINY), scale)
        return scale, least.clamp_(max=0)


class Group(NamedTuple):
    """The values of many groups, their weights (which add up to 1 in each group), and a workspace."""

    x: torch.Tensor
    w: torch.Tensor
    total: torch.Tensor  # what the weights were divided by
    mean: torch.Tensor  # of x
    codes: torch.Tensor
    product: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Group:
        w = importance(x)
        total = w.sum(0)
        w.mul_(total.reciprocal())
        product = x * w
        return cls(x, w, total, product.sum(0), torch.empty_like(x), product)

    def sum(self, c: torch.Tensor, cc: torch.Tensor, xc: torch.Tensor) -> None:
        """Writes the weighted means of `codes` into c, cc and xc (see Sums). Overwrites `codes`."""
        torch.sum(torch.mul(self.w, self.codes, out=self.product), 0, out=c)
        torch.sum(self.codes.mul_(self.product), 0, out=cc)
        torch.sum(self.product.mul_(self.x), 0, out=xc)

    def encode(self, scale: torch.Tensor, least: torch.Tensor, top: int) -> torch.Tensor:
        torch.sub(self.x, least, out=self.codes)
        return self.codes.mul_(inverse(scale)).round_().clamp_(0, top)

    def sums(self, scale: torch.Tensor, least: torch.Tensor, top: int) -> Sums:
        self.encode(scale, least, top)
        c, cc, xc = self.x.new_empty(3, *scale.shape)
        self.sum(c, cc, xc)
        return Sums(self.mean, c, cc, xc)


def best_pair(group: Group, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = group.x.amin(0).clamp_(max=0), group.x.amax(0)
    steps = _times([top + near for near in NEAR], inverse(high - low))
    above = group.x - low
    c, cc, xc = low.new_empty(3, len(NEAR), *low.shape)
    for per_step, *out in zip(steps, c.unbind(), cc.unbind(), xc.unbind(), strict=True):
        torch.mul(above, per_step, out=group.codes).round_().clamp_(max=top)
        group.sum(*out)
    tried = Sums(group.mean, c, cc, xc)
    scale, least = tried.best()
    found = picked(tried.gain(scale, least), scale, least)
    again = group.sums(found[1], found[2], top)  # with the best pair, other codes are nearest
    new = again.best()
    _, scale, least = better([again.gain(*new), *new], found)
    return scale, least


SIX_BITS = Range(0, 63)


def shifted_groups(x: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    """x [g, groups, n] ~ (scale s) c - (least m), with s and m in 0..63: (scale [n] fp16, least [n] fp16, s [groups,
    n], m [groups, n], c [g, groups, n])."""
    group = Group.of(x)
    wanted, least_wanted = best_pair(group, top)
    scale, least = as_half(wanted.clamp_(min=0).amax(0) / 63), as_half(least_wanted.neg_().amax(0) / 63)
    s, m = _small(wanted, scale, SIX_BITS), _small(least_wanted, least, SIX_BITS)
    best: list[torch.Tensor] = []
    for left in reversed(range(REPEATS + 1)):
        step, lowest = scale * s, -(least * m)
        sums = group.sums(step, lowest, top)
        new = [sums.gain(step, lowest).mul_(group.total).sum(0), scale, least, s, m]
        best = better(new, best) if best else new
        if left:
            s, m = _small_pair(sums, scale, least)
            scale, least = _common_pair(sums, s, m, group.total)
    _, scale, least, s, m = best
    return scale.half(), least.half(), s, m, group.encode(scale * s, -(least * m), top)


def _small_pair(sums: Sums, scale: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The six-bit scale and minimum of each group."""
    s = _small(sums.best()[0], scale, SIX_BITS)
    return s, _small((scale * s).mul_(sums.c).sub_(sums.x), least, SIX_BITS)


def _common_pair(sums: Sums, s: torch.Tensor, m: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two fp16 scales of a superblock, given everything else."""
    ws, wm = w * s, w * m
    a, b, c = (ws * s).mul_(sums.cc).sum(0), (ws * m).mul_(sums.c).sum(0), (wm * m).sum(0)
    p, q = ws.mul_(sums.xc).sum(0), wm.mul_(sums.x).sum(0)
    ac = a * c
    det = ac - b * b
    sound = det > 1e-6 * ac
    scale = torch.where(sound, (p * c - b * q) / det, p / a.clamp(min=TINY))
    least = ((b * p - a * q) / det).masked_fill_(~sound, 0)
    return as_half(scale.clamp_(min=0)), as_half(least.clamp_(min=0))
