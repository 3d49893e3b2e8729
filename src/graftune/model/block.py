"""One layer: a mixer and a feed-forward, each on a branch of the residual stream.

A branch is what all parts have in common: a norm before the part, behind it or both, a scale on what it adds to the
stream, and the add itself. The add is left to the norm that reads the sum, which makes it one pass less: a branch takes
the stream x and what is still to be added to it, y, and hands both on. The backward keeps the stream as the branch read
it and what the part saves; norms are recomputed, which costs little.

Legend: T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from graftune import spans
from graftune.kernels import rms_norm
from graftune.model.context import PassContext
from graftune.model.part import Entry, FeedForward, Input, Mixer, NormWeight, Part
from graftune.model.projection import Normed, Projection, ReadyGrad, augmented_buffer

SomePart = TypeVar("SomePart", bound=Part[Any])


class BranchSaved(NamedTuple):
    """What a branch keeps for its backward."""

    x: torch.Tensor  # [T, D], the stream as the part read it
    rstd: torch.Tensor  # [T] fp32, of the norm before the part; empty without one
    part: Any  # what the part saves: a NamedTuple of its own
    out: torch.Tensor | None  # [T, D], what the norm behind the part read; None without one
    out_rstd: torch.Tensor | None  # [T] fp32


@dataclass
class Branch(Generic[SomePart]):
    part: SomePart
    norm: NormWeight | None  # before the part; None: it reads the stream as it is
    out_norm: NormWeight | None  # behind it, ahead of the residual add
    norm_eps: float
    scale: float = 1.0  # of what the branch adds to the stream

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None, ctx: PassContext
    ) -> tuple[torch.Tensor, torch.Tensor, BranchSaved]:
        """(x, y) -> (s = x + y, scale * norm(part(norm(s))), what the backward needs). y is overwritten by the sum."""
        entry = self._entry(x, y, ctx)
        out, saved = self.part.forward(entry, ctx)
        if self.out_norm is None:
            y = out if self.scale == 1 else out.mul_(self.scale)
            return entry.x, y, BranchSaved(entry.x, entry.rstd, saved, None, None)
        y = torch.empty_like(out)
        _, out_rstd = rms_norm.add_forward(out, None, self.out_norm.of(ctx.adapted), self.norm_eps, y)
        return entry.x, y, BranchSaved(entry.x, entry.rstd, saved, out, out_rstd)

    def backward(
        self, grad: torch.Tensor, ready: ReadyGrad | None, saved: BranchSaved, ctx: PassContext,
        below: Branch[Any] | None, need_input: bool = True,
    ) -> tuple[torch.Tensor | None, ReadyGrad | None]:  # fmt: skip
        """The stream's gradient after the branch, in a buffer with adapter columns and perhaps `ready` for the part's
        last projection -> both before the branch. `below` is the branch that wrote the stream before this one; without
        one, the gradient may not be needed."""
        read = self._read(saved, ctx)
        need_input = need_input or (self.norm is not None and self.norm.grad is not None)
        grad_out = self._grad_out(grad, saved, ctx)
        grad_read = self.part.backward(grad_out, ready, read, saved.part, ctx, need_input)
        if grad_read is None:
            return None, None
        return self._to_stream(grad_read, read, grad, ctx, below.wrote if below is not None else None)

    def light(self, saved: BranchSaved) -> BranchSaved:
        """What the policy `selective` keeps of it."""
        return saved._replace(part=self.part.light(saved.part))

    def complete(self, saved: BranchSaved, ctx: PassContext) -> BranchSaved:
        """The same with what `light` left out, made again."""
        return saved._replace(part=self.part.complete(saved.part, self._read(saved, ctx), ctx))

    @property
    def wrote(self) -> Projection | None:
        """The part's last projection, if its dY is the stream's gradient as it is."""
        return self.part.last if self.out_norm is None and self.scale == 1 else None

    @property
    def adapter_columns(self) -> int:
        """Columns that the stream's gradient has beside it, for the part's last projection."""
        return 0 if self.part.last is None else self.part.last.adapter_columns

    def _entry(self, x: torch.Tensor, y: torch.Tensor | None, ctx: PassContext) -> Entry:
        return Entry(x, y, None if self.norm is None else self.norm.of(ctx.adapted), self.norm_eps, ctx)

    def _read(self, saved: BranchSaved, ctx: PassContext) -> Input:
        weight = None if self.norm is None else self.norm.of(ctx.adapted)
        return Input(saved.x, saved.rstd, weight, self.norm_eps)

    def _grad_out(self, grad: torch.Tensor, saved: BranchSaved, ctx: PassContext) -> torch.Tensor:
        """The gradient of what the part returned, in a buffer with the adapter columns of its last projection."""
        if self.out_norm is None and self.scale == 1:
            return grad
        width = saved.x.shape[1]
        grad_out = augmented_buffer(grad, len(grad), width, self.adapter_columns)
        if self.out_norm is None:
            spans.operation("norm")
            torch.mul(grad[:, :width], self.scale, out=grad_out[:, :width])
        else:
            assert saved.out is not None and saved.out_rstd is not None
            weight, learns = self.out_norm.of(ctx.adapted), self.out_norm.grad
            rms_norm.add_backward(grad[:, :width], saved.out, saved.out_rstd, weight, None, learns, grad_out[:, :width])
        return grad_out

    def _to_stream(
        self, grad_read: torch.Tensor, read: Input, grad: torch.Tensor, ctx: PassContext, wrote: Projection | None
    ) -> tuple[torch.Tensor, ReadyGrad | None]:
        """The stream's gradient with what came through the part: in place, or elsewhere while sums on other streams
        still read it. It is dY of the projection that `wrote` the stream before, which may want it ready to
        multiply."""
        width = read.x.shape[1]
        after = grad if ctx.side_streams is None else augmented_buffer(grad, len(grad), width, grad.shape[1] - width)
        if self.norm is None:
            spans.operation("norm")
            torch.add(grad[:, :width], grad_read, out=after[:, :width])
        elif wrote is not None and self.norm.grad is None:
            normed = Normed(read.rstd, self.norm.of(ctx.adapted))
            return after, wrote.norm_backward(grad_read, read.x, normed, grad[:, :width], after, ctx)
        else:
            weight, learns = self.norm.of(ctx.adapted), self.norm.grad
            rms_norm.add_backward(grad_read, read.x, read.rstd, weight, grad[:, :width], learns, after[:, :width])
        return after, None


class FeedForwardBranch(Branch[FeedForward[Any]]):
    def again(self, x: torch.Tensor, y: torch.Tensor | None, ctx: PassContext) -> BranchSaved:
        """What `forward` keeps. What it adds is in the stream already, so the last product is not made again, unless a
        norm behind the part wants to know."""
        if self.out_norm is not None:
            return self.forward(x, y, ctx)[2]
        entry = self._entry(x, y, ctx)
        saved = self.part.again(entry, ctx)
        return BranchSaved(entry.x, entry.rstd, saved, None, None)


@dataclass
class Block:
    index: int
    mixing: Branch[Mixer[Any]]
    feeding: FeedForwardBranch

    @property
    def mixer(self) -> Mixer[Any]:
        return self.mixing.part

    @property
    def feed_forward(self) -> FeedForward[Any]:
        return self.feeding.part

    @property
    def projections(self) -> tuple[Projection, ...]:
        return *self.mixer.projections, *self.feed_forward.projections

    def again(
        self, x: torch.Tensor, ctx: PassContext, rows: torch.Tensor | None = None
    ) -> tuple[BranchSaved, BranchSaved]:
        """What both branches keep, made again from the block's input; the feed-forward's of the given rows only."""
        x, y, mixed = self.mixing.forward(x, None, ctx)
        if rows is not None:
            x, y = x.index_select(0, rows), y.index_select(0, rows)
        return mixed, self.feeding.again(x, y, ctx)
