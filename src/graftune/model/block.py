"""One layer: a list of branches of the residual stream, most often a mixer and a feed-forward.

A branch holds what all parts have in common: a norm before the part, after it or both, a scale on its output, and the
residual add. The add is left to the norm that reads the sum, which saves a pass over memory: a branch takes the
stream x and what is still to be added to it, y, and returns both for the next branch. The forward saves the stream as
the branch read it and what the part saves; the backward recomputes norms, which costs little.

Legend: T tokens, R rows that predict something, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graftune import spans
from graftune.kernels import rms_norm
from graftune.model.context import PassContext
from graftune.model.part import FeedForward, Mixer, NormWeight, Part, PartInput, SavedInput
from graftune.model.projection import Normed, Projection, ReadyGrad, augmented_buffer


@dataclass
class ResidualStream:
    """The residual stream x and what is still to be added to it. A block replaces both fields, so that no caller keeps
    an earlier stream alive."""

    x: torch.Tensor  # [T, D]
    pending: torch.Tensor | None = None

    def total(self) -> torch.Tensor:
        """The sum, which overwrites `pending`."""
        return self.x if self.pending is None else self.pending.add_(self.x)

    def select(self, rows: torch.Tensor) -> None:
        """Drop all rows but these."""
        self.x, self.pending = (
            self.x.index_select(0, rows),
            None if self.pending is None else self.pending.index_select(0, rows),
        )


@dataclass
class ResidualGrad:
    """The stream's gradient in the backward. A block replaces both fields, as it does with `ResidualStream`."""

    grad: torch.Tensor | None  # [T, D + adapter columns]; None: nothing below trains
    ready: ReadyGrad | None = None  # `grad` in the form that the projection below multiplies, if that made one

    def expand(self, rows: torch.Tensor, tokens: int, width: int) -> None:
        """Undo `ResidualStream.select`: the other rows have no gradient."""
        if self.grad is not None:
            whole = augmented_buffer(self.grad, tokens, width, self.grad.shape[1] - width)
            self.grad, self.ready = whole.zero_().index_add_(0, rows, self.grad), None


class BranchSaved(NamedTuple):
    x: torch.Tensor  # [T, D], the stream as the part read it
    rstd: torch.Tensor  # [T] fp32, of the norm before the part; empty without one
    part: Any  # what the part saves: a NamedTuple of its own
    out: torch.Tensor | None  # [T, D], the input of the norm after the part; None without one
    out_rstd: torch.Tensor | None  # [T] fp32


class ParallelSaved(NamedTuple):
    """What a branch of several parts keeps for its backward."""

    parts: tuple[BranchSaved, ...]
    out: torch.Tensor | None  # [T, D], the sum that the norm after the parts read; None without one
    out_rstd: torch.Tensor | None  # [T] fp32

    @property
    def x(self) -> torch.Tensor:
        return self.parts[0].x


