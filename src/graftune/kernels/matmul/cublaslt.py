"""Chooses the fastest algorithm of a matrix product through cuBLASLt's C interface, since torch offers no choice.

The library (the copy that torch has loaded) lists the algorithms that it would consider for a product, with a workspace
and without. Each is timed on the actual tensors, with the cache emptied in between, because in a step every weight
comes from memory. Except for the shortest products, the best few are timed again, each for long enough that the clocks
match its power draw: a step runs a GPU at its power limit (an H200 at 1350 of its 1980 MHz), where the order can
differ. torch.mm's choice is usually the first of the list, so the result is not slower, apart from noise. The choice is
cached on disk for this GPU and this version of the library: a second run starts without timing anything, and computes
with the same algorithms.

Products of 8-bit floats have a scale for each row of a and each column of b, which the library applies to the result.
It offers one algorithm for them but accepts more: the same one with other tiles, which are timed too.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import statistics
from ctypes import POINTER, byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graftune import graph
from graftune.errors import GraftuneError
from graftune.io import user_cache
from graftune.kernels import launch, rehearsal
from graftune.private import find

CANDIDATES, ROUNDS = 16, 7
WORKSPACE = 32 << 20
MANY, FEW_ROUNDS = 32, 3  # from this many candidates on, each is timed in fewer rounds
LONG, NEAR, FINALISTS = 0.05, 1.12, 4  # retime products from these milliseconds on: those this near the best, this many
WARMING, TURN = 60.0, 60.0  # milliseconds of load before the finalists, and for each of them
TILES, CUSTOM_OPTIONS = (
    (20, 23, 24, 151, 215, 411, 497),
    range(8),
)  # variants of 8-bit products, by the library's numbers
AGREE, LOOKED = 0.01, 32  # allowed relative difference of a variant's result, and rows compared
KEPT, FORMAT = 4000, 5  # cached choices; raise FORMAT when the procedure changes
PAUSE = 200_000  # cycles in which the host can send the work to be timed
# From the library's header.
COMPUTE_32F, REAL_32F = 68, 0
KINDS = {torch.bfloat16: 14, torch.float16: 2, torch.float8_e4m3fn: 28}
DESC_TRANSA, DESC_TRANSB = 3, 4
DESC_SCALES, DESC_SCALE_MODES, DESC_FAST_SUMS = (17, 18), (31, 32), 25  # of the library's first and second operand
BY_ROW = 3  # a scale for each row of the first operand and each column of the second
SCALES_SINCE = 120900  # the first version of the library that has them
PREF_WORKSPACE, PREF_REDUCTION, PREF_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
CONFIG_TILE, CONFIG_CUSTOM = 1, 5
IN_FP32 = 1 | 2  # sum the parts of a split product in place or in the compute type, not in 16 bits
NOT_SUPPORTED = 15
_sleep = find("torch.cuda._sleep")


_Algorithm = c_uint64 * 8


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class MatmulShape(NamedTuple):
    """Everything that the choice depends on. "across": stored column by column."""

    kind: torch.dtype
    out_kind: torch.dtype
    m: int
    n: int
    k: int
    a_across: bool  # whether a's columns, not its rows, are contiguous; b likewise
    b_across: bool
    a_stride: int  # between a's rows (or columns); b and the result likewise
    b_stride: int
    out_row_stride: int
    aligned: int  # bytes


Layouts = tuple[c_void_p, c_void_p, c_void_p]  # of b, a and the result
Scales = tuple[torch.Tensor, torch.Tensor]  # of a's rows and of b's columns


class Operands(NamedTuple):
    """The tensors of a @ b -> out; `scales` if a and b are 8-bit codes."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    scales: Scales | None = None


class MatmulPlan(NamedTuple):
    """A product's description for the library, and the chosen algorithm."""

    desc: c_void_p
    layouts: Layouts
    algorithm: _Result


_plans: dict[tuple[torch.device, MatmulShape], MatmulPlan] = rehearsal.device_cache()
_handles: dict[int, c_void_p] = {}
_workspaces: dict[tuple[torch.device, int], torch.Tensor] = rehearsal.device_cache()
ONE, ZERO = c_float(1.0), c_float(0.0)
NOTHING = MatmulPlan(
    c_void_p(), (c_void_p(), c_void_p(), c_void_p()), _Result()
)  # for meta tensors, which call no library


def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device) if out is None else out
    return _multiply(Operands(a, b, out))


