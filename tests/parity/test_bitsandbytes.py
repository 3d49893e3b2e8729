"""NF4 against bitsandbytes' CPU backend: the same bytes, the same values, the same files.

Its version matters: 0.50 changed how scales are quantised on a CPU (kernels/nf4/reference.py says how). And it does not
always agree with itself. Its portable dequantisation, in Python, is ours to the bit. Its compiled kernel departs from
it in two ways, which are let pass there, and only there, and only as exactly that:

- To fp16, rows of an even length that is no multiple of 64 take a loop of its own that rounds halves away from zero and
  everything below 2^-24 to zero, where its other paths round to nearest even, as we do. (Not on an x86 with AVX512.)
- With AVX512, rows of a multiple of 16 that is none of 64 have wrong scales. Blocks of 64 run past the ends of rows, as
  its quantiser, its portable code and its kernel without AVX512 count them; its vectors count floor(length / 64) scales
  to a row, so that from the second row on they take an earlier block's (0.50.2, csrc/cpu_ops.cpp; its branch for ARM
  says in a comment that such rows would get wrong scales, and leaves them to the loop).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch

from graftune.kernels import nf4
from graftune.kernels.nf4 import Nf4
from tests.support import oracle, quantised
from tests.support.thorough import THOROUGH

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = (
    "normal",
    "uniform",
    "heavy",
    "zeros",
    "holes",
    "constant",
    "signs",
    "huge",
    "tiny",
    "denormal",
    "mixed",
    "steps",
)


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    try:
        found = version("bitsandbytes")
    except PackageNotFoundError:
        pytest.skip("bitsandbytes is not installed: NF4's bytes are not compared with it")
    if tuple(map(int, found.split(".")[:2])) < (0, 50):
        pytest.skip(f"bitsandbytes {found} quantises scales otherwise than 0.50: NF4's bytes are not compared with it")
    import torch._dynamo

    compiles = torch._dynamo.config.disable
    torch._dynamo.config.disable = True  # it would compile its fallback for every shape anew
    import bitsandbytes.functional

    yield bitsandbytes.functional
    torch._dynamo.config.disable = compiles


def values(kind: str, count: int, dtype: torch.dtype, gen: torch.Generator) -> torch.Tensor:
    limits = torch.finfo(dtype)
    x = torch.randn(count, generator=gen)
    scale = 10 ** (3 * torch.rand((), generator=gen) - 3)
    if kind == "uniform":
        x = torch.rand(count, generator=gen) * 2 - 1
    elif kind == "heavy":
        x = x / torch.rand(count, generator=gen).clamp(min=1e-3)
    elif kind == "zeros":
        x = torch.zeros(count)
    elif kind == "holes":  # whole blocks of zeros, and single ones
        x[torch.randint(0, 3, (-(-count // 64),), generator=gen).eq(0).repeat_interleave(64)[:count]] = 0
        x[torch.rand(count, generator=gen) < 0.1] = 0
    elif kind == "constant":
        x = torch.full((count,), float(x[0]))
    elif kind == "signs":
        x = x.sign()
    elif kind == "huge":  # the largest of a single block; more would overflow their sum
        x, scale = x / x.abs().max(), torch.tensor(limits.max if count <= 64 else limits.max / count)
    elif kind == "tiny":
        x, scale = x / x.abs().max(), torch.tensor(limits.tiny * 16)
    elif kind == "denormal":
        x, scale = x / x.abs().max(), torch.tensor(limits.tiny / 2)
    elif kind == "mixed":  # another magnitude for each block
        x *= (10 ** (6 * torch.rand(-(-count // 64), generator=gen) - 4)).repeat_interleave(64)[:count]
    elif kind == "steps":  # on the table's values and halfway between them
        table = torch.tensor(nf4.TABLE)
        x = torch.cat((table, (table[1:] + table[:-1]) / 2))[torch.randint(0, 31, (count,), generator=gen)]
    return (x * scale).to(dtype)


def tensors(count: int, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    gen = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=gen))

    for i in range(count):
        kind, dtype = KINDS[i % len(KINDS)], DTYPES[i // len(KINDS) % 3]
        shape = [
            (draw(200),),
            (draw(5000),),
            (draw(90), draw(90)),
            (draw(9), 64 * draw(9)),
            (draw(5), draw(9), draw(70)),
        ]
        shape += [(draw(4), 64 * 256 + draw(3000)), (2 * draw(30), 2 * draw(60))]
        chosen = shape[draw(len(shape)) - 1]
        yield f"{i} {kind} {dtype} {chosen}", values(kind, math.prod(chosen), dtype, gen).view(chosen)


def bytes_of(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same_bytes(ours: Nf4, codes: torch.Tensor, state: Any) -> bool:
    pairs = [(ours.codes, codes), (ours.absmax, state.absmax)]
    if ours.nested_absmax is not None:
        assert ours.nested_map is not None and ours.offset is not None
        pairs += [(ours.nested_absmax, state.state2.absmax), (ours.nested_map, state.state2.code)]
        pairs += [(ours.offset.view(1), state.offset.view(1))]
    else:
        assert not state.nested
    return all(a.dtype == b.dtype and bytes_of(a) == bytes_of(b) for a, b in pairs)


def scales_of(theirs: Any, state: Any) -> torch.Tensor:
    return theirs.dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax


def by_rows(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """What their AVX512 kernel makes of a tensor: a row's scales begin at its number times floor(length / 64)."""
    width = shape[-1]
    packed = codes.view(-1)
    entries = torch.tensor(nf4.TABLE)[torch.stack((packed >> 4, packed & 15), 1).view(-1, width).int()]
    row, column = torch.arange(len(entries))[:, None], torch.arange(width)
    return (entries * scales[row * (width // 64) + column // 64]).to(dtype).view(shape)


def same_values(theirs: Any, ours: Nf4, codes: torch.Tensor, state: Any, dtype: torch.dtype) -> bool:
    """To the bit those of their portable code, and of their kernel but for its two departures (see above)."""
    state.dtype = dtype
    got, scales = nf4.dequantise(ours, dtype), scales_of(theirs, state)
    portable = oracle.nf4_by_bitsandbytes(codes, scales, 64, "nf4", ours.shape, dtype)
    if bytes_of(got) != bytes_of(portable):
        return False
    want = theirs.dequantize_4bit(codes, state)
    if bytes_of(got) == bytes_of(want):
        return True
    if ours.width % 2 or ours.width % 64 == 0:
        return False
    if ours.width % 16 == 0 and bytes_of(want) == bytes_of(by_rows(codes, scales, torch.Size(ours.shape), dtype)):
        return True
    if dtype != torch.float16:
        return False
    exact = nf4.dequantise(ours, torch.float32).view(-1).double()
    a, b = got.view(-1).double(), want.reshape(-1).double()
    half_up = ((a + b) / 2 == exact) & (b.abs() > a.abs())
    lost = (exact.abs() < 2**-24) & (b == 0)
    return bool(((a == b) | half_up | lost).all())


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(4))
def test_random_tensors(theirs: Any, part: int) -> None:
    """240 in all; a thousand where more is asked for."""
    wrong, compared = [], 0
    for name, x in tensors(250 if THOROUGH else 60, seed=part):
        for double in (True, False):
            codes, state = theirs.quantize_4bit(x, quant_type="nf4", compress_statistics=double, blocksize=64)
            ours = nf4.quantise(x, double=double)
            if not same_bytes(ours, codes, state):
                wrong.append(f"bytes: {name} double={double}")
            for dtype in DTYPES if len(codes) > 1 else ():  # they turn a single byte's result around
                compared += 1
                if not same_values(theirs, ours, codes, state, dtype):
                    wrong.append(f"values: {name} double={double} as {dtype}")
    print(f"{compared} tensors dequantised: {len(wrong)} differ")
    assert not wrong, wrong[:20]


@pytest.mark.thorough
def test_many_threads_and_a_large_tensor(theirs: Any) -> None:
    """The scales' mean is summed by as many threads as torch has; here there are enough scales for two."""
    x = torch.randn(3000, 1001, generator=torch.Generator().manual_seed(5))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            codes, state = theirs.quantize_4bit(x, quant_type="nf4", compress_statistics=True, blocksize=64)
            assert same_bytes(nf4.quantise(x), codes, state)
            rows = nf4.quantise_pieces(iter(x.split(170)), x.shape, x.dtype)
            assert same_bytes(rows, codes, state)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 67), (300, 64), (2, 5, 90)], ids=str)
