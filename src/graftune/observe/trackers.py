"""Experiment trackers, fed from the events of metrics.jsonl, with the metric names that Hugging Face's trainers use.

    tensorboard     event files in the run folder
    wandb, trackio  one adapter: both have wandb's calls (init, log, finish)
    mlflow          parameters and metrics of a run in the experiment `graftune`

A resumed run continues its run in the tracker, whose key is stored in the run folder.

A tracker is a callback like any other. Training does not depend on it: if it fails, for example without network, one
warning says so and the run goes on without it. A tracker that is not installed is refused before anything is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from graftune.errors import GraftuneError
from graftune.io.files import write_file
from graftune.io.json_file import read_json
from graftune.observe.events import NOT_CURVES, Event

PROJECT = "graftune"
KEYS = "tracker.json"  # in the run folder: the run's key in each tracker
# Fields of an event and the names of their metrics. Missing fields are not sent; other curves are train/NAME.
NAMES = {
    "step": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/learning_rate",
        "epoch": "train/epoch",
        "tok_s": "train/tokens_per_second",
        "tflops": "train/tflops",
        "floor_share": "train/floor_share",
        "host_idle": "train/host_idle",
    },
    "eval": {"loss": "eval/loss", "perplexity": "eval/perplexity"},
}


class Tracker(Protocol):
    """Made with the run's folder and settings and, of a resumed run, its last step (else None) and its key in the
    tracker (empty if unknown)."""

    key: str  # the run's key in the tracker; empty if it needs none to continue

    def log(self, metrics: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    key = ""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int | None, key: str):
        from torch.utils.tensorboard import SummaryWriter

        # Hides the steps after the resume, which are trained again.
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=None if step is None else step + 1)
        if step is None:
            self.writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbLike:
    """wandb, and trackio, which has the same calls. A run is continued by its id, in trackio by its name. wandb keeps
    the first values of a step; a resumed run sends the same ones again."""

    def __init__(self, module: str, folder: Path, settings: Mapping[str, Any], step: int | None, key: str):
        self.module = importlib.import_module(module)
        by = "id" if module == "wandb" else "name"
        more: dict[str, Any] = {"name": folder.name} | ({by: key, "resume": "allow"} if key else {})
        more |= {"dir": str(folder)} if module == "wandb" else {}  # or its files go to the current folder
        self.key = str(getattr(self.module.init(project=PROJECT, config=dict(settings), **more), by))

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.module.log(metrics, step=step)

    def close(self) -> None:
        self.module.finish()


class MlFlow:
    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int | None, key: str):
        self.module = importlib.import_module("mlflow")
        self.module.set_experiment(PROJECT)
        self.key = str(self.module.start_run(**({"run_id": key} if key else {"run_name": folder.name})).info.run_id)
        if not key:  # parameters of a run cannot be changed
            self.module.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.module.log_metrics(metrics, step=step)

    def close(self) -> None:
        self.module.end_run()


# By the name of their package, which is also the value of the setting and our extra.
TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], int | None, str], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": partial(WandbLike, "wandb"),
    "trackio": partial(WandbLike, "trackio"),
    "mlflow": MlFlow,
}


def check_installed(name: str) -> None:
    """Raises GraftuneError for a tracker whose package is not installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise GraftuneError(
            f"track is {name}, and the package {name} is not installed",
            fix=f'install it with: pip install "graftune[{name}]"',
        )


class Tracking:
    """The callback: opens its tracker with the first event, and closes it with the run."""

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: Mapping[str, Any],
        warn: Callable[[str], None],
        epoch_steps: Sequence[int] = (),
    ):
        """`epoch_steps`: steps of each epoch."""
        self.name, self.folder, self.settings, self.warn = name, folder, settings, warn
        self.epoch_steps = epoch_steps
        self.tracker: Tracker | None = None
        self.failed = name == "none"

    def __call__(self, event: Event) -> None:
        if self.failed:
            return
        try:
            with redirect_stdout(sys.stderr):  # stdout is for results
                self._take(event)
        except Exception as error:  # training does not depend on the service
            self.failed = True
            self.warn(f"{self.name} gets no more events of this run: {type(error).__name__}: {error}")

    def _take(self, event: Event) -> None:
        if self.tracker is None:
            self.tracker = self._opened(event)
        found = metrics_of(event)
        if "train/epoch" in found:
            found["train/epoch"] = epochs_done(event["step"], event["epoch"], self.epoch_steps)
        if found:
            self.tracker.log(found, int(event.get("step", 0)))

    def _opened(self, first: Event) -> Tracker:
        """Called at the first event in this process."""
        keys = _keys(self.folder / KEYS)
        step, key = (int(first["step"]), keys.get(self.name, "")) if first["event"] == "resume" else (None, "")
        tracker = TRACKERS[self.name](self.folder, self.settings, step, key)
        if tracker.key and tracker.key != keys.get(self.name):
            write_file(self.folder / KEYS, json.dumps(keys | {self.name: tracker.key}) + "\n")
        return tracker

    def close(self) -> None:
        tracker, self.tracker = self.tracker, None
        if tracker is None or self.failed:
            return
        try:
            with redirect_stdout(sys.stderr):
                tracker.close()
        except Exception as error:
            self.warn(f"{self.name} could not be closed: {type(error).__name__}: {error}")


def epochs_done(step: int, epoch: int, epoch_steps: Sequence[int]) -> float:
    """Completed epochs with a fraction, as Hugging Face counts them."""
    if epoch >= len(epoch_steps):
        return float(epoch)
    return epoch + (step - sum(epoch_steps[:epoch])) / epoch_steps[epoch]


def _keys(path: Path) -> dict[str, str]:
    """The run's key in each tracker; empty where the file is missing or damaged."""
    try:
        found = read_json(path)
    except (OSError, ValueError):  # the second: not JSON, or not a file
        return {}
    return {str(name): key for name, key in found.items() if isinstance(key, str)} if isinstance(found, dict) else {}


def metrics_of(event: Event) -> dict[str, float]:
    """The metrics of an event, by Hugging Face's names; other figures of a step, such as its loss's, keep their own."""
    names = NAMES.get(event["event"], {})
    if event["event"] == "step":
        names = {name: f"train/{name}" for name in event if name not in NOT_CURVES} | names
    found = {name: float(event[key]) for key, name in names.items() if isinstance(event.get(key), int | float)}
    return found | {f"eval/{name}": float(value) for name, value in (event.get("metrics") or {}).items()}
