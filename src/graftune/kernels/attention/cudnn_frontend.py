"""Packed attention by cuDNN, through the package nvidia-cudnn-frontend: the fastest attention on Hopper.

A plan is built once for a number of document slots, a bound on the documents' length and the strides of the buffers.
The position and the length of each document are device tensors that the plan reads when it runs, so a CUDA graph can
capture it, and its replays use the current lengths. torch's interface to cuDNN's packed attention builds a plan at
every call (75 ms) and cannot be captured.

q, k and v are read in place from the qkv buffer. The gradients need separate buffers (`grad_buffers`). cuDNN sums dq in
its workspace in fp32, in dq's layout but at q's offsets, so dq must have q's row stride; otherwise all documents but
the first get wrong sums, and other parts of the workspace are overwritten. It first writes dk and dv for every query
head to the workspace, in a layout derived from theirs, so they must be contiguous.

Legend: T tokens, S document slots, L bound on their length, N heads, K key heads, H head width.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.graph import is_capturing
from graftune.kernels import launch, rehearsal

if TYPE_CHECKING:
    from graftune.kernels.attention import Documents

PACKAGE = "nvidia-cudnn-frontend"
OLDEST = 90600  # the first cuDNN with grouped heads in packed layouts, and with offsets of 64 bits

# Names of a plan's tensors; cuDNN knows them by number.
NAMES = (
    "q", "k", "v", "out", "stats", "grad_out", "dq", "dk", "dv", "q_at", "k_at", "v_at", "out_at", "stats_at",
    "dq_at", "dk_at", "dv_at", "grad_out_at", "q_lengths", "k_lengths",
)  # fmt: skip
UID = {name: number + 1 for number, name in enumerate(NAMES)}


Strides = tuple[int, int, int, int]


@dataclass(frozen=True)
class CudnnShape:
    """Everything that a plan is built for. Strides are those of tokens; the heads of a token are adjacent."""

    dtype: torch.dtype
    heads: int
    key_heads: int
    width: int
    slots: int
    longest: int
    tokens: int
    scale: float
    strides: Strides  # of q, k, v and out
    grad_strides: Strides | None = None  # of dq, dk, dv and grad_out; None: the forward


@dataclass(frozen=True)
class AttentionPlan:
    """A graph that cuDNN has compiled for one shape."""

    graph: Any
    workspace: int  # bytes


_handles: dict[int, Any] = {}
_plans: dict[tuple[torch.device, CudnnShape], AttentionPlan] = rehearsal.device_cache()


def lacks(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why cuDNN cannot compute such heads on this device; None if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "cuDNN's packed attention takes bf16 and fp16"
    if width % 16 or width > 128:
        return f"cuDNN's packed attention takes heads of up to 128 values, in sixteens; these have {width}"
    if launch.capability(device)[0] not in (9, 10):
        return "cuDNN's packed attention needs a Hopper or Blackwell data centre GPU"
    if launch.is_elsewhere(device):
        return None
    try:
        version = importlib.import_module("cudnn").backend_version()
    except ImportError:
        return f"the package {PACKAGE} is not installed"
    except (OSError, RuntimeError) as error:
        return f"the package {PACKAGE} does not load ({error})"
    return None if version >= OLDEST else f"cuDNN {version} is older than {OLDEST}"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, docs: Documents, scale: float, window: int, out: torch.Tensor,
    cap: float,
) -> torch.Tensor:  # fmt: skip
    """Write out [T, N, H]; returns the log-sum-exp of the scores [T, N]."""
    assert not window and not cap, "the plans have no window and no soft cap"
    tokens, heads, _ = q.shape
    stats = q.new_empty((tokens, heads), dtype=torch.float32)
    strides = _strides(q, k, v, out)
    plan = _plan(q.device, _shape(q, k, docs, scale, strides))
    at = _offsets(docs, (*strides, heads))
    tensors = {"q": q, "k": k, "v": v, "out": out, "stats": stats}
    _run(plan, q.device, tensors | dict(zip(("q_at", "k_at", "v_at", "out_at", "stats_at"), at, strict=True)), docs)
    return stats


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    stats: torch.Tensor,
    docs: Documents,
    scale: float,
    window: int,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cap: float,
) -> None:
    assert not window and not cap, "the plans have no window and no soft cap"
    heads = q.shape[1]
    dq, dk, dv = grads
    assert (len(q) == 1 or dq.stride() == q.stride()) and dk.is_contiguous() and dv.is_contiguous(), "see grad_buffers"
    strides, grad_strides = _strides(q, k, v, out), _strides(dq, dk, dv, grad_out)
    plan = _plan(q.device, _shape(q, k, docs, scale, strides, grad_strides))
    at = _offsets(docs, (*strides, heads, *grad_strides))
    tensors = {"q": q, "k": k, "v": v, "out": out, "stats": stats, "grad_out": grad_out, "dq": dq, "dk": dk, "dv": dv}
    places = ("q_at", "k_at", "v_at", "out_at", "stats_at", "dq_at", "dk_at", "dv_at", "grad_out_at")
    _run(plan, q.device, tensors | dict(zip(places, at, strict=True)), docs)


def grad_buffers(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A buffer for dq with q's row stride, and contiguous ones for dk and dv."""
    tokens, heads, width = q.shape
    dq = q.new_empty(tokens, q.stride(0))[:, : heads * width].unflatten(1, (heads, width))
    return dq, k.new_empty(k.shape), k.new_empty(k.shape)


