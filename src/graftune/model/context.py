"""What all blocks of a pass share: rotary tables, documents, adapters on or off, dropout, per-layer inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from graftune import graph, spans
from graftune.kernels import dropout as dropouts
from graftune.kernels.attention import Documents
from graftune.kernels.paged_attention import PagedKeys
from graftune.kernels.short_conv import Columns

if TYPE_CHECKING:
    from graftune.model.feed_forward.routing import RoutingPass
    from graftune.model.layer_inputs import LayerInputs


RowCopy = tuple[torch.Tensor, torch.Tensor]  # (source, target): index tensors of equal length


class LayerCache:
    """What generation keeps of one layer's past; the layer's mixer makes it, fills it and reads it. A sequence that is
    being generated has a slot for states, each [slots, ...], and pages of rows for keys and values (KeyValues)."""

    def __init__(self, *states: torch.Tensor):
        self.states = states

    def copy_(self, slots: RowCopy, rows: Mapping[int, RowCopy]) -> None:
        """Copy the states of slots, and rows of keys and values, given by the layer's window (0: none)."""
        for held in self.states:
            held.index_copy_(0, slots[1], held.index_select(0, slots[0]))

    def clear_(self, slots: torch.Tensor) -> None:
        """Zero the states of slots, for sequences that have no past."""
        for held in self.states:
            held.index_fill_(0, slots, 0.0)


class Past(Protocol):
    """The past of the sequences in a pass of generation (infer/cache.py)."""

    @property
    def layers(self) -> Sequence[LayerCache | None]:
        """None: the layer keeps nothing."""

    @property
    def slots(self) -> torch.Tensor:
        """The slots of packed documents, [S]; with one new token a sequence they are 0, 1, 2 ..."""

    @property
    def new(self) -> bool:
        """Whether packed documents have no past."""

    def paged(self, window: int) -> PagedKeys:
        """The keys of layers with this window."""

    def columns(self, reach: int) -> Columns:
        """The indices that join packed documents with `reach` kept columns of a convolution before each."""


class Sequences(Protocol):
    """Which tokens of a pass belong together: documents packed end to end, or one new token of each sequence that is
    being generated."""

    @property
    def documents(self) -> Documents | None:
        """The packed documents; None: one new token a sequence."""

    @property
    def backend(self) -> str:
        """The backend of attention over packed documents."""

    @property
    def past(self) -> Past | None:
        """The past of the sequences, in generation; None in training."""

    def final_lengths(self, positions: torch.Tensor) -> torch.Tensor:
        """How long the document of each token is, or will be: [T]."""


MICRO_BATCHES = 4096  # upper bound for a step


def micro_batch_id(step: int, micro_batch: int) -> int:
    """A number for each micro-batch of a run, which seeds its dropout. `step` counts from 0."""
    return step * MICRO_BATCHES + micro_batch


@dataclass(frozen=True)
class Dropout:
    """Counter-based: the mask is a function of (seed, mask_id), so the backward computes it again instead of saving it,
    and a resumed run has the masks of an uninterrupted one. The seed is a device scalar: it changes without a new
    capture."""

    p: float
    seed: torch.Tensor  # 0-dim int64

    def apply(self, x: torch.Tensor, mask_id: int) -> torch.Tensor:
        """x with a share p of its values dropped and the rest scaled up; the same mask at every call."""
        return dropouts.apply(x.contiguous(), self.p, self.seed, mask_id)


class SideStreams:
    """Streams for weight gradients, which no later kernel of the backward reads: they run beside attention's backward,
    whose kernels leave much of the GPU idle. Beside the large products, which fill it, they would only delay those.

    Work is queued with the tensors that it reads, launched together (`flush`) and waited for (`join`): only then may
    the allocator reuse their memory. No two pieces of work write to the same memory, so sums stay the same bit for bit.
    Sums over a few hundred tokens do not fill the GPU either and run on several streams; products have one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = [graph.stream(f"aside {number}", device) for number in range(4)]
        self.queued: list[tuple[Callable[[], object], tuple[torch.Tensor, ...], bool]] = []
        self.in_use: list[tuple[torch.Tensor, ...]] = []

    def queue(self, work: Callable[[], object], *reads: torch.Tensor, product: bool = False) -> None:
        self.queued.append((work, reads, product))

    def flush(self) -> None:
        if not self.queued:
            return
        for stream in self.streams:
            stream.wait_stream(graph.current_stream(self.device))
        for number, (work, reads, product) in enumerate(self.queued):
            aside = self.streams[0 if product else number % len(self.streams)]
            with graph.on(aside, "weight gradients"):
                work()
            self.in_use.append(reads)
        self.queued.clear()

    def join(self) -> None:
        if self.in_use:
            graph.wait(self.device, *self.streams, operation="wait for weight gradients")
            self.in_use.clear()

    def forget(self) -> None:
        """Drop work that a failed pass left queued."""
        self.queued.clear()
        self.join()


class RopeTables(NamedTuple):
    cos: torch.Tensor  # [T, R/2]
    sin: torch.Tensor
    q_scale: torch.Tensor | None  # [T], the factor of queries at their position; None: one


@dataclass
class PassContext:
    tables: tuple[RopeTables, ...]  # for each of ModelSpec.ropes
    positions: torch.Tensor  # [T], from 0 in every document
    sequences: Sequences
    adapted: bool = True
    dropout: Dropout | None = None
    side_streams: SideStreams | None = None
    # Keys and values that several layers share, by the layer whose mixer made them. They stay until the backward has
    # finished. It visits later layers first, which add the gradients of these keys and values to `shared_grads`.
    shared: dict[int, Any] = field(default_factory=dict, init=False)
    shared_grads: dict[int, Any] = field(default_factory=dict, init=False)
    layer_inputs: LayerInputs | None = field(default=None, init=False)  # set by the decoder's forward
    # The embeddings [T, D] that a norm read, and its rstd [T], where the backward needs them.
    embedded: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)
    rows: torch.Tensor | None = field(default=None, init=False)  # the indices of the stream's tokens; None: all
    # Whether only the inputs of blocks are saved: parts then release their tensors as early as possible.
    inputs_only: bool = field(default=False, init=False)
    routing: RoutingPass | None = field(default=None, init=False)  # None: routers are not observed

    def of_rows(self, rows: torch.Tensor) -> PassContext:
        """The context of branches whose stream has only these rows."""
        found = copy(self)
        found.rows = rows
        return found

    def layer_input(self, layer: int) -> torch.Tensor:
        """The layer's own input for the rows of the stream, [T, P]."""
        assert self.layer_inputs is not None, f"layer {layer} reads a per-layer input, and the decoder has none"
        found = self.layer_inputs.of(layer)
        return found if self.rows is None else found.index_select(0, self.rows)

    def add_layer_input_grad(self, layer: int, grad: torch.Tensor) -> None:
        assert self.layer_inputs is not None
        self.layer_inputs.add_grad(layer, grad, self.rows)

    def defer(self, work: Callable[[], object], *reads: torch.Tensor, product: bool = False) -> None:
        """Run `work` now, or later on a side stream where there is one. `reads` are the tensors that it uses, which
        must not change until `join`. `product`: it is large enough to fill the GPU."""
        if self.side_streams is None:
            with spans.covering("weight gradients"):
                work()
        else:
            self.side_streams.queue(work, *reads, product=product)

    def flush(self) -> None:
        if self.side_streams is not None:
            self.side_streams.flush()

    def join(self) -> None:
        if self.side_streams is not None:
            self.side_streams.join()
