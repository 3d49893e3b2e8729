"""Which messages of a conversation are trained, and which roles its template takes."""

from __future__ import annotations

from graftune.data.format import ChatFormat
from graftune.data.record import Record
from graftune.data.row import Refusal
from graftune.data.turns import ROLES, Message, unknown_role


def trained_turns(record: Record, train_on: str) -> tuple[int, ...]:
    """Indices of the messages to train; raises Refusal where there is none.

    A turn that says so itself ("train": false, or OpenAI's "weight": 0) is context and not trained."""
    turns = [
        i for i, message in enumerate(record.messages) if message["role"] == "assistant" and i not in record.skipped
    ]
    if train_on == "flagged" and record.kind in ("messages", "conversations"):
        wrong = [i for i, flag in enumerate(record.flags) if flag and record.messages[i]["role"] != "assistant"]
        if wrong:
            raise Refusal("a flag on a turn that is not the assistant's", f"message {wrong[0] + 1}")
        turns = [i for i in turns if record.flags[i]]
        if not turns:
            raise Refusal("nothing to train", 'no assistant turn has "train": true or "weight": 1')
    wanted = [i for i in (turns[-1:] if train_on == "last" else turns) if record.flags[i] is not False]
    if not wanted:
        which = "the last" if train_on == "last" else "every"
        raise Refusal("nothing to train", f'{which} assistant turn has "train": false or "weight": 0')
    return tuple(wanted)


def check_roles(form: ChatFormat, record: Record, messages: list[Message]) -> None:
    """Refuse what a template would silently leave out: tool calls, and roles that it does not know. The first message
    of each role is looked at; `not_rendered` notes what is missing of the others."""
    seen = {"system", "user", "assistant"}
    for i, message in enumerate(messages):
        if message.get("tool_calls"):
            if not form.renders_calls:
                raise Refusal("refused by the chat template", "it does not render tool calls")
        elif message["role"] not in seen:
            seen.add(message["role"])
            check_role(form, message["role"], i + 1)
            shown = form.render(messages[: i + 1], record.tools)
            marked = {**message, "content": (message["content"] or "") + "?"}
            if shown == form.render([*messages[:i], marked], record.tools):
                raise Refusal("refused by the chat template", f"it does not render the role {message['role']!r}")


def check_role(form: ChatFormat, role: str, place: int) -> None:
    """Refuse a role of message `place` that is misspelt: neither a usual one nor one that the template names."""
    if role not in ("system", "user", "assistant", "tool") and not names_role(form, role):
        raise unknown_role(role, place)


def names_role(form: ChatFormat, role: str) -> bool:
    source = getattr(form.renderer, "source", "")
    return f"'{role}'" in source or f'"{role}"' in source


def with_known_roles(form: ChatFormat, messages: list[Message]) -> list[Message]:
    """The messages with other tools' names of roles replaced, as in data; raises Refusal for an unknown role."""
    made = []
    for place, message in enumerate(messages, 1):
        role: str = message["role"]
        if not names_role(form, role):
            role = ROLES.get(role.strip().lower(), role)
            check_role(form, role, place)
        made.append(message if role == message["role"] else {**message, "role": role})
    return made
