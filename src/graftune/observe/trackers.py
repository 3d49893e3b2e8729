"""Experiment trackers, fed from the events of metrics.jsonl, with the metric names that Hugging Face's trainers use.

    tensorboard     event files in the run folder
    wandb, trackio  one adapter: both have wandb's calls (init, log, finish)
    mlflow          parameters and metrics of a run in the experiment `graftune`

A tracker is a callback like any other. It is no part of training: one that fails later on, as when the network goes, is
said once and left, and the run goes on. One that is not installed is refused before anything is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from graftune.errors import GraftuneError
from graftune.observe.events import Event

PROJECT = "graftune"
NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}  # package of each
# Of an event, by the name that others know. What an event lacks is not sent.
STEP = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "epoch": "train/epoch",
    "tok_s": "train/tokens_per_second",
    "tflops": "train/tflops",
    "floor_share": "train/floor_share",
    "host_idle": "train/host_idle",
}
EVAL = {"loss": "eval/loss", "perplexity": "eval/perplexity"}
NAMES = {"step": STEP, "eval": EVAL}


class Tracker(Protocol):
    def log(self, metrics: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, settings: Mapping[str, Any], resumed: bool):
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))
        if not resumed:
            self.writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbLike:
    """wandb, and trackio, which has its calls."""

    def __init__(self, module: str, folder: Path, settings: Mapping[str, Any], resumed: bool):
        self.module = importlib.import_module(module)
        more = {"resume": "allow"} if resumed else {}
        more |= {"dir": str(folder)} if module == "wandb" else {}  # or its files go to where the command was typed
        self.module.init(project=PROJECT, name=folder.name, config=dict(settings), **more)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.module.log(metrics, step=step)

    def close(self) -> None:
        self.module.finish()


class MlFlow:
    def __init__(self, folder: Path, settings: Mapping[str, Any], resumed: bool):
        self.module = importlib.import_module("mlflow")
        self.module.set_experiment(PROJECT)
        self.module.start_run(run_name=folder.name)
        self.module.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.module.log_metrics(metrics, step=step)

    def close(self) -> None:
        self.module.end_run()


def check_installed(name: str) -> None:
    """Refuses a tracker whose package is not here."""
    if name != "none" and importlib.util.find_spec(NEEDS[name]) is None:
        raise GraftuneError(
            f"track is {name}, and the package {NEEDS[name]} is not installed",
            mend=f'install it with: pip install "graftune[{name}]"',
        )


def open_tracker(name: str, folder: Path, settings: Mapping[str, Any], resumed: bool) -> Tracker:
    if name == "tensorboard":
        return TensorBoard(folder, settings, resumed)
    if name == "mlflow":
        return MlFlow(folder, settings, resumed)
    return WandbLike(name, folder, settings, resumed)


class Tracking:
    """The callback: opens its tracker with the first event, and closes it with the run."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any], warn: Callable[[str], None]):
        self.name, self.folder, self.settings, self.warn = name, folder, settings, warn
        self.tracker: Tracker | None = None
        self.failed = name == "none"

    def __call__(self, event: Event) -> None:
        if self.failed:
            return
        try:
            with redirect_stdout(sys.stderr):  # stdout is for what the command was asked for
                self._take(event)
        except Exception as error:  # whatever a service raises: training does not depend on it
            self.failed = True
            self.warn(f"{self.name} is not told of this run any more: {type(error).__name__}: {error}")

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if self.tracker is None:
            self.tracker = open_tracker(self.name, self.folder, self.settings, resumed=kind == "resume")
        found = metrics_of(event)
        if found:
            self.tracker.log(found, int(event.get("step", 0)))

    def close(self) -> None:
        tracker, self.tracker = self.tracker, None
        if tracker is None or self.failed:
            return
        try:
            with redirect_stdout(sys.stderr):
                tracker.close()
        except Exception as error:
            self.warn(f"{self.name} could not be closed: {type(error).__name__}: {error}")


def metrics_of(event: Event) -> dict[str, float]:
    """What a tracker is sent of an event, by the names that others know."""
    names = NAMES.get(event["event"], {})
    return {name: float(event[key]) for key, name in names.items() if isinstance(event.get(key), int | float)}