def scaled_mm(a: torch.Tensor, b: torch.Tensor, scales: Scales, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K], b [K, N], both in e4m3 with K contiguous, -> (a @ b) * scales[0] [M] * scales[1] [N]."""
    assert all(scale.is_contiguous() and scale.dtype == torch.float32 for scale in scales)
    assert scales[0].shape == a.shape[:1] and scales[1].shape == b.shape[1:], [scale.shape for scale in scales]
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    return _multiply(Operands(a, b, out, scales))


def multiplies_codes(device: torch.device) -> bool:
    """Whether the library has products with scales for this GPU."""
    if launch.capability(device)[0] != 9:
        return False
    return device.type == "meta" or _library().cublasLtGetVersion() >= SCALES_SINCE


def _multiply(operands: Operands) -> torch.Tensor:
    shape, device = _shape(operands), operands.a.device
    plan = _plans.get((device, shape))
    if plan is None:
        assert not graph.is_capturing(device), f"{shape} was not seen before the capture"
        plan = _plans[device, shape] = _fastest(shape, operands)
    _run(plan, operands)
    return operands.out


def _shape(operands: Operands) -> MatmulShape:
    a, b, out, scales = operands
    (m, k), n = a.shape, b.shape[1]
    assert out.shape == (m, n) and out.stride(1) == 1, (out.shape, out.stride())
    assert (out.dtype == a.dtype) == (scales is None), (out.dtype, a.dtype)
    a_across, b_across = a.stride(1) != 1, b.stride(1) != 1
    assert a.stride(0 if a_across else 1) == 1 and b.stride(0 if b_across else 1) == 1, (a.stride(), b.stride())
    aligned = min(256, *(1 << ((at & -at).bit_length() - 1) for at in map(launch.address, (a, b, out))))
    a_stride, b_stride = a.stride(1 if a_across else 0), b.stride(1 if b_across else 0)
    return MatmulShape(a.dtype, out.dtype, m, n, k, a_across, b_across, a_stride, b_stride, out.stride(0), aligned)


def _fastest(shape: MatmulShape, operands: Operands) -> MatmulPlan:
    """The cached choice, or the fastest of the timed candidates. Waits for the device; runs once for each shape."""
    device = operands.a.device
    # Allocated even if nothing is timed, so that every run needs the memory that its plan predicts.
    flush = rehearsal.workspace(flush_bytes(device), device)
    if device.type == "meta":
        _workspace(device, graph.current_stream(device).cuda_stream)
        return NOTHING
    desc, layouts = _problem(shape)
    _point(desc, operands)
    card = torch.cuda.get_device_name(device), _library().cublasLtGetVersion()
    key = "|".join(map(str, (FORMAT, *card, *shape)))
    known = _recalled(key, desc, layouts, device)
    if known is not None:
        return MatmulPlan(desc, layouts, known)
    offered = _candidates(shape, desc, layouts, device)
    found = [*offered, *(_variants(offered[0], desc, layouts, device) if operands.scales and offered else ())]
    plans = [MatmulPlan(desc, layouts, result) for result in found]
    rounds, times, right = ROUNDS if len(plans) < MANY else FEW_ROUNDS, dict[int, float](), None
    for i, plan in enumerate(plans):
        if i < len(offered):
            times[i] = _time(plan, operands, flush, rounds)
            if right is None and len(plans) > len(offered) and times[i] < float("inf"):
                right = _some_rows(operands)
        else:
            times[i] = _time_if_right(plan, operands, flush, rounds, right)
    least = min(times.values(), default=float("inf"))
    if least == float("inf"):
        raise GraftuneError(f"cuBLASLt has no algorithm for {shape}", fix="set deterministic, which needs none")
    best = sorted((i for i in times if times[i] <= NEAR * least), key=lambda i: times[i])[:FINALISTS]
    bytes_read = sum(x.numel() * x.element_size() for x in (operands.a, operands.b))
    if least >= LONG and len(best) > 1 and bytes_read > len(flush):
        loaded = _under_load([plans[i] for i in best], operands, least)
        times = dict(zip(best, loaded, strict=True))
    chosen = plans[min(times, key=lambda i: times[i])]
    user_cache.remember("products", key, bytes(chosen.algorithm.algo).hex(), KEPT)
    return chosen


def _recalled(key: str, desc: c_void_p, layouts: Layouts, device: torch.device) -> _Result | None:
    """The cached choice, if the library still accepts it for this product."""
    text = user_cache.recall("products").get(key)
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{128}", text):
        return None
    return _accepted(_Algorithm.from_buffer_copy(bytes.fromhex(text)), desc, layouts, device)


def _accepted(algo: Any, desc: c_void_p, layouts: Layouts, device: torch.device) -> _Result | None:
    """The algorithm as a heuristic result, if the library accepts it for this product."""
    found, (first, second, result) = _Result(), layouts
    status = _library().cublasLtMatmulAlgoCheck(
        _handle(device), desc, first, second, result, result, byref(algo), byref(found)
    )
    if status or found.state or found.workspace > WORKSPACE:
        return None
    found.algo = algo
    return found


def _variants(offered: _Result, desc: c_void_p, layouts: Layouts, device: torch.device) -> list[_Result]:
    """The algorithm with other tiles and custom options."""
    found: dict[bytes, _Result] = {}
    for tile, option in itertools.product(TILES, CUSTOM_OPTIONS):
        algo = _Algorithm.from_buffer_copy(bytes(offered.algo))
        settings = ((CONFIG_TILE, c_uint32(tile)), (CONFIG_CUSTOM, c_uint32(option)))
        if any(_library().cublasLtMatmulAlgoConfigSetAttribute(byref(algo), place, byref(value), c_size_t(4))
               for place, value in settings):  # fmt: skip
            continue  # this version of the library has no such tile
        variant = _accepted(algo, desc, layouts, device)
        if variant is not None and bytes(algo) != bytes(offered.algo):
            found[bytes(algo)] = variant
    return list(found.values())


def _time_if_right(
    plan: MatmulPlan, operands: Operands, flush: torch.Tensor, many: int, right: torch.Tensor | None
) -> float:
    """`_time` of a variant that the library accepts but did not offer. Infinite if its result differs from that of an
    offered algorithm (`right`), or if there is no such result to compare with."""
    if right is None or not right.norm() > 0:
        return float("inf")
    operands.out[_looked_at(operands)] = float("nan")  # so that an earlier result cannot pass for this one
    ms = _time(plan, operands, flush, many)
    return ms if (_some_rows(operands) - right).norm() <= AGREE * right.norm() else float("inf")


def _looked_at(operands: Operands) -> torch.Tensor:
    """Rows spread over the result: at its ends, tokens may be padding and all values zero."""
    return torch.linspace(0, len(operands.out) - 1, LOOKED, device=operands.out.device).long()


def _some_rows(operands: Operands) -> torch.Tensor:
    return operands.out[_looked_at(operands)].float()


def _under_load(plans: list[MatmulPlan], operands: Operands, about: float) -> list[float]:
    """Milliseconds of each plan in the second half of its turn, with the device busy throughout. Only for operands that
    do not fit the cache together."""
    many = max(1, round(TURN / 2 / about))

    def repeat(plan: MatmulPlan, times: int) -> None:
        for _ in range(times):
            _run(plan, operands)

    repeat(plans[0], round(WARMING / about))
    halves = []
    for plan in plans:
        repeat(plan, many)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        repeat(plan, many)
        end.record()
        halves.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / many for begin, end in halves]


def flush_bytes(device: torch.device) -> int:
    """Bytes to write to empty the cache; no more, since they add to the first step's saved activations."""
    return launch.cache_bytes(device)


