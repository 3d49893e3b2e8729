"""Attention over pages: the reference against packed attention over the same keys in order, the kernel against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftune.kernels import attention, paged_attention
from graftune.kernels.attention import Documents
from graftune.kernels.paged_attention import PAGE, PagedKeys, reference
from tests.kernels.harness import NAN, close

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# heads, key heads, head width
HEADS = [(4, 2, 64), (3, 1, 16), (6, 6, 24), (8, 1, 128), (2, 1, 256), (1, 1, 512)]
OPTIONS: list[dict[str, Any]] = [{}, {"window": 5}, {"window": 21}, {"cap": 3.0}, {"sinks": True}]
# new tokens of each sequence (None: one each), and keys before them
NEW = [(None, (0, 40, 15, 16)), ((5, 1, 18, 3), (0, 33, 16, 15))]


class Case:
    """Random keys of some sequences, scattered over the pages of a pool that is NaN elsewhere."""

    def __init__(self, heads: tuple[int, int, int], dtype: torch.dtype, new: tuple[int, ...] | None, past: Any):
        n, k, width = heads
        counts = new or (1,) * len(past)
        ends = [before + count for before, count in zip(past, counts, strict=True)]
        pages = torch.randperm(sum(-(-end // PAGE) for end in ends) + 3) + 1
        self.table = torch.zeros(len(past), max(-(-end // PAGE) for end in ends) + 1, dtype=torch.int32)
        self.keys, self.values = (torch.full(((len(pages) + 1) * PAGE, k, width), NAN).to(dtype) for _ in range(2))
        self.q = torch.randn(sum(counts), n, width).to(dtype)
        self.k, self.v, rows = [], [], []
        for index, (before, end) in enumerate(zip(past, ends, strict=True)):
            used = -(-end // PAGE)
            self.table[index, :used], pages = pages[:used], pages[used:]
            at = torch.arange(end)
            row = self.table[index, at // PAGE].long() * PAGE + at % PAGE
            made = torch.randn(2, end, k, width).to(dtype)
            self.keys[row[:before]], self.values[row[:before]] = made[:, :before]
            self.k.append(made[0]), self.v.append(made[1]), rows.append(row[before:])
        self.new = [torch.cat([x[-c:] for x, c in zip(y, counts, strict=True)]) for y in (self.k, self.v)]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        self.paged = PagedKeys(self.table, starts, torch.tensor(past), torch.cat(rows), new, max(ends))
        self.sinks = torch.randn(n)
        self.counts = counts

    def run(self, device: str, sinks: bool = False, window: int = 0, cap: float = 0.0) -> torch.Tensor:
        keys, values = self.keys.to(device), self.values.to(device)
        paged = PagedKeys(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in self.paged))
        wide = torch.full((len(self.q), self.q[0].numel() + 8), NAN, dtype=self.q.dtype, device=device)
        out = wide[:, :-8].view_as(self.q) if len(self.q) == 1 else wide[:, :-8].unflatten(1, self.q.shape[1:])
        paged_attention.store_(*(x.to(device) for x in self.new), keys, values, paged.rows)
        more = self.sinks.to(device) if sinks else None
        paged_attention.forward(self.q.to(device), keys, values, paged, 0.3, window, out, cap, more)
        assert wide[:, -8:].isnan().all()
        return out.cpu()

    def in_order(self, sinks: bool = False, window: int = 0, cap: float = 0.0) -> torch.Tensor:
        """By packed attention, in fp32, over queries for all positions of which the last are the new tokens."""
        found, start = [], 0
        for k, v, count in zip(self.k, self.v, self.counts, strict=True):
            q = torch.zeros(len(k), *self.q.shape[1:])
            q[-count:] = self.q[start : start + count]
            more = self.sinks if sinks else None
            docs = Documents.of([len(k)])
            out, _ = attention.forward(q, k.float(), v.float(), docs, 0.3, window, "cpu", None, cap, more)
            found.append(out[-count:])
            start += count
        return torch.cat(found)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("new", "past"), NEW, ids=["one", "several"])
def test_the_reference_is_attention_over_the_keys_in_order(options: dict[str, Any], new: Any, past: Any) -> None:
    case = Case((4, 2, 8), torch.float32, new, past)
    close(case.run("cpu", **options), case.in_order(**options), 2e-6)


@pytest.mark.few(20)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("new", "past"), NEW, ids=["one", "several"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_kernel_is_the_reference(
    kernels_on: None,
    honest_rounding: None,
    poison: None,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    heads: Any,
    new: Any,
    past: Any,
    dtype: torch.dtype,
    options: dict[str, Any],
    splits: int,
) -> None:
    from graftune.kernels.paged_attention import kernel

    monkeypatch.setattr(kernel, "splits_of", lambda *_: splits if new is None else 1)
    case = Case(heads, dtype, new, past)
    close(case.run(device, **options), case.in_order(**options), TOLERANCE[dtype])


def test_a_sequences_result_does_not_depend_on_the_others(kernels_on: None, device: str) -> None:
    case = Case((4, 2, 16), torch.float32, None, (3, 37, 20))
    together = case.run(device)
    case.table[0], case.table[2] = case.table[2].clone(), case.table[1].clone()
    case.paged.before[0], case.paged.before[2] = 11, 30
    assert case.run(device)[1].equal(together[1])


def test_split_by_the_number_of_sequences() -> None:
    from graftune.kernels.paged_attention import kernel

    cpu = torch.device("cpu")
    assert [kernel.splits_of(s, 2, 1, cpu) for s in (1, 4, 64)] == [8, 2, 1] and kernel.splits_of(1, 2, 9, cpu) == 1
    assert reference.PAGE == PAGE
