"""Rows -> prompts, for models that write the answers themselves.

A row has a prompt (or question, query, instruction), as text or as a list of turns, or a conversation, whose last
answers are left out. The other columns, answers included, go to the reward functions as they are. A text becomes a user
turn of the chat template, as everywhere else. Rows without a prompt are counted by reason, as in other data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graftune.data.columns import ASKS, CHATS, EXTRAS, SYSTEMS, filled
from graftune.data.record import to_record
from graftune.data.row import Refusal
from graftune.data.source import digest_of, rows, sources
from graftune.data.turns import Message, parsed, role_of
from graftune.errors import GraftuneError
from graftune.settings.sections import DataConfig
from graftune.settings.sources import DataValue, label

_ANSWER = "answer"  # stands in for the answer that a record of other data has


@dataclass(frozen=True)
class PromptRow:
    messages: list[Message]  # that the model is given
    given: str | list[Any]  # the prompt as the data has it, for reward functions
    columns: dict[str, Any]  # the row's other columns
    row: int  # its key in the data
    place: str = ""  # of the row, as a user finds it

    @property
    def asked(self) -> str:
        """The text of the last turn, to show to a person."""
        return str(self.messages[-1]["content"] or "")


@dataclass(frozen=True)
class PromptData:
    prompts: list[PromptRow]
    refused: dict[str, list[str]]  # the places of rows that were left out, by reason
    sha256: str


def read_prompts(value: DataValue, config: DataConfig) -> PromptData:
    """Every prompt of the data; GraftuneError if there is none."""
    files, refused, found = sources(value), dict[str, list[str]](), list[PromptRow]()
    for row in rows(files, config.map, max_unpacked=config.max_unpacked):
        try:
            if isinstance(row.value, Refusal):
                raise row.value
            found += [prompt_of(row.value, row.key, row.place)] * row.times
        except Refusal as refusal:
            if config.strict:
                raise GraftuneError(str(refusal), where=f"{label(value)}, {row.place}", fix="correct the row") from None
            refused.setdefault(refusal.reason, []).append(row.place)
    if not found:
        why = f" ({max(refused, key=lambda reason: len(refused[reason]))})" if refused else ""
        raise GraftuneError(
            f"there is no row with a prompt{why}", where=label(value), fix="give rows with a prompt or messages"
        )
    return PromptData(found, refused, digest_of(files))


def prompt_of(row: dict[str, Any], key: int = 0, place: str = "") -> PromptRow:
    own = filled(row)
    name = next((name for name in (*CHATS, *ASKS) if name in own), "")
    if not name:
        raise Refusal("missing key", "a row has a prompt, a question or messages; or name the column with map")
    given = row[own[name]]
    if name in CHATS or isinstance(given, list):
        given = turns = _before_answer(parsed(given, f"in {own[name]!r}"))
        record = {"messages": [*turns, {"role": "assistant", "content": _ANSWER}]}
    else:
        extra = {other: row[own[other]] for other in EXTRAS if name == "instruction" and other in own}
        ask = {"instruction": given} if extra else {"prompt": given}
        record = ask | extra | {"response": _ANSWER}
    record |= {other: row[own[other]] for other in SYSTEMS if other in own}
    columns = {other: value for other, value in row.items() if other != own[name]}
    return PromptRow(to_record(record).messages[:-1], given, columns, key, place)


def _before_answer(turns: Any) -> list[Any]:
    """The turns up to the last one that is not the assistant's."""
    if not isinstance(turns, list):
        raise Refusal("wrong type", "a conversation must be a list of turns")
    last = max((place for place, turn in enumerate(turns) if role_of(turn) != "assistant"), default=-1)
    return turns[: last + 1]
