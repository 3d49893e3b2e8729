"""SwiGLU on a fused gate/up product. gate_up [T, 2F] -> [T, F]; fp32 inside."""

from graftune.kernels.swiglu.reference import backward, forward

__all__ = ["backward", "forward"]
