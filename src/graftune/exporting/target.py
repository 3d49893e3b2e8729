"""Finds what is exported: a run, an adapter with its base, several adapters, or a base alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftune.data.format import ChatFormat
from graftune.data.template import usable_format
from graftune.errors import GraftuneError
from graftune.exporting.merge import Weighted
from graftune.observe.events import number, read_events
from graftune.run_folder import (
    RunCheckpoint,
    adapter_folder,
    find_base,
    find_state,
    is_run,
    state_adapter,
    state_base,
    trains_all,
    whole_run,
)
from graftune.session import check_base, with_template
from graftune.settings.config import Config
from graftune.settings.recognise import parse_weight
from graftune.settings.sections import DataConfig
from graftune.weights.adapter import is_adapter, load_adapter
from graftune.weights.adapter_fit import Adapter, fitted
from graftune.weights.base import Base, open_base


@dataclass(frozen=True)
class ExportSource:
    base: Base  # unchanged, except for the chat template
    adapters: tuple[Weighted, ...]  # fitted to the base
    data: DataConfig  # how the template is used
    name: str  # the stem of the files' names
    folder: Path  # where they go by default
    run: Path | None = None

    def __post_init__(self) -> None:
        if self.base.tokenizer.template is not None:
            self.base.tokenizer.template.checked_source()  # refused before the weights are written

    def form(self, base: Base) -> tuple[ChatFormat | None, str]:
        """The chat format for the exported tokenizer, or the reason why there is none."""
        try:
            return usable_format(base.tokenizer, self.data), ""
        except GraftuneError as error:
            return None, f"the chat template cannot be used ({error.what})"


def find(target: str, base: str, revision: str, add: Sequence[str], any_base: bool) -> ExportSource:
    path, weight = parse_weight(target)
    if not path and not base:
        raise GraftuneError("there is nothing to export", fix="give a run, an adapter or a base")
    folder, state = Path(path).expanduser(), find_state(path) if path else None
    if state is not None:
        return _of_state(state, weight, base, revision, add, any_base)
    if is_run(folder) and trains_all(folder):
        return _whole(folder, base, add, target)
    if not is_run(folder) and not is_adapter(folder):
        if base or add or weight != 1:
            raise GraftuneError("is not an adapter or run folder", where=path, fix="give one made by train or PEFT")
        opened = open_base(path, revision)
        return ExportSource(opened, (), DataConfig(), _plain_name(opened), Path.cwd())
    first = load_adapter(adapter_folder(folder))
    opened = open_base(base or find_base(first), revision or first.revision)
    check_base(opened, first.base_sha256, any_base, first.folder)
    adapters = _weighted(first, weight, add, opened, any_base)
    config = Config.of({"template": first.template, "append_eos": first.append_eos})
    opened = with_template(opened, config, first)
    inside = folder.name == "adapter" and is_run(folder.parent)
    run = folder if is_run(folder) else folder.parent if inside else None
    name = run.resolve().name if run else folder.resolve().name.removesuffix(folder.suffix if folder.is_file() else "")
    return ExportSource(opened, adapters, config.data, name, run / "export" if run else Path.cwd(), run)


def _of_state(
    state: RunCheckpoint, weight: float, base: str, revision: str, add: Sequence[str], any_base: bool
) -> ExportSource:
    """A run at one of its checkpoints, with the run's template and settings."""
    opened = state_base(state, base, revision)
    adapters = _weighted(state_adapter(state, opened, any_base), weight, add, opened, any_base)
    name = f"{state.run.resolve().name}-step-{state.step}"
    return ExportSource(opened, adapters, state.config.data, name, state.run / "export", state.run)


def _weighted(first: Adapter, weight: float, add: Sequence[str], base: Base, any_base: bool) -> tuple[Weighted, ...]:
    """The first adapter and the ones to add, with their weights, fitted to the base."""
    adapters = [(first, weight), *((_added(path, base, any_base), w) for path, w in map(parse_weight, add))]
    return tuple(Weighted(fitted(adapter, base.spec, base.tensors), w) for adapter, w in adapters)


def _added(path: str, base: Base, any_base: bool) -> Adapter:
    state = find_state(path)
    if state is not None:
        return state_adapter(state, base, any_base)
    adapter = load_adapter(adapter_folder(Path(path).expanduser()))
    check_base(base, adapter.base_sha256, any_base, adapter.folder)
    return adapter


def _whole(folder: Path, base: str, add: Sequence[str], target: str) -> ExportSource:
    """A run that trained every weight: its model is the base."""
    if base or add or parse_weight(target)[1] != 1:
        raise GraftuneError(
            "this run trained the whole model, not an adapter",
            where=str(folder),
            fix="leave out base, add and weights",
        )
    settings = whole_run(folder)
    opened = open_base(settings["base"])
    data = Config.of({"template": settings["template"], "append_eos": settings["append_eos"]}).data
    return ExportSource(opened, (), data, folder.resolve().name, folder / "export", folder)


def _plain_name(base: Base) -> str:
    name = base.path.stem if base.path.is_file() else Path(base.name).resolve().name or base.path.name
    return re.sub(r"[^\w.-]", "-", name)


def run_facts(run: Path | None) -> dict[str, Any]:
    """The facts about the training that an APR file stores."""
    if run is None or not (run / "metrics.jsonl").is_file():
        return {}
    events = read_events(run / "metrics.jsonl")
    starts = [e for e in events if e["event"] == "run_start"]
    evals = [e for e in events if e["event"] == "eval" and e.get("step")]
    losses = [(loss, e.get("epoch")) for e in evals if (loss := number(e.get("loss"))) is not None]
    loss, epoch = min(losses, key=lambda each: each[0], default=(None, None))
    facts: dict[str, Any] = {"epoch": epoch if type(epoch) is int else None, "val_loss": loss}
    if starts:
        data = starts[0].get("data")
        facts |= {"data_hash": data if isinstance(data, str) else None, "started_at": number(starts[0].get("time"))}
    return {key: value for key, value in facts.items() if value is not None}
