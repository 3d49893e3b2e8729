"""Finds out what a chat template does by rendering probe conversations.

A template is a program; reading its source for marker strings goes wrong with the next model. So it is rendered a few
dozen times, once per run, with texts of our own, and the results are kept in a `ChatFormat`: the constant text
after an answer and which part of it ends the turn, the same for tool calls, whether a system turn is taken, in which
form tool call arguments and empty contents are wanted, and how reasoning is written.

A template that writes nothing that could end a turn is refused by name, since a model trained with it never learns to
stop; `append_eos` adds the tokenizer's EOS instead. A template that refuses a bare question and answer is tried
again with a system turn, with tools, and with both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from graftune.data.format import REASONING_KEYS, ChatFormat, Reasoning, Renderer, in_parts, special_tokens
from graftune.data.record import Message
from graftune.errors import GraftuneError
from graftune.tokenizer import Tokenizer

# The probes differ in their first and in their last character, so that what two renderings share stops at the content.
ANSWERS = ("Axq zero one", "Byk zero two")
_ASK, _SYSTEM, _WHY, _VALUES = "Zq ask", "Zq system", "Jq because", ("Mq first", "Nk second!")
_TOOL = {
    "type": "function",
    "function": {
        "name": "zq_tool",
        "description": "Zq description",
        "parameters": {
            "type": "object",
            "properties": {"zq_key": {"type": "string", "description": "Zq key"}},
            "required": ["zq_key"],
        },
    },
}
_TAG = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]|\w+|\s|.", re.DOTALL)

Render = Callable[..., str | None]


def probe(
    renderer: Renderer, name: str, tokenizer: Tokenizer, *, append_eos: bool, variables: Mapping[str, Any] | None = None
) -> ChatFormat:
    variables = variables or {}
    system: list[Message] = [{"role": "system", "content": _SYSTEM}]
    first_error: GraftuneError | None = None
    parts = False

    def rendered(messages: list[Message], tools: list[Any] | None = None, generate: bool = False) -> str | None:
        nonlocal first_error
        if parts:
            messages = [m | {"content": in_parts(m["content"])} if m["content"] else m for m in messages]
        try:
            return renderer.render(messages, tools=tools, add_generation_prompt=generate, **variables)
        except GraftuneError as error:
            first_error = first_error or error
            return None

    ways: tuple[tuple[bool, list[Any], list[Any] | None], ...]
    ways = ((False, [], None), (False, system, None), (False, [], [_TOOL]), (False, system, [_TOOL]))
    for parts, head, tools in (*ways, *((True, head, tools) for _, head, tools in ways)):  # noqa: B007 - used below
        first, second = (rendered([*head, *_asked(answer)], tools) or "" for answer in ANSWERS)
        if ANSWERS[0] in first and ANSWERS[1] in second:
            break
    else:
        why = f"cannot render a question and an answer ({first_error.what})" if first_error else "leaves out the answer"
        raise GraftuneError(why, where=name, fix="give another template with `template: FILE`, or `template: none`")
    # Some templates strip content or put a space before it: neither touches what follows it.
    suffix = shared_start(first[::-1], second[::-1])[::-1]
    middle = rendered([*head, *_asked(ANSWERS[0]), {"role": "user", "content": _ASK}], tools) or ""
    following = middle[middle.rfind(ANSWERS[0]) + len(ANSWERS[0]) :] if ANSWERS[0] in middle else ""
    end, end_id = _turn_end(suffix, following, tokenizer)
    control = tuple(sorted(special_tokens(tokenizer).values(), key=len, reverse=True))
    append, notes = "", tuple[str, ...]()
    if end_id is None:
        append, end_id = _closed_later(first, following, control, tokenizer)
    if append:
        notes = (f"the template leaves the last answer open: it is closed with {append!r}, as earlier answers are",)
    else:
        append, end_id, notes = _closing(name, tokenizer, end, end_id, append_eos=append_eos)
    reasoning = _reasoning(rendered, head, tools, first)
    return ChatFormat(
        renderer,
        name,
        suffix,
        end,
        end_id,
        append,
        takes_system=_takes_system(rendered, tools),
        notes=notes,
        reasoning=reasoning,
        control=control,
        variables=variables,
        parts=parts,
        renders_tools="zq_tool" in (rendered([*head, _asked("")[0]], [_TOOL], True) or ""),
        **_calls(rendered, head, tokenizer),
    )


def _asked(answer: str, **more: Any) -> list[Message]:
    return [{"role": "user", "content": _ASK}, {"role": "assistant", "content": answer, **more}]


def _closing(
    name: str, tokenizer: Tokenizer, end: str, end_id: int | None, *, append_eos: bool
) -> tuple[str, int | None, tuple[str, ...]]:
    """(EOS to append, the id that ends an answer, what a user should know)."""
    if end_id is None and append_eos:
        if not tokenizer.eos_token:
            raise GraftuneError("append_eos: the tokenizer has no EOS token", where=name, fix="use another template")
        return tokenizer.eos_token, tokenizer.eos_id, ()
    if not end:
        raise GraftuneError(
            "has no token that ends an answer, so the model would never learn to stop",
            where=name,
            fix="set append_eos to add EOS after each answer, or give another template",
        )
    if end_id is None:
        return "", None, (f"the template ends an answer with {end!r}, which is ordinary text to this tokenizer",)
    if end_id not in tokenizer.stop_ids:
        return (
            "",
            end_id,
            (f"the template ends an answer with {end!r}, which is not one of the model's own end tokens",),
        )
    return "", end_id, ()


def _turn_end(suffix: str, following: str, tokenizer: Tokenizer) -> tuple[str, int | None]:
    """The part of `suffix` that ends a turn: up to its first stop token, or else its last control token, among those
    that also stand after an answer in the middle of a conversation (`following`); where none does, among all of them.
    Without any it is all that is not blank."""
    ids, offsets = tokenizer.encode_with_offsets(suffix) if suffix else ([], [])
    special, common = special_tokens(tokenizer), len(shared_start(suffix, following))
    places: list[int] = []
    for reach in (common, len(suffix)):
        known = [i for i, (_, end) in enumerate(offsets) if len(suffix[:end].rstrip()) <= reach]
        stops = [i for i in known if ids[i] in tokenizer.stop_ids]
        places = places or stops[:1] or [i for i in known if ids[i] in special][-1:]
    if places:
        return suffix[: offsets[places[0]][1]].rstrip(), ids[places[0]]
    return suffix.rstrip(), None


def _closed_later(first: str, following: str, control: tuple[str, ...], tokenizer: Tokenizer) -> tuple[str, int | None]:
    """How a template that leaves the last answer open closes it once a question follows: what stands between the two,
    without the question's own header. Nothing, if there is no control token in it."""
    between, before = following.rpartition(_ASK)[0], first.partition(_ASK)[0]
    shared = len(shared_start(between[::-1], before[::-1]))
    header = min(place for place in borders(between, control, len(between)) if place >= len(between) - shared)
    end, end_id = _turn_end(between[:header], between[:header], tokenizer)
    return (end, end_id) if end_id is not None else ("", None)


