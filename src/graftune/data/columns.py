"""Decides which column of a row holds what, by name, once for each set of names, and notes everything unusual.

Names are compared without capitals, spaces and hyphens. A pair that data sets agree on (prompt/response,
question/answer ...) is taken before other combinations; where two pairs fit, the row is refused and `map` is named
rather than one of them guessed. Preference data looks like answers with something beside them, so it is looked for
first: training on rejected answers would be the worst of silent mistakes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

from graftune.data.row import plain, quoted
from graftune.errors import GraftuneError

Kind = Literal["messages", "conversations", "alpaca", "prompt/response", "text"]

CHATS = ("messages", "conversations", "conversation")
ASKS = ("prompt", "question", "query", "instruction")
ANSWERS = ("response", "completion", "answer", "output")
PAIRS = (
    ("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("query", "response"),
    ("instruction", "output"), ("instruction", "response"),
)  # fmt: skip
EXTRAS = ("input", "context")  # what an instruction is about (alpaca's, dolly's)
SYSTEMS = ("system", "system_prompt")
WEIGHT = "loss_weight"  # not `weight`, which may be anything: a person's, a parcel's
KNOWN = frozenset((*CHATS, *ASKS, *ANSWERS, *EXTRAS, *SYSTEMS, WEIGHT, "text", "tools", "history"))
# the names that `map` may give to columns
TARGETS = tuple(sorted({*KNOWN, "chosen", "rejected", "label"} - {"conversation", "context", "system_prompt"}))
EXPECTED = "prompt/response, question/answer, instruction/output, messages, conversations or text"

_BETTER = {"chosen", "preferred", "chosen_response", "response_chosen", "preferred_response", "preferred_output",
           "response_0", "response_a", "response_j"}  # fmt: skip
_WORSE = {"rejected", "rejected_response", "response_rejected", "dispreferred", "non_preferred_output", "response_1",
          "response_b", "response_k"}  # fmt: skip
MEDIA = {"image": "images", "images": "images", "audio": "audio", "audios": "audio", "video": "video",
         "videos": "video"}  # fmt: skip
LABELS = ("label", "kto_tag")
PREFERENCE, RATED = "preference data", "answers rated good or bad (KTO)"


@dataclass(frozen=True)
class ColumnPlan:
    """Columns by their own names, "" where there is none. `refusal` is (reason, detail) of rows with these columns."""

    kind: Kind = "text"
    ask: str = ""  # the prompt; in chats the list of turns, in texts the text
    answer: str = ""
    extra: str = ""
    system: str = ""
    tools: str = ""
    history: str = ""
    weight: str = ""  # of the row's loss
    label: str = ""
    media: tuple[str, ...] = ()  # columns that nothing reads: a row with something in one of them is refused
    notes: tuple[str, ...] = ()
    refusal: tuple[str, str] | None = None


def normal(name: object) -> str:
    return str(name).strip().lower().replace(" ", "_").replace("-", "_")


def filled(row: dict[str, Any]) -> dict[str, str]:
    """The row's names of the columns that are not null, by their normal names."""
    return {normal(name): name for name, value in row.items() if value is not None}


def plan_for(row: dict[str, Any]) -> ColumnPlan:
    """How to read the row. Columns that are null do not count, unless nothing is left without them."""
    if None in row.values():
        plan = _plan(tuple(name for name, value in row.items() if value is not None))
        if plan.refusal is None:
            return plan
    return _plan(tuple(row))


@functools.lru_cache(maxsize=4096)
def _plan(names: tuple[str, ...]) -> ColumnPlan:
    own: dict[str, str] = {}
    for name in names:
        if normal(name) not in own or name == normal(name):
            own[normal(name)] = name
    worse = sorted(_WORSE & own.keys())
    if worse and _BETTER & own.keys():
        return ColumnPlan(refusal=(PREFERENCE, f"it has the column {quoted(own[worse[0]])}"))
    system = next((own[name] for name in SYSTEMS if name in own), "")
    found = _chat(own) or _pair(own) or _text(own)
    if found.refusal is not None:
        return found
    tools, history = own.get("tools", ""), own.get("history", "") if found.kind != "text" else ""
    if found.kind == "text":
        system = tools = ""
    weight = own.get(WEIGHT, "")
    used = {found.ask, found.answer, found.extra, system, tools, history, weight}
    unused = [f"column not used: {plain(name)}" for name in names if name not in used]
    notes = [f"column {quoted(name)} read as {normal(name)}" for name in used if name and name != normal(name)]
    return replace(
        found,
        system=system,
        tools=tools,
        history=history,
        weight=weight,
        label=next((own[name] for name in LABELS if name in own), ""),
        media=tuple(name for name in names if normal(name) in MEDIA and name not in used),
        notes=(*unused, *found.notes, *sorted(notes)),
    )


def _chat(own: dict[str, str]) -> ColumnPlan | None:
    for name in CHATS:
        if name in own:
            return ColumnPlan("messages" if name == "messages" else "conversations", own[name])
    return None


