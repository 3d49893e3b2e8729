"""A base in host memory, or gathered by NCCL from one rank, on CUDA: blocks are fetched on a stream of their own inside
the captured step. What is computed is what a resident base computes, to the bit, and no step waits for the device."""

from __future__ import annotations

import pytest
import torch

from graftune.batch import Example
from graftune.model.bundles import Bundles, BundleStorage, HostMemory
from graftune.settings.sections import LoraConfig
from graftune.step.evaluate import evaluate
from tests.dist.sharded import buffer_bytes, kept_bytes
from tests.gpu.test_quantised import base_of, trained
from tests.support import quantised

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LORA = LoraConfig(rank=4, alpha=8.0)
KINDS = [("nf4", ""), ("Q4_K", "Q6_K"), ("bf16", ""), ("fp8", "")]


@pytest.fixture(scope="module")
def gathered():
    """A rank's parts, of one rank, gathered by NCCL."""
    from benchmarks.step import alone

    from graftune.dist.shard import shards_of

    world = alone()
    world.attach(CUDA)
    assert world.captured
    yield lambda on_host=False: shards_of(world, CUDA, on_host=on_host)
    world.leave()


def made(kind: str, table: str, layers: int, storage: BundleStorage | None) -> quantised.oracle.Ours:
    """bf16 and fp8: of the same values as the nf4 case has."""
    base, base_dtype = base_of("nf4" if kind in ("bf16", "fp8") else kind, table, layers)
    return quantised.placed(
        base, LORA, kind if kind in ("bf16", "fp8") else base_dtype, "cuda", torch.bfloat16, storage=storage
    )


def steps(
    kind: str, table: str, layers: int, storage: BundleStorage | None, graph: bool = True, recompute: str = "none"
):
    """Figures and weights of six captured steps; `trained` lets no step after the first wait for the device."""
    torch.use_deterministic_algorithms(True)
    try:
        ours = made(kind, table, layers, storage)
        figures, weights, loop = trained(ours, 6, graph=graph, deterministic=True, recompute=recompute)
    finally:
        torch.use_deterministic_algorithms(False)
    assert loop.captures == (1 if graph else 0)
    assert isinstance(ours.decoder.bundles, Bundles) is (storage is not None)
    return figures, weights


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize(("kind", "table"), KINDS)
def test_captured_from_host_memory_is_resident_bit_for_bit(kind, table, layers):
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 units")
    want = steps(kind, table, layers, None)
    for graph in (True, False):
        got = steps(kind, table, layers, HostMemory(CUDA), graph)
        assert got[0] == want[0] and torch.equal(got[1], want[1])


@pytest.mark.parametrize("recompute", ["selective", "full", "offload"])
def test_recomputing_reads_a_block_within_its_visit(recompute):
    want, got = (steps("nf4", "", 5, storage, recompute=recompute) for storage in (None, HostMemory(CUDA)))
    assert got[0] == want[0] and torch.equal(got[1], want[1])


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize(("kind", "table"), KINDS[:3])
def test_gathered_by_nccl_inside_the_graph_is_resident_bit_for_bit(kind, table, on_host, gathered):
    want, got = (steps(kind, table, 5, storage) for storage in (None, gathered(on_host)))
    assert got[0] == want[0] and torch.equal(got[1], want[1])


def test_an_evaluation_between_replays_leaves_them_what_they_need():
    """Forward passes end with other blocks in the buffers than a replay begins with."""
    examples = [Example([5, 6, 7, 8, 9, 10], [False, False, True, True, True, True])]
    found = []
    for storage in (None, HostMemory(CUDA)):
        ours, seen = made("nf4", "", 5, storage), []
        for _ in range(2):
            figures, _, _ = trained(ours, 3, graph=True)
            seen += [figures, evaluate(ours.decoder, examples, capacity=64, backend="flash").loss]
            seen.append(ours.arena.weights.clone())
        found.append(seen)
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want) if isinstance(got, torch.Tensor) else got == want


def test_pinned_memory_takes_no_more_than_the_bytes():
    ours = made("nf4", "", 5, HostMemory(CUDA))
    bundles = ours.decoder.bundles
    assert isinstance(bundles, Bundles)
    assert all(kept.is_pinned() for bundle in bundles.bundles.values() for kept in bundle.kept)
    frozen = quantised.frozen_bytes(ours.decoder)
    assert kept_bytes(bundles) < 1.05 * frozen and buffer_bytes(bundles) < frozen