def describe(cudnn: Any, shape: CudnnShape, handle: Any, capability: tuple[int, int]) -> Any:
    """Describe the forward or the backward as a cuDNN graph, its tensors numbered by UID; it is not compiled yet."""
    data = cudnn.data_type
    io = {torch.bfloat16: data.BFLOAT16, torch.float16: data.HALF}[shape.dtype]
    graph = cudnn.pygraph(
        io_data_type=io,
        intermediate_data_type=data.FLOAT,
        compute_data_type=data.FLOAT,
        handle=handle,
        sm_version=capability[0] * 10 + capability[1],
    )
    n, k, h, length = shape.heads, shape.key_heads, shape.width, shape.longest

    def index(name: str, entries: int, kind: Any) -> Any:
        made = graph.tensor(dim=[entries, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, name=name)
        made.set_uid(UID[name])
        return made

    def laid(tensor: Any, name: str, heads: int, width: int, stride: int, at: Any) -> Any:
        """Set the layout [S, heads, L, width] with this row stride, each document at its own offset."""
        tensor.set_dim([shape.slots, heads, length, width])
        tensor.set_stride([length * stride, width, stride, 1])
        tensor.set_ragged_offset(at)
        tensor.set_uid(UID[name])
        return tensor

    def given(name: str, heads: int, width: int, stride: int, at: Any, kind: Any = io) -> Any:
        dim, strides = [shape.slots, heads, length, width], [length * stride, width, stride, 1]
        return laid(graph.tensor(dim=dim, stride=strides, data_type=kind, name=name), name, heads, width, stride, at)

    at = {name: index(f"{name}_at", shape.slots + 1, data.INT64) for name in ("q", "k", "v", "out", "stats")}
    q = given("q", n, h, shape.strides[0], at["q"])
    keys = given("k", k, h, shape.strides[1], at["k"])
    values = given("v", k, h, shape.strides[2], at["v"])
    options = {
        "attn_scale": shape.scale,
        "use_padding_mask": True,
        "seq_len_q": index("q_lengths", shape.slots, data.INT32),
        "seq_len_kv": index("k_lengths", shape.slots, data.INT32),
        "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        "diagonal_band_right_bound": 0,
    }
    if shape.grad_strides is None:
        out, stats = graph.sdpa(q=q, k=keys, v=values, generate_stats=True, name="attention", **options)
        laid(out, "out", n, h, shape.strides[3], at["out"]).set_output(True)
        laid(stats, "stats", n, 1, n, at["stats"]).set_output(True).set_data_type(data.FLOAT)
        return graph
    out = given("out", n, h, shape.strides[3], at["out"])
    place = index("grad_out_at", shape.slots + 1, data.INT64)
    grad_out = given("grad_out", n, h, shape.grad_strides[3], place)
    stats = given("stats", n, 1, n, at["stats"], data.FLOAT)
    tokens = max(_up(shape.tokens, 128), length)  # bounds the workspace, which would otherwise hold S * L tokens
    found = graph.sdpa_backward(
        q=q, k=keys, v=values, o=out, dO=grad_out, stats=stats, name="attention_backward",
        max_total_seq_len_q=tokens, max_total_seq_len_kv=tokens, **options,
    )  # fmt: skip
    for name, tensor, heads, stride in zip(("dq", "dk", "dv"), found, (n, k, k), shape.grad_strides[:3], strict=True):
        place = index(f"{name}_at", shape.slots + 1, data.INT64)
        laid(tensor, name, heads, h, stride, place).set_output(True)
    return graph


def _strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Strides:
    strides = (q.stride(0), k.stride(0), v.stride(0), out.stride(0))
    aligned = all(x.data_ptr() % 16 == 0 for x in (q, k, v, out)) and not any(stride % 8 for stride in strides)
    assert aligned, f"cuDNN reads 16 bytes at once: with row strides {strides} not all tokens are aligned to that"
    return strides


def _shape(
    q: torch.Tensor,
    k: torch.Tensor,
    docs: Documents,
    scale: float,
    strides: Strides,
    grad_strides: Strides | None = None,
) -> CudnnShape:
    tokens, heads, width = q.shape
    # Round the bound up to whole tiles: this avoids cuDNN's special case for documents of one token.
    longest = _up(docs.longest, 128)
    slots = len(docs.cu_seqlens) - 1
    return CudnnShape(q.dtype, heads, k.shape[1], width, slots, longest, tokens, scale, strides, grad_strides)


def _plan(device: torch.device, shape: CudnnShape) -> AttentionPlan:
    if (device, shape) not in _plans:
        assert not is_capturing(device), "this shape was not seen before the capture"
        _plans[device, shape] = _build(device, shape)
    return _plans[device, shape]


def _build(device: torch.device, shape: CudnnShape) -> AttentionPlan:
    if device.type == "meta":
        return AttentionPlan(None, rehearsal.library_bytes("cudnn attention", shape))
    cudnn = importlib.import_module("cudnn")
    try:
        with torch.cuda.device(device):
            graph = describe(cudnn, shape, _handle(cudnn, device), torch.cuda.get_device_capability(device))
            graph.validate()
            graph.build_operation_graph()
            # Use cuDNN's own engines only: newer packages also offer engines that Python compiles.
            graph.deselect_engines(["sdpa_fwd", "sdpa_bwd"])
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
            size = graph.get_workspace_size()
    except (RuntimeError, ValueError, NotImplementedError, cudnn.cudnnGraphNotSupportedError) as error:
        side = "forward" if shape.grad_strides is None else "backward"
        raise GraftuneError(
            f"cuDNN {cudnn.backend_version()} has no plan for attention's {side} with {shape.heads}/{shape.key_heads}"
            f" heads of {shape.width} and {shape.slots} documents of up to {shape.longest} tokens ({error})",
            fix=f"uninstall {PACKAGE} to use torch's flash attention, or install another version of it",
        ) from error
    return AttentionPlan(graph, size)


def _run(plan: AttentionPlan, device: torch.device, tensors: dict[str, torch.Tensor], docs: Documents) -> None:
    lengths = _lengths(docs)
    # Allocated for one call: 386 MiB at 8B and 8192 tokens, which other operations use between two calls. The allocator
    # or the graph's pool may hand it out again at once, because later work on this stream runs after the call. Its
    # contents are undefined; the tests fill it with NaN.
    workspace = rehearsal.workspace(max(plan.workspace, 1), device)
    if device.type == "meta":
        return
    cudnn = importlib.import_module("cudnn")
    handle = _handle(cudnn, device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    pointers = {UID[name]: tensor.data_ptr() for name, tensor in tensors.items()}
    pointers[UID["q_lengths"]] = pointers[UID["k_lengths"]] = lengths.data_ptr()
    plan.graph.execute(pointers, workspace.data_ptr(), handle=handle)


def _offsets(docs: Documents, strides: tuple[int, ...]) -> list[torch.Tensor]:
    """The offset of each document in elements, [S + 1] int64 for every row stride. A pass has a `Documents` object of
    its own, which keeps them for all layers."""
    for stride in strides:
        if stride not in docs.prepared:
            docs.prepared[stride] = docs.cu_seqlens.to(torch.int64) * stride
    return [docs.prepared[stride] for stride in strides]


def _lengths(docs: Documents) -> torch.Tensor:
    if "lengths" not in docs.prepared:
        docs.prepared["lengths"] = docs.cu_seqlens[1:] - docs.cu_seqlens[:-1]
    return docs.prepared["lengths"]


def _handle(cudnn: Any, device: torch.device) -> Any:
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _handles:
        with torch.cuda.device(device):
            _handles[index] = cudnn.create_handle()
    return _handles[index]


def _up(number: int, step: int) -> int:
    return ceil_div(number, step) * step
