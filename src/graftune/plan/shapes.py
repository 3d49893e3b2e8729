"""Shape, dtype and layout of the results of torch's operations.

torch computes most of this for meta tensors with its compiler's reference functions: the first call imports the
compiler and sympy, which takes three seconds and 100 MiB at the start of every run, and each call takes ten times as
long as here. So the operations of a step have rules below; an operation without a rule is left to torch, and the plan
names it. A test compares the rules with torch (tests/plan/test_shapes.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
META = torch.device("meta")
FLOAT = torch.float32

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    def entered(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operations, function))
        return function

    return entered


def empty(shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Dense, its dimensions in the order in which x's lie in memory."""
    if x.is_contiguous():
        return empty(x.shape, dtype or x.dtype)
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    return torch.empty_permuted(x.shape, order, dtype=dtype or x.dtype, device=META)


def broadcast(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    wanted: tuple[int, ...] = ()
    for shape in shapes:
        longer, shorter = (wanted, shape) if len(wanted) >= len(shape) else (shape, wanted)
        lead = len(longer) - len(shorter)
        wanted = (*longer[:lead], *(b if a == 1 else a for a, b in zip(longer[lead:], shorter, strict=True)))
    return wanted


def _laid(operands: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """In the layout of the first operand that has the whole shape."""
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    shape = tensors[0].shape if len(tensors) == 1 else broadcast(x.shape for x in tensors)
    whole = next((x for x in tensors if x.shape == shape), None)
    return empty(shape, dtype) if whole is None else like(whole, dtype)


def _promoted(operands: Sequence[Any]) -> torch.dtype:
    first, *rest = [x for x in operands if x is not None]
    found = [torch.result_type(first, other) for other in rest]
    return functools.reduce(torch.promote_types, found) if found else first.dtype


@rule(
    aten.add, aten.sub, aten.mul, aten.rsub, aten.clamp, aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum,
    aten.lerp, aten.addcmul, aten.neg, aten.abs, aten.pow, aten.remainder, aten.floor_divide, aten.bitwise_and,
    aten.bitwise_or, aten.bitwise_not, aten.bitwise_xor, aten.__rshift__, aten.__lshift__, aten.bitwise_right_shift,
    aten.bitwise_left_shift,
)  # fmt: skip
def _pointwise(*operands: Any, **_: Any) -> torch.Tensor:
    return _laid(operands, _promoted(operands))


@rule(
    aten.div,
    aten.reciprocal,
    aten.sqrt,
    aten.rsqrt,
    aten.exp,
    aten.expm1,
    aten.log,
    aten.log1p,
    aten.cos,
    aten.sin,
    aten.tanh,
    aten.sigmoid,
)
def _in_floats(*operands: Any, rounding_mode: str | None = None) -> torch.Tensor:
    dtype = _promoted(operands)
    return _laid(operands, dtype if dtype.is_floating_point or rounding_mode else FLOAT)


@rule(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isfinite, aten.isnan, aten.logical_not)
def _compared(*operands: Any) -> torch.Tensor:
    return _laid(operands, torch.bool)


@rule(
    aten.silu, aten.gelu, aten.square, aten.masked_fill, aten.nan_to_num, aten.softplus, aten.silu_backward,
    aten.gelu_backward, aten.softplus_backward, aten.log_sigmoid_backward, aten.sigmoid_backward, aten.tanh_backward,
    aten.threshold_backward, aten.relu, aten.index_add,
)  # fmt: skip
def _as_the_first(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return like(x)


@rule(aten.log_sigmoid_forward)
def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and what a CPU keeps for a backward; a GPU keeps nothing."""
    return like(x), like(x)


@rule(aten.select_backward, aten.slice_backward)
def _part_backward(grad: torch.Tensor, sizes: Sequence[int], *_: Any) -> torch.Tensor:
    return empty(sizes, grad.dtype)


@rule(aten.where)
def _where(condition: torch.Tensor, *operands: Any) -> torch.Tensor:
    return _laid((*operands, condition), _promoted(operands))


@rule(aten.ones, aten.zeros, aten.randn, aten.rand)
def _made(shape: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return empty(shape, dtype)


@rule(aten.eye)
def _eye(size: int, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
    return empty((size, size), dtype)


@rule(aten.full)
def _full(shape: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    kinds = {bool: torch.bool, int: torch.int64}
    return empty(shape, dtype or kinds.get(type(value), torch.get_default_dtype()))


@rule(aten.scalar_tensor)
def _scalar(value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return empty((), dtype)


@rule(aten.arange)
def _arange(*ends: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    start, stop, step = (0, ends[0], 1) if len(ends) == 1 else (*ends, 1)[:3]
    whole = all(isinstance(end, int) for end in ends)
    return empty((max(0, math.ceil((stop - start) / step)),), dtype or (torch.int64 if whole else FLOAT))


@rule(aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full)
def _anew(x: torch.Tensor, shape: Sequence[int], *_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
    return empty(shape, dtype or x.dtype)


@rule(aten.empty_like, aten.clone, aten.ones_like, aten.zeros_like, aten.full_like)
def _as_it_is(
    x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, memory_format: Any = None, **__: Any
) -> torch.Tensor:
    return empty(x.shape, dtype or x.dtype) if memory_format is torch.contiguous_format else like(x, dtype)


def _reduced(x: torch.Tensor, dims: int | Sequence[int] | None, keep: bool, dtype: torch.dtype) -> torch.Tensor:
    over = range(x.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {dim % x.dim() for dim in over} if x.dim() else set()
    sizes = [1 if i in gone else n for i, n in enumerate(x.shape) if keep or i not in gone]
    return empty(sizes, dtype)


@rule(aten.sum, aten.mean)
def _added(x: torch.Tensor, dims: Any = None, keep: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _reduced(x, dims, keep, dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))


@rule(aten.amax, aten.amin, aten.logsumexp)
def _largest(x: torch.Tensor, dims: Any = None, keep: bool = False) -> torch.Tensor:
    return _reduced(x, dims, keep, x.dtype)


@rule(aten.all, aten.any)
def _decided(x: torch.Tensor, dims: Any = None, keep: bool = False) -> torch.Tensor:
    return _reduced(x, dims, keep, torch.bool)


@rule(aten.mm)
def _mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return empty((a.shape[0], b.shape[1]), out_dtype or a.dtype)


@rule(aten.addmm)
def _addmm(_: Any, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
    return empty((a.shape[0], b.shape[1]), out_dtype or a.dtype)


@rule(aten.bmm)
def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return empty((*a.shape[:2], b.shape[2]), a.dtype)


@rule(aten._scaled_mm)
def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, bias: Any = None, scale_out: Any = None,
    out_dtype: torch.dtype | None = None, fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    return empty((a.shape[0], b.shape[1]), out_dtype or a.dtype)


@rule(aten._softmax, aten._log_softmax)
def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return empty(x.shape, x.dtype)


@rule(aten.tril)
def _tril(x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    return empty(x.shape, x.dtype)


@rule(aten.flip)
def _flip(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return like(x)


@rule(aten.linalg_solve_triangular)
def _solve_triangular(a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor:
    """By column, as LAPACK writes it."""
    return empty((*broadcast((a.shape[:-2], b.shape[:-2])), b.shape[-1], b.shape[-2]), b.dtype).mT


@rule(aten.cumsum)
def _cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like(x, dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))


@rule(aten.index_select)
def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = index.numel()
    return empty(shape, x.dtype)


@rule(aten.index)
def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """By numbers. Indexed dimensions that lie together are replaced where they are, else the result's come first."""
    used = [dim for dim, index in enumerate(indices) if index is not None]
    rest = [size for dim, size in enumerate(x.shape) if dim not in used]
    first = used[0] if used[-1] - used[0] == len(used) - 1 else 0
    picked = broadcast(i.shape for i in indices if i is not None)
    if used == [0] and len(picked) == 1:  # rows, each laid out as it was
        return like(x.new_empty(0).as_strided((*picked, *rest), x.stride()))
    return empty((*rest[:first], *picked, *rest[first:]), x.dtype)


@rule(aten.repeat_interleave)
def _repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    assert output_size is not None, "else a device is asked for it"
    return empty((output_size,), repeats.dtype)


@rule(aten.argmax)
def _argmax(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    assert dim is not None and not keepdim
    shape = list(x.shape)
    del shape[dim]
    return empty(shape, torch.int64)


@rule(aten.topk)
def _topk(x: torch.Tensor, k: int, dim: int = -1, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = list(x.shape)
    shape[dim] = k
    return empty(shape, x.dtype), empty(shape, torch.int64)


@rule(aten.sort)
def _sort(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return like(x), like(x, torch.int64)


@rule(aten.searchsorted)
def _searchsorted(_: Any, x: torch.Tensor, *, out_int32: bool = False, **__: Any) -> torch.Tensor:
    return empty(x.shape, torch.int32 if out_int32 else torch.int64)


@rule(aten.gather)
def _gather(x: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> torch.Tensor:
    return like(index, x.dtype)


@rule(aten.cat)
def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    filled = [x for x in tensors if x.dim() > 1 or x.numel()] or [tensors[0]]
    shape = list(filled[0].shape)
    shape[dim] = sum(x.shape[dim] for x in filled)
    return empty(shape, functools.reduce(torch.promote_types, (x.dtype for x in tensors)))


@rule(aten.stack)
def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return empty(shape, functools.reduce(torch.promote_types, (x.dtype for x in tensors)))


@rule(aten._unsafe_view)
def _unsafe_view(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return aten.view.default(x, shape)


@rule(aten._flash_attention_forward)
def _flash(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """Over packed documents: the output, the log-sum-exp [N, T], the random state that there is none of."""
    tokens, heads = q.shape[:2]
    state, unused = empty((2,), torch.uint64), empty((), torch.uint64)
    return like(q), empty((heads, tokens), FLOAT), state, unused, empty((0,), q.dtype)


@rule(aten._flash_attention_backward)
def _flash_backward(grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    return like(q), like(k), like(v)


@rule(aten._scaled_dot_product_flash_attention_for_cpu)
def _flash_cpu(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens = q.shape[:3]
    return _by_token(q), empty((batch, tokens, heads), FLOAT).transpose(1, 2)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _flash_cpu_backward(grad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    return _by_token(q), _by_token(k), _by_token(v)


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, width] over storage in the order of batch, tokens, heads."""
    batch, heads, tokens, width = x.shape
    return empty((batch, tokens, heads, width), x.dtype).transpose(1, 2)
