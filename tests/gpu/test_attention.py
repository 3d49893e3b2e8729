"""Every attention backend of this GPU against the reference in fp32: values, captured passes that follow changed
lengths, no host synchronisation, and the same bits where they are promised."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from graftune.kernels import attention, rehearsal
from graftune.kernels.attention import Documents, cudnn_frontend, flash
from graftune.kernels.rope.reference import added_up
from tests.kernels.test_attention_kernel import check, close, packed

pytestmark = pytest.mark.gpu
BACKENDS = ["cudnn", "mixed", "flash", "triton"]
HALVES = [torch.bfloat16, torch.float16]
HEADS, TOKENS, SLOTS, LONGEST = (8, 2, 64), 512, 6, 256
MIXES = [(200, 56, 255, 1, 0, 0), (1, 130, 256, 60, 65, 0), (256, 256, 0, 0, 0, 0)]


def need(backend: str, dtype: torch.dtype, width: int) -> None:
    lacks = {"cudnn": cudnn_frontend.lacks, "mixed": cudnn_frontend.lacks, "flash": flash.lacks}.get(backend)
    reason = lacks(torch.device("cuda"), dtype, width) if lacks else None
    if reason:
        pytest.skip(reason)


def seqlens(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")


@pytest.fixture(autouse=True)
def poisoned_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN must not count on what it finds in its workspace: another layer's sums, as a rule."""
    made = rehearsal.workspace
    # NaN as fp32 and as bf16
    monkeypatch.setattr(rehearsal, "workspace", lambda size, device: made(size, device).fill_(0xFF))


class Pass:
    """Two layers' attention over one set of documents, in packed buffers that stay where they are."""

    def __init__(self, backend: str, dtype: torch.dtype = torch.bfloat16):
        n, k, h = HEADS
        self.backend, self.scale = backend, h**-0.5
        self.inputs = packed(TOKENS, HEADS, dtype, "cuda")
        self.grad = torch.randn(TOKENS, n, h, device="cuda").to(dtype)
        self.grads = torch.empty(2, TOKENS, n + 2 * k, h, dtype=dtype, device="cuda")
        self.run(seqlens(MIXES[0]))  # plans and kernels exist before a capture

    def run(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        docs = Documents(cu_seqlens, None, LONGEST)
        for layer in self.grads:
            out, stats = attention.forward(*self.inputs, docs, self.scale, 0, self.backend)
            made = attention.grad_buffers(*self.inputs[:2], self.backend)
            views = made or layer.split([HEADS[0], HEADS[1], HEADS[1]], 1)
            attention.backward(self.grad, *self.inputs, out, stats, docs, self.scale, 0, views, self.backend)
            if made:
                counts = (HEADS[0], HEADS[1], HEADS[1])
                added = [added_up(x, n).to(dtype=layer.dtype) for x, n in zip(made, counts, strict=True)]
                torch.cat(added, 1, out=layer)
        return out


@pytest.mark.parametrize(
    "lengths",
    [(512,), (200, 56, 255, 1, 0, 0), (1, 130, 256, 60, 65, 0), (64,) * 8, (3,) * 170 + (2,), (129, 127, 128, 128)],
)
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (4, 4, 64)])
def test_every_layer_is_the_reference_s(heads, lengths):
    """Three passes on other values, each in a poisoned workspace: nothing of what lay there may reach the sums."""
    need("cudnn", torch.bfloat16, heads[2])
    for _ in range(3):
        check(lengths, heads, torch.bfloat16, "cuda", longest=512, backend="cudnn")


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(("heads", "window"), [((8, 2, 64), 0), ((32, 8, 128), 100), ((4, 1, 256), 0), ((6, 3, 40), 7)])
def test_sinks(heads, window, dtype):
    check((200, 56, 255, 1, 0), heads, dtype, "cuda", window=window, longest=256, sunk=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 4, 64), (32, 8, 128), (3, 1, 80), (9, 3, 64)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_the_reference(backend, heads, dtype):
    need(backend, dtype, heads[2])
    check((300, 1, 77, 129, 0, 513, 0), heads, dtype, "cuda", longest=600, backend=backend)


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1, 0), (1000,), (64,) * 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_documents(backend, lengths):
    need(backend, torch.bfloat16, 64)
    check(lengths, (8, 2, 64), torch.bfloat16, "cuda", backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("width", [16, 40, 64, 100, 128, 200, 256])
def test_our_kernels_take_every_width(width, dtype):
    check((150, 1, 77, 0), (4, 2, width), dtype, "cuda", backend="triton")


@pytest.mark.parametrize("window", [1, 33, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows(dtype, window):
    check((300, 1, 77, 0), (4, 2, 64), dtype, "cuda", window=window, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_pass_follows_changed_lengths(backend):
    need(backend, torch.bfloat16, HEADS[2])
    work, static = Pass(backend), seqlens(MIXES[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work.run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work.run(static)
    for lengths in (MIXES[1], MIXES[2], MIXES[0]):
        static.copy_(seqlens(lengths))
        work.grads.fill_(float("nan"))
        out.fill_(float("nan"))
        graph.replay()
        replayed, grads = out.clone(), work.grads.clone()
        work.grads.fill_(float("nan"))
        eager = work.run(seqlens(lengths))
        assert torch.equal(replayed, eager), lengths
        if backend == "triton":
            assert torch.equal(grads, work.grads), lengths
        close(grads, work.grads, torch.float16)  # the others add in whatever order the tiles come


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_never_waits_for_the_device(backend):
    need(backend, torch.bfloat16, HEADS[2])
    work, cu_seqlens = Pass(backend), seqlens(MIXES[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work.run(cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["flash", "triton"])
def test_deterministic_mode_gives_the_same_bits(backend, deterministic):
    need(backend, torch.bfloat16, HEADS[2])
    choice = attention.choose(torch.device("cuda"), torch.bfloat16, HEADS[2], True, False)
    assert choice.backend in ("flash", "triton")
    work, cu_seqlens = Pass(backend), seqlens(MIXES[0])
    runs = []
    for _ in range(3):
        work.grads.fill_(float("nan"))
        runs.append((work.run(cu_seqlens).clone(), work.grads.clone()))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_no_plan_is_built_during_a_capture(monkeypatch):
    need("cudnn", torch.bfloat16, 64)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    q, k, v = packed(192, (4, 2, 64), torch.bfloat16, "cuda")
    with pytest.raises(AssertionError, match="before the capture"):
        attention.forward(q, k, v, Documents(seqlens((192,)), None, 192), 0.11, 0, "cudnn")


def test_the_choice_says_why():
    cuda = torch.device("cuda")
    assert attention.choose(cuda, torch.float32, 64, False, False).backend == "triton"
    assert attention.choose(cuda, torch.bfloat16, 64, False, True).backend == "triton"
    assert attention.choose(cuda, torch.bfloat16, 64, False, False, capped=True).backend == "triton"
    assert attention.choose(cuda, torch.bfloat16, 60, False, False).backend == "triton"
    lacking = cudnn_frontend.lacks(cuda, torch.bfloat16, 64)
    best = attention.choose(cuda, torch.bfloat16, 64, False, False)
    assert best.backend == "cudnn" if lacking is None else (best.backend == "flash" and lacking in best.why)
