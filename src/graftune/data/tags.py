"""Tags in the texts of templates: what they look like, and which of them closes which.

`<think>` and `</think>`, `[THINK]` and `[/THINK]`, `<|START_THINKING|>` and `<|END_THINKING|>`, `<|channel>` and
`<channel|>` are pairs of one name. Pairs are recognised by their form, so that tags of new models are recognised too.
"""

from __future__ import annotations

import re

TAG = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]")
_OPENING, _CLOSING = {"start", "begin", "open", "bo"}, {"end", "close", "stop", "eo", "finish"}


def tag_kind(tag: str) -> tuple[str, str]:
    """(its name, "open" or "close")."""
    inner = tag.strip("<>[]")
    words = [word for word in re.split(r"[\W_]+", inner.lower()) if word]
    name = "".join(word for word in words if word not in _OPENING | _CLOSING | {"of"})
    closing = "/" in inner or not _CLOSING.isdisjoint(words) or (inner.endswith("|") and not inner.startswith("|"))
    return name, "close" if closing else "open"


def is_pair(opening: str, closing: str) -> bool:
    name, kind = tag_kind(opening)
    return kind == "open" and (name, "close") == tag_kind(closing) and bool(name)


def unclosed(text: str) -> str:
    """The last tag in `text` that is opened and not closed there; empty if there is none."""
    opened: list[str] = []
    for tag in TAG.findall(text):
        if tag_kind(tag)[1] == "open":
            opened.append(tag)
        elif opened and is_pair(opened[-1], tag):
            opened.pop()
    return opened[-1] if opened else ""
