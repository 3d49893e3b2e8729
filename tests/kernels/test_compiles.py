"""What a step launches on a Hopper card compiles for it: the interpreter, which runs these kernels here, takes more.

Without a GPU one setting of each kind is compiled, and of launches that differ in alignment alone one; `make gpu-test`,
and GRAFTUNE_COMPILE=all anywhere, compile all.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.kernels.compiling import SETTINGS

OTHER_SHAPES = {"short", "qk norm, bias", "blocks, more", "fp8, 8B", "8B, rank 32"}
ALL = torch.cuda.is_available() or os.environ.get("GRAFTUNE_COMPILE") == "all"
TAKEN = [name for name in SETTINGS if ALL or name not in OTHER_SHAPES]
QUANTISED = [name for name in TAKEN if name.startswith(("nf4", "fp8", "blocks"))]


@pytest.mark.parametrize("settings", [sorted(set(TAKEN) - set(QUANTISED)), QUANTISED], ids=["floats", "quantised"])
def test_every_kernel_of_a_step_compiles(settings: list[str]) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiling", *([] if ALL else ["--aligned"]), *settings]
    done = subprocess.run(command, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
