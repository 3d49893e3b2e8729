"""Fetches frozen weights to the device only while they are used, into two buffers that the blocks share.

A bundle holds the frozen weights of one block, of the embedding or of the head in one flat buffer of bytes. Its storage
stores the bytes: host memory (`HostMemory`), or the memory of all ranks (dist/shard.py). Quantised weights are fetched
as they are stored. Block i always uses buffer i % 2, so each of its weights is a view with a fixed address: kernels
need no changes, and passes can be captured in graphs.

    forward     while block i + 1 computes, block i + 2 is fetched into the buffer of block i
    backward    the same in reverse order; the last two blocks are still in the buffers

A backward therefore ends with the first two blocks in the buffers, which is the state that every captured pass expects.
Embedding and head, which may be as large as twenty blocks, share a third buffer: the head is fetched piece by piece
between the blocks of the forward, the embedding between those of the backward. (Fetched as a whole in the queue of the
blocks, each would stall the pass. Buffers for three blocks were not needed.) A tied table stays on the device.

Fetches run on a separate stream. The host tracks what each buffer holds and the event to wait for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graftune import graph
from graftune.arithmetic import ceil_div
from graftune.kernels import launch

EMBEDDING, HEAD = "embedding", "head"
ALIGNMENT = 256  # bytes, of a tensor in its bundle: the alignment of the allocator
SMALL = 4096  # bytes; smaller tensors (such as the table of NF4's scales) stay on the device
LARGEST_PIECE, SMALLEST_PIECE = 64 << 20, 64 << 10  # bytes that are copied from host memory at once

Key = int | str  # a block's number, EMBEDDING or HEAD
MoveTensor = Callable[[torch.Tensor], torch.Tensor]


class Movable(Protocol):
    """A frozen weight whose tensors can be moved."""

    def move(self, place: MoveTensor) -> None:
        """Replaces each tensor by the result of `place`, a tensor of the same shape; always in the same order."""


class BundleStorage(Protocol):
    """Stores the bytes of bundles."""

    collective: bool  # whether a fetch is a collective operation

    def sizes(self, count: int) -> list[int]:
        """The sizes of the pieces that store `count` bytes; their sum may be larger."""

    def keep(self, piece: torch.Tensor) -> torch.Tensor:
        """Returns the stored form of a piece."""

    def fetch(self, kept: torch.Tensor, into: torch.Tensor) -> None:
        """Copies a stored piece into a buffer, on the current stream."""


class HostMemory:
    """Host memory, pinned where the device is a GPU. torch rounds pinned memory up to powers of two, so pieces have
    such sizes."""

    collective = False

    def __init__(self, device: torch.device):
        self.pinned = launch.on_gpu(device)

    def sizes(self, count: int) -> list[int]:
        sizes = [LARGEST_PIECE] * (count // LARGEST_PIECE)
        rest = count % LARGEST_PIECE
        while rest >= SMALLEST_PIECE:
            sizes.append(1 << (rest.bit_length() - 1))
            rest -= sizes[-1]
        return [*sizes, rest] if rest else sizes

    def keep(self, piece: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(piece), dtype=torch.uint8, device="cpu", pin_memory=self.pinned).copy_(piece)

    def fetch(self, kept: torch.Tensor, into: torch.Tensor) -> None:
        into.copy_(kept, non_blocking=True)


class Residents:
    """Every frozen weight stays on the device: nothing is fetched."""

    collective = False

    def begin(self) -> None: ...
    def enter(self, key: Key) -> None: ...
    def leave(self, key: Key, following: Key) -> None: ...
    def restore_first_blocks(self) -> None: ...


@dataclass(frozen=True)
class TensorPlace:
    """The position of a tensor in its bundle."""

    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bundle:
    weights: Sequence[Movable]
    places: Sequence[TensorPlace]
    sizes: Sequence[int]  # of its pieces
    kept: Sequence[torch.Tensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def attach(self, flat: torch.Tensor) -> None:
        """Makes the weights views into `flat`."""
        views = iter([place.view(flat) for place in self.places])
        for weight in self.weights:
            weight.move(_large(lambda _: next(views)))


@dataclass
class Buffer:
    flat: torch.Tensor
    holds: Key | None = None
    arrived: Any = None  # the event recorded after the last fetch, until the stream of the pass has waited for it


class Bundles:
    """The bundles of a decoder, their storage and the buffers. While loading, `add` moves each bundle from the device
    to the storage; `finish` allocates the buffers."""

    def __init__(self, storage: BundleStorage, device: torch.device):
        self.storage, self.device = storage, device
        self.bundles: dict[Key, Bundle] = {}
        self.buffers: dict[Key, Buffer] = {}  # by the bundle's key; several bundles share a buffer
        self.side = graph.stream("weights", device)
        self.pending: deque[tuple[Buffer, torch.Tensor, torch.Tensor]] = deque()  # pieces of a table to fetch
        self.at_once = 1  # pieces of a table that are sent after each block

    @property
    def collective(self) -> bool:
        """Whether every rank has to run every pass, because a fetch is a collective operation."""
        return self.storage.collective

    def add(self, key: Key, weights: Sequence[Movable]) -> None:
        held: list[torch.Tensor] = []

        def noted(tensor: torch.Tensor) -> torch.Tensor:
            held.append(tensor)
            return tensor

        for weight in weights:
            weight.move(_large(noted))
        if not held:
            return
        places = _laid_out(held)
        sizes = self.storage.sizes(places[-1].stop)
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        for place, tensor in zip(places, held, strict=True):
            place.view(flat).copy_(tensor)
        kept = [self.storage.keep(piece) for piece in flat.split(sizes)]
        for weight in weights:
            weight.move(_large(_absent))
        self.bundles[key] = Bundle(weights, places, sizes, kept)

    def finish(self) -> None:
        blocks = [key for key in self.bundles if isinstance(key, int)]
        tables = [key for key in self.bundles if not isinstance(key, int)]
        for keys in (blocks[::2], blocks[1::2], tables):
            if not keys:
                continue
            flat = torch.empty(max(self.bundles[key].nbytes for key in keys), dtype=torch.uint8, device=self.device)
            buffer = Buffer(flat)
            for key in keys:
                self.buffers[key] = buffer
                self.bundles[key].attach(flat)
        most = max((len(self.bundles[key].sizes) for key in tables), default=0)
        self.at_once = max(1, ceil_div(2 * most, max(1, len(blocks))))  # a table arrives after half the blocks

    # In a pass

    def begin(self) -> None:
        """Fetches the embedding and the first two blocks."""
        for key in (EMBEDDING, 0, 1):
            self._fetch(key)

    def enter(self, key: Key) -> None:
        """Makes the current stream wait until this bundle's weights have arrived."""
        self._fetch(key)
        buffer = self.buffers.get(key)
        if buffer is None:
            return
        if any(on_its_way is buffer for on_its_way, *_ in self.pending):
            self._send(len(self.pending))
        if buffer.arrived is not None:
            graph.wait(self.device, buffer.arrived, operation="wait for weights")
            buffer.arrived = None

    def leave(self, key: Key, following: Key) -> None:
        """Called when the current stream has read the bundle `key`: fetches `following`, if there is such a bundle."""
        if key in self.bundles:
            self._fetch(following)
            if isinstance(key, int):
                self._send(self.at_once)

    def restore_first_blocks(self) -> None:
        """Restores the state that a captured pass expects: the first bundles have arrived and no fetch is pending."""
        self.begin()
        for key in (EMBEDDING, 0, 1):
            self.enter(key)

    def _fetch(self, key: Key) -> None:
        """Fetches a block immediately; the pieces of a table are queued and sent between the blocks."""
        buffer = self.buffers.get(key)
        if buffer is None or buffer.holds == key:
            return
        bundle, buffer.holds = self.bundles[key], key
        pieces = zip(buffer.flat[: bundle.nbytes].split(list(bundle.sizes)), bundle.kept, strict=True)
        if isinstance(key, int):
            self._copy((buffer, into, kept) for into, kept in pieces)
        else:
            self.pending.clear()
            self.pending.extend((buffer, into, kept) for into, kept in pieces)

    def _send(self, count: int) -> None:
        self._copy(self.pending.popleft() for _ in range(min(count, len(self.pending))))

    def _copy(self, pieces: Iterable[tuple[Buffer, torch.Tensor, torch.Tensor]]) -> None:
        pieces = list(pieces)
        if not pieces:
            return
        self.side.wait_stream(graph.current_stream(self.device))  # kernels queued there may still read the buffer
        with graph.on(self.side, "fetching weights"):
            for _, into, kept in pieces:
                self.storage.fetch(kept, into)
            arrived = graph.event(self.device)
            arrived.record(self.side)
        pieces[-1][0].arrived = arrived


def _large(place: MoveTensor) -> MoveTensor:
    return lambda tensor: tensor if tensor.nbytes < SMALL else place(tensor)


def _laid_out(tensors: Sequence[torch.Tensor]) -> list[TensorPlace]:
    """Places the tensors one after another, each at a multiple of ALIGNMENT."""
    places: list[TensorPlace] = []
    for tensor in tensors:
        assert tensor.is_contiguous(), "a bundle is made of whole tensors"
        start = ceil_div(places[-1].stop, ALIGNMENT) * ALIGNMENT if places else 0
        places.append(TensorPlace(start, tensor.shape, tensor.dtype))
    return places


def _absent(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape without memory, until the buffers exist."""
    return tensor.new_empty(()).expand(tensor.shape)
