"""Rotary frequencies: plain, and scaled for contexts longer than the one a model was first trained on.

linear     divides all frequencies by one factor
llama3     divides those of long wavelengths, keeps those of short ones, and blends those between
yarn       does the same by the number of turns within the original context, and scales attention
longrope   has a divisor for each frequency, and a second list of them for texts beyond the original context
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

WIDEST = 1 << 16  # columns of a head in a sane file


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled. Fields that a kind does not use stay at their defaults."""

    kind: str = "none"  # none | linear | llama3 | yarn | longrope | proportional
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # yarn's and longrope's; 0: from the factor
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short: tuple[float, ...] = ()  # longrope's divisors, up to the original length and beyond it
    long: tuple[float, ...] = ()
    share: float = 1.0  # proportional: of the frequencies, the first ones; the others are zero
    divisors: tuple[float, ...] = ()  # of the frequencies: a GGUF stores these in place of Llama 3's settings


@dataclass(frozen=True)
class RopeSpec:
    """How attention rotates queries and keys. Layers with equal specs share rotary tables."""

    width: int  # columns of a head that are rotated
    theta: float
    scaling: RopeScaling = field(default_factory=RopeScaling)
    enabled: bool = True
    temperature: float = 0.0  # queries are multiplied by 1 + temperature * log(1 + position // temperature_length)
    temperature_length: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether the frequencies can be computed and are finite; those of a damaged file may not be."""
        scaling = self.scaling
        lengths = {len(scaling.short), len(scaling.long), self.width // 2}
        if scaling.kind == "longrope" and (len(lengths) != 1 or scaling.original_length < 2):
            return False
        return self.width > WIDEST or bool(self.build().frequencies.isfinite().all())

    def build(self) -> Rope:
        by_position = self.temperature, self.temperature_length
        if not self.enabled:  # an angle of zero changes nothing
            return Rope(torch.zeros(self.width // 2), 1.0, *by_position)
        frequencies, attention = inverse_frequencies(self.width, self.theta, self.scaling)
        if self.scaling.kind != "longrope":
            return Rope(frequencies, attention, *by_position)
        far = inverse_frequencies(self.width, self.theta, RopeScaling())[0] / torch.tensor(self.scaling.long)
        return Rope(frequencies, attention, *by_position, far, self.scaling.original_length)


class Rope(NamedTuple):
    """The frequencies from which the decoder computes the rotary tables of some layers."""

    frequencies: torch.Tensor  # [R/2] fp32, R the columns of a head that are rotated
    scaling: float  # multiplies cos and sin
    temperature: float = 0.0
    temperature_length: int = 0
    far: torch.Tensor | None = None  # the frequencies of documents longer than `limit`
    limit: int = 0

    def q_scale(self, positions: torch.Tensor, longest: int | None) -> torch.Tensor | None:
        """What queries are multiplied by, [T] in fp32; None: nothing. `longest` bounds the positions, if known."""
        if not self.temperature or (longest is not None and longest <= self.temperature_length):
            return None
        return (positions // self.temperature_length + 1).float().log().mul_(self.temperature).add_(1.0)

    def to(self, device: torch.device) -> Rope:
        far = None if self.far is None else self.far.to(device)
        return self._replace(frequencies=self.frequencies.to(device), far=far)


def inverse_frequencies(width: int, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [width / 2] in fp32, attention factor that multiplies cos and sin); for longrope, those of
    short texts."""
    frequencies, attention = _scaled(width, theta, scaling)
    return (frequencies / torch.tensor(scaling.divisors) if scaling.divisors else frequencies), attention


def _scaled(width: int, theta: float, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    base = 1.0 / theta**exponents
    if scaling.kind == "none":
        return base, 1.0
    if scaling.kind == "linear":
        return base / scaling.factor, 1.0
    if scaling.kind == "proportional":
        rotated = torch.arange(width // 2) < int(scaling.share * width // 2)
        return torch.where(rotated, base / scaling.factor, 0.0), 1.0
    if scaling.kind == "llama3":
        return _llama3(base, scaling), 1.0
    if scaling.kind == "longrope":
        return base / torch.tensor(scaling.short), long_attention(scaling)
    return _yarn(base, theta, width, scaling)


def long_attention(scaling: RopeScaling) -> float:
    """Longrope's attention factor; its `factor` is the longest context divided by the original one."""
    if scaling.attention_factor or scaling.factor <= 1:
        return scaling.attention_factor or 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_length))


def _llama3(base: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divides frequencies of long wavelengths by `factor`, keeps those of short ones, and blends those between."""
    wavelength = 2 * math.pi / base
    share = (scaling.original_length / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    share = share.clamp(0.0, 1.0)
    return (1 - share) * base / scaling.factor + share * base


def _yarn(base: torch.Tensor, theta: float, width: int, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Keeps frequencies with many turns within the original context, interpolates slow ones, with a ramp between."""

    def dimension(turns: float) -> float:
        return width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = base / scaling.factor * ramp + base * (1 - ramp)

    if scaling.attention_factor:
        return frequencies, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        all_dim = yarn_attention(scaling.factor, scaling.mscale_all_dim)
        return frequencies, yarn_attention(scaling.factor, scaling.mscale) / all_dim
    return frequencies, yarn_attention(scaling.factor)


def yarn_attention(factor: float, weight: float = 1.0) -> float:
    """Yarn's attention factor, for models that do not state another."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