@dataclass(kw_only=True)
class _Adds:
    """What a branch does to its output before it is added to the stream: a norm, a scale, both or neither."""

    out_norm: NormWeight | None
    out_eps: float = 0.0  # of out_norm
    scale: float = 1.0

    @property
    def _plain(self) -> bool:
        return self.out_norm is None and self.scale == 1

    def _added(
        self, out: torch.Tensor, ctx: PassContext
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(scale * norm(out), what the norm read, its rstd); `out` may be overwritten."""
        y, read, rstd = out, None, None
        if self.out_norm is not None:
            y, read = torch.empty_like(out), out
            _, rstd = rms_norm.add_forward(out, None, self.out_norm.of(ctx.adapted), self.out_eps, y)
        return y if self.scale == 1 else y.mul_(self.scale), read, rstd

    def _added_backward(
        self, grad: torch.Tensor, saved: BranchSaved | ParallelSaved, ctx: PassContext, into: torch.Tensor
    ) -> None:
        """The gradient of what is added [T, D] -> that of `_added`'s input, written to `into`."""
        if self.out_norm is None:
            spans.operation("norm")
            torch.mul(grad, self.scale, out=into)
            return
        assert saved.out is not None and saved.out_rstd is not None
        grad = grad if self.scale == 1 else grad * self.scale
        weight, trained = self.out_norm.of(ctx.adapted), self.out_norm.grad
        rms_norm.add_backward(grad, saved.out, saved.out_rstd, weight, None, trained, into)


@dataclass(kw_only=True)
class Branch(_Adds):
    """A branch with one part: x + scale * out_norm(part(norm(x)))."""

    part: Part[Any]
    norm: NormWeight | None  # before the part; None: it reads the stream as it is
    norm_eps: float = 0.0  # of norm

    @property
    def parts(self) -> tuple[Part[Any], ...]:
        return (self.part,)

    @property
    def output_projection(self) -> Projection | None:
        """The part's last projection, if its dY is the stream's gradient (there is no norm or scale in between)."""
        return self.part.last if self._plain else None

    @property
    def adapter_columns(self) -> int:
        """Adapter columns that the buffer of the stream's gradient needs for the part's last projection."""
        return 0 if self.part.last is None else self.part.last.adapter_columns

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None, ctx: PassContext
    ) -> tuple[torch.Tensor, torch.Tensor, BranchSaved]:
        """(x, y) -> (s = x + y, what the branch adds to s, what the backward needs). y is overwritten by the sum."""
        entry = self._input(x, y, ctx)
        out, saved = self.part.forward(entry, ctx)
        y, read, rstd = self._added(out, ctx)
        if ctx.inputs_only:
            return entry.x, y, BranchSaved(entry.x, entry.rstd, None, None, None)
        return entry.x, y, BranchSaved(entry.x, entry.rstd, saved, read, rstd)

    def recompute(self, x: torch.Tensor, y: torch.Tensor | None, ctx: PassContext) -> BranchSaved:
        """Recompute what `forward` saves, for the last branch of a block: its output is not needed again, so a part may
        skip its last product, unless a norm reads that."""
        if self.out_norm is not None:
            return self.forward(x, y, ctx)[2]
        entry = self._input(x, y, ctx)
        saved = self.part.recompute(entry, ctx)
        return BranchSaved(entry.x, entry.rstd, saved, None, None)

    def backward(
        self, grad: torch.Tensor, ready: ReadyGrad | None, saved: BranchSaved, ctx: PassContext,
        projection_below: Projection | None, need_input: bool = True, added: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ReadyGrad | None]:  # fmt: skip
        """The stream's gradient after the branch -> the one before it, or None where the input needs no gradient.
        `grad` has adapter columns for the part's last projection; `ready`: the same gradient in the form that this
        projection multiplies. `projection_below` wrote the stream before this branch. `added`: the gradient [T, D] of
        what the branch added, where it is not the stream's."""
        read = self._saved_input(saved, ctx)
        need_input = need_input or (self.norm is not None and self.norm.grad is not None)
        grad_out = grad
        if added is not None or not self._plain:
            width = saved.x.shape[1]
            grad_out = augmented_buffer(grad, len(grad), width, self.adapter_columns)
            self._added_backward(grad[:, :width] if added is None else added, saved, ctx, grad_out[:, :width])
        held = [saved.part]
        del saved  # so that the part can release each tensor after its last use
        grad_read = self.part.backward(grad_out, ready, read, held.pop(), ctx, need_input)
        if grad_read is None:
            return None, None
        return self._to_stream(grad_read, read, grad, ctx, projection_below)

    def drop_recomputable(self, saved: BranchSaved) -> BranchSaved:
        return saved._replace(part=self.part.drop_recomputable(saved.part))

    def recompute_dropped(self, saved: BranchSaved, ctx: PassContext) -> BranchSaved:
        return saved._replace(part=self.part.recompute_dropped(saved.part, self._saved_input(saved, ctx), ctx))

    def _input(self, x: torch.Tensor, y: torch.Tensor | None, ctx: PassContext) -> PartInput:
        return PartInput(x, y, None if self.norm is None else self.norm.of(ctx.adapted), self.norm_eps, ctx)

    def _saved_input(self, saved: BranchSaved, ctx: PassContext) -> SavedInput:
        weight = None if self.norm is None else self.norm.of(ctx.adapted)
        return SavedInput(saved.x, saved.rstd, weight, self.norm_eps)

    def _to_stream(
        self,
        grad_read: torch.Tensor,
        read: SavedInput,
        grad: torch.Tensor,
        ctx: PassContext,
        projection_below: Projection | None,
    ) -> tuple[torch.Tensor, ReadyGrad | None]:
        """Add the part's input gradient to the stream's gradient: in place, or in a new buffer while weight gradients
        on other CUDA streams still read the old one. The sum is dY of `projection_below`, which may also return it in
        the form that it multiplies."""
        width = read.x.shape[1]
        after = grad if ctx.side_streams is None else augmented_buffer(grad, len(grad), width, grad.shape[1] - width)
        if self.norm is None:
            spans.operation("norm")
            torch.add(grad[:, :width], grad_read, out=after[:, :width])
        elif projection_below is not None and self.norm.grad is None:
            normed = Normed(read.rstd, self.norm.of(ctx.adapted))
            return after, projection_below.norm_backward(grad_read, read.x, normed, grad[:, :width], after, ctx)
        else:
            weight, trained = self.norm.of(ctx.adapted), self.norm.grad
            rms_norm.add_backward(grad_read, read.x, read.rstd, weight, grad[:, :width], trained, after[:, :width])
        return after, None


