"""graftune from Python: open a model, take steps, save, sample; or train and export as the command line does.

    import graftune

    session = graftune.open("model.gguf", rank=8)
    data = session.prepare("data.jsonl")
    for batch in session.batches(data):
        session.forward_backward(batch)
        print(session.optim_step().loss)
    session.save_adapter("my-adapter")
    print(session.generate("Once upon a time", max_new_tokens=20)[0])

A session resolves `auto` as a run does: device, dtypes and learning rate when it is opened, the tokens of a step by
the data and memory (recompute and the size of a micro-batch) by a plan when training begins, so that evaluation and
chat need no memory for training.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from graftune.data.dataset import Dataset
from graftune.data.memory import as_value
from graftune.errors import GraftuneError
from graftune.exporting import Exported
from graftune.exporting import export as export_target
from graftune.losses import LOSSES, Loss
from graftune.observe.console import Console
from graftune.observe.events import Event
from graftune.observe.memory import free_bytes
from graftune.plan import card_here
from graftune.rl import RL
from graftune.run_folder import (
    adapter_folder,
    find_state,
    is_run,
    open_adapter,
    open_state,
    trains_all,
    whole_run,
    with_adapter,
)
from graftune.runtime import device_of, set_up
from graftune.session import Batch, Sample, Session, StepStats, arguments, open_session
from graftune.settings import auto
from graftune.settings.config import Config, leaves
from graftune.settings.keywords import Settings
from graftune.settings.sections import LOSS_SETTINGS, LossName
from graftune.step.accumulator import Accumulator
from graftune.step.evaluate import EvalResult
from graftune.step.scaler import LossScaler
from graftune.training import launch
from graftune.training.prepare import plan_session
from graftune.training.run import TrainResult
from graftune.weights.adapter import is_adapter, load_adapter

__all__ = [
    "Accumulator",
    "Batch",
    "Config",
    "Dataset",
    "EvalResult",
    "Exported",
    "LossScaler",
    "Sample",
    "Session",
    "StepStats",
    "TrainResult",
    "export",
    "open",
    "train",
]


def open(
    base: str | os.PathLike[str] = "",
    *,
    adapter: str | os.PathLike[str] = "",
    loss: LossName | Loss | None = None,
    quiet: bool = False,
    console: Console | None = None,
    **settings: Unpack[Settings],
) -> Session:
    """Open a base, or a run or adapter folder together with the base it belongs to. A checkpoint of a run is opened by
    `open("runs/mine@step-200")`, `@best` or `@last`, also while the run trains. An empty base is the bundled SmolLM2.

    `settings` are those of docs/settings.md. `loss` is one of its names, or an object of a class of your own that
    derives from `graftune.losses.Loss`. The values that `auto` resolves to are printed on stderr, unless `quiet`.

    Example:
        session = graftune.open("model.gguf", rank=8, lr=1e-4)
        print(session.chat([{"role": "user", "content": "Hi"}], max_new_tokens=20))
    """
    console = console or Console(quiet=quiet)
    given = _settings(settings) | ({"loss": loss} if isinstance(loss, str) else {})
    device = device_of(str(given.get("device", "auto")))
    for note in set_up(device):
        console.note(note)
    # Measured before anything is loaded: a plan counts the base too.
    card = card_here(device) if device.type == "cuda" else None
    free = free_bytes(device) if device.type == "cpu" else 0
    session = _opened(arguments.path_text(base, "base"), arguments.path_text(adapter, "adapter"), given)
    parts = session.parts
    parts.say, session.feed.planner = console.note, functools.partial(plan_session, card=card, free=free)
    session._use_loss(None if isinstance(loss, str) else loss)
    console.note(f"device: {session.runtime.describe()}; attention: {parts.attention.backend}")
    console.note(f"frozen weights: {parts.placement.describe()}")
    if given.get("lr", "auto") == "auto":
        own = LOSSES[session.config.train.loss].lr
        console.note(auto.explanation(Config(), session.config, session.base.spec.parameters, own))
    if note := session.tokenizer.refused_template:
        console.note(note)
    return session


def _opened(base: str, adapter: str, settings: dict[str, Any]) -> Session:
    state = find_state(adapter or base) if adapter or base else None
    if state is not None:
        return open_state(state, {**settings, "base": base} if adapter and base else settings)
    folder = Path(adapter or base or ".")
    if base and not adapter and is_run(folder) and trains_all(folder):
        settings = whole_run(folder) | settings
        base, folder = settings["base"], Path(settings["base"])
    tuned = bool(adapter or base) and (is_run(folder) or is_adapter(folder))
    if adapter and not tuned:
        raise GraftuneError("is not an adapter or run folder", where=adapter, fix="give one made by train or PEFT")
    if tuned and is_run(folder):
        # The run's settings of data and loss hold for its evaluation too; its template is saved with the adapter.
        stored = Config.of_run(folder).nested()
        kept = {k: v for k, v in stored["data"].items() if k not in ("template", "append_eos")}
        settings = kept | {name: stored["train"][name] for name in LOSS_SETTINGS} | settings
    config = Config.of(settings | {"base": base if adapter or not tuned else ""}, where="settings")
    if not tuned:
        return open_session(config)
    return open_adapter(with_adapter(config, load_adapter(adapter_folder(folder))), folder)


def train(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    base: str | os.PathLike[str] = "",
    adapter: str | os.PathLike[str] = "",
    loss: LossName | None = None,
    callbacks: Sequence[Callable[[Event], object]] = (),
    resume: str | os.PathLike[str] | None = None,
    console: Console | None = None,
    overrides: dict[str, Any] | None = None,
    **settings: Unpack[Settings],
) -> TrainResult:
    """Train a whole run in a folder of its own, as `graftune train` does. `config` is a Config, a dict of settings, or
    a YAML file; `settings` override it. `resume` is the folder of a run to go on with. With `reward` it is a run of
    reinforcement learning, as `graftune rl`.

    Each of `callbacks` is called with every event of the run's log, a dict with `event` (step, eval, sample, run_end,
    ...) and its figures. One that returns "stop" ends the run after a checkpoint, as Ctrl-C does.

    Example:
        result = graftune.train(base="model.gguf", data=[{"prompt": "Say 1", "response": "one"}], val_split=0.0)
        print(result.folder, result.steps)
    """
    _check_callbacks(callbacks)
    named = {"base": arguments.path_text(base, "base"), "adapter": arguments.path_text(adapter, "adapter")}
    given = _settings(settings) | {name: value for name, value in (*named.items(), ("loss", loss)) if value}
    folder = None if resume is None else arguments.path_text(resume, "resume")
    if config is None and folder is not None:
        whole = Config.of_run(folder)
    elif config is None:
        whole = Config.of(given, where="settings")
    else:
        if isinstance(config, Mapping):
            config = Config.of(_settings(config), where="settings")
        whole = config if isinstance(config, Config) else Config.load(arguments.path_text(config, "config"))
        whole = whole.replace(**given) if given and folder is None else whole
    kind, changed = RL if whole.rl.reward else launch.TRAINING, {**(overrides or {}), **given}
    return launch.train(whole, console=console, resume=folder, overrides=changed, callbacks=callbacks, kind=kind)


def export(
    target: str | os.PathLike[str],
    to: str,
    *,
    kind: str = "",
    out: str | os.PathLike[str] = "",
    base: str | os.PathLike[str] = "",
    revision: str = "",
    any_base: bool = False,
    add: Sequence[str] = (),
    force: bool = False,
    adapter_names: str = "checkpoint",
    console: Console | None = None,
) -> Exported:
    """Write a run, an adapter or a base for other programs. `to` is peft, merged, gguf-lora, gguf or apr; `kind` is a
    type such as Q8_0 (or, merged, BF16); `add` are further adapters, each PATH or PATH=WEIGHT, whose changes are added.
    `adapter_names` (of peft): the class whose names the adapter has, checkpoint, text or multimodal.

    Example:
        print(graftune.export("runs/mine", "gguf", kind="Q8_0").path)
    """
    return export_target(
        arguments.path_text(target, "target"),
        to,
        kind=kind,
        out=arguments.path_text(out, "out"),
        base=arguments.path_text(base, "base"),
        revision=revision,
        any_base=any_base,
        add=add,
        force=force,
        adapter_names=adapter_names,
        console=console,
    )


def _check_callbacks(given: Any) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(callable(one) for one in given):
        raise GraftuneError(f"callbacks is {given!r}", fix="give a list of functions that take an event")


def _settings(given: Any) -> dict[str, Any]:
    """Keyword settings as plain values: paths as text, records as the path of the file they were written to."""
    plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}
    return plain | {name: as_value(plain[name]) for name in ("data", "eval_data") if name in plain}


def _shown(verb: Any) -> None:
    """Write the settings out in a verb's signature, for help() and for completion in a notebook."""
    signature = inspect.signature(verb)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    names = {p.name for p in own}
    more = [
        inspect.Parameter(leaf.name, inspect.Parameter.KEYWORD_ONLY, default=leaf.default, annotation=leaf.type)
        for leaf in leaves()
        if leaf.name not in names
    ]
    verb.__signature__ = signature.replace(parameters=[*own, *more])


_shown(open)
_shown(train)
