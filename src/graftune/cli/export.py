"""graftune export: a run, an adapter or a base in a format that other programs take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from graftune.cli.settings import Switch, given, takes
from graftune.observe.console import Console
from graftune.settings.recognise import check_target, parse_weight
from graftune.settings.sections import OF_MACHINE

Format = Literal["peft", "merged", "gguf-lora", "gguf", "apr"]
Names = Literal["checkpoint", "text", "multimodal"]


@takes("base", omit=OF_MACHINE)
def export(
    target: str,
    /,
    *,
    to: Format,
    type: Annotated[str, Parameter(show_default=False)] = "",
    out: Annotated[str, Parameter(show_default=False)] = "",
    add: Annotated[tuple[str, ...], Parameter(show_default=False, consume_multiple=False, negative="")] = (),
    adapter_names: Annotated[Names, Parameter(show_default=False)] = "checkpoint",
    force: Switch = False,
    json: Switch = False,
    quiet: Switch = False,
    settings: Any = None,
) -> int:
    """Write a run, an adapter or a base for other programs. What is written is read back before it counts.

    Parameters
    ----------
    target
        Run folder, adapter (folder, .gguf or .apr), or base. ADAPTER=0.5 takes half of an adapter's change.
    to
        peft: adapter folder. merged: Hugging Face folder. gguf-lora: adapter for llama.cpp and Ollama. gguf: merged
        model for them. apr: adapter in one checked file.
    type
        Of gguf: F32, F16, BF16, Q8_0 (the default), Q6_K, Q5_K_M, Q4_K_M, IQ4_XS, Q4_0, Q3_K_M or MXFP4 (experts; the
        rest Q8_0). Of merged: F32, F16 or BF16; by default that of the original, or BF16 if the original is quantised.
        Of gguf-lora: F32 (the default), F16 or BF16.
    out
        Where to write; without it, into the run's export folder, or here.
    add
        One more adapter whose change is added: ADAPTER or ADAPTER=WEIGHT. May be repeated.
    adapter_names
        Of peft, for text-and-vision models: the class whose names the adapter has. checkpoint: that of the base's
        config.json. text: ...ForCausalLM. multimodal: ...ForConditionalGeneration.
    force
        Replace what is there.
    json
        Print one JSON document to stdout.
    quiet
        No notes and no progress.
    """
    path = parse_weight(target)[0]
    target = check_target(path) + target.removeprefix(path)

    from graftune import api
    from graftune.observe.memory import human_bytes
    from graftune.training.signals import raised_signals

    console = Console(json=json, quiet=quiet)
    flags = given(settings)
    with raised_signals():  # so that partial files are removed
        how: dict[str, Any] = {"kind": type, "out": out, "add": add, "force": force, "adapter_names": adapter_names}
        done = api.export(target, to, console=console, **how, **flags)
    for note in done.notes:
        console.note(note)
    console.result({**done.facts, "files": [str(file) for file in done.files]})
    if not json:
        console.line(f"{done.path} ({human_bytes(done.facts['bytes'])}, read back and checked)")
    return 0
