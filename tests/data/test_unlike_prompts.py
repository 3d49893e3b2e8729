"""Templates whose generation prompt is unlike the header that they render, or that open reasoning in ways of their own.

One small template for each way in which a header, a reasoning tag or another text of the template was trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftune.data.chat import (
    CLOSED_AT_ONCE,
    HEADER_TRAINED,
    MORE_ADDED,
    MOST_ADDED,
    NO_NAME,
    NO_REASONING,
    OTHER_PROMPT,
)
from graftune.data.record import BLANK, EARLY
from graftune.errors import GraftuneError
from tests.data.helpers import CHATML, turns, with_template
from tests.data.test_masks import all_runs, prepared

HEADER = "{{ '<|im_start|>assistant\n' }}"
CALL = {"type": "function", "function": {"name": "look", "arguments": {"key": "x"}}}
TOOL = {"role": "tool", "content": "found"}
ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content + '<|end|>' }}"
    "{% elif m.role == 'tool' %}{{ '<result>' + m.content + '</result>' }}{% else %}{{ '<|assistant|>' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + (c | tojson) + '</call>' }}{% endfor %}"
    "{{ (m.content or '') + END }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def prompting(header: str, source: str = CHATML) -> str:
    return source.replace(HEADER, "{{ '" + header + "' }}")


@pytest.mark.parametrize("change", ["\n<|im_start|>assistant\n", "<|im_start|>Assistant\n", "<|im_start|>asistant\n",
                                    "<|im_start|> assistant\n\n", "  <|im_start|>assistant\n"])  # fmt: skip
def test_another_header_in_the_prompt(change: str, tmp_path: Path) -> None:
    data = prepared(tmp_path, {"messages": turns("a", "b", "c", "d")}, with_template(prompting(change)))
    assert all_runs(data) == ["b<|im_end|>", "d<|im_end|>"] and all(text.endswith(change) for text in data.prompts)
    assert data.summary.notes[OTHER_PROMPT["inference"]] == 1


def test_a_name_in_the_header(tmp_path: Path) -> None:
    source = CHATML.replace("m.role +", "m.role + (' ' + m.name if m.name else '') +")
    messages = [*turns("a"), {"role": "assistant", "content": "b", "name": "Bob"}]
    data = prepared(tmp_path, {"messages": messages}, with_template(source))
    assert all_runs(data) == ["b<|im_end|>"] and data.summary.notes == {NO_NAME: 1}


def test_another_header_after_tool_results(tmp_path: Path) -> None:
    source = ROLES.replace("END", "'<|end|>'").replace(
        "{{ '<|assistant|>' }}{% endif %}", "{{ '\n' if messages[-1].role == 'tool' }}{{ '<|assistant|>' }}{% endif %}"
    )
    messages = [*turns("a"), {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOL, turns("a", "b")[1]]
    runs = all_runs(prepared(tmp_path, {"messages": messages}, with_template(source)))
    assert runs[1] == "b<|end|>" and runs[0].endswith("</call><|end|>")


def test_two_answers_that_end_otherwise_in_the_middle(tmp_path: Path) -> None:
    source = ROLES.replace("END", "('<|end_of_text|>' if not loop.last else '<|end|>')")
    messages = [*turns("a", "b"), {"role": "assistant", "content": "c"}]
    data = prepared(tmp_path, {"messages": messages}, with_template(source))
    assert all_runs(data) == ["b<|end|>", "c<|end|>"]


def test_a_header_that_cannot_be_told_is_refused_by_name(tmp_path: Path) -> None:
    source = prompting("<|user|>me:")
    with pytest.raises(GraftuneError, match=r"header is not recognised.*me:.*assistant.*prompt_form: template"):
        prepared(tmp_path, {"messages": turns("a", "b")}, with_template(source))
    data = prepared(tmp_path, {"messages": turns("a", "b")}, with_template(source), prompt_form="template")
    assert all_runs(data) == ["b<|im_end|>"] and data.prompts[0].endswith("<|im_start|>assistant\n")


# A template that splits reasoning off at its own tag, and prints it; and one that drops it.
SHOWN = CHATML.replace(
    "m.content +",
    "(('<thought>\n' + m.content.split('</thought>')[0] + '\n</thought>\n') if '</thought>' in m.content else '') + "
    "m.content.split('</thought>')[-1] +",
)
DROPS = CHATML.replace("m.content +", "m.content.split('</thought>')[-1] +")


@pytest.mark.parametrize("source", [SHOWN, DROPS])
def test_reasoning_tags_are_learnt(source: str, tmp_path: Path) -> None:
    chat = with_template(prompting("<|im_start|>assistant\n<thought>\n", source))
    data = prepared(tmp_path, {"messages": turns("a", "b")}, chat)
    assert [run.replace("\n", "") for run in all_runs(data)] == ["</thought>b<|im_end|>"]
    assert data.summary.notes.keys() == {OTHER_PROMPT["inference"], CLOSED_AT_ONCE}


@pytest.mark.parametrize(("opening", "close"), [("{think}", "{/think}"), ("### Thinking\\n", "\\n### Answer\\n")])
def test_a_block_that_the_prompt_opens_needs_no_tags(opening: str, close: str, tmp_path: Path) -> None:
    shown = f"(('{opening}' + m.reasoning_content + '{close}') if m.reasoning_content else '') + m.content +"
    source = prompting(f"<|im_start|>assistant\n{opening}", CHATML.replace("m.content +", shown))
    data = prepared(tmp_path, {"messages": turns("a", "b")}, with_template(source))
    assert all_runs(data) == [close.replace("\\n", "\n") + "b<|im_end|>"]
    assert CLOSED_AT_ONCE in data.summary.notes


@pytest.mark.parametrize(("opening", "close"), [("{think}", "{/think}"), ("### Thinking\\n", "### Answer")])
def test_a_text_without_tags_that_the_source_names_closes_the_block(opening: str, close: str, tmp_path: Path) -> None:
    source = prompting(
        f"<|im_start|>assistant\n{opening}", CHATML.replace("m.content", f"m.content.split('{close}')[-1]")
    )
    data = prepared(tmp_path, {"messages": turns("a", "b")}, with_template(source))
    assert [run.replace("\n", "") for run in all_runs(data)] == [f"{close}b<|im_end|>"]
    closed = source.replace(opening, opening + close)
    assert all_runs(prepared(tmp_path, {"messages": turns("a", "b")}, with_template(closed))) == ["b<|im_end|>"]


def test_a_block_that_nothing_closes_is_refused(tmp_path: Path) -> None:
    for opening in ("<thought>\n", "Here is how I reason:\n"):
        chat = with_template(prompting(f"<|im_start|>assistant\n{opening}"))
        with pytest.raises(GraftuneError, match=r"opens a block that nothing closes.*prompt_form: template"):
            prepared(tmp_path, {"messages": turns("a", "b")}, chat)
        data = prepared(tmp_path, {"messages": turns("a", "b")}, chat, prompt_form="template")
        assert all_runs(data) == ["b<|im_end|>"]


@pytest.mark.parametrize(
    ("opening", "close"),
    [("<think>\n", "\n</think>\n\n"), ("<thought>", "</thought>"), ("<|think>why\n", "<think|>")],
)
def test_reasoning_is_left_out_where_the_prompt_has_closed_it(opening: str, close: str, tmp_path: Path) -> None:
    chat = with_template(prompting(f"<|im_start|>assistant\n{opening}{close}"))
    for record in (turns("a", f"{opening}hm{close}b"), [*turns("a"), turns("a", "b")[1] | {"reasoning_content": "hm"}]):
        data = prepared(tmp_path, {"messages": record}, chat)
        assert all_runs(data) == ["b<|im_end|>"] and data.summary.notes[NO_REASONING] == 1


def test_trailing_blanks_stay_where_an_open_answer_is_closed(tmp_path: Path) -> None:
    """And a system turn of the template's own that ends like an answer does not hide the end."""
    system = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}{% endif %}"
    source = system + CHATML.replace("+ '<|im_end|>\n'", "+ ('' if loop.last and m.role != 'user' else '<|im_end|>\n')")
    data = prepared(tmp_path, {"messages": turns("a", "b \n", "c", "d  ")}, with_template(source))
    assert all_runs(data) == ["b \n<|im_end|>", "d  <|im_end|>"]


