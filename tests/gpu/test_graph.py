"""A captured product gives at every replay what its first, eager run gave."""

from __future__ import annotations

import pytest
import torch

from graftune.graph import Captured
from graftune.kernels import matmul

pytestmark = pytest.mark.gpu


def test_products_that_clear_their_workspace() -> None:
    """cuBLAS clears a part of its workspace before most products: that is captured with them."""
    a, b = (torch.randn(2048, 2048, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty(2048, 2048, dtype=torch.bfloat16, device="cuda")

    def work() -> None:
        with matmul.tuned():
            matmul.mm(a, b, out)

    run = Captured(work)
    run()
    first = out.clone()
    for _ in range(3):
        out.zero_()
        run()
        assert torch.equal(out, first)
