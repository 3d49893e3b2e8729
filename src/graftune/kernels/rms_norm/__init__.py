"""RMS norm over the last dimension. x [..., D], weight [D]; fp32 inside, result in x's dtype."""

from graftune.kernels.rms_norm.reference import backward, forward

__all__ = ["backward", "forward"]
