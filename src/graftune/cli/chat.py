"""graftune chat: talk to a run, an adapter or a base.

Messages come from a conversation on a terminal, from a pipe (one per line, each its own conversation), or from one
`--prompt`. With --compare the same message goes to base and tuned model, each keeping its own side of the conversation.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter

from graftune.cli.settings import Count, Switch, takes
from graftune.cli.talk import Talk, converse
from graftune.cli.target import open_target
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.settings.values import check_range

# Settings of data that have no meaning for a conversation.
NOT_CHATTED = (
    "data", "eval_data", "val_split", "eval_examples", "map", "max_seq_len", "train_on", "prompt_form",
    "train_reasoning", "strict", "max_unpacked",
)  # fmt: skip


@Parameter(name="*", group=Group("Sampling", sort_key=5))
@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    temperature: float = 0.0
    "0 takes the likeliest token; higher is more varied."
    top_k: Count = 0
    "Sample from the k likeliest tokens; 0: from all."
    top_p: float = 1.0
    "Sample from the likeliest tokens that together have this probability."
    seed: Count = 0
    "Seed of the sampling."
    max_new_tokens: Count = 256
    "Longest answer, in tokens."

    def check(self) -> None:
        check_range("--temperature", self.temperature, 0, 100)
        check_range("--top-k", self.top_k, 0)
        check_range("--top-p", self.top_p, most=1, above=0)
        check_range("--seed", self.seed, 0)
        check_range("--max-new-tokens", self.max_new_tokens, 1)


@takes("base", "data", omit=NOT_CHATTED)
def chat(
    target: str,
    /,
    *,
    compare: Switch = False,
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    system: Annotated[str, Parameter(show_default=False)] = "",
    json: Switch = False,
    quiet: Switch = False,
    sampling: SamplingFlags | None = None,
    settings: Any = None,
) -> int:
    """Talk to a run, an adapter or a base. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.

    Parameters
    ----------
    target
        Run folder, adapter folder, or base ("" for the bundled one).
    compare
        Show the base's answer beside the tuned one's.
    prompt
        Answer this one message and end. Without it, messages come from the terminal, or one per line from a pipe.
    system
        System message that opens the conversation.
    json
        Print one JSON object per answer: prompt, answer and, with --compare, base_answer.
    quiet
        No notes.
    """
    console = Console(json=json, quiet=quiet)
    sampling = sampling or SamplingFlags()
    sampling.check()
    if prompt is not None and not prompt.strip():
        raise GraftuneError("--prompt is blank", fix="give it a message")
    with console.working("opening the model"):
        run = open_target(
            target, settings, needs_adapter="--compare" if compare else None, console=console, task="chat"
        )
    talk = Talk(run, console, asdict(sampling), system=system, compare=compare)
    if prompt is not None:
        talk.answer(prompt)
    elif sys.stdin is None:
        raise GraftuneError("there is no input to read prompts from", fix="give one with --prompt")
    elif sys.stdin.isatty():
        return converse(talk, console)
    else:
        for line in sys.stdin:
            if line.strip():
                talk.reset()
                talk.answer(line.strip())
    return 0
