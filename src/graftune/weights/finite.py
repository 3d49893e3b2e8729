"""Checks that a base has no NaN or Inf while it is loaded, once for files that do not change.

One sum per weight, on its device: a NaN or Inf anywhere makes the sum NaN or Inf. Of blocks and codes only the scales
are summed, since every code is finite under a finite scale. Only a sum that is not finite is examined value by value,
so that values whose sum overflows are not refused. On a CPU the check adds an eighth to three quarters to the time of
filling the weights, on a GPU 1 to 3%, so the result is stored by the files' paths, sizes and times, as digests are.

Rejected: checking the bytes as they are read. The CPU would do that work for every device, and most formats have no
cheap test.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.io import digest
from graftune.kernels import rehearsal
from graftune.model.frozen.mapped import numbers
from graftune.weights import names, safetensors_io
from graftune.weights.base import Base


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite: by their sum, and one by one only where the sum is not."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


class FiniteCheck:
    """Checks the weights of one base as they are loaded: `note` each weight, `check_sums` now and then, `passed` at the
    end. Does nothing in a rehearsal, and for files that have passed before. `held`: their format and dtype."""

    def __init__(self, base: Base, held: str):
        self.base = base
        self.open = list[tuple[Sequence[str], torch.Tensor, torch.Tensor]]()  # names, what was summed, its sum
        self.key = _key(base, held) if rehearsal.current() is None else ""
        self.active = rehearsal.current() is None and not (self.key and digest.is_noted("finite", self.key))

    def note(self, tensors: Sequence[str], weight: Any) -> None:
        """Takes the sums of a weight whose rows are those of these tensors, or of a tensor."""
        if not self.active:
            return
        members = _members(weight)
        shared = [tensors] * len(members) if len(members) != len(tensors) else [[name] for name in tensors]
        for named, member in zip(shared, members, strict=True):
            for values in _numbers(member):
                self.open.append((named, values, values.sum()))
                if values.device.type == "cpu":
                    self.check_sums()  # a CPU has nothing to wait for, and the pieces of a mapped file would pile up

    def check_sums(self) -> None:
        """Checks the sums so far; a GPU waits once for all of them."""
        if not self.open:
            return
        sums = torch.stack([total.float() for *_, total in self.open]).isfinite().tolist()
        for sound, (named, values, _) in zip(sums, self.open, strict=True):
            if not sound and not bool(values.isfinite().all()):
                raise self._refused(self._first(named, values), values.dtype)
        self.open.clear()

    def passed(self) -> None:
        self.check_sums()
        if self.active and self.key:
            digest.note("finite", self.key)

    @contextmanager
    def naming(self, tensors: Sequence[str]) -> Iterator[None]:
        """Adds the tensor's name to the error of a quantiser, which refuses NaN and Inf but does not know the name."""
        try:
            yield
        except GraftuneError as error:
            if error.where is not None or "NaN" not in error.what:
                raise
            raise self._refused(next((name for name in tensors if not self._is_sound(name)), tensors[0])) from None

    def _is_sound(self, name: str) -> bool:
        return all(is_finite(values) for values in _numbers(self.base.tensors[name]))

    def _first(self, named: Sequence[str], values: torch.Tensor) -> str:
        """The tensor that has the first row with NaN or Inf."""
        if len(named) == 1 or values.dim() != 2:
            return named[0]
        row, end = int((~values.isfinite()).any(1).nonzero()[0]), 0
        for name in named:
            end += self.base.tensors[name].shape[0]
            if row < end:
                return name
        return named[-1]

    def _refused(self, name: str, dtype: torch.dtype | None = None) -> GraftuneError:
        if dtype is not None and self._is_sound(name):
            what = f"tensor {name} holds numbers beyond the range of {str(dtype).removeprefix('torch.')}"
            return GraftuneError(what, where=_file(self.base, name), fix="set base_dtype to bf16 or fp32")
        what = f"tensor {name} holds numbers that are not finite"
        return GraftuneError(what, where=_file(self.base, name), fix="download the model again")


def refusal_of(base: Base) -> GraftuneError | None:
    """The error for the first tensor of a base with NaN or Inf; None if there is none."""
    check = FiniteCheck(base, "")
    bad = next((name for name in base.tensors if not check._is_sound(name)), None)
    return None if bad is None else check._refused(bad)


def _members(weight: Any) -> list[Any]:
    """What a weight is made of: one member for each tensor, or one for all."""
    if hasattr(weight, "members"):
        return list(weight.members)
    return [getattr(weight, "weight", weight)]


def _numbers(member: Any) -> Iterable[torch.Tensor]:
    """Floats that are all finite exactly where the member's values are."""
    return (member,) if isinstance(member, torch.Tensor) else numbers(member)


def _key(base: Base, held: str) -> str:
    """The key under which a passed check is stored; empty where there are no files."""
    files = [file for file in base.files if file.is_file()] if base.kind in ("gguf", "safetensors") else []
    state = digest.settled_state(files) if files else None
    return "" if state is None else json.dumps([state, held])


def _file(base: Base, name: str) -> str:
    """The file of a sharded folder that holds the tensor, where its index says so."""
    index = base.path / safetensors_io.INDEX if base.path.is_dir() else Path()
    if index.is_file():
        shards = {names.from_hf(theirs): file for theirs, file in safetensors_io.weight_map(index).items()}
        return str(base.path / shards[name]) if name in shards else str(base.path)
    return str(base.path / safetensors_io.SINGLE) if base.path.is_dir() else str(base.path)