def test_keys_of_a_call_keep_their_order(tmp_path: Path) -> None:
    call = {"function": {"arguments": {"key": "x"}, "name": "look"}, "type": "function", "id": "c1"}
    messages = [*turns("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    data = prepared(tmp_path, {"messages": messages}, with_template(ROLES.replace("END", "'<|end|>'")))
    assert all_runs(data) == [
        '<call>{"function": {"arguments": {"key": "x"}, "name": "look"}, "type": "function", "id": "c1"}</call><|end|>'
    ]


def test_a_header_without_a_generation_prompt_is_trained_and_said(tmp_path: Path) -> None:
    data = prepared(tmp_path, {"messages": turns("a", "b")}, with_template(prompting("")))
    assert all_runs(data) == ["<|im_start|>assistant\nb<|im_end|>"] and data.summary.notes == {HEADER_TRAINED: 1}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("Assistant: ", "", "'Assistant:' before"),
        ("", "\nThank you.", "'Thank you.' after"),
        ("Assistant: ", " Bye!", "'Assistant:' before and 'Bye!' after"),
        ("' + ('So: ' if loop.index > 2 else '') + '", "", "'So:' before"),
    ],
)
def test_words_of_the_template_around_an_answer_are_said(before: str, after: str, said: str, tmp_path: Path) -> None:
    """What is trained beside the author's text is reported; a template without such words reports nothing."""
    answer = f"('{before}' + m.content + '{after}' if m.role == 'assistant' else m.content) +"
    chat = with_template(CHATML.replace("m.content +", answer))
    data = prepared(tmp_path, {"messages": turns("a", "b", "c", "d")}, chat)
    words = "So: " if "So" in before else before
    assert all_runs(data)[1] == f"{words}d{after}<|im_end|>"
    assert data.summary.notes == {added(said): 1}
    assert not prepared(tmp_path, {"messages": turns("a", "b")}, with_template(CHATML)).summary.notes


