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

import itertools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from graftune.data.format import (
    REASONING_KEYS,
    ChatFormat,
    Reasoning,
    Renderer,
    in_parts,
    special_tokens,
    thinking_parts,
)
from graftune.data.header import align, borders, shared_header, shared_start, units
from graftune.data.tags import TAG, is_pair, tag_kind, unclosed
from graftune.data.turns import Message
from graftune.errors import GraftuneError
from graftune.tokenizer import Tokenizer

# The probes differ in their first and in their last character, so that what two renderings share stops at the content.
ANSWERS = ("Axq zero one", "Byk zero two")
_ASK, _SYSTEM, _WHY, _VALUES = "Zq ask", "Zq system", "Jq because", ("Mq first", "Nk second!")
_RESULT = "Zq result"
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
MOST_TAGS = 64  # tags, or string literals, of a template's source that are tried
_LITERAL = re.compile(r"""(["'])((?:\\.|(?!\1)[^\\])*)\1""", re.DOTALL)  # in a template's source

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
            messages = [
                m | {"content": in_parts(m["content"])} if m["content"] and isinstance(m["content"], str) else m
                for m in messages
            ]
        try:
            return renderer.render(messages, tools=tools, add_generation_prompt=generate, **variables)
        except GraftuneError as error:
            first_error = first_error or error
            return None

    for parts, tools, head in itertools.product((False, True), (None, [_TOOL]), ([], system)):  # noqa: B007 - used below
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
    question = (rendered([*head, _asked("")[0]], tools) or "").rpartition(_ASK)[2]
    end, end_id = _turn_end(suffix, following, tokenizer, question)
    control = tuple(sorted(special_tokens(tokenizer).values(), key=len, reverse=True))
    append, notes = "", tuple[str, ...]()
    if end_id is None:
        append, end_id = _closed_later(first, following, question, control, tokenizer)
    if append:
        notes = (f"the template leaves the last answer open: it is closed with {append!r}, as earlier answers are",)
    else:
        append, end_id, notes = _closing(name, tokenizer, end, end_id, append_eos=append_eos)
    prompt = (rendered([*head, _asked("")[0]], tools, True) or "").rpartition(_ASK)[2]
    plain = first[first.rfind(_ASK) + len(_ASK) : first.rfind(ANSWERS[0])]
    reasoning = _reasoning(rendered, head, tools, (prompt, plain), getattr(renderer, "source", ""))
    # Delimiters of reasoning that do not look like tags are also aligned as single units.
    texts = (text for text in reasoning.tags if text and not TAG.search(text))
    control = tuple(sorted({*control, *texts}, key=len, reverse=True))
    return ChatFormat(
        renderer,
        name,
        suffix,
        end,
        end_id,
        append,
        takes_system=_SYSTEM in (rendered([*system, _asked("")[0]], tools, True) or ""),
        notes=notes,
        reasoning=reasoning,
        empty_reasoning=bool(reasoning.tags[0]) and reasoning.tags[0] in plain and reasoning.closed_by(plain),
        header=prompt.removesuffix(align(prompt, plain, control).extra) + plain,
        before=plain[align(prompt, plain, control).end :],
        control=control,
        variables=variables,
        parts=parts,
        renders_tools="zq_tool" in (rendered([*head, _asked("")[0]], [_TOOL], True) or ""),
        **_calls(rendered, head, tokenizer, question),
    )


def _asked(answer: Any, **more: Any) -> list[Message]:
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


def _turn_end(suffix: str, following: str, tokenizer: Tokenizer, question: str = "") -> tuple[str, int | None]:
    """(the part of `suffix`, the text after an answer, that ends a turn; the id of its last token). It ends with the
    first stop token, or else the control token that also ends a question (`question`: the text after a question's
    content), or else the last control token. Tokens that also follow an answer inside a conversation (`following`) come
    first. Without any control token: (`suffix` without blanks at its end, None)."""
    ids, offsets = tokenizer.encode_with_offsets(suffix) if suffix else ([], [])
    special, common = special_tokens(tokenizer), len(shared_start(suffix, following))
    ends = [id for id in (tokenizer.encode(question) if question else []) if id in special][:1]
    places: list[int] = []
    for reach in (common, len(suffix)):
        known = [i for i, (_, end) in enumerate(offsets) if len(suffix[:end].rstrip()) <= reach]
        stops = [i for i in known if ids[i] in tokenizer.stop_ids]
        alike = next((i for i in known if ids[i] in ends), None)
        while alike is not None and alike + 1 in known and tag_kind(special.get(ids[alike + 1], "<>"))[1] == "close":
            alike += 1  # several tokens that end a turn
        places = (
            places or stops[:1] or ([] if alike is None else [alike]) or [i for i in known if ids[i] in special][-1:]
        )
    if places:
        return suffix[: offsets[places[0]][1]].rstrip(), ids[places[0]]
    return suffix.rstrip(), None


