"""Where a GPU is there, the blocks of a GGUF are sent as they are and dequantised on it: no row is read on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftune.kernels import launch
from graftune.model.frozen import fill
from graftune.model.frozen.formats.nf4 import Nf4Rows
from graftune.model.frozen.mapped import read_to
from graftune.weights.base import default_base, open_base
from graftune.weights.gguf_io import GgufTensor
from graftune.weights.rows import RowRange

CPU = torch.device("cpu")


@pytest.fixture
def sources() -> dict[str, Any]:
    tensors = open_base(str(default_base())).tensors
    names = ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight")  # q's rows lie in another order
    found: dict[str, Any] = {name: tensors[name] for name in names}
    return found | {"first rows": RowRange(tensors[names[0]], 100)}


@pytest.fixture
def only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that passes for a GPU, and on which no row may be read as numbers."""
    monkeypatch.setattr(launch, "on_gpu", lambda place: True)
    monkeypatch.setattr(launch, "fused", lambda x: False)

    def refused(self: GgufTensor, start: int, stop: int) -> torch.Tensor:
        raise AssertionError("read on the CPU")

    monkeypatch.setattr(GgufTensor, "read", refused)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_numbers(sources, request: pytest.FixtureRequest, dtype: torch.dtype) -> None:
    wanted = {name: source.read(0, source.shape[0]) for name, source in sources.items()}
    request.getfixturevalue("only_there")
    for name, source in sources.items():
        assert source.dtype_name.startswith("Q")
        target = torch.full(source.shape, float("nan"), dtype=dtype)
        fill(target, source)
        assert torch.equal(target, wanted[name].to(dtype)), name
        assert torch.equal(read_to(source, 3, 40, CPU), wanted[name][3:40]), name


def test_a_cpu_reads_rows(sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GgufTensor, "raw")
    (first, *_) = sources.values()
    fill(torch.empty(first.shape), first)
    assert Nf4Rows.quantised(first, CPU).shape == first.shape