def _takes_system(rendered: Render, tools: list[Any] | None) -> bool:
    head = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _ASK}]
    return _SYSTEM in (rendered(head, tools, True) or "")


def _calls(rendered: Render, head: list[Message], tokenizer: Tokenizer) -> dict[str, Any]:
    """How tool calls are rendered: with arguments as objects or as JSON text, with null or empty content."""
    tried: dict[tuple[str | None, str], tuple[list[str], str | None]] = {}
    for content in (None, ""):
        for arguments in ("object", "text"):
            pair = [_call_rendered(rendered, head, content, arguments, value) for value in _VALUES]
            clean = [text for text, value in zip(pair, _VALUES, strict=True) if text and _clean(text, value)]
            if len(clean) == 2:
                longer = _call_rendered(rendered, head, content, arguments, _VALUES[0], answered=True)
                tried[content, arguments] = clean, longer
    if not tried:
        return {}
    # Some templates take a null content only in the last turn, and some read an empty one as no call at all.
    content, arguments = next((way for way, (_, longer) in tried.items() if longer), next(iter(tried)))
    (first, second), longer = tried[content, arguments]
    suffix = shared_start(first[::-1], second[::-1])[::-1]
    end, end_id = _turn_end(suffix, (longer or "").rpartition(_VALUES[0])[2], tokenizer)
    blank = "" if ("", arguments) in tried else None
    found = {"renders_calls": True, "arguments": arguments, "null_content": content, "blank_content": blank}
    if end_id is not None:
        # What stands before the end token closes the call itself, and depends on its arguments.
        token = special_tokens(tokenizer).get(end_id, end)
        found |= {"call_suffix": suffix[suffix.index(token) :], "call_end": token}
    return found


