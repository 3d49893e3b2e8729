"""Shared makings of the tests: tiny random models of every family, and the real default base."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

os.environ["GRAFTUNE_CACHE"] = tempfile.mkdtemp(prefix="graftune-")  # not the user's own
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests import tiny

# A runner in the background or under nohup ignores these, and so would the processes that tests send them to.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

atexit.register(shutil.rmtree, os.environ["GRAFTUNE_CACHE"], ignore_errors=True)
if not torch.cuda.is_available():
    # Triton's interpreter runs the kernels then. Read when a kernel is defined, so before any kernel.py is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory):
    """family -> a Hugging Face folder with a tiny random model, made once a session."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny.make_folder(family, tmp_path_factory.mktemp("tiny") / family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from graftune.weights.base import default_base

    return default_base()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
