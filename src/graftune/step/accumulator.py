"""A gradient accumulator by name, for a user's own training loop; graftune's step adds directly to the arena.

Sums are fp32 for every input dtype, since a bf16 sum stops growing after about 256 equal terms. Their addresses never
change, so that a captured graph can write to them. Nothing here waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from graftune.errors import GraftuneError


class Accumulator:
    """Sums gradients by name in fp32. With `shapes`, every sum is allocated at once and other names are refused;
    without them, a name's first gradient allocates its sum."""

    def __init__(self, shapes: Mapping[str, Sequence[int]] | None = None, device: torch.device | str | None = None):
        self.fixed = shapes is not None
        self.counts: Counter[str] = Counter()  # accumulations since the last reset
        self.device = None if device is None else torch.empty(0, device=device).device  # None: that of a gradient
        self.sums = {name: torch.zeros(tuple(shape), device=device) for name, shape in (shapes or {}).items()}

    @property
    def count(self) -> int:
        """Micro-batches added since the last reset: the number of gradients under the most frequent name."""
        return max(self.counts.values(), default=0)

    def __len__(self) -> int:
        return len(self.sums)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The running sum itself, not a copy."""
        if name not in self.sums:
            known = ", ".join(list(self.sums)[:4]) + (", ..." if len(self.sums) > 4 else "") or "none yet"
            raise GraftuneError("no gradient has this name", where=name, fix=f"there are: {known}")
        return self.sums[name]

    @torch.no_grad()
    def accumulate(self, name: str | Mapping[str, torch.Tensor], grad: torch.Tensor | None = None) -> None:
        """Add one gradient under its name, or a dict of them. If one does not fit, none is added."""
        if isinstance(name, str):
            if grad is None:
                raise GraftuneError("there is no gradient to add", where=name, fix="pass accumulate(name, gradient)")
            name = {name: grad}
        for key, value in name.items():
            total = self[key] if self.fixed else self.sums.get(key, value)
            device = total.device if key in self.sums else self.device or value.device
            if (total.shape, device) != (value.shape, value.device):
                raise GraftuneError(
                    f"a gradient of shape {tuple(value.shape)} on {value.device} does not fit a sum of shape "
                    f"{tuple(total.shape)} on {device}",
                    where=key,
                    fix="accumulate gradients of one shape and device under a name",
                )
        for key, value in name.items():
            if key not in self.sums:
                self.sums[key] = torch.zeros(value.shape, device=value.device)
            self.sums[key].add_(value)
            self.counts[key] += 1

    @torch.no_grad()
    def get_and_reset(self) -> dict[str, torch.Tensor]:
        """Copies of the sums; the accumulator restarts from zero."""
        sums = {name: total.clone() for name, total in self.sums.items()}
        self.clear()
        return sums

    @torch.no_grad()
    def scale_all(self, factor: float | torch.Tensor) -> None:
        """Multiply every sum by a number or by a 0-dim tensor on the device."""
        if isinstance(factor, torch.Tensor) and factor.dim():
            raise GraftuneError(
                f"a factor of shape {tuple(factor.shape)} is not a number", fix="pass a float or a 0-dim tensor"
            )
        for total in self.sums.values():
            total.mul_(factor)

    @torch.no_grad()
    def clear(self) -> None:
        """Set all sums to zero."""
        for total in self.sums.values():
            total.zero_()
        self.counts.clear()
