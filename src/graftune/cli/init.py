"""graftune init: looks at a base and its data, and writes a commented YAML file of settings for them.

The file has the settings that users change most, each with its value and a reason; all others keep their defaults.
`auto` stays `auto`, so that the file still fits when the data grows; the comment names the value it has now.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from graftune.cli.data import show_data
from graftune.cli.plan import peak_line
from graftune.cli.settings import Switch, given, looked_at, positional, takes
from graftune.errors import GraftuneError, one_line
from graftune.io.files import write_file
from graftune.io.yaml_file import HEADER
from graftune.observe.console import Console
from graftune.settings import auto
from graftune.settings.config import Config

EXAMPLES = 3  # whose masks are shown
COLUMN = 34  # where comments begin
ENDING = """
# Relative paths start from the folder where graftune runs.
# docs/settings.md lists all settings; those not named here keep their defaults.
"""


@takes(
    "base",
    "data",
    omit=("base", "data", "base_on", "embedding_on", "shard_base", "compute_dtype", "threads", "any_base"),
)
def init(
    base: Annotated[str, Parameter(show_default=False)] = "",
    data: Annotated[str, Parameter(show_default=False)] = "",
    /,
    *more: Annotated[str, Parameter(name="MORE", show_default=False)],
    out: str = "graftune.yaml",
    force: Switch = False,
    json: Switch = False,
    settings: Any = None,
) -> int:
    """Look at BASE and DATA, show the mask of three examples, write a commented YAML file of settings, and state the
    steps, time and memory to expect. No weight is loaded.

    Parameters
    ----------
    base
        Hugging Face name or folder, or a .gguf file.
    data
        .jsonl, .json, .csv or .parquet file, a folder or glob of them, or a Hub data set.
    more
        More data: all of it is read (a glob that the shell expanded).
    out
        File to write.
    force
        Replace the file if it exists.
    json
        Print what was found and written as one JSON document to stdout.
    """
    console, file = Console(json=json), Path(out).expanduser()
    _check_file(file, force)
    asked = Config.of(positional(given(settings), base=base, data=data, more=more))
    whole = looked_at(asked)
    dataset, tokenizer = show_data(whole, console, EXAMPLES)

    from graftune.data.preview import summary_json
    from graftune.weights.describe import base_facts

    job, plan, coming = _planned(whole, console)
    facts, lines = base_facts(job.base), coming.lines() if plan else coming.lines()[:1]
    lines.append(peak_line(plan) if plan else "memory and time are predicted on CUDA and on CPUs only")
    reasons = _reasons(facts, dataset.summary, job, plan)
    write_file(file, _text(asked, job.config.train.epochs, reasons, lines, out))
    console.result(
        {"file": str(file), "base": facts, "data": summary_json(dataset, tokenizer, EXAMPLES)}
        | {"expected_run": coming.document(), "plan": plan.document() if plan else None}
    )
    if not json:
        for line in lines:
            console.line(line)
    console.note(f"wrote {file}; train with: graftune train -c {shlex.quote(str(file))}")
    return 0


def _check_file(file: Path, force: bool) -> None:
    if file.is_dir():
        raise GraftuneError("is a folder", where=str(file), fix="give --out the name of a file")
    if file.exists() and not force:
        fix = "give another name with --out, or replace it with --force"
        raise GraftuneError("exists already", where=str(file), fix=fix)
    if not file.parent.is_dir():
        fix = "make the folder, or give another name with --out"
        raise GraftuneError("is in a folder that does not exist", where=str(file), fix=fix)


def _planned(config: Config, console: Console) -> tuple[Any, Any, Any]:
    """The job, with more epochs where the data makes too few steps; its plan (None on a device whose memory is not
    planned); and what to expect of the run."""
    from graftune.data.sample import sample_for
    from graftune.losses import choose
    from graftune.plan import best, refusal
    from graftune.runtime import device_of
    from graftune.tokenizer.template import today
    from graftune.training.expected import expected
    from graftune.training.prepare import PLANNED_ON, job_of

    is_planned = device_of(config.base.device).type in PLANNED_ON
    # Steps and learning rate do not depend on the device.
    device = config.base.device if is_planned else "cpu"
    date = config.data.date or today().isoformat()  # as the data was shown with
    config = config.replace(
        device=device, date=date, data=config.data.data or str(sample_for(choose(config.train).data.name))
    )
    job = job_of(config, console)
    plan = best(job)
    if is_planned and not plan.fits:
        raise refusal(job, plan)
    coming = expected(job, plan)
    if coming is not None and coming.warning:
        epochs = math.ceil(config.train.epochs * auto.TOO_FEW / coming.steps)
        return _planned(config.replace(epochs=epochs), Console(silent=True))
    return job, plan if is_planned else None, coming


def _reasons(facts: dict[str, Any], summary: Any, job: Any, plan: Any) -> dict[str, dict[str, str]]:
    """The settings in the file, by the heading they stand below, each with its reason. `facts`: of the base; `summary`:
    of the data."""
    chosen = job.config
    size, lora = f"{facts['parameters']:,} parameters", chosen.lora.resolved()
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.kinds.items())
    long = summary.needed > summary.max_seq_len
    cut = "set this to that number to keep them whole" if long else "all fit"
    usual = Config().train.epochs
    few = f"{usual:g} make fewer than {auto.TOO_FEW} steps" if chosen.train.epochs > usual else "1 on large data"
    micro = f"0: as many as fit, {plan.capacity} here" if plan else "0: as many as fit"
    recompute = f"auto: {plan.recompute} here, the least that fits" if plan else "auto: none here"
    held = len(job.validation)
    return {
        "the base": {
            "base": f"{facts['architecture']}, {size}, context {facts['context']}",
            "base_dtype": f"auto: {job.placement.describe()}",
            "device": f"auto: {job.runtime.device if plan else 'the best there is'} here",
        },
        "the data": {
            "data": f"{summary.rows} rows ({kinds}); {summary.examples} examples, {summary.tokens} tokens",
            "max_seq_len": f"0: {summary.max_seq_len} here; the longest example has {summary.needed} tokens: {cut}",
            "train_on": f"trained: {summary.supervised_share:.0%} of the tokens, as the masks that init showed",
            "template": f"auto: {summary.template or 'none is needed'}",
            "val_split": f"{held} examples are held out, {len(job.training)} are trained on",
        },
        "the adapter": {
            "rank": "suits most tasks; 8 saves memory, 64 learns more from large data",
            "alpha": f"0: twice the rank, so {lora.alpha:g}",
            "targets": "every projection of every layer; qv is smaller and learns less",
        },
        "the run": {
            "lr": auto.explanation(chosen.replace(lr="auto"), chosen, facts["parameters"]),
            "epochs": f"passes over the data; {few}",
            "tokens_per_step": auto.explanation(chosen.replace(tokens_per_step="auto"), chosen, facts["parameters"]),
            "tokens_per_micro_batch": micro,
            "recompute": recompute,
            "patience": "evaluations without improvement before the run stops; the best checkpoint is kept",
            "out": "empty: a new folder below runs/",
        },
    }


def _text(asked: Config, epochs: float, reasons: dict[str, dict[str, str]], lines: list[str], out: str) -> str:
    """The file: the settings that have a reason, and those that were asked for. `epochs`: of the planned run."""
    import yaml

    values, defaults = asked.flat() | {"epochs": epochs}, Config().flat()
    named = {name for group in reasons.values() for name in group}
    others = {name: "as given to graftune init" for name, value in asked.flat().items() if value != defaults[name]}
    if left := {name: why for name, why in others.items() if name not in named}:
        reasons = reasons | {"also given": left}
    text = HEADER + f"# Written by graftune init. Train with: graftune train -c {one_line(shlex.quote(out))}\n"
    text += "".join(f"# {one_line(line)}\n" for line in lines)
    for title, group in reasons.items():
        text += f"\n# {title}\n"
        for name, why in group.items():
            why = others.get(name, why) if name not in ("base", "data") else why
            value = yaml.safe_dump([values[name]], default_flow_style=True, width=10**6).strip()[1:-1]
            text += f"{f'{name}: {value}':<{COLUMN}}  # {one_line(why)}\n"
    return text + ENDING