def _closed_later(
    first: str, following: str, question: str, control: tuple[str, ...], tokenizer: Tokenizer
) -> tuple[str, int | None]:
    """(text, id) with which a template that leaves the last answer open closes it once a question follows: the text
    between the two, without the question's header. If the template's default system turn ends like an answer, that
    header cannot be told from the end of the answer: then the text that ends a question is taken (`question`: the text
    after its content), or a stop token. ("", None) if there is no control token in any of them."""
    # Text after the last answer is in every rendering: only what a following question adds counts.
    between = following.rpartition(_ASK)[0].removeprefix(first.rpartition(ANSWERS[0])[2])
    before = first.partition(_ASK)[0]
    shared = len(shared_start(between[::-1], before[::-1]))
    header = min(place for place in borders(between, control, len(between)) if place >= len(between) - shared)
    closing = question.strip() if between.lstrip().startswith(question.strip()) else ""
    token = next((unit for unit in units(between, control) if unit in control), "")
    stop = token if tokenizer.backend.token_to_id(token) in tokenizer.stop_ids else ""
    for text in (between[:header], closing, stop):
        end, end_id = _turn_end(text, text, tokenizer)
        if end_id is not None:
            return end, end_id
    return "", None


def _calls(rendered: Render, head: list[Message], tokenizer: Tokenizer, question: str) -> dict[str, Any]:
    """How tool calls are rendered: with arguments as objects or as JSON text, with null or empty content."""
    tried: dict[tuple[str | None, str], tuple[list[str], str | None]] = {}
    for beside in ({}, dict.fromkeys(REASONING_KEYS, _WHY)):  # some templates render calls beside reasoning only
        for content, arguments in itertools.product((None, ""), ("object", "text")):
            pair = [_call_rendered(rendered, head, content, arguments, value, beside) for value in _VALUES]
            clean = [text for text, value in zip(pair, _VALUES, strict=True) if text and _clean(text, value)]
            if len(clean) == 2:
                longer = _call_rendered(rendered, head, content, arguments, _VALUES[0], beside, answered=True)
                tried[content, arguments] = clean, longer
        if tried:
            break
    if not tried:
        return {}
    # Some templates take a null content only in the last turn, and some read an empty one as no call at all.
    content, arguments = next((way for way, (_, longer) in tried.items() if longer), next(iter(tried)))
    (first, second), longer = tried[content, arguments]
    suffix = shared_start(first[::-1], second[::-1])[::-1]
    end, end_id = _turn_end(suffix, (longer or "").rpartition(_VALUES[0])[2], tokenizer, question)
    blank = "" if ("", arguments) in tried else None
    found = {"renders_calls": True, "arguments": arguments, "null_content": content, "blank_content": blank}
    if end_id is not None:
        # What stands before the end token closes the call itself, and depends on its arguments.
        token = special_tokens(tokenizer).get(end_id, end)
        found |= {"call_suffix": suffix[suffix.index(token) :], "call_end": token}
    else:  # the role that follows ends a call, as GLM's <|observation|> does
        between = (longer or "").rpartition(_VALUES[0])[2].partition(_RESULT)[0]
        ids = tokenizer.encode(between) if between else []
        found["call_append"] = next((special_tokens(tokenizer).get(i, "") for i in ids if i in tokenizer.stop_ids), "")
    return found


