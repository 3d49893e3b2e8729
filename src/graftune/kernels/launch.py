"""Where our Triton kernels run: on CUDA. Elsewhere the references beside them compute the same.

One function, so that every operation decides alike; the tests replace it (and `roomy`) to run the kernels through
Triton's interpreter on a CPU. `kernel.py` files are imported only where they run: Triton is not on every machine.
"""

from __future__ import annotations

import torch


def fused(x: torch.Tensor) -> bool:
    """Of nothing at all there is nothing to launch."""
    return x.is_cuda and x.numel() > 0


def roomy(device: torch.device) -> bool:
    """Whether weights get room for their adapters beside them (model/projection.py)."""
    return device.type == "cuda"


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that holds n: Triton's tiles have such sides."""
    return max(least, 1 << (n - 1).bit_length())
