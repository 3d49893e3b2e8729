"""Shared makings of the tests: tiny random models of every family, and the real default base."""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["GRAFTUNE_CACHE"] = tempfile.mkdtemp(prefix="graftune-")  # not the user's own
os.environ["GRAFTUNE_LEDGER"] = os.environ["GRAFTUNE_CACHE"] + "/ledger"  # nor that of the machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.support import tiny
from tests.support.thorough import THOROUGH, thinned

# A runner in the background or under nohup ignores these, and so would the processes that tests send them to.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

atexit.register(shutil.rmtree, os.environ["GRAFTUNE_CACHE"], ignore_errors=True)
# Of a test that asks for no number of its own. GRAFTUNE_EXAMPLES=1000 looks further.
settings.register_profile("graftune", max_examples=int(os.environ.get("GRAFTUNE_EXAMPLES", "15")), deadline=None)
settings.load_profile("graftune")
if not THOROUGH:  # in a fresh clone each worker would parse every module, for constants that examples may be made of
    providers._get_local_constants = lambda: providers._local_constants  # type: ignore
# bitsandbytes, which PEFT imports, compiles functions when it is imported, transformers keeps some from being compiled,
# and torch's compiler takes three seconds to import for that: in every worker. Nothing here compiles with torch, and
# those functions compute the same without it.
torch.compile = lambda model=None, **_: model if model is not None else lambda function: function  # type: ignore
torch.compiler.disable = lambda fn=None, **_: fn if fn is not None else lambda function: function  # type: ignore
if not torch.cuda.is_available():
    # Triton's interpreter runs the kernels then. Read when a kernel is defined, so before any kernel.py is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# After the lines above, whose order is part of what they do.
rehearsed_once = importlib.import_module("tests.support.rehearsed_once")
importlib.import_module("tests.support.assembled_once").install()
plot = importlib.import_module("graftune.observe.plot")

# Files and folders of tests/, the longest first; see pytest_collection_modifyitems.
LONGEST = (
    *("dist/", "two_ways/test_resume", "page/", "exporting/test_smollm2.py", "plan/test_plan_resident.py"),
    *("parity/test_llama_cpp.py", "weights/test_hub.py", "kernels/test_whole_step.py", "parity/test_smollm2.py"),
    *("training/test_reserve.py", "parity/test_quantised.py", "bad_input/test_disk.py"),
    *(
        "kernels/test_compiles.py",
        "benchmarks/test_scale.py",
        "exporting/test_families.py",
        "plan/test_plan_choices.py",
    ),
)

IMPORTED_LATER = (
    "peft",
    "transformers.models.llama.modeling_llama",
    "matplotlib.pyplot",
    "httpx",
    "uvicorn",
    "pyarrow.parquet",
)

# Half a second at the end of every run, and hundreds end here. `draws` has it back; tests/observe/test_plot.py draws.
_loss_plot, plot.loss_plot = plot.loss_plot, lambda *_: None


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory):
    """family -> a Hugging Face folder with a tiny random model, made once a session."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny.make_folder(family, tmp_path_factory.mktemp("tiny") / family)
            set_aside()  # transformers and much of torch were imported for it
        return made[family]

    return get


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from graftune.weights.base import default_base

    return default_base()


@pytest.fixture(scope="session")
def shallow_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default base's first layers, for tests that ask for real weights and not for depth."""
    from tests.support.shallow import first_layers

    return smollm2 if THOROUGH else first_layers(smollm2, 4, tmp_path_factory.mktemp("shallow") / "smollm2.gguf")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw their loss.png, as they do outside of the tests."""
    monkeypatch.setattr(plot, "loss_plot", _loss_plot)


def set_aside() -> None:
    """A run begins by looking for what an earlier one left behind (`forget_earlier_runs`), through all that the process
    has imported, transformers and torch's compiler among it: half a second a run. What is alive now is not looked at
    again; what comes later is."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _quicker(request: pytest.FixtureRequest) -> None:
    set_aside()
    rehearsed_once.install("plan" not in request.module.__name__)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """In a fresh clone the first worker collects alone, since every module is compiled then, those of other packages
    that tests import later, too; the others find that done. The folder is among the last ones to be collected, and only
    test files are in it."""
    tests = Path(__file__).parent
    if not os.environ.get("PYTEST_XDIST_WORKER") or (tests / "two_ways" / "__pycache__").exists():
        return (yield)
    with open(__file__) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
            return (yield)
        for name in IMPORTED_LATER:
            importlib.import_module(name)
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several workers each begins with some of the longest files. What one steals from another at the end is short
    then, and no file is divided whose tests share a process or a model that takes seconds to make."""
    kept = thinned(items, named=any("::" in word for word in config.args))
    config.hook.pytest_deselected(items=sorted(set(items) - set(kept), key=lambda item: item.nodeid))
    items[:] = kept
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    long = [[item for item in items if item.nodeid.startswith(f"tests/{name}")] for name in LONGEST]
    taken = {item for group in long for item in group}
    rest, ordered = iter([item for item in items if item not in taken]), []
    for worker in range(workers):  # xdist gives each an equal number, in this order
        own = [item for group in long[worker::workers] for item in group]
        share = (len(items) - len(ordered)) // (workers - worker)
        ordered += own + list(itertools.islice(rest, max(0, share - len(own))))
    items[:] = ordered + list(rest)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or what is alive at the end is taken for a leak, and told of


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what passing tests recorded (record_property("said", ...)), from all workers."""
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
    said = [value for report in reports for name, value in getattr(report, "user_properties", ()) if name == "said"]
    for line in sorted(set(map(str, said))):
        terminalreporter.write_line(line)
