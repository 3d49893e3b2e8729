"""A gradient accumulator by name, for loops other than ours: our own step adds straight into the arena.

Sums are fp32 whatever dtype comes in, since a bf16 sum stops growing after some 256 equal terms. Tensors lie one behind
the other in flat buffers, so scaling and clearing are one operation for all of them, and they stay where they are as
long as the accumulator lives: a captured graph may write to them. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from graftune.errors import GraftuneError
from graftune.runtime import refusing


class Accumulator:
    """With `shapes` everything is allocated at once and other names are refused; without, a name's first gradient
    makes its place."""

    def __init__(self, shapes: Mapping[str, Sequence[int]] | None = None, device: torch.device | str | None = None):
        self.device = None if device is None else torch.device(device)  # without one: each gradient's own
        self.fixed = shapes is not None
        self.counts: Counter[str] = Counter()  # accumulations since the last reset
        self._views: dict[str, torch.Tensor] = {}
        self._flats: list[tuple[torch.Tensor, dict[str, tuple[int, ...]]]] = []
        if shapes is not None:
            place = self.device or torch.device("cpu")
            with refusing(place):
                self._add_place({name: tuple(shape) for name, shape in shapes.items()}, place)

    @property
    def count(self) -> int:
        """Micro-batches added since the last reset: how often the most frequent name came."""
        return max(self.counts.values(), default=0)

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The running sum itself, not a copy."""
        self._check_name(name)
        return self._views[name]

    @torch.no_grad()
    def accumulate(self, name: str | Mapping[str, torch.Tensor], grad: torch.Tensor | None = None) -> None:
        """One gradient under its name, or a dict of them: all are added, or (where one does not fit) none."""
        if isinstance(name, str):
            if grad is None:
                raise GraftuneError("there is no gradient to add", where=name, fix="pass accumulate(name, gradient)")
            grads: Mapping[str, torch.Tensor] = {name: grad}
        else:
            grads = name
        for key, value in grads.items():
            self._check(key, value)
        new: dict[torch.device, dict[str, tuple[int, ...]]] = {}
        for key, value in grads.items():
            if key not in self._views:
                new.setdefault(value.device, {})[key] = tuple(value.shape)
        for device, shapes in new.items():
            self._add_place(shapes, device)
        for key, value in grads.items():
            self._views[key].add_(value)
            self.counts[key] += 1

    @torch.no_grad()
    def get_and_reset(self) -> dict[str, torch.Tensor]:
        """The sums, as tensors of their own; the accumulator starts again from zero."""
        sums: dict[str, torch.Tensor] = {}
        for flat, shapes in self._flats:
            sums |= _views(flat.clone(), shapes)
        self.clear()
        return sums

    @torch.no_grad()
    def scale_all(self, factor: float | torch.Tensor) -> None:
        """Multiplies every sum, by a number or by a 0-dim tensor on the device."""
        if isinstance(factor, torch.Tensor) and factor.dim():
            raise GraftuneError(
                f"a factor of shape {tuple(factor.shape)} is not a number", fix="pass a float or a 0-dim tensor"
            )
        for flat, _ in self._flats:
            flat.mul_(factor)

    @torch.no_grad()
    def clear(self) -> None:
        """All sums are zero again."""
        for flat, _ in self._flats:
            flat.zero_()
        self.counts.clear()

    def _add_place(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        flat = torch.zeros(sum(map(math.prod, shapes.values())), dtype=torch.float32, device=device)
        self._flats.append((flat, shapes))
        self._views |= _views(flat, shapes)

    def _check_name(self, name: str) -> None:
        if name not in self._views:
            known = ", ".join(list(self._views)[:4]) + (", ..." if len(self._views) > 4 else "")
            raise GraftuneError("no gradient has this name", where=name, fix=f"there are: {known or 'none yet'}")

    def _check(self, name: str, grad: torch.Tensor) -> None:
        if self.fixed:
            self._check_name(name)
        place = self._views.get(name)
        if place is not None and place.shape != grad.shape:
            raise GraftuneError(
                f"the gradient's shape {tuple(grad.shape)} does not fit {tuple(place.shape)}",
                where=name,
                fix="accumulate gradients of one shape under a name",
            )
        home = place.device if place is not None else self.device
        if home is not None and (grad.device.type != home.type or home.index not in (None, grad.device.index)):
            raise GraftuneError(
                f"the gradient lies on {grad.device}, its sum on {home}", where=name, fix=f"move it to {home} first"
            )


def _views(flat: torch.Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