def added(said: str) -> str:
    return f"the template adds {said} answers: it is trained, since the model has to write it"


@pytest.mark.parametrize(
    ("condition", "messages"),
    [
        ("messages[loop.index0 - 1].role == 'tool'", [*turns("a"), TOOL, turns("a", "b")[1]]),
        ("messages[0].role == 'system'", turns("a", "b", system="Be brief.")),
        ("loop.index > 4", turns("a", "b", "c", "d", "e", "f")),
        ("'\\n' in m.content", turns("a", "b\nc")),
        ("m.reasoning", [*turns("a"), turns("a", "b")[1] | {"reasoning": "why"}]),
        ("messages[loop.index0 - 1].content == 'hi'", turns("hi", "b")),
    ],
)
def test_words_that_only_some_answers_get_are_said(condition: str, messages: Any, tmp_path: Path) -> None:
    """No probe has such an answer: each row is looked at."""
    words = f"('' if m.role != 'assistant' or not ({condition}) else"
    text = f"{words} 'So: ') + m.content + {words} '\nBye!') +"
    data = prepared(tmp_path, {"messages": messages}, with_template(CHATML.replace("m.content +", text)))
    assert all_runs(data)[-1] == f"So: {messages[-1]['content']}\nBye!<|im_end|>"
    assert data.summary.notes[added("'So:' before and 'Bye!' after")] == 1


def test_words_that_differ_in_every_answer_are_counted_together(tmp_path: Path) -> None:
    source = CHATML.replace(
        "m.content +", "m.content + (' at ' ~ m.content | length if m.role == 'assistant' else '') +"
    )
    asked = [text for n in range(1, 11) for text in ("a", "b" * n)]
    data = prepared(tmp_path, {"messages": turns(*asked)}, with_template(source))
    named = range(11 - MOST_ADDED, 11)  # the last answers are rendered first
    assert data.summary.notes == {added(f"'at {n}' after"): 1 for n in named} | {MORE_ADDED: 1}


OPEN = CHATML.replace("+ '<|im_end|>\n'", "+ ('' if loop.last and m.role != 'user' else '<|im_end|>\n')")
WORDS = "('So: ' if m.role == 'assistant' else '') +"
BLOCK = "('<thought>' + (m.reasoning or '') + '</thought>' if m.role == 'assistant' else '') +"
SECOND = "not loop.first and messages[loop.index0 - 1].role == 'assistant'"
JOINED = CHATML.replace("'<|im_start|>' + m.role + '\n'", f"('\nSo: ' if {SECOND} else '<|im_start|>' + m.role + '\n')")


