"""Weights in 8-bit floats, multiplied as codes: activations and gradients become codes too, with one scale per token.

The product needs both operands with the summed dimension contiguous. A weight is stored that way for the forward, but
not for dX (the sum runs over `out`), so the codes are transposed into a buffer that all layers share: two bytes of
traffic per value, 4 ms of a step at 8B. `both` keeps the transposed codes instead, in the memory of a bf16 base, on
cards with much more memory than that (formats/fp8.py). The same row scales are used in both passes
(kernels/fp8/reference.py). Adapters are beside and below the codes as in any augmented weight, in three columns of
codes per rank instead of one of bf16: `adapter_codes` says where, and `Workspace.publish` writes them there.

Weights are rounded to the nearest code once, while they are read. The codes of a checkpoint with one scale per row, or
one for all, are taken as they are (`CodedRows`).

`matmul_augmented` and `input_grad_augmented` take bf16 buffers, as every kind does, and quantise them in a pass of
their own. The methods after them are for fp8_projection.py: there the kernel that writes the buffer also writes codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol, Self, runtime_checkable

import torch

from graftune import spans
from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.kernels import fp8, launch
from graftune.kernels.augmented_weight import Adapters
from graftune.kernels.fp8 import AdapterCodes, Rows
from graftune.kernels.lora_linear import Copy, LowRank
from graftune.model.bundles import MoveTensor
from graftune.model.frozen.interface import Augmented, RowSource
from graftune.model.frozen.mapped import pieces, read_to

MOST_RANK = 64  # above it, three columns of codes per rank cost more than a pass over y


@runtime_checkable
class CodedRows(Protocol):
    """A source of rows that are e4m3 codes already, each row with one scale."""

    def read_codes(self, start: int, stop: int) -> Rows: ...


class Workspace:
    """Shared by the FP8 weights of a model: the scratch that codes are transposed into, and the list of adapters that
    are stored as codes beside them. Only the stream of the products may use the scratch, one product after the other.
    Transposing during attention's backward was tried: cuDNN's kernel fills every multiprocessor."""

    def __init__(self, size: int, widest: int, device: torch.device):
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.ones = torch.ones(widest, dtype=torch.float32, device=device)
        self.adapter_codes: list[AdapterCodes] = []
        self._tables: dict[str, torch.Tensor] = {}

    @staticmethod
    def size(out: int, width: int, ranks: int) -> int:
        """The bytes of scratch that a weight's transposed codes take."""
        return width * fp8.aligned(_tiled(out + fp8.adapter_code_columns(ranks)))

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes + self.ones.nbytes

    def matrix(self, rows: int, width: int) -> torch.Tensor:
        lines = fp8.aligned(width)
        return self.flat[: rows * lines].view(rows, lines).view(fp8.E4M3)[:, :width]

    def publish(self) -> None:
        """Quantises the adapters again, after they have changed."""
        fp8.quantise_adapters(self.adapter_codes, self._tables)


