"""NF4: four bits a value, one scale a block of 64 and, with double quantisation, one byte a scale.

    m_b   = max |w_i| in block b of 64                  code_i = the table's entry nearest to w_i / m_b
    o     = mean of m                                   s_c    = max |m_b - o| in group c of 256 blocks
    a_b   = the map's entry nearest to (m_b - o) / s_c  w_i   ~= table[code_i] * (map[a_b] * s_c + o)

The table's sixteen values are quantiles of a normal distribution; the map's 256 have a sign, a decimal exponent and a
fraction. Two codes share a byte, the earlier one in its high half. Blocks run over the flattened tensor, past the ends
of rows.

The bytes are those of bitsandbytes 0.50 on a CPU, its peculiarities included: whole blocks are multiplied by 1 / m and
a ragged last one divided by m; "nearest" for the scales is read from 65,536 bins rather than found exactly (0.49 found
it exactly, and differs in two scales of a thousand, by less than a bin); a group of equal scales has the codes 0. The
offset is torch's mean over all scales on a CPU, so scales are kept in fp32 (a sixteenth byte a value) until the last is
there, and the offset's last bit depends on torch's number of threads, as in bitsandbytes.

Tensors are processed in pieces: beside the input and the result there are only temporaries of PIECE values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.kernels import launch
from graftune.kernels.rehearsal import cached

BLOCK, GROUP = 64, 256  # values a scale; scales a second scale
PIECE = 1 << 18  # values at a time, a multiple of BLOCK: they fit a core's cache
LEAST = 1e-38  # the least divisor: a smaller scale is replaced by it in the division
BINS = 65536  # of the scales' quantiser
TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class Nf4:
    """A quantised tensor. The last three fields are all set (double quantisation) or all None."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the tensor that was quantised
    codes: torch.Tensor  # [values / 2, rounded up] uint8
    absmax: torch.Tensor  # [blocks] uint8 codes into the map, or fp32
    nested_absmax: torch.Tensor | None = None  # [groups] fp32
    nested_map: torch.Tensor | None = None  # [256] fp32, the map with which `absmax` was made
    offset: torch.Tensor | None = None  # fp32: 0-dim, or [P] for P equal parts that were quantised separately

    def __post_init__(self) -> None:
        n, blocks = self.numel, ceil_div(self.numel, BLOCK)
        assert n > 0 and self.codes.dtype == torch.uint8 and self.codes.shape == ((n + 1) // 2,)
        assert self.absmax.shape == (blocks,) and self.absmax.dtype == (torch.uint8 if self.double else torch.float32)
        if self.nested_absmax is None:
            assert self.nested_map is None and self.offset is None
            return
        assert self.nested_map is not None and self.offset is not None
        assert self.nested_absmax.shape == (ceil_div(blocks, GROUP),) and self.nested_map.shape == (256,)
        if self.offset.dim():
            assert self.offset.dim() == 1 and n == blocks * BLOCK and blocks % (len(self.offset) * GROUP) == 0
        assert {x.dtype for x in (self.nested_absmax, self.nested_map, self.offset)} == {torch.float32}

    @property
    def double(self) -> bool:
        return self.nested_absmax is not None

    @property
    def part_blocks(self) -> int:
        """Blocks that share an offset, where it has several; else 0."""
        return 0 if self.offset is None or not self.offset.dim() else len(self.absmax) // len(self.offset)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        fields = ("codes", "absmax", "nested_absmax", "nested_map", "offset")
        return {name: x for name in fields if (x := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())

    def to(self, device: torch.device | str) -> Nf4:
        moved = {name: x.to(device) for name, x in self.tensors.items()}
        return Nf4(self.shape, self.dtype, **moved)


def encode(values: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor) -> None:
    """Writes codes and scales of flat values that begin with a block; only the end of the tensor may be ragged."""
    for at in range(0, len(values), PIECE):
        x = values[at : at + PIECE].float()
        whole = len(x) // BLOCK * BLOCK
        blocks, rest, scaled = x[:whole].view(-1, BLOCK), x[whole:], x.new_zeros((len(x) + 1) // 2 * 2)
        scales = absmax[at // BLOCK : ceil_div(at + len(x), BLOCK)]
        torch.amax(blocks.abs(), 1, out=scales[: len(blocks)])
        factors = 1.0 / scales[: len(blocks)].clamp(min=LEAST)
        torch.mul(blocks, factors[:, None], out=scaled[:whole].view(-1, BLOCK))
        if len(rest):
            scales[-1] = rest.abs().max().clamp(min=LEAST)
            torch.div(rest, scales[-1], out=scaled[whole : len(x)])
        found = nearest(scaled.clamp_(-1, 1))
        torch.add(found[1::2], found[::2], alpha=16, out=codes[at // 2 : at // 2 + len(found) // 2])


def nearest(scaled: torch.Tensor) -> torch.Tensor:
    """How many borders between the table's entries lie below each value, as uint8. [-1, 1] is cut into cells with at
    most one border each, so that two lookups and one comparison do: six times as fast as torch's bucketize."""
    below, border = cells(scaled.device)
    cell = _cell(scaled).clamp_(0, len(below) - 1)  # a NaN may get any cell; `finish` refuses it
    return below.index_select(0, cell).add_((scaled > border.index_select(0, cell)).view(torch.uint8))


def _cell(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.add(1.0).mul_(32.0).to(torch.int32)  # monotonic, which is all that `nearest` needs


@cached
def table_on(device: torch.device) -> torch.Tensor:
    """TABLE on a device. The first call copies it there, so it must not happen during a capture."""
    return torch.tensor(TABLE, device=device)


@cached
def borders(device: torch.device) -> torch.Tensor:
    table = table_on(device)
    return (table[:-1] + table[1:]) / 2


@cached
def cells(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For each cell: the number of borders in earlier cells, and its own border (infinite where it has none)."""
    edges = borders(torch.device("cpu"))
    at = _cell(edges).long()
    assert len(at.unique()) == len(at)
    border = torch.full((65,), math.inf).index_copy_(0, at, edges)
    below = torch.bucketize(torch.arange(65), at).to(torch.uint8)
    return below.to(device), border.to(device)


def nest(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales on a CPU -> (their codes, the groups' scales, the offset)."""
    offset = absmax.mean()
    centred = absmax - offset
    padded = torch.zeros(ceil_div(len(absmax), GROUP) * GROUP)
    padded[: len(absmax)] = centred
    groups = padded.view(-1, GROUP)
    scales = groups.abs().amax(1)
    scaled = (groups * (1.0 / scales)[:, None]).clamp_(-1, 1)
    # In fp64 the product is exact, so this rounds once, like the fused multiply-add it stands for.
    place = scaled.add_(1.0).double().mul_((BINS - 1) / 2).add_(0.5).float().nan_to_num_(0.0).to(torch.int32)
    codes = bins().index_select(0, place.view(-1))  # where all scales of a group are equal, 0 * inf: place 0
    return codes[: len(absmax)].clone(), scales, offset


@cached
def dynamic_map() -> torch.Tensor:
    """The map of the scales: seven decades, each with twice the steps of the one below, in both signs; zero; one.
    Values are rounded as torch rounds them."""
    entries = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        middles = (10 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / 2.0)
        entries += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(entries), dtype=torch.float32)


@cached
def bins() -> torch.Tensor:
    """The map's entry for each of the 65,536 places between -1 and 1."""
    entries = dynamic_map()
    places = -1.0 + torch.arange(BINS, dtype=torch.float32) * 2.0 / (BINS - 1)
    return torch.bucketize(places, (entries[:-1] + entries[1:]) * 0.5).to(torch.uint8)


def finish(shape: tuple[int, ...], dtype: torch.dtype, codes: torch.Tensor, absmax: torch.Tensor, double: bool) -> Nf4:
    """The tensor from its codes and fp32 scales. The scales are quantised on the CPU, wherever the codes are: then the
    bytes do not depend on how a device sums."""
    scales = absmax.cpu()
    if not bool(scales.isfinite().all()):
        raise GraftuneError("a weight to be quantised holds NaN or infinity", fix="check the checkpoint")
    if not double:
        return Nf4(shape, dtype, codes, absmax.to(launch.device_of(codes)))
    numbers, groups, offset = nest(scales)
    device = launch.device_of(codes)
    rest = (x.to(device) for x in (numbers, groups, dynamic_map(), offset))
    return Nf4(shape, dtype, codes, *rest)


def joined(parts: Sequence[Nf4]) -> Nf4 | None:
    """The rows of all parts, one after the other, each with its own codes and scales. None if the parts differ in size
    or end within a group of scales."""
    first, blocks = parts[0], len(parts[0].absmax)
    alike = all(part.shape == first.shape and part.double == first.double for part in parts)
    if not alike or first.numel != blocks * BLOCK or (first.double and blocks % GROUP):
        return None
    codes, absmax = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "absmax"))
    shape = (len(parts) * first.rows, first.width)
    if first.nested_absmax is None or first.nested_map is None or first.offset is None:
        return Nf4(shape, first.dtype, codes, absmax)
    groups = torch.cat([part.nested_absmax for part in parts if part.nested_absmax is not None])
    offsets = torch.stack([part.offset for part in parts if part.offset is not None])
    return Nf4(shape, first.dtype, codes, absmax, groups, first.nested_map, offsets)


def whole_blocks(pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same values in flat pieces of whole blocks, except for the last; the rest of a piece joins the next one."""
    left: torch.Tensor | None = None
    for piece in pieces:
        flat = piece.reshape(-1)
        if left is not None and len(left):
            fill = min(BLOCK - len(left), len(flat))
            left, flat = torch.cat((left, flat[:fill])), flat[fill:]
            if len(left) < BLOCK:
                continue
            yield left
        whole = len(flat) // BLOCK * BLOCK
        if whole:
            yield flat[:whole]
        left = flat[whole:].clone()  # a view would keep the piece alive
    if left is not None and len(left):
        yield left


@cached
def pairs(device: torch.device) -> torch.Tensor:
    """Both values of each byte as one 8-byte word: one lookup for two values."""
    table, byte = torch.tensor(TABLE), torch.arange(256)
    return torch.stack((table[byte >> 4], table[byte & 15]), 1).view(torch.int64).view(-1).to(device)


def scales(nf4: Nf4, blocks: torch.Tensor) -> torch.Tensor:
    """fp32 scales of the blocks named by an int64 tensor, in its shape."""
    at = blocks.reshape(-1)
    found = nf4.absmax.index_select(0, at)
    if nf4.nested_absmax is not None:
        assert nf4.nested_map is not None and nf4.offset is not None
        found = nf4.nested_map.index_select(0, found.int()) * nf4.nested_absmax.index_select(0, at // GROUP)
        found += nf4.offset.index_select(0, at // nf4.part_blocks) if nf4.part_blocks else nf4.offset
    return found.view_as(blocks)


def values(nf4: Nf4, start: int, stop: int) -> torch.Tensor:
    """Elements start to stop of the flattened tensor in fp32."""
    first, last = start // BLOCK, ceil_div(stop, BLOCK)
    codes = nf4.codes[first * (BLOCK // 2) : last * (BLOCK // 2)]
    found = pairs(nf4.device).index_select(0, codes.int()).view(torch.float32)
    scale = scales(nf4, torch.arange(first, last, device=nf4.device))
    whole = len(found) // BLOCK * BLOCK
    found[:whole].view(-1, BLOCK).mul_(scale[: whole // BLOCK, None])
    found[whole:].mul_(scale[-1])
    return found[start - first * BLOCK : stop - first * BLOCK]


def dequantise(nf4: Nf4, out: torch.Tensor, start: int, used: torch.Tensor | None = None) -> None:
    """Writes the rows from `start` on to out [rows, width], which may have a row stride. Ignores `used`, which only
    saves time on a GPU."""
    rows, width = out.shape
    if out.is_contiguous():
        flat, first = out.view(-1), start * width
        for at in range(0, len(flat), PIECE):
            piece = flat[at : at + PIECE]
            piece.copy_(values(nf4, first + at, first + at + len(piece)))
        return
    step = max(1, PIECE // width)
    for row in range(0, rows, step):
        piece = out[row : row + step]
        at = (start + row) * width
        piece.copy_(values(nf4, at, at + piece.numel()).view_as(piece))


def select(nf4: Nf4, ids: torch.Tensor) -> Nf4:
    """The rows named by ids as a tensor of their own, with fp32 scales. Rows must be whole blocks."""
    assert nf4.width % BLOCK == 0
    a_row = nf4.width // BLOCK
    blocks = ids[:, None] * a_row + torch.arange(a_row, device=ids.device)
    codes = nf4.codes.view(nf4.rows, -1).index_select(0, ids)
    return Nf4((len(ids), nf4.width), nf4.dtype, codes.view(-1), scales(nf4, blocks).view(-1))


def gather(nf4: Nf4, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Dequantises rows of any width to `out`, value by value."""
    table = table_on(nf4.device)
    column = torch.arange(nf4.width, device=nf4.device)
    step = max(1, PIECE // nf4.width)
    for row in range(0, len(ids), step):
        at = ids[row : row + step, None] * nf4.width + column
        byte = nf4.codes[at >> 1].int()
        code = torch.where(at % 2 == 0, byte >> 4, byte & 15)
        out[row : row + step].copy_(table[code] * scales(nf4, at // BLOCK))