def _pair(own: dict[str, str]) -> ColumnPlan | None:
    """A question and an answer. Pairs that data sets agree on come first; input/output needs to stand alone."""
    found = [(ask, answer) for ask, answer in PAIRS if ask in own and answer in own]
    notes: tuple[str, ...] = ()
    if not found:
        asks, answers = [n for n in ASKS if n in own], [n for n in ANSWERS if n in own]
        found = [(ask, answer) for ask in asks for answer in answers]
        if not asks and answers == ["output"] and "input" in own:
            found = [("input", "output")]
        elif len(found) == 1:
            notes = (f"columns {found[0][0]!r} and {found[0][1]!r} read as prompt and response",)
    if not found:
        return None
    if len(found) > 1:
        shown = " or ".join(f"{own[ask]}/{own[answer]}" for ask, answer in found)
        ask, answer = (own[name] for name in found[0])
        return ColumnPlan(
            refusal=("ambiguous columns", f"{shown}; say which with map, as prompt={ask},response={answer}")
        )
    ((ask, answer),) = found
    extra = next((own[name] for name in EXTRAS if name in own), "") if ask == "instruction" else ""
    kind: Kind = "alpaca" if ask == "instruction" else "prompt/response"
    return ColumnPlan(kind, own[ask], own[answer], extra, notes=notes)


def _text(own: dict[str, str]) -> ColumnPlan:
    if "text" in own:
        return ColumnPlan("text", own["text"])
    for ask, answer in PAIRS:
        if ask in own or answer in own:
            has, lacks = (ask, answer) if ask in own else (answer, ask)
            if "prompt" in (has, lacks):
                needs = "a prompt needs a response (or completion) beside it; prompts alone are for graftune rl"
                return ColumnPlan(refusal=("missing key", needs))
            return ColumnPlan(refusal=("missing key", f"{lacks!r} beside {has!r}"))
    shown = [quoted(name) for name in own.values()][:6]
    listed = (", ".join(shown) + (", ..." if len(own) > 6 else "")) or "no keys"
    return ColumnPlan(refusal=("unknown keys", f"found {listed}; expected {EXPECTED}, or name them with map"))


def refusal_of_all(row: dict[str, Any]) -> GraftuneError | None:
    """Why a whole file with such a row is refused where every answer is trained: it is for another loss."""
    plan = plan_for(row)
    if plan.refusal is not None and plan.refusal[0] == PREFERENCE:
        return GraftuneError(
            f"is {PREFERENCE} ({plan.refusal[1]}), which takes a preference loss",
            fix=f"set loss: dpo (or another one for pairs); to train on the preferred answers alone, {_preferred(row)}",
        )
    if is_rated(plan, row):
        return GraftuneError(
            f"is data of {RATED}, by its column {quoted(plan.label)}, which takes a loss of its own",
            fix="set loss: kto; or remove the bad answers and the column, and train on the good ones",
        )
    return None


LOSSES = {
    "pairs": "dpo",
    "rated answers": "kto",
    "answers": "cross_entropy",
}  # kind of data -> a loss that takes it


def kind_of_row(row: dict[str, Any]) -> str:
    """The kind of data that such a row belongs to: a key of LOSSES, or empty if that is unknown."""
    plan = plan_for(row)
    if plan.refusal is not None:
        return "pairs" if plan.refusal[0] == PREFERENCE or (_BETTER | _WORSE) & set(map(normal, row)) else ""
    return "rated answers" if is_rated(plan, row) else "answers"


def refusal_of_other(row: dict[str, Any], kind: str, taken: str) -> GraftuneError | None:
    """Why a whole file with such a row is refused by a loss for data of `kind`; `taken` says what that is."""
    found = kind_of_row(row)
    if found in ("", kind) or (kind == "rated answers" and any(normal(name) in LABELS for name in row)):
        return None
    what = {"pairs": PREFERENCE, "rated answers": RATED, "answers": "answers that are all right"}[found]
    fix = f"set loss: {LOSSES[found]}, or give {taken}"
    return GraftuneError(f"holds {what}, and this loss takes {taken}", fix=fix)


def _preferred(row: dict[str, Any]) -> str:
    """How to take the better answers of such a row."""
    column = next(name for name in row if normal(name) in _BETTER)
    value, asked = row[column], any(normal(name) in ASKS for name in row)
    whole = isinstance(value, list) and any(isinstance(t, dict) and t.get("role") in ("user", "human") for t in value)
    if whole:
        return f"say so with map, as messages={column}"
    if asked and isinstance(value, str | list):
        return f"say so with map, as response={column}"
    if isinstance(value, str):
        return f"say so with map, as text={column}"
    return "write them as prompt/response or messages"


def is_rated(plan: ColumnPlan, row: dict[str, Any]) -> bool:
    """Whether the answer is marked good or bad: `label` true or false, as text in a CSV file. Also 0 or 1 beside a
    completion, as TRL has it; beside other names a number is more often a class of the data."""
    if not plan.label or plan.kind == "text":
        return False
    value = row[plan.label]
    if isinstance(value, str):
        value = {"true": True, "false": False, "1": 1, "0": 0}.get(value.strip().lower())
    numbered = normal(plan.label) == "kto_tag" or normal(plan.answer) == "completion"
    return isinstance(value, bool) or (numbered and isinstance(value, int | float) and value in (0, 1))
