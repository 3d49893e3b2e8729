"""graftune from Python: open a model, take steps, save, generate.

    import graftune

    session = graftune.open("model.gguf", rank=8)
    data = session.prepare("data.jsonl")
    for batch in session.batches(data):
        session.forward_backward(batch)
        print(session.optim_step().loss)
    session.save("my-adapter")
    print(session.generate("Once upon a time", max_new_tokens=20)[0])

`train` is what the command line calls: a whole run with its folder, checkpoints and evaluations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graftune.config import Config
from graftune.errors import GraftuneError
from graftune.exporting import export
from graftune.run_folder import adapter_folder, find_state, is_run, open_state, trains_all, whole_run, with_adapter
from graftune.session import Session, open_session
from graftune.step.accumulator import Accumulator
from graftune.step.scaler import LossScaler
from graftune.training.launch import train
from graftune.training.loop import TrainResult
from graftune.weights.adapter import is_adapter, load_adapter

__all__ = ["Accumulator", "LossScaler", "Session", "TrainResult", "export", "open", "train"]


def open(base: str = "", *, adapter: str = "", **settings: Any) -> Session:
    """Open a base, or a run or adapter folder together with the base it belongs to. Of a run also a checkpoint, as in
    `open("runs/mine@step-200")`, `@best` or `@last`, while it trains too.

    `settings` are those of the configuration: rank, alpha, lr, device, ... An empty base is the bundled SmolLM2.
    """
    state = find_state(adapter or base) if adapter or base else None
    if state is not None:
        return open_state(state, {**settings, "base": base} if adapter and base else settings)
    folder = Path(adapter or base or ".")
    if base and not adapter and is_run(folder) and trains_all(folder):
        settings = whole_run(folder) | settings
        base, folder = settings["base"], Path(settings["base"])
    tuned = bool(adapter or base) and (is_run(folder) or is_adapter(folder))
    if adapter and not tuned:
        raise GraftuneError("is not an adapter or run folder", where=adapter, mend="give one made by train or PEFT")
    if tuned and is_run(folder):
        # What the run took for data is what its evaluation means too; its template travels with the adapter.
        data = Config.of_run(folder).nested()["data"]
        settings = {k: v for k, v in data.items() if k not in ("template", "append_eos")} | settings
    settings["base"] = base if adapter or not tuned else ""
    config = Config.of(settings, where="settings")
    if tuned:
        config = with_adapter(config, load_adapter(adapter_folder(folder)))
    return open_session(config)