def _call_rendered(
    rendered: Render, head: list[Message], content: str | None, arguments: str, value: str, *, answered: bool = False
) -> str | None:
    """A conversation whose last turn calls a tool. `answered`: the tool's result and an answer follow."""
    given: Any = {"zq_key": value} if arguments == "object" else f'{{"zq_key": "{value}"}}'
    call = {"id": "zqcall001", "type": "function", "function": {"name": "zq_tool", "arguments": given}}
    turns: list[Message] = [
        {"role": "user", "content": _ASK},
        {"role": "assistant", "content": content, "tool_calls": [call]},
    ]
    if answered:
        turns += [
            {"role": "tool", "content": "Zq result", "tool_call_id": "zqcall001", "name": "zq_tool"},
            {"role": "assistant", "content": ANSWERS[0]},
        ]
    for tools in ([_TOOL], None):
        text = rendered([*head, *turns], tools)
        if text is not None:
            return text
    return None


def _clean(text: str, value: str) -> bool:
    """Whether a rendered call holds its argument as a model should write it: not as Python's repr of an object, not as
    JSON within JSON, and without a None where the content is null."""
    place = text.rfind(value)
    if place < 0 or "zq_tool" not in text:
        return False
    call = text[text.find(_ASK) + len(_ASK) :]
    return "{'zq_key'" not in call and '\\"zq_key' not in call and "None" not in call


def _reasoning(rendered: Render, head: list[Message], tools: list[Any] | None, plain: str) -> Reasoning:
    prompt = rendered([*head, _asked("")[0]], tools, True) or ""
    header = shared_header(prompt, plain)
    for key in REASONING_KEYS:
        shown = rendered([*head, *_asked(ANSWERS[0], **{key: _WHY})], tools) or ""
        why, answer = shown.rfind(_WHY), shown.rfind(ANSWERS[0])
        if header <= why < answer and shown.startswith(prompt[:header]):
            opening = plain[header : plain.rfind(ANSWERS[0])]  # of the answer itself
            return Reasoning(key, shown[header:why], shown[why + len(_WHY) : answer].removesuffix(opening))
    return Reasoning()


def shared_start(*texts: str) -> str:
    """The longest text that all of them start with."""
    low, high = min(texts), max(texts)  # every text sorted between these two has the same start
    for place, letter in enumerate(low):
        if letter != high[place]:
            return low[:place]
    return low


def shared_header(prompt: str, full: str, control: Iterable[str] = ()) -> int:
    """How far `prompt` and `full` agree, in whole control tokens, tags and words."""
    reach = len(shared_start(prompt, full))
    return max((place for place in borders(prompt, control, reach) & borders(full, control, reach)), default=0)


def borders(text: str, control: Iterable[str], reach: int) -> set[int]:
    """Places up to `reach` that lie between control tokens, tags, words and other letters of `text`."""
    names = [re.escape(name) for name in control]
    pattern = re.compile("|".join([*names, _TAG.pattern]), re.DOTALL) if names else _TAG
    places = {0}
    for match in pattern.finditer(text):
        if match.end() > reach:
            break
        places.add(match.end())
    return places