@dataclass(kw_only=True)
class ParallelBranch(_Adds):
    """A branch with several parts that read the same stream, each through norms of its own:
    x + scale * out_norm(sum of the branches' outputs)."""

    branches: tuple[Branch, ...]

    output_projection = None
    adapter_columns = 0

    @property
    def parts(self) -> tuple[Part[Any], ...]:
        return tuple(branch.part for branch in self.branches)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None, ctx: PassContext
    ) -> tuple[torch.Tensor, torch.Tensor, ParallelSaved]:
        """As `Branch.forward`. The first part's norm computes the sum x + y, which the other parts read."""
        total, saved = None, []
        for branch in self.branches:
            x, out, kept = branch.forward(x, y, ctx)
            y, total = None, out if total is None else total.add_(out)
            saved.append(kept)
        assert total is not None, "a branch has at least one part"
        y, read, rstd = self._added(total, ctx)
        return x, y, ParallelSaved(tuple(saved), read, rstd)

    def recompute(self, x: torch.Tensor, y: torch.Tensor | None, ctx: PassContext) -> ParallelSaved:
        if self.out_norm is not None:
            return self.forward(x, y, ctx)[2]
        saved: list[BranchSaved] = []
        for branch in self.branches:
            saved.append(branch.recompute(x, y, ctx))
            x, y = saved[-1].x, None
        return ParallelSaved(tuple(saved), None, None)

    def backward(
        self, grad: torch.Tensor, ready: ReadyGrad | None, saved: ParallelSaved, ctx: PassContext,
        projection_below: Projection | None, need_input: bool = True,
    ) -> tuple[torch.Tensor | None, ReadyGrad | None]:  # fmt: skip
        """As `Branch.backward`. The parts add to the stream's gradient in turn; they read the output's from a copy."""
        width = saved.x.shape[1]
        added = grad.new_empty(len(grad), width)
        self._added_backward(grad[:, :width], saved, ctx, added)
        after: torch.Tensor | None = None
        for branch, kept in reversed(list(zip(self.branches, saved.parts, strict=True))):
            below = projection_below if branch is self.branches[0] else None
            after, ready = branch.backward(grad, None, kept, ctx, below, need_input, added)
            grad = grad if after is None else after
        return after, ready

    def drop_recomputable(self, saved: ParallelSaved) -> ParallelSaved:
        pairs = zip(self.branches, saved.parts, strict=True)
        return saved._replace(parts=tuple(branch.drop_recomputable(kept) for branch, kept in pairs))

    def recompute_dropped(self, saved: ParallelSaved, ctx: PassContext) -> ParallelSaved:
        pairs = zip(self.branches, saved.parts, strict=True)
        return saved._replace(parts=tuple(branch.recompute_dropped(kept, ctx) for branch, kept in pairs))


