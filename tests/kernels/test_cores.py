"""Pieces of work on all cores: each on one thread in which torch has one, the process's own number of threads kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from graftune.kernels import cores, gguf_dequant
from graftune.kernels.gguf_dequant import KINDS, reference, row_bytes


@pytest.fixture
def three() -> Iterator[None]:
    own = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(own)


def test_an_error_comes_back_once_nobody_writes_any_more(three: None) -> None:
    running, begun = set[int](), []

    def work(start: int) -> None:
        running.add(start)
        begun.append(start)
        try:
            if start == 2:
                raise ValueError("piece 2")
            threading.Event().wait(0.01)
        finally:
            running.discard(start)

    with pytest.raises(ValueError, match="piece 2"):
        cores.share(work, range(1000))
    assert not running and len(begun) < 1000


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("F32", "F16", "BF16")])
def test_blocks_are_dequantised_to_the_same_bits_by_any_number_of_cores(kind: str, three: None) -> None:
    """And nothing is divided among torch's threads: they would wait for each other at every operation."""
    drawn, rows, width = torch.Generator().manual_seed(5), 300, 512
    blocks = torch.randint(256, (rows, row_bytes(kind, width)), dtype=torch.uint8, generator=drawn)
    ids = torch.randint(rows, (2 * rows,), generator=drawn)
    threads, decode = set[int](), reference._DECODE[kind]

    def watched(raw: torch.Tensor) -> torch.Tensor:
        threads.add(torch.get_num_threads())
        return decode(raw)

    found = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(reference._DECODE, kind, watched)
        for count in (3, 1):
            torch.set_num_threads(count)
            whole = torch.empty(rows, width)
            gguf_dequant.dequantise(blocks, kind, whole)
            found[count] = whole, gguf_dequant.gather(blocks, kind, ids, torch.float32)
    assert threads == {1}
    for shared, alone in zip(found[3], found[1], strict=True):
        assert torch.equal(shared.view(torch.int32), alone.view(torch.int32))