def _time(plan: MatmulPlan, operands: Operands, flush: torch.Tensor, many: int) -> float:
    """Median milliseconds of a few rounds; infinite if the algorithm refuses these tensors."""
    try:
        _run(plan, operands)
    except CublasError:
        return float("inf")
    rounds = []
    for _ in range(many):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        _sleep(PAUSE)  # otherwise the host's launch time bounds a short product
        begin.record()
        _run(plan, operands)
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end))
    return statistics.median(rounds)


def _problem(shape: MatmulShape) -> tuple[c_void_p, Layouts]:
    """Describe the product. The library is column-major, where a row-major a @ b is b' a': b is its first operand."""
    lib, kind, desc = _library(), KINDS[shape.kind], c_void_p()
    _check(lib.cublasLtMatmulDescCreate(byref(desc), COMPUTE_32F, REAL_32F))
    _set(desc, DESC_TRANSA, c_int(int(shape.b_across)))
    _set(desc, DESC_TRANSB, c_int(int(shape.a_across)))
    if shape.kind == torch.float8_e4m3fn:
        _set(desc, DESC_FAST_SUMS, c_int8(1))
        for attribute in DESC_SCALE_MODES:
            _set(desc, attribute, c_int(BY_ROW))
    first = _layout(kind, *((shape.k, shape.n) if shape.b_across else (shape.n, shape.k)), shape.b_stride)
    second = _layout(kind, *((shape.m, shape.k) if shape.a_across else (shape.k, shape.m)), shape.a_stride)
    return desc, (first, second, _layout(KINDS[shape.out_kind], shape.n, shape.m, shape.out_row_stride))


def _set(desc: c_void_p, attribute: int, value: Any) -> None:
    _check(_library().cublasLtMatmulDescSetAttribute(desc, attribute, byref(value), ctypes.sizeof(value)))


