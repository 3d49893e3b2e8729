"""What a step launches on a Hopper card compiles for it: the interpreter, which runs these kernels here, takes more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kernels.compiling import SETTINGS

QUANTISED = [name for name in SETTINGS if name.startswith(("nf4", "fp8", "blocks"))]


@pytest.mark.parametrize("settings", [sorted(set(SETTINGS) - set(QUANTISED)), QUANTISED], ids=["floats", "quantised"])
def test_every_kernel_of_a_step_compiles(settings: list[str]) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling", *settings], env=plain, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