def test_files_both_ways(theirs: Any, shape: tuple[int, ...], dtype: torch.dtype, double: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    codes, state = theirs.quantize_4bit(x, quant_type="nf4", compress_statistics=double, blocksize=64)
    written = {f"m.weight.{name}": value for name, value in state.as_dict(packed=True).items()} | {"m.weight": codes}
    loaded = nf4.from_checkpoint(written, "m.weight")
    assert loaded.shape == shape and loaded.dtype == dtype and same_bytes(loaded, codes, state)

    ours = quantised.nf4_checkpoint(nf4.quantise(x, double=double), "m.weight")
    assert ours.keys() == written.keys()
    for name, value in written.items():
        assert ours[name].shape == value.shape and ours[name].dtype == value.dtype, name
        assert bytes_of(ours[name]) == bytes_of(value), name
    given = {name.removeprefix("m.weight."): value for name, value in ours.items() if name != "m.weight"}
    read = theirs.QuantState.from_dict(given, torch.device("cpu"))
    assert read.dtype == dtype and same_values(theirs, loaded, ours["m.weight"], read, dtype)


def test_an_older_map_is_kept(theirs: Any) -> None:
    """bitsandbytes before 0.50 wrote -1 for the map's first entry when it quantised on a CPU: the file's map counts."""
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(9))
    codes, state = theirs.quantize_4bit(x, quant_type="nf4", compress_statistics=True, blocksize=64)
    state.state2.code = state.state2.code.clone()
    state.state2.code[0] = -1.0
    state.absmax[5] = 0
    written = {f"w.{name}": value for name, value in state.as_dict(packed=True).items()} | {"w": codes}
    got = nf4.dequantise(nf4.from_checkpoint(written, "w"))
    assert bytes_of(got) == bytes_of(theirs.dequantize_4bit(codes, state))
