"""graftune plan: predicts memory by owner and the largest micro-batch that fits; with data also steps and time.

Only headers are read. A card that is not here is planned for by its name (--gpu 4090) or by its memory.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from cyclopts import Parameter

from graftune.cli.settings import Switch, given, loaded, looked_at, positional, show_config, takes
from graftune.errors import GraftuneError
from graftune.observe.console import Console

WIDTH = 40  # of the bar


@takes(
    "base",
    "lora",
    "data",
    "optim",
    "train",
    "rl",
    "samples",
    "sample_tokens",
    "score",
    "score_records",
    "metric",
    "metric_records",
)
def plan(
    base: Annotated[str, Parameter(show_default=False)] = "",
    data: Annotated[str, Parameter(show_default=False)] = "",
    /,
    *more: Annotated[str, Parameter(name="MORE", show_default=False)],
    config: Annotated[str, Parameter(name=["--config", "-c"], show_default=False)] = "",
    gpu: Annotated[str, Parameter(show_default=False)] = "",
    memory: Annotated[str, Parameter(show_default=False)] = "",
    print_config: Switch = False,
    json: Switch = False,
    settings: Any = None,
) -> int:
    """Show how much memory training BASE would take, by owner, and what fits; with DATA also its steps and their time.
    With a reward, as for graftune rl: with the cache of the samples. Nothing is loaded.

    Parameters
    ----------
    base
        Hugging Face name or folder, or a .gguf file.
    data
        .jsonl, .json, .csv or .parquet file, for its shapes; without it every token counts as trained.
    more
        More data: all of it is read (a glob that the shell expanded).
    config
        YAML file of settings; flags override it.
    gpu
        GPU to plan for, by name (4090, A100-40, L4, T4, H100); it need not be here.
    memory
        Memory of the device to plan for, as 24GiB.
    print_config
        Print the settings as YAML and end.
    json
        Print the plan as one JSON document to stdout.
    """
    console = Console(json=json)
    flags = positional(given(settings), base=base, data=data, more=more)
    whole = loaded(config, flags, console)
    if print_config:
        return show_config(whole, console)
    whole = looked_at(whole)
    if re.fullmatch(r"\d{1,4}", memory):
        console.note(f"--memory {memory} is taken as {memory}GiB")
        memory += "GiB"

    from graftune.observe.memory import parse_bytes
    from graftune.plan import best, furthest, largest, policies_of, refusal
    from graftune.plan.cards import find
    from graftune.rl.prepare import job_of as rl_job_of
    from graftune.training.expected import expected
    from graftune.training.prepare import job_of

    named = find(gpu) if gpu else None
    if gpu and not whole.base.device.startswith("cuda"):
        if "device" in flags:
            raise GraftuneError(f"--gpu {gpu} and --device {whole.base.device} contradict each other", fix="give one")
        whole = whole.replace(device="cuda")
    learns_by_rewards = bool(whole.rl.reward)
    make = rl_job_of if learns_by_rewards else job_of
    job = make(whole, console, memory=parse_bytes(memory) if memory else 0, named=named)
    found = best(job)
    fits = {policy: largest(job, policy) for policy in policies_of(job)}
    coming = expected(job, found)
    steps = {"expected_run": coming.document() if coming else None}
    console.result(found.document() | {"largest": fits, "largest_looked_for": furthest(job)} | steps)
    if not json:
        _show(console, found, fits, furthest(job))
        missing = [] if learns_by_rewards else ["give data to see how many steps it makes and how long they take"]
        for line in coming.lines() if coming else missing:
            console.line(line)
    if coming and coming.warning:
        console.warn(coming.warning)
    if not found.fits:
        raise refusal(job, found)
    return 0


def _show(console: Console, found: Any, fits: dict[str, int], furthest: int) -> None:
    from graftune.observe.memory import human_bytes

    owners = found.owners()
    most = max(owners.values())
    rows = [[name, human_bytes(size), _bar(size, most)] for name, size in owners.items()]
    rows.append(["total", human_bytes(sum(owners.values())), ""])
    chosen = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    console.table(f"memory on {found.where}", ["owner", "bytes", "share"], rows)
    console.line(chosen)
    console.line(peak_line(found))
    if found.bytes.host > 1 << 28:
        console.line(f"pinned host memory: {human_bytes(found.bytes.host)}")
    if found.transfer:
        console.line(found.transfer)
    for note in found.notes:
        console.note(note)
    words = {0: "does not fit", furthest: f"{furthest} or more"}
    largest = [[policy, words.get(size, str(size))] for policy, size in fits.items()]
    console.table("largest micro-batch that fits", ["recompute", "tokens"], largest)


def peak_line(found: Any) -> str:
    """The predicted peak of a plan, and what has to be free for it."""
    from graftune.observe.memory import human_bytes

    measured = "torch's allocator" if found.device == "cuda" else "the process"
    return (
        f"expected peak of {measured}: {human_bytes(found.expected)}; "
        f"{human_bytes(found.needed)} of {human_bytes(found.free)} free are needed"
    )


def _bar(size: int, most: int) -> str:
    """Eighths of a character, so that small owners still show."""
    eighths = round(size / most * WIDTH * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