@dataclass
class Block:
    """A layer. If only some rows are needed after the last block, its branches after its last mixer read only those: a
    feed-forward works on every row by itself."""

    index: int
    branches: tuple[Branch | ParallelBranch, ...]
    stream_scale: torch.Tensor | None = None  # [1], frozen: multiplies the stream after the last branch

    def __post_init__(self) -> None:
        mixing = [any(isinstance(part, Mixer) for part in branch.parts) for branch in self.branches]
        # The number of branches up to the last one that has a mixer; all of them where none has.
        self.mixing = max((number + 1 for number, mixes in enumerate(mixing) if mixes), default=len(mixing))

    @property
    def parts(self) -> tuple[Part[Any], ...]:
        return tuple(part for branch in self.branches for part in branch.parts)

    @property
    def mixer(self) -> Mixer[Any]:
        return next(part for part in self.parts if isinstance(part, Mixer))

    @property
    def feed_forward(self) -> FeedForward[Any]:
        return next(part for part in self.parts if isinstance(part, FeedForward))

    @property
    def projections(self) -> tuple[Projection, ...]:
        return tuple(projection for part in self.parts for projection in part.projections)

    @property
    def adapter_columns(self) -> int:
        return max(branch.adapter_columns for branch in self.branches)

    @property
    def output_projection(self) -> Projection | None:
        """The projection whose dY is the gradient of the stream after this block, if there is one."""
        return self.branches[-1].output_projection if self.stream_scale is None else None

    def forward(self, stream: ResidualStream, ctx: PassContext, rows: torch.Tensor | None = None) -> list[Any]:
        """Replaces the stream; returns what each branch saves. `rows`: the only rows needed after the block."""
        saved = [self._through(number, stream, ctx, rows) for number in range(len(self.branches))]
        self._select(stream, len(self.branches), rows)
        if self.stream_scale is not None:
            stream.x, stream.pending = stream.total().mul_(self.stream_scale), None
        return saved

    def recompute(self, x: torch.Tensor, ctx: PassContext, rows: torch.Tensor | None = None) -> list[Any]:
        """Recomputes what `forward` saves from the block's input."""
        stream, last = ResidualStream(x), len(self.branches) - 1
        del x
        saved = [self._through(number, stream, ctx, rows) for number in range(last)]
        self._select(stream, last, rows)
        return [*saved, self.branches[last].recompute(stream.x, stream.pending, self._ctx(last, ctx, rows))]

    def _through(self, number: int, stream: ResidualStream, ctx: PassContext, rows: torch.Tensor | None) -> Any:
        """Runs one branch: replaces the stream, returns what the branch saves."""
        self._select(stream, number, rows)
        own = self._ctx(number, ctx, rows)
        stream.x, stream.pending, saved = self.branches[number].forward(stream.x, stream.pending, own)
        return saved

    def drop_recomputable(self, saved: list[Any]) -> list[Any]:
        return [branch.drop_recomputable(kept) for branch, kept in zip(self.branches, saved, strict=True)]

    def recompute_dropped(self, saved: list[Any], ctx: PassContext, rows: torch.Tensor | None) -> list[Any]:
        return [
            branch.recompute_dropped(saved[number], self._ctx(number, ctx, rows))
            for number, branch in enumerate(self.branches)
        ]

    def backward(
        self, stream: ResidualGrad, saved: list[Any], ctx: PassContext, rows: torch.Tensor | None,
        projection_below: Projection | None, need_input: bool,
    ) -> None:  # fmt: skip
        """Replaces the stream's gradient after the block by the one before it, and empties `saved`. `projection_below`
        wrote the stream before this block; `need_input`: something below trains."""
        width = saved[0].x.shape[1]
        self._scale_grad(stream, ctx, width)
        for number, branch in reversed(list(enumerate(self.branches))):
            if rows is not None and number + 1 == self.mixing:
                spans.operation("response rows")
                stream.expand(rows, len(ctx.positions), width)
            assert stream.grad is not None
            stream.grad, stream.ready = branch.backward(
                stream.grad,
                stream.ready,
                saved.pop(),
                self._ctx(number, ctx, rows),
                self.branches[number - 1].output_projection if number else projection_below,
                need_input or number > 0,
            )

    def _select(self, stream: ResidualStream, number: int, rows: torch.Tensor | None) -> None:
        """Drop all rows but these before branch `number`, if it is the first one after the last mixer."""
        if rows is not None and number == self.mixing:
            spans.operation("response rows")
            stream.select(rows)

    def _ctx(self, number: int, ctx: PassContext, rows: torch.Tensor | None) -> PassContext:
        return ctx if rows is None or number < self.mixing else ctx.of_rows(rows)

    def _scale_grad(self, stream: ResidualGrad, ctx: PassContext, width: int) -> None:
        """Apply the stream's scale, in a new buffer while weight gradients on other CUDA streams read the old one."""
        if self.stream_scale is not None and stream.grad is not None:
            grad = stream.grad
            after = augmented_buffer(grad, len(grad), width, grad.shape[1] - width) if ctx.side_streams else grad
            torch.mul(grad[:, :width], self.stream_scale, out=after[:, :width])
            stream.grad, stream.ready = after, None
