"""Opens what a run leaves in its folder: the adapter or model, and checkpoints.

A checkpoint is named RUN@step-200, RUN@best or RUN@last; plain RUN names one while the run has no adapter yet.

A checkpoint holds the flat arena. With the run's settings it becomes the adapter, or the whole model, of that step;
nothing is written for it. The run may train meanwhile and delete checkpoints: if one is gone when it is opened, the
folder is listed again. An open file stays readable after its name is deleted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.io.files import whole
from graftune.losses import choose
from graftune.model.arena import Arena
from graftune.model.lora import build_arena, target_names, targets_of
from graftune.session import Session, SessionParts, check_base, open_session, with_template
from graftune.settings.config import Config
from graftune.settings.sections import LOSS_SETTINGS, OF_MACHINE, LoraConfig
from graftune.settings.targets import expand_targets
from graftune.weights import checkpoint
from graftune.weights.adapter import adapter_tensors, is_adapter, load_adapter
from graftune.weights.adapter_fit import Adapter, place_adapter
from graftune.weights.base import Base, default_base, open_base, with_new_tokens
from graftune.weights.model import is_model

TRIES = 20  # listings; the run deletes a checkpoint every few seconds at most


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def trains_all(folder: Path) -> bool:
    """Whether the run in this folder trains the whole model."""
    return Config.of_run(folder).train.method != "lora"


def whole_run(folder: Path) -> dict[str, Any]:
    """Settings that open the whole model of a run, with the run's settings of data. Its template is saved with the
    model."""
    if not is_model(folder / "model"):
        raise GraftuneError("this run has no model yet", where=str(folder), fix="resume it and let it finish")
    data = Config.of_run(folder).nested()["data"]
    template = "none" if data["template"] == "none" else "auto"
    return data | {"template": template, "base": str(folder / "model")}


def adapter_folder(folder: Path) -> Path:
    """The folder of an adapter, given that folder or the run that made it."""
    run = Path(str(folder).rpartition("@")[0] or ".")
    if "@" in folder.name and not folder.exists() and is_run(run):
        raise GraftuneError(
            "names a checkpoint, and training continues from an adapter",
            where=str(folder),
            fix="export it to peft and give that folder",
        )
    if not is_run(folder):
        return folder
    if trains_all(folder):
        raise GraftuneError(
            "this run trained the whole model, not an adapter",
            where=str(folder),
            fix=f"give {folder / 'model'} as the base",
        )
    place = whole(folder / "adapter")
    if not is_adapter(place):
        raise GraftuneError("this run has no adapter yet", where=str(folder), fix="resume it and let it finish")
    return place


def with_adapter(config: Config, adapter: Adapter) -> Config:
    """The configuration of a run that starts from an adapter: rank, targets and the rest are the adapter's (asking for
    others is a contradiction), and so are its base and template where none is asked for."""
    default = LoraConfig()
    from_adapter = {}
    for name in ("rank", "alpha", "targets", "rslora", "train_norms", "new_tokens"):
        asked, has = getattr(config.lora, name), getattr(adapter.lora, name)
        same = expand_targets(asked) == has if name == "targets" else asked == has
        if not same and asked != getattr(default, name):
            raise GraftuneError(
                f"{name} is {asked!r} and the adapter's is {has!r}", where=str(adapter.folder), fix=f"leave {name} out"
            )
        from_adapter[name] = has
    data = config.data
    return config.replace(
        **from_adapter,
        adapter=str(adapter.folder),
        base=config.base.base or find_base(adapter),
        revision=config.base.revision or adapter.revision,
        template=adapter.template if data.template == "auto" else data.template,
        append_eos=data.append_eos or adapter.append_eos,
    )


def find_base(adapter: Adapter) -> str:
    """The base an adapter says it belongs to, as something open_base takes."""
    name = adapter.base_name
    if name and (Path(name).exists() or not name.startswith("/")):
        return name
    # A path from another machine or environment: the bundled base may be the same file elsewhere.
    try:
        fallback = open_base(str(default_base()))
    except GraftuneError:
        fallback = None
    if fallback is not None and fallback.sha256 == adapter.base_sha256:
        return str(fallback.path)
    raise GraftuneError(
        f"its base {name or '(none named)'} is not here", where=str(adapter.folder), fix="set base to where it is"
    )


@dataclass(frozen=True)
class RunCheckpoint:
    """The trained weights of a run at one of its steps."""

    run: Path
    config: Config  # the run's
    step: int
    name: str  # as messages show it: step 200, the best so far
    path: Path
    weights: torch.Tensor  # the flat arena
    base_sha256: str

    @property
    def trains_all(self) -> bool:
        return self.config.train.method != "lora"


def find_state(target: str) -> RunCheckpoint | None:
    """The checkpoint that a target names; None if it names something else, such as a run with its adapter."""
    run, which = split(target)
    if not is_run(run):
        return None
    if not which and (is_adapter(run / "adapter") or is_model(run / "model")):
        return None
    return _opened(run, which)


def split(target: str) -> tuple[Path, str]:
    """Split RUN@WHICH, unless a file or folder of the whole name exists."""
    found = re.fullmatch(r"(.+)@([^@/]+)", target)
    if found is None or Path(target).expanduser().exists():
        return Path(target).expanduser(), ""
    return Path(found[1]).expanduser(), found[2]


def _opened(run: Path, which: str) -> RunCheckpoint:
    root = run / "checkpoints"
    for _ in range(TRIES):
        found = checkpoint.steps(root)
        if not found:
            raise GraftuneError(
                "this run has no checkpoint yet", where=str(run), fix="wait for its first one, or resume the run"
            )
        try:
            step, name = _choose(run, which, found)
            weights, (_, identity) = checkpoint.weights_of(found[step]), checkpoint.read_state(found[step])
        except FileNotFoundError:  # deleted since it was listed
            continue
        return RunCheckpoint(
            run, Config.of_run(run), step, name, root / f"step-{step}", weights, str(identity.get("base", ""))[:64]
        )
    raise GraftuneError("its checkpoints are gone before they can be read", where=str(run), fix="try again")


def _choose(run: Path, which: str, found: dict[int, Path]) -> tuple[int, str]:
    """The step and its name. Raises FileNotFoundError if the listing is out of date."""
    there = ", ".join(f"step-{step}" for step in sorted(found))
    exact = re.fullmatch(r"step-([0-9]{1,15})", which)
    if which not in ("", "best", "last") and not exact:
        raise GraftuneError(
            f"@{which} is not a state of this run", where=str(run), fix=f"use @best, @last or one of {there}"
        )
    if exact and int(exact[1]) not in found:
        raise GraftuneError(f"has no checkpoint of step {int(exact[1])}", where=str(run), fix=f"there are {there}")
    if exact:
        return int(exact[1]), f"step {int(exact[1])}"
    last = max(found)
    best = checkpoint.read_state(found[last])[0].best_step
    if which == "last" or (not which and best < 0):
        return last, f"step {last}, the last so far"
    if best < 0:
        raise GraftuneError(
            "has no best checkpoint, since nothing has been validated", where=str(run), fix=f"use {run}@last"
        )
    if best not in found:
        raise FileNotFoundError(best)
    return best, f"step {best}, the best on validation so far"


def open_state(state: RunCheckpoint, settings: dict[str, Any]) -> Session:
    """Open the model at that step. `settings` override the run's; the run's settings of its machine are not used."""
    stored = state.config.nested()
    base = {name: value for name, value in stored["base"].items() if name not in OF_MACHINE}
    train = {name: stored["train"][name] for name in ("method", "seed", *LOSS_SETTINGS)}
    config = Config.of({**base, **stored["lora"], **stored["data"], **train, **settings}, where="settings")
    session = open_session(config)
    arena = session.parts.arena
    _check(state, session.base, arena, config.base.any_base)
    arena.weights.copy_(state.weights)
    arena.publish()
    if not state.trains_all:
        session.parts.config = session.config.replace(adapter=str(state.path))
    return session


def open_adapter(config: Config, folder: Path) -> Session:
    """Open a base with the adapter of this folder, or of this run. If the run's loss compares with its start, the
    adapter that it continued is read when the loss is first evaluated. Without one, the start was the base."""
    run = Config.of_run(folder) if is_run(folder) else config
    if run is config or not run.train.reference == config.train.reference == "start":
        return open_session(config)
    session = open_session(config.replace(reference="base"))
    if run.lora.adapter:
        parts = session.parts
        parts.config = parts.config.replace(reference="start")
        parts.loss, parts.read_start = choose(parts.config.train), partial(_read_start, Path(run.lora.adapter), parts)
    return session


def _read_start(adapter: Path, parts: SessionParts) -> torch.Tensor:
    arena = build_arena(parts.base.spec, parts.lora, torch.device("cpu"), torch.float32)
    place_adapter(load_adapter(adapter), arena, parts.base)
    return arena.weights


def state_base(state: RunCheckpoint, base: str = "", revision: str = "") -> Base:
    """The run's base with the run's template. Only the headers of its files are read."""
    config, start = state.config, Path(state.config.lora.adapter or ".")
    opened = open_base(base or config.base.base, revision or config.base.revision)
    return with_template(opened, config, load_adapter(start) if config.lora.adapter and is_adapter(start) else None)


def state_adapter(state: RunCheckpoint, base: Base, any_base: bool = False) -> Adapter:
    """The adapter at that step, as a session has it. Of the base only the tables that new tokens extend are loaded."""
    if state.trains_all:
        raise GraftuneError(
            "is a checkpoint of a run that trained the whole model, and only what such a run has left is exported",
            where=f"{state.run}@step-{state.step}",
            fix="finish the run and export it; chat and eval open its checkpoints",
        )
    config, asked = state.config, state.config.lora.resolved()
    lora = replace(asked, adapter="", targets=target_names(base.spec, targets_of(base.spec, asked)))
    wide = with_new_tokens(base, lora.new_tokens)
    arena = build_arena(wide.spec, lora, torch.device("cpu"), torch.float32)
    _check(state, base, arena, any_base)
    arena.weights.copy_(state.weights)
    tables = {
        name.removesuffix(".rows"): wide.tensors[f"{name.removesuffix('.rows')}.weight"].read(0, wide.spec.vocab)
        for name in arena.slots
        if name.endswith(".rows")
    }
    template = "none" if config.data.template == "none" or base.tokenizer.template is None else "auto"
    return Adapter(
        state.path,
        lora,
        adapter_tensors(arena, wide, tables),
        base.reference,
        state.base_sha256,
        template,
        config.data.append_eos,
        config.base.revision,
    )


def _check(state: RunCheckpoint, base: Base, arena: Arena, any_base: bool) -> None:
    where = f"{state.run}@step-{state.step}"
    check_base(base, state.base_sha256, any_base, where)
    if arena.weights.shape != state.weights.shape:
        raise GraftuneError("holds other weights than the run's settings say", where=where, fix="take another")
