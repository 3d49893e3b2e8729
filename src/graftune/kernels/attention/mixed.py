"""cuDNN's forward with our backward, which is faster on a few hundred tokens."""

from __future__ import annotations

import functools

from graftune.kernels.attention import kernel
from graftune.kernels.attention.cudnn_frontend import forward
from graftune.kernels.attention.kernel import grad_buffers

__all__ = ["backward", "forward", "grad_buffers"]

backward = functools.partial(kernel.backward, by_token=True)  # cuDNN's stats are [T, N]
