"""What takes the place of the GPU, its libraries and the files' contents while a step is rehearsed.

Streams and events do nothing but say which stream is current; Triton's launches do nothing, since our wrappers allocate
their results themselves; cuDNN's and cuBLASLt's plans are not built, but their workspaces are allocated where the real
code would: the memory of libraries is part of the plan. The rest of the step is the step's own code.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from graftune import kernels
from graftune.errors import GraftuneError
from graftune.kernels.attention.reference import documents
from graftune.kernels.linear_cross_entropy import reference as cross_entropy
from graftune.kernels.linear_cross_entropy.reference import to_gradient_
from graftune.kernels.nf4 import Nf4
from graftune.model.frozen import Nf4Rows, pieces
from graftune.observe.memory import forget_peak, peak_resident_bytes, resident_bytes
from graftune.plan.ledger import MAPPED, MIB, Ledger
from graftune.plan.libraries import CUBLAS, flash_bytes, index_bytes, workspace_bytes
from graftune.plan.pretend import META, wrap

WORKSPACES = "workspaces"
HOPPER = (9, 0)
ENOUGH_ROWS = 16  # of x, from which on the copy of a weight pays


@dataclass(frozen=True)
class Card:
    """The GPU that is planned for, here or elsewhere."""

    name: str
    free: int
    total: int
    capability: tuple[int, int] = HOPPER
    processors: int = 132  # some kernels divide their work, and allocate, by these
    cache: int = 60 * MIB  # emptied where algorithms are timed
    here: bool = False


@dataclass(frozen=True)
class Host:
    """The CPU's libraries. Some copy a weight that is read across its rows (x W') whole before they multiply."""

    ledger: Ledger
    copies: bool

    def inside(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        if not self.copies or func.overloadpacket not in PRODUCTS:
            return None
        a, b = [value for value in args if isinstance(value, torch.Tensor)][-2:]
        across = b.stride(0) == 1 and b.stride(-1) > 1
        if b.dim() != 2 or not across or len(a) < ENOUGH_ROWS:
            return None
        return wrap(torch.empty(b.numel(), dtype=b.dtype, device=META), torch.device("cpu"), self.ledger)


@functools.cache
def copies_operand(dtype: torch.dtype) -> bool:
    """Whether they do so on this machine: looked at, since it is in no manual (oneDNN on Arm does in fp32)."""
    weight, x = torch.ones(4096, 1024, dtype=dtype), torch.ones(128, 1024, dtype=dtype)
    forget_peak()
    before = max(resident_bytes(), peak_resident_bytes())
    y = x @ weight.t()
    return peak_resident_bytes() - before - y.nbytes > weight.nbytes // 2


class Stream:
    """Knows that it is another one, and nothing else."""

    _count = 0

    def __init__(self, *_: Any, **__: Any):
        Stream._count += 1
        self.cuda_stream = Stream._count

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class Event:
    def __init__(self, *_: Any, **__: Any): ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Device:
    """The pretended GPU: which stream is current, and the libraries' memory."""

    def __init__(self, card: Card, device: torch.device, ledger: Ledger):
        self.card, self.device, self.ledger = card, device, ledger
        self.current: Any = Stream()
        self.capturing = False
        self.spaces: dict[Any, torch.Tensor] = {}
        self.flash = torch.ops.aten._flash_attention_backward.default

    def inside(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Before an operation of torch's own: cuBLAS's memory for the stream, once; or what the operation takes for a
        moment, to be held until it is made."""
        if func is self.flash:
            return self._hold(flash_bytes(args))
        if func is torch.ops.aten.index.Tensor and (size := index_bytes(args)):
            return self._hold(size)
        if func.overloadpacket in GPU_PRODUCTS and args[0].is_cuda and self.current not in self.spaces:
            with self.ledger.owner(WORKSPACES):
                self.spaces[self.current] = self._hold(CUBLAS)
        return None

    def _hold(self, size: int) -> torch.Tensor:
        return wrap(torch.empty(size, dtype=torch.uint8, device=META), self.device, self.ledger)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(self, stream: Any) -> Iterator[None]:
        self.capturing = True
        try:
            with self.stream(stream):
                yield
        finally:
            self.capturing = False


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def asked(card: Card) -> Iterator[None]:
    """Questions to torch.cuda and cuDNN are answered as on the card."""
    with ExitStack() as held:
        _answers(lambda owner, name, value: held.enter_context(replaced(owner, name, value)), card)
        yield


def _answers(put: Callable[[Any, str, Any], object], card: Card) -> None:
    from graftune.kernels.attention import cudnn_frontend

    put(torch.cuda, "get_device_capability", lambda device=None: card.capability)
    put(torch.cuda, "get_device_name", lambda device=None: card.name)
    about = SimpleNamespace(multi_processor_count=card.processors, total_memory=card.total, name=card.name)
    about.major, about.minor, about.L2_cache_size = *card.capability, card.cache
    put(torch.cuda, "get_device_properties", lambda device=None: about)
    put(torch.cuda, "mem_get_info", lambda device=None: (card.free, card.total))
    if not card.here:  # as graftune is installed beside a GPU
        found = SimpleNamespace(backend_version=lambda: cudnn_frontend.OLDEST)
        put(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        put(cudnn_frontend, "importlib", SimpleNamespace(import_module=lambda name: found))


PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.addmm_}
GPU_PRODUCTS = {*PRODUCTS, torch.ops.aten._scaled_mm}


@contextmanager
def on(gpu: Device) -> Iterator[None]:
    """While it is on, torch.cuda, Triton, cuDNN and cuBLASLt are those of `gpu`."""
    card, real_tensor = gpu.card, torch.tensor

    def tensor(data: Any, *, device: Any = None, **how: Any) -> torch.Tensor:
        made = real_tensor(data, **how)  # torch would fill it on the real device
        return made if device is None else made.to(device)

    with ExitStack() as held:

        def put(owner: Any, name: str, value: Any) -> None:
            held.enter_context(replaced(owner, name, value))

        put(torch, "tensor", tensor)
        put(torch.cuda, "Stream", Stream)
        put(torch.cuda, "Event", Event)
        put(torch.cuda, "stream", gpu.stream)
        put(torch.cuda, "device", lambda device: nullcontext())
        put(torch.cuda, "current_stream", lambda device=None: gpu.current)
        put(torch.cuda, "current_device", lambda: 0)
        put(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
        _answers(put, card)
        if not torch.cuda.is_available():  # or torch would look for a driver at the first tensor
            put(torch.cuda, "_lazy_init", lambda: None)
        _launch_nothing(put)
        _libraries(put, gpu)
        yield


def _launch_nothing(put: Callable[[Any, str, Any], None]) -> None:
    try:
        from triton.runtime import interpreter, jit
    except ImportError:
        raise GraftuneError(
            "a plan for a GPU runs the code of its kernels, and the package triton is not installed",
            mend="pip install triton, or plan with --device cpu",
        ) from None
    packages = pkgutil.iter_modules(kernels.__path__, kernels.__name__ + ".")
    for name in [f"{package.name}.kernel" for package in packages if package.ispkg]:
        if importlib.util.find_spec(name):
            importlib.import_module(name)  # before `own_caches` looks for caches
    for kind in (jit.JITFunction, interpreter.InterpretedFunction):
        put(kind, "run", lambda *_, **__: None)


def _libraries(put: Callable[[Any, str, Any], None], gpu: Device) -> None:
    from graftune.kernels.attention import cudnn_frontend, timing
    from graftune.kernels.matmul import cublaslt

    def build(device: torch.device, shape: Any) -> Any:
        return cudnn_frontend.Plan(None, workspace_bytes(shape))

    def attend(plan: Any, device: torch.device, tensors: Any, docs: Any) -> None:
        cudnn_frontend._lengths(docs)
        with gpu.ledger.owner(WORKSPACES):
            cudnn_frontend._workspace(device, plan.workspace)

    def space(operands: Any) -> None:
        with gpu.ledger.owner(WORKSPACES):
            cublaslt._workspace(operands.a.device, gpu.current.cuda_stream)

    def fastest(shape: Any, operands: Any) -> Any:
        device = operands.a.device
        with gpu.ledger.owner(WORKSPACES):
            flush = torch.empty(cublaslt.flush_bytes(device), dtype=torch.uint8, device=device)
        space(operands)
        del flush
        return cublaslt.Plan(None, None, None)  # type: ignore[arg-type]

    put(cudnn_frontend, "_plans", {})
    put(cudnn_frontend, "_build", build)
    put(cudnn_frontend, "_run", attend)
    put(timing, "_time", lambda work: work() or 0.0)
    put(timing, "_key", lambda *asked: "")
    put(timing, "remembered", SimpleNamespace(recall=lambda kind: {}, remember=lambda *words: None))
    put(cublaslt, "_plans", {})
    put(cublaslt, "_workspaces", {})
    put(cublaslt, "_fastest", fastest)
    put(cublaslt, "_run", lambda plan, operands: space(operands))
    put(cublaslt, "_library", lambda: SimpleNamespace(cublasLtGetVersion=lambda: cublaslt.SCALES_SINCE))


@contextmanager
def own_caches(paused: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Functions that keep what they made, a table for a device, start anew: what they make is counted whoever ran
    before, and nothing that only pretends to be a table stays behind. Those without arguments are computed while the
    counting is `paused`, for real: shapes may follow from them."""

    def real(kept: Any) -> Callable[[], Any]:
        def compute() -> Any:
            with paused():
                return kept()

        return compute

    with ExitStack() as held:
        for module in [module for name, module in sys.modules.items() if name.startswith("graftune.")]:
            for name, value in list(vars(module).items()):
                if callable(getattr(value, "cache_clear", None)):
                    plain = value.__wrapped__
                    fresh = functools.cache(plain) if inspect.signature(plain).parameters else real(value)
                    held.enter_context(replaced(module, name, fresh))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def fewer_pieces(whole: bool) -> Iterator[None]:
    """Weights are read a few rows at a time, thousands of times for a large model, and rounded column by column;
    predictions are compared a few rows at a time; a CPU attends to documents one by one, and turns logits into
    gradients so. A few of these times show the same peak. `whole`: all rows are read, in at most eight pieces (a
    quantiser counts them); else two and the last."""

    def some(rows: int, width: int) -> list[tuple[int, int]]:
        every = pieces(rows, width)
        if not whole:
            return _few(every)
        size = max(every[0][1], -(-rows // 8))
        return [(start, min(start + size, rows)) for start in range(0, rows, size)]

    shapes: set[torch.Size] = set()

    def once(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        if logits.shape in shapes:
            return logits.new_zeros((), dtype=torch.float32)
        shapes.add(logits.shape)
        return to_gradient_(logits, *rest)

    with ExitStack() as held:
        held.enter_context(replaced(cross_entropy, "to_gradient_", once))
        for name, module in list(sys.modules.items()):
            if name.startswith("graftune.model.frozen.") and getattr(module, "pieces", None) is pieces:
                held.enter_context(replaced(module, "pieces", some))
            if name.startswith("graftune.kernels.attention.") and getattr(module, "documents", None) is documents:
                held.enter_context(replaced(module, "documents", lambda lengths: _few(documents(lengths))))
        yield


def _few(every: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return every if len(every) <= 3 else [*every[:2], every[-1]]


DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8, "I8": torch.int8}


class Unread:
    """Mixed into a source of rows: its shape and kind are what they were, its contents are never looked at. What
    safetensors gives out is its map of the file, not a copy; a GGUF's rows are made."""

    shape: tuple[int, ...]
    dtype_name: str
    ledger: Ledger

    def read(self, start: int, stop: int) -> torch.Tensor:
        with self._given_out:
            return torch.empty(stop - start, *self.shape[1:], dtype=self._dtype)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(ids), *self.shape[1:], dtype=self._dtype)

    def values(self) -> torch.Tensor:
        with self._given_out:
            return torch.empty(self.shape, dtype=self._dtype)

    def raw(self, start: int, stop: int) -> torch.Tensor:
        return torch.empty(stop - start, self.nbytes // self.shape[0], dtype=torch.uint8)  # type: ignore[attr-defined]

    def load(self, device: torch.device) -> Nf4Rows:
        """A checkpoint's NF4, with its scales' scales where it has them. On a CPU it stays in the map."""
        with self.ledger.owner(MAPPED) if device.type == "cpu" else nothing():
            return self._loaded(device)

    def _loaded(self, device: torch.device) -> Nf4Rows:
        count = math.prod(self.shape)
        blocks, parts = -(-count // 64), vars(self)["parts"]
        codes = torch.empty((count + 1) // 2, dtype=torch.uint8, device=device)
        if not any(name.endswith(".nested_absmax") for name in parts):
            return Nf4Rows(Nf4(self.shape, torch.bfloat16, codes, torch.empty(blocks, device=device)))
        scales = torch.empty(blocks, dtype=torch.uint8, device=device)
        groups, entries, offset = (torch.empty(n, device=device) for n in ((-(-blocks // 256),), (256,), ()))
        return Nf4Rows(Nf4(self.shape, torch.bfloat16, codes, scales, groups, entries, offset))

    @property
    def _given_out(self) -> AbstractContextManager[None]:
        return self.ledger.owner(MAPPED) if hasattr(self, "shard") else nothing()

    @property
    def _dtype(self) -> torch.dtype:
        """Plain floats of a safetensors file come as they are; blocks, and a GGUF's floats, in fp32."""
        return DTYPES.get(self.dtype_name, torch.float32) if hasattr(self, "shard") else torch.float32


def unread(source: Any, ledger: Ledger) -> Any:
    """The same source without its contents; still an instance of its own class, which loading asks for."""
    kind = type("Unread" + type(source).__name__, (Unread, type(source)), {})
    copy: Any = object.__new__(kind)
    vars(copy)["ledger"] = ledger
    for name, value in vars(source).items():
        vars(copy)[name] = unread(value, ledger) if _is_source(value) else value
    return copy


def _is_source(value: Any) -> bool:
    return hasattr(value, "gather") and hasattr(value, "dtype_name")
