"""What a step launches on a Hopper card compiles for it: the interpreter, which runs these kernels here, takes more.

Without a GPU `make test` compiles one kernel of each folder that a few settings use, with most of its flags, and
`make test-all` each kernel.
`make gpu-test`, and GRAFTUNE_COMPILE=all anywhere, compile every signature of every setting.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from tests.support.thorough import THOROUGH

FEW = ["bf16", "nf4", "delta rule", "sampling"]
MORE = [
    "dropout, norms, clipped by layer", "convolutions", "every weight", "blocks, floats", "fp8", "options of attention",
    "heads of 512",
]  # fmt: skip
ALL = torch.cuda.is_available() or os.environ.get("GRAFTUNE_COMPILE") == "all"


def test_kernels_of_a_step_compile() -> None:
    few = ["--distinct", *FEW, *MORE] if THOROUGH else ["--one-each", *FEW]
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiling", *([] if ALL else few)]
    done = subprocess.run(command, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
