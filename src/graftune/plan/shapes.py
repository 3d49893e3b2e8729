"""Shape, dtype and layout of the results of torch's operations.

torch computes most of this for meta tensors with its compiler's reference functions: the first call imports the
compiler and sympy, which takes three seconds and 100 MiB at the start of every run, and each call takes ten times as
long as here. So the operations of a step have rules below; an operation without a rule is left to torch and listed in
the plan's notes. A test compares the rules with torch (tests/plan/test_shapes.py).
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


def empty(shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A dense tensor of x's shape, its dimensions in the memory order of x's."""
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
    """A tensor of the broadcast shape, in the layout of the first operand that has that shape."""
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    shape = tensors[0].shape if len(tensors) == 1 else broadcast(x.shape for x in tensors)
    whole = next((x for x in tensors if x.shape == shape), None)
    return empty(shape, dtype) if whole is None else like(whole, dtype)


def _promoted(operands: Sequence[Any]) -> torch.dtype:
    first, *rest = [x for x in operands if x is not None]
    found = [torch.result_type(first, other) for other in rest]
    return functools.reduce(torch.promote_types, found) if found else first.dtype


def _pointwise(*operands: Any, **_: Any) -> torch.Tensor:
    return _laid(operands, _promoted(operands))


def _in_floats(*operands: Any, rounding_mode: str | None = None) -> torch.Tensor:
    dtype = _promoted(operands)
    return _laid(operands, dtype if dtype.is_floating_point or rounding_mode else FLOAT)


def _compared(*operands: Any) -> torch.Tensor:
    return _laid(operands, torch.bool)


