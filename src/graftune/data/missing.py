"""Finds parts of a conversation that are missing from its rendered text, so that they can be counted and reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from graftune.data.format import REASONING_KEYS, Reasoning
from graftune.data.turns import Message

NOT_RENDERED = {
    "system": "system text that the template does not render as written",
    "user": "user text that the template does not render as written",
    "assistant": "assistant text that the template does not render as written",
    "tool": "tool results that the template does not render as written",
    "reasoning": "reasoning that the template does not render",
    "calls": "tool calls that the template does not render as written",
}


def not_rendered(messages: list[Message], whole: str, answers: dict[int, str], reasoning: Reasoning) -> Iterator[str]:
    """Notes about parts of the conversation that are missing from its text, one per kind. `answers`: the texts of the
    trained turns."""
    found = set[str]()
    for i, message in enumerate(messages):
        text = answers.get(i, whole)
        if len(message) == 2 and (message["content"] or "") in text:
            continue  # it has only a role and a content, which is in the text as it was written
        for kind in _lost(message, text, found, reasoning):
            if kind not in found:
                found.add(kind)
                yield NOT_RENDERED[kind]


def _lost(message: Message, text: str, found: set[str], reasoning: Reasoning) -> Iterator[str]:
    """The kinds of a message's parts that are missing from `text`. Some kinds that were noted already (`found`) are not
    searched for: a search that finds nothing reads all of the text."""
    content = message["content"]
    kind = message["role"] if message["role"] in NOT_RENDERED else "tool"
    close = reasoning.close.strip()
    if content and (kind not in found or ("reasoning" not in found and close in content)):
        why, rest = _without_reasoning(content, reasoning) if kind == "assistant" else ("", content)
        if rest.strip() not in text:
            yield kind
        elif why not in text:
            yield "reasoning"
    if "reasoning" not in found:
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str) and message[key].strip() not in text:
                yield "reasoning"
    if "calls" not in found:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            parts = _leaves([function["name"], function["arguments"]])
            if not all(part in text or json.dumps(part)[1:-1] in text for part in parts):
                yield "calls"


def _without_reasoning(content: str, reasoning: Reasoning) -> tuple[str, str]:
    """Reasoning that is written in the content, and the rest. A prompt may have written its opening tag already."""
    close = reasoning.close.strip()
    if not close or close not in content:
        return "", content
    before, _, after = content.partition(close)
    before = before.strip()
    return before[reasoning.opening(before) :].strip(), after


def _leaves(value: Any) -> Iterator[str]:
    """Every key, text and number in a value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value.strip()
    elif value is not None and not isinstance(value, bool):
        yield json.dumps(value)