def _call_rendered(
    rendered: Render,
    head: list[Message],
    content: str | None,
    arguments: str,
    value: str,
    beside: Message,
    *,
    answered: bool = False,
) -> str | None:
    """A conversation whose last turn calls a tool. `beside`: fields beside the call. `answered`: the tool's result
    and an answer follow."""
    given: Any = {"zq_key": value} if arguments == "object" else f'{{"zq_key": "{value}"}}'
    call = {"id": "zqcall001", "type": "function", "function": {"name": "zq_tool", "arguments": given}}
    turns: list[Message] = [
        {"role": "user", "content": _ASK},
        {"role": "assistant", "content": content, "tool_calls": [call], **beside},
    ]
    if answered:
        turns += [
            {"role": "tool", "content": _RESULT, "tool_call_id": "zqcall001", "name": "zq_tool"},
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


def _reasoning(
    rendered: Render, head: list[Message], tools: list[Any] | None, header: tuple[str, str], source: str
) -> Reasoning:
    """Finds the texts around reasoning by rendering it in each known field, as a part of the content, and inside the
    content before each closing tag that the template's source names. `header`: the text between question and answer, in
    the generation prompt and in the rendering."""
    prompt, plain = header
    aligned = align(prompt, plain, ())
    names = list(dict.fromkeys(TAG.findall(source)))[:MOST_TAGS]
    literals = {text.replace("\\n", "\n").strip() for _, text in _LITERAL.findall(source)} - {""}
    opening = aligned.extra
    left = unclosed(opening)
    for key in REASONING_KEYS:
        shown = rendered([*head, *_asked(ANSWERS[0], **{key: _WHY})], tools) or ""
        if (found := _block(shown, prompt, plain, plain[aligned.end :], literals)) is not None:
            return Reasoning(key, *found, channel=found[1].strip() + found[0].strip() in shown)
    as_part = [*thinking_parts(_WHY), *in_parts(ANSWERS[0])]
    shown = (rendered([*head, *_asked(as_part)], tools) if "thinking" in source else None) or ""
    found = _block(shown, prompt, plain, plain[aligned.end :], literals)
    if found and any(is_pair(tag, close) for tag in TAG.findall(found[0]) for close in TAG.findall(found[1])):
        return Reasoning("", *found, part=True)
    for close in names:
        if tag_kind(close)[1] != "close":
            continue
        before = next((tag for tag in names if is_pair(tag, close)), "")
        shown = rendered([*head, *_asked(f"{before}{_WHY}{close}{ANSWERS[0]}")], tools) or ""
        later = rendered([*head, *_asked(f"{before}{_WHY}{close}{ANSWERS[0]}"), *_asked(ANSWERS[1])], tools) or ""
        if all(not text or f"{_WHY}{close}{ANSWERS[0]}" in text for text in (shown, later)):
            continue  # printed unchanged: the template does not treat it as a tag
        raw = f"{_WHY}{close}{ANSWERS[0]}" in shown
        if (
            not raw
            and (found := _block(shown, prompt, plain, plain[aligned.end :], literals)) is not None
            and close in found[1]
        ):
            return Reasoning("", *found)
        if close != "</think>":
            before = opening[opening.rindex(left) :] if left else before
            return Reasoning("", before, _as_wide(close, opening or before))
        return Reasoning()
    if not (tags := TAG.findall(opening)):
        return _untagged(rendered, head, tools, opening, literals) if opening.strip() else Reasoning()
    if "<think>" in tags or "</think>" in tags:
        return Reasoning()
    if not left:  # the prompt opens the block and closes it
        place = opening.index(tags[-1])
        return Reasoning("", opening[:place].strip(), opening[place:])
    close = next((tag for tag in names if is_pair(left, tag)), "")
    return Reasoning("", opening[opening.rindex(left) :], close and _as_wide(close, opening))


def _block(shown: str, prompt: str, plain: str, own: str, literals: Collection[str]) -> tuple[str, str] | None:
    """The text before and after reasoning in a rendered answer; None if it is not rendered before the answer. `plain`:
    the header of an answer without reasoning; `own`: the end of that header that the prompt lacks; `literals`: the
    string literals in the template's source."""
    why, answer = shown.rfind(_WHY), shown.rfind(ANSWERS[0])
    asked = shown.rfind(_ASK, 0, why) + len(_ASK)
    if not len(_ASK) <= asked <= why < answer:
        return None
    before, after = shown[asked:why], shown[why + len(_WHY) : answer]
    close = after.removesuffix(own) if after.removesuffix(own).strip() else after  # the answer may have its own opening
    # Beside the tag there may be a header that the prompt does not have, or the prompt may have the tag too.
    pairs = [(tag, end) for tag in TAG.finditer(before) for end in TAG.finditer(after) if is_pair(tag[0], end[0])]
    if pairs:
        tag = pairs[-1][0]
        end = next(end for other, end in pairs if other is tag).end()
        blanks = len(after[end:]) - len(after[end:].lstrip())
        return before[tag.start() :], after[: end + blanks]  # text after it belongs to the answer
    tagged = TAG.search(close)
    # Without tags, the prompt may end with the whole block.
    asked_for = prompt if tagged else prompt.rstrip().removesuffix(close.strip() or "\0")
    opening = before[align(asked_for, before, ()).end :]
    if not opening.strip() and len(plain) < len(before):
        opening = before[shared_header(plain, before) :]
    # If the header cannot be told from the opening, the opening may be a string literal of the template's source.
    named = [text for text in literals if len(text) > 2 and not TAG.search(text) and before.rstrip().endswith(text)]
    if not tagged and named:
        opening = min([*named, opening.strip() or before], key=len)
    return opening, close


def _untagged(
    rendered: Render, head: list[Message], tools: list[Any] | None, opening: str, literals: Collection[str]
) -> Reasoning:
    """The reasoning block that a prompt opens with a text that does not look like a tag. A string literal of the
    template's source closes the block if the template does not print it unchanged inside an answer."""
    for close in sorted(literals, key=lambda text: (len(text), text))[:MOST_TAGS]:
        inner = f"{_WHY}\n\n{close}\n\n{ANSWERS[0]}"  # no template writes it like this
        shown = rendered([*head, *_asked(f"{opening}{inner}")], tools) or inner
        later = rendered([*head, *_asked(f"{opening}{inner}"), *_asked(ANSWERS[1])], tools) or inner
        if len(close) > 1 and not (inner in shown and inner in later):
            before, found, _ = opening.partition(close)
            return Reasoning("", before if found else opening, _as_wide(close, opening))
    return Reasoning()


def _as_wide(close: str, opening: str) -> str:
    """The closing tag, on a line of its own if the opening tag is."""
    return f"\n{close}\n\n" if opening.endswith("\n") else close