@pytest.mark.parametrize(
    ("source", "answer", "trained"),
    [
        # An answer that is left open has the words already when it is closed.
        (OPEN.replace("m.content", "m.content + ('' if m.role == 'user' else ' Bye!')"), "b", "b Bye!<|im_end|>"),
        # Words behind a block are no part of the tag that closes it, and do not hide an empty block.
        (CHATML.replace("m.content +", BLOCK + WORDS + "m.content +"), "b", "<thought></thought>So: b<|im_end|>"),
        (
            CHATML.replace("m.content +", BLOCK + WORDS + "m.content +"),
            "<thought>why</thought>b",
            "<thought>why</thought>So: b<|im_end|>",
        ),
        # A block that the prompt has opened is not opened again behind the words.
        (
            prompting("<|im_start|>assistant\n<think>\n", CHATML.replace("m.content +", WORDS + "m.content +")),
            "<think>\nwhy\n</think>\n\nb",
            "why\n</think>\n\nSo: b<|im_end|>",
        ),
        # The prompt may have a whole block that names its channel, behind a misspelt header.
        (
            prompting(
                "<|im_start|>asistant\n<|channel>thought\n<channel|>",
                CHATML.replace("m.content +", WORDS + "m.content.split('<channel|>')[-1] +"),
            ),
            "b",
            "So: b<|im_end|>",
        ),
        # It is not closed twice where the template cuts reasoning out of the content and writes an empty block.
        (
            prompting(
                "<|im_start|>Assistant\n<thought>",
                CHATML.replace("m.content +", BLOCK + WORDS + "m.content.split('</thought>')[-1] +"),
            ),
            "<thought>why</thought>b",
            "why</thought>So: b<|im_end|>",
        ),
    ],
)
def test_words_beside_a_block_or_an_open_end(source: str, answer: str, trained: str, tmp_path: Path) -> None:
    data = prepared(tmp_path, {"messages": turns("a", answer)}, with_template(source), train_reasoning="all")
    assert all_runs(data) == [trained]
    said = "'Bye!' after" if "Bye" in source else "'So:' before"
    assert added(said) in data.summary.notes


def test_a_word_is_not_taken_for_the_role_of_the_prompt(tmp_path: Path) -> None:
    """Nothing before `So` agrees with what is before `assistant`: without a header the answer is refused by name."""
    messages = [*turns("a", "b"), {"role": "assistant", "content": "c"}]
    with pytest.raises(GraftuneError, match=r"header is not recognised.*So: "):
        prepared(tmp_path, {"messages": messages}, with_template(JOINED.replace("assistant\n' }}", "assistant' }}")))


def test_calls_that_are_rendered_beside_reasoning_only(tmp_path: Path) -> None:
    source = ROLES.replace("END", "'<|end|>'").replace("m.tool_calls or []", "(m.tool_calls if m.reasoning else [])")
    message: dict[str, Any] = {"role": "assistant", "content": "see", "tool_calls": [CALL], "reasoning": "hm"}
    data = prepared(tmp_path, {"messages": [*turns("a"), message]}, with_template(source))
    assert "<call>" in all_runs(data)[0]


@pytest.mark.parametrize(
    ("messages", "trained", "note"),
    [
        (turns("a", " ", "c", "d"), ["d"], BLANK),
        (turns("a", "b", "c", "\n"), ["b"], BLANK),
        (turns("", "a", "b", "c")[1:], ["c"], EARLY),
        (turns("a", "b", "c"), ["b"], "1 turn after the last trained answer left out"),
    ],
)
def test_what_is_left_out_is_counted(messages: Any, trained: list[str], note: str, tmp_path: Path) -> None:
    data = prepared(tmp_path, {"messages": messages}, with_template(CHATML))
    assert all_runs(data) == [f"{text}<|im_end|>" for text in trained] and data.summary.notes[note] == 1


def test_a_call_after_reasoning_that_the_prompt_opened(tmp_path: Path) -> None:
    """The tag before a call is like the one that opens reasoning, and is no part of the header."""
    source = (
        ROLES.replace("END", "'<|end|>'").replace("<call>", "<|START_ACTION|>").replace("</call>", "<|END_ACTION|>")
    )
    why = "{% if m.reasoning %}{{ '<|START_THINKING|>' + m.reasoning + '<|END_THINKING|>' }}{% endif %}{% for c in"
    source = source.replace("{% for c in", why).replace(
        "{{ '<|assistant|>' }}{% endif %}", "{{ '<|assistant|><|START_THINKING|>' }}{% endif %}"
    )
    messages = [*turns("a"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    (run,) = all_runs(prepared(tmp_path, {"messages": messages}, with_template(source)))
    assert run.startswith("<|END_THINKING|><|START_ACTION|>{") and run.endswith("}<|END_ACTION|><|end|>")