def _made(shape: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return empty(shape, dtype)


def _full(shape: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    kinds = {bool: torch.bool, int: torch.int64}
    return empty(shape, dtype or kinds.get(type(value), torch.get_default_dtype()))


def _arange(*ends: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    start, stop, step = (0, ends[0], 1) if len(ends) == 1 else (*ends, 1)[:3]
    whole = all(isinstance(end, int) for end in ends)
    return empty((max(0, math.ceil((stop - start) / step)),), dtype or (torch.int64 if whole else FLOAT))


def _anew(x: torch.Tensor, shape: Sequence[int], *_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
    return empty(shape, dtype or x.dtype)


def _as_it_is(
    x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, memory_format: Any = None, **__: Any
) -> torch.Tensor:
    return empty(x.shape, dtype or x.dtype) if memory_format is torch.contiguous_format else like(x, dtype)


def _reduced(
    x: torch.Tensor, dims: int | Sequence[int] | None = None, keep: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    over = range(x.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {dim % x.dim() for dim in over} if x.dim() else set()
    sizes = [1 if i in gone else n for i, n in enumerate(x.shape) if keep or i not in gone]
    return empty(sizes, dtype or x.dtype)


def _added(*args: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _reduced(*args, dtype=dtype or _of_sums(args[0]))


def _of_sums(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.dtype.is_floating_point else torch.int64


def _product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    return empty((*a.shape[:-1], b.shape[-1]), out_dtype or a.dtype)


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, bias: Any = None, scale_out: Any = None,
    out_dtype: torch.dtype | None = None, fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    return _product(a, b, out_dtype)


def _solve_triangular(a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor:
    """Column-major, as LAPACK writes it."""
    return empty((*broadcast((a.shape[:-2], b.shape[:-2])), b.shape[-1], b.shape[-2]), b.dtype).mT


def _resized(x: torch.Tensor, dim: int, size: int) -> list[int]:
    """x's shape with another size of one dimension."""
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Indexing by integers. Adjacent indexed dimensions are replaced in place; else the indices' shape comes first."""
    used = [dim for dim, index in enumerate(indices) if index is not None]
    rest = [size for dim, size in enumerate(x.shape) if dim not in used]
    first = used[0] if used[-1] - used[0] == len(used) - 1 else 0
    picked = broadcast(i.shape for i in indices if i is not None)
    if used == [0] and len(picked) == 1:  # rows, each of which keeps its layout
        return like(x.new_empty(0).as_strided((*picked, *rest), x.stride()))
    return empty((*rest[:first], *picked, *rest[first:]), x.dtype)


def _repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    assert output_size is not None, "else a device is asked for it"
    return empty((output_size,), repeats.dtype)


def _topk(x: torch.Tensor, k: int, dim: int = -1, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = _resized(x, dim, k)
    return empty(shape, x.dtype), empty(shape, torch.int64)


def _searchsorted(_: Any, x: torch.Tensor, *, out_int32: bool = False, **__: Any) -> torch.Tensor:
    return empty(x.shape, torch.int32 if out_int32 else torch.int64)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    filled = [x for x in tensors if x.dim() > 1 or x.numel()] or [tensors[0]]
    return empty(_resized(filled[0], dim, sum(x.shape[dim] for x in filled)), _common_dtype(tensors))


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return empty(shape, _common_dtype(tensors))


def _common_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors))


def _flash(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """Over packed documents: the output, the log-sum-exp [N, T], and placeholders for dropout's random state."""
    tokens, heads = q.shape[:2]
    state, unused = empty((2,), torch.uint64), empty((), torch.uint64)
    return like(q), empty((heads, tokens), FLOAT), state, unused, empty((0,), q.dtype)


def _flash_cpu(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens = q.shape[:3]
    return _by_token(q), empty((batch, tokens, heads), FLOAT).transpose(1, 2)


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, width] over storage in the order of batch, tokens, heads."""
    batch, heads, tokens, width = x.shape
    return empty((batch, tokens, heads, width), x.dtype).transpose(1, 2)


_BY_OPERATIONS: dict[tuple[Any, ...], Rule] = {
    (
        aten.add, aten.sub, aten.mul, aten.rsub, aten.clamp, aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum,
        aten.lerp, aten.addcmul, aten.neg, aten.abs, aten.pow, aten.remainder, aten.floor_divide, aten.bitwise_and,
        aten.bitwise_or, aten.bitwise_not, aten.bitwise_xor, aten.__rshift__, aten.__lshift__,
        aten.bitwise_right_shift, aten.bitwise_left_shift,
    ): _pointwise,
    (
        aten.div, aten.reciprocal, aten.sqrt, aten.rsqrt, aten.exp, aten.expm1, aten.log, aten.log1p, aten.cos,
        aten.sin, aten.tanh, aten.sigmoid,
    ): _in_floats,
    (
        aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isfinite, aten.isnan, aten.logical_not,
    ): _compared,
    (
        aten.silu, aten.gelu, aten.square, aten.masked_fill, aten.nan_to_num, aten.softplus, aten.silu_backward,
        aten.gelu_backward, aten.softplus_backward, aten.log_sigmoid_backward, aten.sigmoid_backward,
        aten.tanh_backward, aten.threshold_backward, aten.relu, aten.index_add, aten.flip,
    ): lambda x, *_, **__: like(x),
    # The result, and what a CPU keeps for a backward; a GPU keeps nothing.
    (aten.log_sigmoid_forward,): lambda x: (like(x), like(x)),
    (aten.select_backward, aten.slice_backward): lambda grad, sizes, *_: empty(sizes, grad.dtype),
    (aten.where,): lambda condition, *operands: _laid((*operands, condition), _promoted(operands)),
    (aten.ones, aten.zeros, aten.randn, aten.rand): _made,
    (aten.eye,): lambda size, *_, dtype=None, **__: empty((size, size), dtype),
    (aten.full,): _full,
    (aten.scalar_tensor,): lambda value, *, dtype=None, **_: empty((), dtype),
    (aten.arange,): _arange,
    (aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full): _anew,
    (aten.empty_like, aten.clone, aten.ones_like, aten.zeros_like, aten.full_like): _as_it_is,
    (aten.sum, aten.mean): _added,
    (aten.amax, aten.amin, aten.logsumexp): _reduced,
    (aten.all, aten.any): lambda *args: _reduced(*args, dtype=torch.bool),
    (aten.argmax,): lambda *args: _reduced(*args, dtype=torch.int64),
    (aten.mm, aten.bmm): _product,
    (aten.addmm,): lambda _, a, b, out_dtype=None, **__: _product(a, b, out_dtype),
    (aten._scaled_mm,): _scaled_mm,
    (aten._softmax, aten._log_softmax, aten.tril): lambda x, *_: empty(x.shape, x.dtype),
    (aten.linalg_solve_triangular,): _solve_triangular,
    (aten.cumsum,): lambda x, dim, *, dtype=None: like(x, dtype or _of_sums(x)),
    (aten.index_select,): lambda x, dim, index: empty(_resized(x, dim, index.numel()), x.dtype),
    (aten.index,): _index,
    (aten.repeat_interleave,): _repeat_interleave,
    (aten.topk,): _topk,
    (aten.sort,): lambda x, *_, **__: (like(x), like(x, torch.int64)),
    (aten.searchsorted,): _searchsorted,
    (aten.gather,): lambda x, dim, index, **_: like(index, x.dtype),
    (aten.cat,): _cat,
    (aten.stack,): _stack,
    (aten._unsafe_view,): lambda x, shape: aten.view.default(x, shape),
    (aten._flash_attention_forward,): _flash,
    (aten._flash_attention_backward,): lambda grad, q, k, v, *_, **__: (like(q), like(k), like(v)),
    (aten._scaled_dot_product_flash_attention_for_cpu,): _flash_cpu,
    (aten._scaled_dot_product_flash_attention_for_cpu_backward,): lambda grad, q, k, v, *_, **__: (
        _by_token(q), _by_token(k), _by_token(v)
    ),
}  # fmt: skip
RULES = {operation: rule for operations, rule in _BY_OPERATIONS.items() for operation in operations}
