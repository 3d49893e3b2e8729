"""What a process has imported or changed that does one thing with graftune and nothing else.

One process imports torch, which takes most of the time, and forks a child for each of these."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CODES = {
    # A GPU machine may have torch, numpy, safetensors and tokenizers only.
    "the hot path imports without optional packages": """
for name in "gguf cyclopts rich matplotlib yaml pyarrow huggingface_hub regex transformers peft".split():
    sys.modules[name] = None
import graftune.step.step, graftune.training.trainer, graftune.api, graftune.infer.generate
""",
    "importing and resolving change nothing of the process": """
torch.set_float32_matmul_precision("medium")
before = dict(os.environ)
import graftune.api
from graftune.runtime import resolve, set_up
resolve()
assert dict(os.environ) == before, set(os.environ) ^ set(before)
assert torch.get_float32_matmul_precision() == "medium"
""",
    "plain output loads neither rich nor matplotlib": """
for name in ("rich", "matplotlib", "cyclopts", "yaml"):
    sys.modules[name] = None
from graftune.observe import console, events, memory, plot, speed
c = console.Console()
c.table("t", ("a",), [(1,)]); c.side_by_side("s", [console.AnswerRow("p", "b")])
with c.progress(1) as p: p.update(1, loss=1.0)
""",
    "a rehearsal imports no compiler": """
from tests.plan.test_shapes import SETUPS
from graftune.plan import rehearse
compilers = ("torch._dynamo", "torch._inductor", "sympy")
before = set(sys.modules)
for of in list(SETUPS.values())[::6]:
    rehearse(of())
found = sorted(name for name in set(sys.modules) - before if name.startswith(compilers))
assert not found, found[:5]
""",
}
FORK = """
import json, os, sys, traceback
import torch
assert not any(name.startswith("graftune") for name in sys.modules)
faults = {}
for name, code in json.load(sys.stdin).items():
    read, write = os.pipe()
    if os.fork() == 0:
        fault = ""
        try:
            os.dup2(2, 1)
            exec(code, {"os": os, "sys": sys, "torch": torch})
        except BaseException:
            fault = traceback.format_exc()
        os.write(write, fault.encode()[-4000:])
        os._exit(0 if not fault else 1)
    os.close(write)
    with os.fdopen(read) as told:
        fault = told.read()
    faults[name] = fault or ("it crashed" if os.wait()[1] else "")
print(json.dumps(faults))
"""


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-c", FORK]
    done = subprocess.run(command, input=json.dumps(CODES), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("what", CODES)
def test_in_a_process_of_its_own(what: str, faults: dict[str, str]) -> None:
    assert not faults[what], faults[what]
