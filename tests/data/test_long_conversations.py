"""Conversations of many turns: the same examples as by rendering every beginning, in time that grows with the turns."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from graftune.data import turn_places
from graftune.data.fit import MOST_ALONE, MOST_RENDERED, Built, Fitter
from graftune.data.format import ChatFormat
from graftune.data.row import Refusal
from tests.data.generated import Spec
from tests.data.helpers import CHATML, NO_END, TEMPLATES, built, shipped, with_template
from tests.support.thorough import THOROUGH

Messages = list[dict[str, Any]]
ODD = {
    "numbered": CHATML.replace("m.content +", "loop.index ~ ' ' ~ m.content +"),
    "another header far on": CHATML.replace("m.role +", "m.role + ('!' if loop.index0 > 9 else '') +"),
    # A window would say that the prompt of a late turn ends behind "assistant", too.
    "a shorter prompt far on": CHATML.replace(
        "'<|im_start|>assistant\n'", "'<|im_start|>' + ('assistant\n' if messages | length < 10 else '')"
    ),
    "drops what is old": CHATML.replace(
        "m.content +", "(m.content if loop.index0 > messages | length - 7 else m.content.split('</think>')[-1]) +"
    ),
    "says what it repeats": CHATML.replace(
        "m.content +",
        "m.content + ('[again]' if loop.index0 > 6 and messages[loop.index0 - 6].content == m.content else '') +",
    ),
    "calls": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}


def shown(made: list[Built]) -> tuple[Any, set[str]]:
    """All of it; the notes once for the row, as they are counted. Of words that the template adds, only the first few
    that are met are named: which ones depends on what is rendered."""
    kept = [one._replace(example=one.example and dataclasses.astuple(one.example), notes=()) for one in made]
    return kept, {re.sub("^the template adds .*", "it adds words", note) for one in made for note in one.notes}


def conversation(draw: random.Random, *, calls: bool) -> Messages:
    def text(words: int = 6) -> str:
        said = " ".join(draw.choice(("one", "two", "three", "é", "<|im_end|>", "ok")) for _ in range(words))
        return draw.choice((said, said, said, f" {said}\n", f"<think>\nhm {said}\n</think>\n\n{said}", "ok"))

    messages: Messages = [{"role": "system", "content": "Be brief."}] if draw.random() < 0.5 else []
    messages.append({"role": "user", "content": text(draw.choice((3, 60)))})
    way = draw.choice(("by turns", "by turns", "one question", "both"))
    for place in range(draw.randrange(4, 16)):
        if calls and draw.random() < 0.5:
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": place}}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": text()},
            ]
            continue
        messages.append({"role": "assistant", "content": text()})
        if way == "by turns" or (way == "both" and draw.random() < 0.5):
            messages.append({"role": "user", "content": text()})
    return [*messages, {"role": "assistant", "content": text(), **draw.choice(({}, {}, {"weight": 0.5}))}]


def compared(seed: int, source: Any, monkeypatch: pytest.MonkeyPatch, *, calls: bool = False) -> bool:
    """Whether there is an example; the same ones, or the same refusal, whichever way they are found."""
    monkeypatch.undo()
    draw = random.Random(seed)
    row = {"messages": conversation(draw, calls=calls)}
    settings = {"max_seq_len": draw.choice((8192, 200, 90)), "train_reasoning": draw.choice(("all", "none"))}
    found: list[Any] = []
    for few in (3, 10**6):
        monkeypatch.setattr(turn_places, "FEW", few)
        if few > 3:  # and each turn that is too long is rendered and encoded by itself
            monkeypatch.setattr(Fitter, "_too_long", lambda *_: None)
        try:
            found.append(shown(built(row, source, append_eos=True, **settings)))
        except Refusal as refusal:
            found.append(refusal.text)
    same = found[0] == found[1]  # apart from the assertion, which would show two lists of thousands of tokens
    assert same, (seed, settings)
    return not isinstance(found[0], str)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_windows_find_what_whole_renderings_find(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [compared(seed, shipped(name), monkeypatch) for seed in range(6 if THOROUGH else 3)]
    assert any(made) or name in NO_END


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ODD)
def test_templates_that_windows_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = with_template(ODD[name])
    made = [compared(seed, source, monkeypatch, calls=name == "calls") for seed in range(10 if THOROUGH else 5)]
    assert any(made)


def test_generated_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(16 if THOROUGH else 8):
        spec = Spec.random(random.Random(seed))
        compared(seed, with_template(spec.source()), monkeypatch, calls=spec.calls != "none" and not spec.beside)


def long(way: str, turns: int) -> Messages:
    messages: Messages = [{"role": "user", "content": "the question"}]
    for place in range(turns):
        messages.append({"role": "assistant", "content": f"answer {place}"})
        if way == "by turns":
            messages.append({"role": "user", "content": f"question {place}"})
        elif way == "calls":
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": place}}}
            messages[-1] = {"role": "assistant", "content": "", "tool_calls": [call]}
            messages.append({"role": "tool", "content": f"result {place}"})
    return [*messages, {"role": "assistant", "content": "the end"}]


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many messages each rendering had."""
    counts: list[int] = []
    render = ChatFormat.render

    def counted(form: ChatFormat, messages: Messages, *args: Any, **named: Any) -> str:
        counts.append(len(messages))
        return render(form, messages, *args, **named)

    monkeypatch.setattr(ChatFormat, "render", counted)
    yield counts


@pytest.mark.few(2)
@pytest.mark.parametrize("limit", [1 << 20, 512, 64])
@pytest.mark.parametrize("way", ["by turns", "one question", "calls"])
def test_what_is_rendered_grows_with_the_turns(way: str, limit: int, rendered: list[int]) -> None:
    source, work = with_template(ODD["calls"]), []
    for turns in (100, 400):
        rendered.clear()
        assert built({"messages": long(way, turns)}, source, max_seq_len=limit)
        work.append(sum(rendered))
    assert work[1] < 7 * work[0] and work[1] < 60 * len(long(way, 400))  # the square of the turns: 16, and 800


@pytest.mark.thorough
def test_too_many_answers_to_one_question() -> None:
    source = with_template(CHATML)
    assert len(built({"messages": long("one question", MOST_ALONE)}, source, max_seq_len=64)) > MOST_ALONE - 9
    with pytest.raises(Refusal, match=f"over {MOST_ALONE}"):
        built({"messages": long("one question", 2 * MOST_ALONE)}, source, max_seq_len=64)
    rewriting = with_template(ODD["numbered"].replace("loop.index", "messages | length"))
    assert len(built({"messages": long("one question", 99)}, rewriting, max_seq_len=64)) > 80
    with pytest.raises(Refusal, match=f"over {MOST_RENDERED}"):
        built({"messages": long("one question", 2 * MOST_RENDERED)}, rewriting, max_seq_len=64)