class Fp8(Augmented):
    """`adapter_columns`: columns of bf16 beside x and dY for h and g, as in the other kinds; 0: no adapters. `slack`:
    the factor by which dropout may scale up the adapters' input."""

    kind = "fp8"

    def __init__(
        self,
        out_features: int,
        in_features: int,
        device: torch.device,
        compute: torch.dtype,
        workspace: Workspace,
        *,
        adapter_columns: int = 0,
        slack: float = 1.0,
        both: bool = False,
    ):
        if out_features % 16 or in_features % 16:
            raise GraftuneError(
                f"fp8 products come in multiples of 16, and a weight is {out_features} x {in_features}",
                fix="use base_dtype bf16 or nf4",
            )
        self.out_features, self.in_features, self.compute = out_features, in_features, compute
        self.adapter_columns, self.slack = adapter_columns, slack
        code_columns = fp8.adapter_code_columns(adapter_columns) if adapter_columns else 0
        rows = out_features + code_columns
        self.whole = fp8.buffer(_tiled(rows), in_features + code_columns, device, zero=True)
        self.storage = self.whole[:rows]
        self.scale = torch.ones(out_features, dtype=torch.float32, device=device)
        self.workspace = workspace
        self.transposed: torch.Tensor | None = None  # [in, out + code_columns]: the transposed codes, with `both`
        if both:
            self.transposed = fp8.buffer(in_features, out_features + code_columns, device, zero=True)
        self.adapter_codes: AdapterCodes | None = None
        self.name = "product"  # of the projection, in a profile

    @classmethod
    def of(
        cls,
        sources: Sequence[RowSource],
        device: torch.device,
        compute: torch.dtype,
        workspace: Workspace,
        *,
        adapter_columns: int = 0,
        slack: float = 1.0,
        both: bool = False,
    ) -> Self:
        """Reads and quantises a weight on the device, piece by piece: peak memory is the codes and a few rows."""
        rows, width = sum(s.shape[0] for s in sources), sources[0].shape[1]
        made = cls(rows, width, device, compute, workspace, adapter_columns=adapter_columns, slack=slack, both=both)
        at = 0
        for source in sources:
            for start, stop in pieces(*source.shape):
                if isinstance(source, CodedRows):
                    made.fill_codes(at + start, source.read_codes(start, stop))
                else:
                    made.fill(at + start, read_to(source, start, stop, device))
            at += source.shape[0]
        made.finish()
        return made

    def fill(self, start: int, values: torch.Tensor) -> None:
        """Quantises `values` into the rows from `start` on."""
        place = slice(start, start + len(values))
        self.scale[place] = fp8.quantise(values.to(launch.device_of(self.storage)), self.weight[place])

    def fill_codes(self, start: int, rows: Rows) -> None:
        """Stores codes in the rows from `start` on, unchanged. A NaN in a row sets its scale to NaN, which `finish`
        refuses."""
        place, device = slice(start, start + len(rows.codes)), launch.device_of(self.storage)
        codes = rows.codes.view(torch.uint8).to(device)
        self.weight.view(torch.uint8)[place] = codes
        broken = (codes & 0x7F).eq(0x7F).any(1)
        self.scale[place] = rows.scale.to(device).masked_fill(broken, float("nan"))

    def finish(self) -> None:
        """Call this when all rows are filled."""
        if not bool(self.scale.isfinite().all()):
            raise GraftuneError("a weight holds NaN or infinity", fix="download the model again")
        if self.transposed is not None:
            fp8.transpose(self.weight, self.transposed[:, : self.out_features])

    @property
    def shared(self) -> tuple[torch.Tensor, ...]:
        return self.workspace.flat, self.workspace.ones

    @property
    def nbytes(self) -> int:
        codes = [self.whole] if self.transposed is None else [self.whole, self.transposed]
        return sum(len(c) * c.stride(0) for c in codes) + self.scale.nbytes

    def place_adapters(self, adapters: Adapters) -> list[Copy]:
        """Copies nothing: `Workspace.publish` quantises the adapters."""
        below = self.below if self.transposed is None else self.transposed[:, self.out_features :].t()
        figures = torch.zeros(4, dtype=torch.float32, device=self.scale.device)
        self.adapter_codes = AdapterCodes(*adapters, self.scale, self.beside, below, figures)
        self.workspace.adapter_codes.append(self.adapter_codes)
        return []

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(self._rows(x, None, None), self.in_features)

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return self._grad_product(self._rows(grad, self.scale, None), self.out_features)

    def matmul_augmented(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[x | h] -> x W' + s h B'."""
        width, group = self.in_features, self._adapter_codes
        rows = self._rows(x[:, :width], None, group.forward.reach, self.slack)
        fp8.lay(x[:, width : width + len(group.down)], rows, width, group.forward.shift)
        product = self._product(rows)
        return product if out is None else out.copy_(product)

    def input_grad_augmented(self, grad: torch.Tensor) -> torch.Tensor:
        """[dY | g] -> dY W + g A."""
        width, group = self.out_features, self._adapter_codes
        rows = self._rows(grad[:, :width], self.scale, group.backward.reach)
        fp8.lay(grad[:, width : width + len(group.down)], rows, width, group.backward.shift)
        return self._grad_product(rows)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        codes = self.weight.view(torch.uint8).index_select(0, ids).view(fp8.E4M3)
        return (codes.float() * self.scale[ids].unsqueeze(1)).to(self.compute)

    def after_norm(
        self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(s = x + y, rstd, norm(s) W' + s h B', h), without norm(s) in bf16. y is overwritten by the sum."""
        group = self._adapter_codes
        codes = self._buffer(len(x), self.in_features)
        total, rstd, scale = fp8.norm(x, y, weight, eps, codes[:, : self.in_features], reach=group.forward.reach)
        rows = Rows(codes, scale)
        h = fp8.down(rows, self.in_features, group.down, group.forward.shift)
        return total, rstd, self._product(rows), h

    def after_act(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(swiglu(gate_up) W' + s h B', h)."""
        rows, h = self._act(gate_up)
        return self._product(rows), h

    def low_after_act(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The h of `after_act`."""
        return self._act(gate_up)[1]

    def _act(self, gate_up: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        group, width = self._adapter_codes, self.in_features
        codes = self._buffer(len(gate_up), width)
        rows = Rows(codes, fp8.act(gate_up, codes[:, :width], reach=group.forward.reach))
        return rows, fp8.down(rows, width, group.down, group.forward.shift)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, in] -> (x W' + s h B', h): h goes from its kernel straight into the codes."""
        group = self._adapter_codes
        rows = self._rows(x, None, group.forward.reach)
        h = fp8.down(rows, self.in_features, group.down, group.forward.shift)
        return self._product(rows), h

    def act_backward(self, grad_act: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor, act: torch.Tensor) -> Rows:
        """Writes SwiGLU's backward to `out`, this weight's dY, and `act` (kernels/swiglu); returns dY's codes."""
        codes, reach = self._buffer(len(out), self.out_features), self._adapter_codes.backward.reach
        inner = codes[:, : self.out_features]
        return Rows(codes, fp8.act_backward(grad_act, gate_up, out, act, inner, self.scale, reach=reach))

    def norm_backward(
        self,
        grad_y: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> Rows:
        """Writes the norm's backward to `out`: the gradient of the stream that this weight's product was added to,
        which is its dY. Returns dY's codes for `backward`."""
        codes, reach = self._buffer(len(x), self.out_features), self._adapter_codes.backward.reach
        inner = codes[:, : self.out_features]
        return Rows(codes, fp8.norm_backward(grad_y, x, rstd, weight, residual, out, inner, self.scale, reach=reach))

    def rope_backward(
        self,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: tuple[int, int, int],
    ) -> Rows:
        """Writes rope's backward to `out`, this weight's dY. Returns dY's codes for `backward`."""
        codes, reach = self._buffer(len(out), self.out_features), self._adapter_codes.backward.reach
        inner = codes[:, : self.out_features]
        return Rows(codes, fp8.rope_backward(grads, out, cos, sin, heads, inner, self.scale, reach=reach))

    def backward(
        self,
        grad: torch.Tensor,
        low: LowRank,
        *,
        grad_up: torch.Tensor | None = None,
        rows: Rows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dY [T, out] -> (dY W + g A, g); dB is added into `grad_up` where given. `rows`: the codes of dY, if the
        kernel that wrote it made them, with columns after them for the codes of g."""
        reach, shift = self._adapter_codes.backward
        if rows is None:
            rows = self._rows(grad, self.scale, reach)
        g = fp8.up_backward(grad, low, rows, shift) if grad_up is None else fp8.up_both(grad, low, grad_up, rows, shift)
        return self._grad_product(rows), g

    @property
    def _adapter_codes(self) -> AdapterCodes:
        assert self.adapter_codes is not None, "no adapters were placed here"
        return self.adapter_codes

    def _buffer(self, tokens: int, width: int) -> torch.Tensor:
        code_columns = self.storage.shape[1] - self.in_features
        return fp8.buffer(tokens, width + code_columns, self.storage.device)

    def _rows(
        self,
        x: torch.Tensor,
        factor: torch.Tensor | None,
        reach: torch.Tensor | None,
        slack: float = 1.0,
    ) -> Rows:
        """x as codes, with columns after them for the codes of h where there is a reach."""
        width = x.shape[1]
        codes = self._buffer(len(x), width) if reach is not None else fp8.buffer(len(x), width, x.device)
        return Rows(codes, fp8.quantise(x, codes[:, :width], factor=factor, reach=reach, slack=slack))

    def _product(self, rows: Rows, width: int | None = None) -> torch.Tensor:
        spans.product(self.name)
        weight = Rows(self.storage[: self.out_features, :width], self.scale)
        return fp8.mm(rows, weight, self.compute)

    def _grad_product(self, rows: Rows, height: int | None = None) -> torch.Tensor:
        """Multiplies by the first `height` rows of the storage, or by all."""
        spans.product(self.name)
        if self.transposed is not None:
            transposed = self.transposed[:, :height]
        else:
            height = height or len(self.storage)
            codes = self.whole[: _tiled(height), : self.in_features]
            transposed = self.workspace.matrix(self.in_features, len(codes))
            fp8.transpose(codes, transposed)
            transposed = transposed[:, :height]
        return fp8.mm(rows, Rows(transposed, self.workspace.ones[: self.in_features]), self.compute)


class FetchedFp8(Fp8):
    """An FP8 weight in a buffer that other blocks use too (model/bundles.py): the adapters' codes have their own memory
    and are copied beside and below the weight's for each product. The row scales stay on the device: the adapters are
    quantised with them after every update, and the next block writes dY times them."""

    @cached_property
    def lines(self) -> torch.Tensor:
        """The codes with the padding between their rows."""
        size = self.whole.stride(0)
        return self.whole.view(torch.uint8).as_strided((len(self.whole), size), (size, 1))

    def move(self, place: MoveTensor) -> None:
        self.lines = place(self.lines)
        self.whole = self.lines.view(fp8.E4M3)[:, : self.whole.shape[1]]
        self.storage = self.whole[: len(self.storage)]

    def place_adapters(self, adapters: Adapters) -> list[Copy]:
        super().place_adapters(adapters)
        beside, below = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (self.beside, self.below))
        self.adapter_codes = self.workspace.adapter_codes[-1] = self._adapter_codes._replace(beside=beside, below=below)
        return []

    def _product(self, rows: Rows, width: int | None = None) -> torch.Tensor:
        if width is None:
            self.beside.view(torch.uint8).copy_(self._adapter_codes.beside.view(torch.uint8))
        return super()._product(rows, width)

    def _grad_product(self, rows: Rows, height: int | None = None) -> torch.Tensor:
        if height is None:
            self.below.view(torch.uint8).copy_(self._adapter_codes.below.view(torch.uint8))
        return super()._grad_product(rows, height)


def _tiled(rows: int) -> int:
    """The number of rows, rounded up to whole words of 16 bytes of the transposed codes."""
    return ceil_div(rows, 64) * 64
