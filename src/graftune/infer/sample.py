"""The settings of a call: greedy, or temperature with top-k and top-p, and the seed; and the numbers of its samples."""

from __future__ import annotations

import hashlib
import numbers
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from graftune.errors import GraftuneError
from graftune.kernels import draw


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int = 256
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()  # besides the tokenizer's own

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed"):
            value, real = getattr(self, name), name in ("temperature", "top_p")
            if isinstance(value, bool) or not isinstance(value, numbers.Real if real else numbers.Integral):
                raise GraftuneError(f"{name} is {value!r}", fix=f"it must be a {'' if real else 'whole '}number")
        for name, ok, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature == 0 or self.temperature >= 1e-3, "0 or at least 0.001"),
            ("seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not ok:
                raise GraftuneError(f"{name} is {getattr(self, name)}", fix=f"it must be {rule}")

    @property
    def mode(self) -> str:
        """Which kernels draw (kernels/draw)."""
        if self.temperature == 0:
            return draw.GREEDY
        return draw.LIMITED if self.top_k or self.top_p < 1 else draw.WHOLE


def sample_numbers(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The number of each sample of a call: it follows from the prompt, and from how many samples of that prompt come
    before, so that a sample does not depend on the other prompts of a call."""
    found, seen = list[int](), Counter[bytes]()
    for prompt in prompts:
        key = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=6).digest()
        found.append(int.from_bytes(key) << 15 | seen[key])
        seen[key] += 1
    return found
