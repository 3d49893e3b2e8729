"""Opens the target of chat and eval: a run, an adapter or a base, named by one argument."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from graftune.cli.settings import given
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.settings.recognise import check_adapter, check_base, check_target


def open_target(target: str, settings: Any, needs_adapter: str | None, console: Console, task: str) -> Any:
    """Open TARGET. With --base beside it, TARGET is an adapter and --base says where its base is now.

    `needs_adapter` names the flag that makes no sense without one; `task` tells others who share the device what runs.
    """
    flags = given(settings)
    base = flags.pop("base", "")
    if base:
        check_adapter(target)
        base = check_base(base)
    else:
        target = check_target(target)

    from graftune import api
    from graftune.training import reserve

    run = (
        api.open(base, adapter=target, console=console, **flags) if base else api.open(target, console=console, **flags)
    )
    reserve.register(run, console, f"{task} {Path(target).name or 'the bundled base'}")
    adapter = run.describe().get("adapter") or ""
    if checkpoint := re.search(r"checkpoints/step-(\d+)$", adapter):
        console.note(f"taking the checkpoint of step {checkpoint[1]}")
    if needs_adapter and not adapter:
        raise GraftuneError(
            f"{target or 'the bundled base'} has no adapter to compare with",
            fix=f"give a run or adapter folder, or leave out {needs_adapter}",
        )
    return run