def _point(desc: c_void_p, operands: Operands) -> None:
    """Set the scales, which belong to the description but change with every call."""
    for attribute, scale in zip(DESC_SCALES, reversed(operands.scales or ()), strict=False):
        _set(desc, attribute, c_void_p(scale.data_ptr()))


def _candidates(shape: MatmulShape, desc: c_void_p, layouts: Layouts, device: torch.device) -> list[_Result]:
    """The algorithms that the library would consider, with a workspace and without."""
    lib, preference, (first, second, result) = _library(), c_void_p(), layouts
    _check(lib.cublasLtMatmulPreferenceCreate(byref(preference)))
    for attribute, wanted in ((PREF_REDUCTION, IN_FP32), *((place, shape.aligned) for place in PREF_ALIGNMENTS)):
        value = c_uint32(wanted)
        _check(lib.cublasLtMatmulPreferenceSetAttribute(preference, attribute, byref(value), ctypes.sizeof(value)))
    usable: dict[bytes, _Result] = {}
    for most in (WORKSPACE, 0):
        size, found, count = c_uint64(most), (_Result * CANDIDATES)(), c_int()
        _check(lib.cublasLtMatmulPreferenceSetAttribute(preference, PREF_WORKSPACE, byref(size), ctypes.sizeof(size)))
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            _handle(device), desc, first, second, result, result, preference, CANDIDATES, found, byref(count)
        )
        if status != NOT_SUPPORTED:  # else it has no such algorithm
            _check(status)
            usable |= {bytes(one.algo): one for one in found[: count.value] if one.state == 0}
    lib.cublasLtMatmulPreferenceDestroy(preference)
    return list(usable.values())


def _layout(kind: int, rows: int, columns: int, stride: int) -> c_void_p:
    layout = c_void_p()
    _check(
        _library().cublasLtMatrixLayoutCreate(byref(layout), kind, c_uint64(rows), c_uint64(columns), c_int64(stride))
    )
    return layout


def _run(plan: MatmulPlan, operands: Operands) -> None:
    a, b, out, _ = operands
    stream = graph.current_stream(a.device).cuda_stream
    space = _workspace(a.device, stream)
    if plan is NOTHING:
        return
    _point(plan.desc, operands)
    first, second, result = plan.layouts
    _check(
        _library().cublasLtMatmul(
            _handle(a.device), plan.desc, byref(ONE), c_void_p(b.data_ptr()), first, c_void_p(a.data_ptr()), second,
            byref(ZERO), c_void_p(out.data_ptr()), result, c_void_p(out.data_ptr()), result,
            byref(plan.algorithm.algo), c_void_p(space.data_ptr()), c_size_t(WORKSPACE), c_void_p(stream),
        )
    )  # fmt: skip


def _workspace(device: torch.device, stream: int) -> torch.Tensor:
    """The workspace of a stream, kept for good because captured graphs use it. A capture needs one that exists."""
    if (device, stream) not in _workspaces:
        if graph.is_capturing(device):  # products run in order on a capture's stream, so any workspace serves
            return next(space for (where, _), space in _workspaces.items() if where == device)
        _workspaces[device, stream] = rehearsal.workspace(WORKSPACE, device)
    return _workspaces[device, stream]


def _handle(device: torch.device) -> c_void_p:
    index = device.index or 0
    if index not in _handles:
        handle = c_void_p()
        with torch.cuda.device(device):
            _check(_library().cublasLtCreate(byref(handle)))
        _handles[index] = handle
    return _handles[index]


@functools.cache
def _library() -> ctypes.CDLL:
    """The copy that torch has loaded: a second one would need the same memory again."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if "libcublasLt.so" in line}
    if not paths:
        raise GraftuneError("torch has not loaded cuBLASLt", fix="set deterministic, which does without it")
    lib = ctypes.CDLL(paths.pop())
    lib.cublasLtMatmul.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]
    lib.cublasLtMatmul.argtypes += [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p]
    lib.cublasLtMatmulAlgoGetHeuristic.argtypes = [c_void_p] * 7 + [c_int, POINTER(_Result), POINTER(c_int)]
    for name in ("cublasLtMatmulDescSetAttribute", "cublasLtMatmulPreferenceSetAttribute"):
        getattr(lib, name).argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    lib.cublasLtMatmulPreferenceDestroy.argtypes = [c_void_p]
    lib.cublasLtMatmulAlgoCheck.argtypes = [c_void_p] * 8
    lib.cublasLtGetVersion.restype = c_size_t
    return lib


class CublasError(RuntimeError):
    """The library returned an error."""


def _check(status: int) -> None:
    if status:
        raise CublasError(f"cuBLASLt returned status {status}")
