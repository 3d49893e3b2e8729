"""Templates that are unlike the shipped ones, each a finding: other headers in the prompt, reasoning of other kinds,
words around answers, calls closed otherwise, system prompts held back.

One small template for each way in which a header, a reasoning tag or another text of the template was trained.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import tokenizers

from graftune.data.chat import (
    CLOSED_AT_ONCE,
    HEADER_TRAINED,
    MORE_ADDED,
    MOST_ADDED,
    NO_NAME,
    NO_REASONING,
    NOT_RENDERED,
    OTHER_PROMPT,
)
from graftune.data.dataset import prepare
from graftune.data.format import EMPTY_NOT_TRAINED, EVERYTHING_TRAINED
from graftune.data.mask import ACROSS
from graftune.data.record import BLANK, EARLY
from graftune.errors import GraftuneError
from graftune.settings.sections import DataConfig
from tests.data.helpers import CHATML, all_runs, prepared, tokenizer, turns, with_template

START, END = "<|im_start|>assistant\n", "<|im_end|>"
CALL = {"type": "function", "function": {"name": "look", "arguments": {"key": "x"}}}
OTHER_ORDER = {"function": {"arguments": {"key": "x"}, "name": "look"}, "type": "function", "id": "c1"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content + '<|end|>' }}"
    "{% elif m.role == 'tool' %}{{ '<result>' + m.content + '</result>' }}{% else %}{{ '<|assistant|>' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + (c | tojson) + '</call>' }}{% endfor %}"
    "{{ (m.content or '') + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def prompting(header: str, source: str = CHATML) -> str:
    return source.replace("{{ '<|im_start|>assistant\n' }}", "{{ '" + header + "' }}")


def asked(content: str | None, **more: Any) -> list[dict[str, Any]]:
    """A question, and an answer with more than its content."""
    return [*turns("a"), {"role": "assistant", "content": content, **more}]


def said(words: str) -> str:
    return f"the template adds {words} answers: it is trained, since the model has to write it"


def around(before: str, after: str) -> str:
    answer = f"('{before}' + m.content + '{after}' if m.role == 'assistant' else m.content) +"
    return CHATML.replace("m.content +", answer)


def around_some(condition: str) -> str:
    """Words around the answers for which the condition holds."""
    words = f"('' if m.role != 'assistant' or not ({condition}) else"
    return CHATML.replace("m.content +", f"{words} 'So: ') + m.content + {words} '\nBye!') +")


TWO = turns("a", "b", "c", "d")
TOOL = {"role": "tool", "content": "found"}
AFTER_TOOL = [*turns("a"), TOOL, turns("a", "b")[1]]
# A template that splits reasoning off at its own tag, and prints it; and one that drops it.
SHOWN = CHATML.replace(
    "m.content +",
    "(('<thought>\n' + m.content.split('</thought>')[0] + '\n</thought>\n') if '</thought>' in m.content else '') + "
    "m.content.split('</thought>')[-1] +",
)
DROPS = CHATML.replace("m.content +", "m.content.split('</thought>')[-1] +")
REASONING = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\n' -}}
  {%- if m.role == 'assistant' and loop.index0 < ns.last -%}
    {{- m.content.split('</think>')[-1].lstrip('\n') -}}
  {%- else -%}{{- m.content -}}{%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""
OPENS = prompting("<|im_start|>assistant\n<think>\n")
OPEN_END = CHATML.replace("+ '<|im_end|>\n'", "+ ('' if loop.last and m.role != 'user' else '<|im_end|>\n')")
HELP = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}{% endif %}"
WORDS = "('So: ' if m.role == 'assistant' else '') +"
BLOCK = "('<thought>' + (m.reasoning or '') + '</thought>' if m.role == 'assistant' else '') +"
WORDY = CHATML.replace("m.content +", WORDS + "m.content +")
BLOCK_AND_WORDS = CHATML.replace("m.content +", BLOCK + WORDS + "m.content +")
SECOND = "not loop.first and messages[loop.index0 - 1].role == 'assistant'"
JOINED = CHATML.replace("'<|im_start|>' + m.role + '\n'", f"('\nSo: ' if {SECOND} else '<|im_start|>' + m.role + '\n')")
ORDINARY_END = CHATML.replace("<|im_end|>\n", "[over]\n")
OVER = "the template ends an answer with '[over]', which is ordinary text to this tokenizer"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}BODY{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EMPTY_BLOCKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if thinking is defined and not thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
ONLY_FULL_BLOCKS = EMPTY_BLOCKS.replace(
    "'<think>\n' + (m.reasoning_content or '')", "'<think>\n' + m.reasoning_content"
).replace("{% if m.role == 'assistant' %}", "{% if m.reasoning_content %}")
EMPTY, FULL = "<think>\n\n</think>\n\n", "<think>\nwhy\n</think>\n\n"
# Another spelling of the field that the template reads.
THOUGHT = [*turns("a", "b", "c"), asked("d", thinking="why")[1]]
DEFAULT = CHATML.replace("{% for", "{% if messages[0].role != 'system' %}{{ 'DEFAULT' }}{% endif %}{% for")
PARTS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '[THINK]' + p.thinking + '[/THINK]' if p.type == 'thinking' else p.text }}{% endfor %}{% endif %}"
    "{{ '</s>' }}{% endif %}{% endfor %}"
)
REASONED = [*asked("b", reasoning_content="why"), *turns("c", "[THINK]so[/THINK]d", "e", "f")]
MERGED = {"system turns merged into the first user turn: the template takes none": 1}
COUNTED = CHATML.replace("m.content +", "m.content + (' at ' ~ m.content | length if m.role == 'assistant' else '') +")
NULL = (
    "{% for m in messages %}{% if m.tool_calls and m.content is none %}"
    "{% set call = m.tool_calls[0].function %}"
    "{{ '<|im_start|>assistant\ncall ' + call.name + call.arguments + '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MORE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}{% else %}"
    "{{ ('<|assistant|>' if messages[loop.index0 - 1].role == 'user' else '[more] ') + m.content + '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<|assistant|>' }}{% endif %}"
)
UNCLOSED_QUESTION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if not loop.last or m.role != 'user' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM_LAST = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NEEDS_TOOLS = (
    "{% for t in tools %}{{ t.function.name + '\n' }}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{{ '<|end_of_turn|>' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS_OF_CALLS = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.name + (m.tool_calls[0].function.arguments | tojson) + '</s>' }}"
    "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ACTIONS = (
    ROLES.replace("<call>", "<|START_ACTION|>")
    .replace("</call>", "<|END_ACTION|>")
    .replace(
        "{% for c in",
        "{% if m.reasoning %}{{ '<|START_THINKING|>' + m.reasoning + '<|END_THINKING|>' }}{% endif %}{% for c in",
    )
    .replace("{{ '<|assistant|>' }}{% endif %}", "{{ '<|assistant|><|START_THINKING|>' }}{% endif %}")
)


SO = {said("'So:' before"): 1}


class Case(NamedTuple):
    source: str
    messages: list[dict[str, Any]]
    trained: list[str]
    notes: dict[str, int] | None = None  # these, and no others
    settings: Mapping[str, Any] = MappingProxyType({})
    prompt: str = ""  # how the prompt of the last example ends
    among: Mapping[str, int] = MappingProxyType({})  # the notes
    examples: int = 0


CASES = {
    "an answer that spells its end token": Case(
        CHATML,
        turns("Which token?", "It is <|im_end|> and\n<|im_end|>", "And?", END),
        ["It is <|im_end|> and\n<|im_end|><|im_end|>", END + END],
    ),
    "a name in the header": Case(
        CHATML.replace("m.role +", "m.role + (' ' + m.name if m.name else '') +"),
        asked("b", name="Bob"), [f"b{END}"], {NO_NAME: 1},
    ),
    "another header after tool results": Case(
        ROLES.replace(
            "{{ '<|assistant|>' }}{% endif %}",
            "{{ '\n' if messages[-1].role == 'tool' }}{{ '<|assistant|>' }}{% endif %}",
        ),
        [*asked("", tool_calls=[CALL]), TOOL, turns("a", "b")[1]],
        [f"<call>{json.dumps(CALL)}</call><|end|>", "b<|end|>"],
    ),
    "two answers that end otherwise in the middle": Case(
        ROLES.replace("'<|end|>' }}{% endif", "('<|end_of_text|>' if not loop.last else '<|end|>') }}{% endif"),
        [*turns("a", "b"), turns("a", "c")[1]], ["b<|end|>", "c<|end|>"],
    ),
    "two answers in a row": Case(  # D3: the second one's opening, which the model has to write, is trained
        MORE, [*turns("a", "b"), turns("a", "c")[1]], ["b<|end|>[more] c<|end|>"]
    ),
    "a header without a generation prompt": Case(
        prompting(""), turns("a", "b"), [f"{START}b{END}"], {HEADER_TRAINED: 1}
    ),
    "the keys of a call keep their order": Case(
        ROLES, asked(None, tool_calls=[OTHER_ORDER]), [f"<call>{json.dumps(OTHER_ORDER)}</call><|end|>"]
    ),
    "calls that are rendered beside reasoning only": Case(
        ROLES.replace("m.tool_calls or []", "(m.tool_calls if m.reasoning else [])"),
        asked("see", tool_calls=[CALL], reasoning="hm"), [f"<call>{json.dumps(CALL)}</call>see<|end|>"],
    ),
    # The tag before a call is like the one that opens reasoning, and is no part of the header.
    "a call after reasoning that the prompt opened": Case(
        ACTIONS, asked("", tool_calls=[CALL]),
        [f"<|END_THINKING|><|START_ACTION|>{json.dumps(CALL)}<|END_ACTION|><|end|>"],
    ),
    # D8: the template reads its tools whatever the conversation, and closes calls with a token of its own.
    "a template that needs tools": Case(
        NEEDS_TOOLS, asked(None, tool_calls=[CALL]), ['{"key": "x"}<|end_of_turn|>'],
        prompt=f"look\n<|im_start|>user\na{END}\n{START}",
    ),
    # D2: the template tells a call by `content is none`; with "" it would print an empty answer and its end first.
    # Arguments are wanted as text here (D8), and an empty content as null.
    **{
        f"null content stays null, {content!r}": Case(
            NULL, asked(content, tool_calls=[CALL]), [f'call look{{"key": "x"}}{END}'], {}
        )
        for content in (None, "")
    },
    # D9: a tool call that ends with EOS already gets no second one.
    "append_eos of a call": Case(
        EOS_OF_CALLS, asked("", tool_calls=[CALL]), ['look{"key": "x"}</s>'], settings={"append_eos": True}
    ),
    "append_eos of a text": Case(EOS_OF_CALLS, turns("a", "b"), ["b</s>"], settings={"append_eos": True}),
    # D1: the prompt opens <|im_start|> where the answered conversation goes on with <|im_end|>, of which both have the
    # first five letters; cut there, neither would be a control token.
    "no answer begins inside a tag": Case(
        UNCLOSED_QUESTION, turns("a", "b"), [f"b{END}"], prompt=f"<|im_start|>user\na{START}"
    ),
    **{
        f"a system turn that is not taken, {way}": Case(
            NO_SYSTEM.replace("BODY", body), turns("a", "b", "c", "d", system="Be brief."), [f"b{END}", f"d{END}"],
            MERGED, prompt=f"<|im_start|>user\nBe brief.\n\na{END}\n{START}b{END}\n<|im_start|>user\nc{END}\n{START}",
        )
        for way, body in (("raises", "{{ raise_exception('no system') }}"), ("drops", ""))
    },
    "old reasoning is dropped": Case(
        REASONING,
        turns("One?", "<think>\nhm\n</think>\n\nBlue", "Two?", "<think>\nso\n</think>\n\nRed", "Three?", "Green"),
        [f"<think>\nhm\n</think>\n\nBlue{END}", f"<think>\nso\n</think>\n\nRed{END}", f"Green{END}"],
        prompt=f"One?{END}\n{START}Blue{END}\n<|im_start|>user\nTwo?{END}\n{START}Red{END}\n"
        f"<|im_start|>user\nThree?{END}\n{START}",
        examples=3,
    ),
    "without reasoning nothing is rewritten": Case(REASONING, TWO, [f"b{END}", f"d{END}"], {}, examples=1),
    # D1, D7: the answer goes behind the prompt that inference gives, and closes what that has opened.
    "the prompt opens a block": Case(
        OPENS, turns("a", "<thinner", "c", "<think>\nwell\n</think>\n\nBy the way"),
        [f"\n</think>\n\n<thinner{END}", f"well\n</think>\n\nBy the way{END}"],
        prompt=f"{START}<think>\n", among={OTHER_PROMPT["inference"]: 1}, examples=2,
    ),
    "the prompt that the template renders": Case(
        OPENS, turns("a", "<thinner"), [f"<thinner{END}"], {OTHER_PROMPT["template"]: 1}, {"prompt_form": "template"},
        START,
    ),
    # The whole conversation then does not start with each turn's own rendering, but it does up to the end token.
    "an end of text after the last turn only": Case(
        CHATML.replace("{% if add_gen", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}{% if add_gen"),
        TWO, [f"b{END}", f"d{END}"], examples=1,
    ),
    "an end in ordinary text": Case(ORDINARY_END, TWO, ["b[over]", "d[over]"], among={OVER: 0}),
    "an end in ordinary text, append_eos": Case(
        ORDINARY_END, TWO, ["b[over]</s>", "d[over]</s>"], settings={"append_eos": True}
    ),
    # And a system turn of the template's own that ends like an answer does not hide the end.
    "trailing blanks where an open answer is closed": Case(
        HELP + OPEN_END, turns("a", "b \n", "c", "d  "), [f"b \n{END}", f"d  {END}"]
    ),
    **{
        f"reasoning tags are learnt, {trained!r}": Case(
            prompting("<|im_start|>assistant\n<thought>\n", source), turns("a", "b"), [f"{trained}b{END}"],
            {OTHER_PROMPT["inference"]: 1, CLOSED_AT_ONCE: 1},
        )
        for trained, source in (("\n</thought>\n", SHOWN), ("\n</thought>\n\n", DROPS))
    },
    **{
        f"a block without tags, {opening}": Case(
            prompting(
                f"<|im_start|>assistant\n{opening}",
                CHATML.replace(
                    "m.content +",
                    f"(('{opening}' + m.reasoning_content + '{close}') if m.reasoning_content else '') + m.content +",
                ),
            ),
            turns("a", "b"), [close.replace("\\n", "\n") + f"b{END}"], among={CLOSED_AT_ONCE: 1},
        )
        for opening, close in (("{think}", "{/think}"), ("### Thinking\\n", "\\n### Answer\\n"))
    },
    **{
        f"a block whose end only the source names, {opening}{end}": Case(
            prompting(
                f"<|im_start|>assistant\n{opening}{end}", CHATML.replace("m.content", f"m.content.split('{close}')[-1]")
            ),
            turns("a", "b"), [f"{'' if end else shown}b{END}"],
        )
        for opening, close, shown in (
            ("{think}", "{/think}", "{/think}"), ("### Thinking\\n", "### Answer", "\n### Answer\n\n"),
        )
        for end in ("", close)
    },
    **{
        f"reasoning behind a closed block, {opening}{number}": Case(
            prompting(f"<|im_start|>assistant\n{opening}{close}"), messages, [f"b{END}"], among={NO_REASONING: 1},
        )
        for opening, close in (
            ("<think>\n", "\n</think>\n\n"), ("<thought>", "</thought>"), ("<|think>why\n", "<think|>"),
        )
        for number, messages in enumerate((turns("a", f"{opening}hm{close}b"), asked("b", reasoning_content="hm")))
    },
    # What is trained beside the author's text is reported.
    **{
        f"words around answers, {words}": Case(source, TWO, trained, {said(words): 1})
        for source, trained, words in (
            (around("Assistant: ", ""), [f"Assistant: b{END}", f"Assistant: d{END}"], "'Assistant:' before"),
            (around("", "\nThank you."), [f"b\nThank you.{END}", f"d\nThank you.{END}"], "'Thank you.' after"),
            (
                around("Assistant: ", " Bye!"), [f"Assistant: b Bye!{END}", f"Assistant: d Bye!{END}"],
                "'Assistant:' before and 'Bye!' after",
            ),
            (around("' + ('So: ' if loop.index > 2 else '') + '", ""), [f"b{END}", f"So: d{END}"], "'So:' before"),
        )
    },
    # No probe has such an answer: each row is looked at.
    **{
        f"words around some answers, {condition}": Case(
            around_some(condition), messages, [*trained, f"So: {messages[-1]['content']}\nBye!{END}"],
            among={said("'So:' before and 'Bye!' after"): 1},
        )
        for condition, messages, trained in (
            ("messages[loop.index0 - 1].role == 'tool'", AFTER_TOOL, []),
            ("messages[0].role == 'system'", turns("a", "b", system="Be brief."), []),
            ("loop.index > 4", turns("a", "b", "c", "d", "e", "f"), [f"b{END}", f"d{END}"]),
            ("'\\n' in m.content", turns("a", "b\nc"), []),
            ("m.reasoning", asked("b", reasoning="why"), []),
            ("messages[loop.index0 - 1].content == 'hi'", turns("hi", "b"), []),
        )
    },
    "words that differ in every answer are counted together": Case(
        COUNTED, turns(*(text for n in range(1, 11) for text in ("a", "b" * n))),
        [f"{'b' * n} at {n}{END}" for n in range(1, 11)],  # the last answers are rendered first
        {said(f"'at {n}' after"): 1 for n in range(11 - MOST_ADDED, 11)} | {MORE_ADDED: 1},
    ),
    # An answer that is left open has the words already when it is closed.
    "words and an open end": Case(
        OPEN_END.replace("m.content", "m.content + ('' if m.role == 'user' else ' Bye!')"), turns("a", "b"),
        [f"b Bye!{END}"], among={said("'Bye!' after"): 1},
    ),
    # Words behind a block are no part of the tag that closes it, and do not hide an empty block.
    **{
        f"words behind a block, {answer}": Case(
            BLOCK_AND_WORDS, turns("a", answer), [trained], settings={"train_reasoning": "all"}, among=SO
        )
        for answer, trained in (
            ("b", f"<thought></thought>So: b{END}"),
            ("<thought>why</thought>b", f"<thought>why</thought>So: b{END}"),
        )
    },
    # A block that the prompt has opened is not opened again behind the words.
    "words behind a block that the prompt opens": Case(
        prompting("<|im_start|>assistant\n<think>\n", WORDY), turns("a", "<think>\nwhy\n</think>\n\nb"),
        [f"why\n</think>\n\nSo: b{END}"], settings={"train_reasoning": "all"}, among=SO,
    ),
    # The prompt may have a whole block that names its channel, behind a misspelt header.
    "words behind a channel": Case(
        prompting(
            "<|im_start|>asistant\n<|channel>thought\n<channel|>",
            CHATML.replace("m.content +", WORDS + "m.content.split('<channel|>')[-1] +"),
        ),
        turns("a", "b"), [f"So: b{END}"], settings={"train_reasoning": "all"}, among=SO,
    ),
    # It is not closed twice where the template cuts reasoning out of the content and writes an empty block.
    "words behind an empty block": Case(
        prompting(
            "<|im_start|>Assistant\n<thought>",
            CHATML.replace("m.content +", BLOCK + WORDS + "m.content.split('</thought>')[-1] +"),
        ),
        turns("a", "<thought>why</thought>b"), [f"why</thought>So: b{END}"],
        settings={"train_reasoning": "all"}, among=SO,
    ),
    # D5; and D6: an empty system turn is no missing one.
    "reasoning that is not rendered is counted": Case(
        REASONING,
        [*turns("One?", "<think>\nhm\n</think>\n\nBlue", "Two?"), asked("Red", reasoning_content="because")[1]],
        [f"<think>\nhm\n</think>\n\nBlue{END}", f"Red{END}"], among={NOT_RENDERED["reasoning"]: 1},
    ),
    "an empty system turn": Case(
        DEFAULT, [{"role": "system", "content": ""}, *turns("a", "b")], [f"b{END}"],
        prompt=f"<|im_start|>system\n{END}\n<|im_start|>user\na{END}\n{START}",
    ),
    "no system turn": Case(
        DEFAULT, turns("a", "b"), [f"b{END}"], prompt=f"DEFAULT<|im_start|>user\na{END}\n{START}"
    ),
    **{
        f"blocks of reasoning, {choice}": Case(EMPTY_BLOCKS, THOUGHT, trained, notes, {"train_reasoning": choice})
        for choice, trained, notes in (
            ("all", [f"{EMPTY}b{END}", f"{FULL}d{END}"], {}),
            ("not_empty", [f"b{END}", f"{FULL}d{END}"], {}),
            ("none", [f"b{END}", f"d{END}"], {}),
            ("auto", [f"b{END}", f"{FULL}d{END}"], {EMPTY_NOT_TRAINED: 0}),  # where the template writes empty blocks
        )
    },
    "blocks only where there is reasoning": Case(
        ONLY_FULL_BLOCKS, THOUGHT, [f"b{END}", f"{FULL}d{END}"], among={EVERYTHING_TRAINED: 0}
    ),
    "a variable that closes the block": Case(
        EMPTY_BLOCKS, turns("a", "b"), [f"b{END}"], settings={"template_vars": {"thinking": False}}, prompt=EMPTY
    ),
    # Ministral 3's template reads it from the list of parts; a template that prints a list as JSON does not.
    **{
        f"reasoning as a part of the content, {choice}": Case(PARTS, REASONED, trained, {}, {"train_reasoning": choice})
        for choice, trained in {
            "auto": ["[THINK]why[/THINK]b</s>", "[THINK]so[/THINK]d</s>", "f</s>"],
            "none": ["b</s>", "d</s>", "f</s>"],
        }.items()
    },
    "parts that are printed as JSON": Case(
        CHATML.replace("m.content", "(m.content if m.content is string else m.content | tojson)"), REASONED[:2],
        [f"b{END}"], among={NOT_RENDERED["reasoning"]: 1},
    ),
    **{
        f"left out and counted, {note}{number}": Case(CHATML, messages, [f"{trained}{END}"], among={note: 1})
        for number, (messages, trained, note) in enumerate(
            (
                (turns("a", " ", "c", "d"), "d", BLANK),
                (turns("a", "b", "c", "\n"), "b", BLANK),
                (turns("", "a", "b", "c")[1:], "c", EARLY),
                (turns("a", "b", "c"), "b", "1 turn after the last trained answer left out"),
            )
        )
    },
}  # fmt: skip
CASES |= {
    f"another header in the prompt, {header!r}": Case(
        prompting(header), TWO, [f"b{END}", f"d{END}"], prompt=header, among={OTHER_PROMPT["inference"]: 1}
    )
    for header in (f"\n{START}", "<|im_start|>Assistant\n", "<|im_start|>asistant\n", "<|im_start|> assistant\n\n",
                   f"  {START}")
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_trained(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    record = {"messages": case.messages} | ({"tools": TOOLS} if case.source == NEEDS_TOOLS else {})
    data = prepared(tmp_path, record, with_template(case.source), **case.settings)
    assert all_runs(data) == case.trained and data.prompts[-1].endswith(case.prompt)
    assert case.notes is None or data.summary.notes == case.notes
    assert case.among.items() <= data.summary.notes.items() and case.examples in (0, len(data.examples))


@pytest.mark.parametrize(
    ("source", "messages", "why"),
    [
        (prompting("<|user|>me:"), turns("a", "b"), "header is not recognised.*me:.*assistant.*prompt_form: template"),
        (prompting(f"{START}<thought>\n"), turns("a", "b"), "a block that nothing closes.*prompt_form: template"),
        (prompting(f"{START}Here is how I reason:\n"), turns("a", "b"), "a block that nothing closes.*prompt_form"),
        # Nothing before `So` agrees with what is before `assistant`: the word is not taken for the role of the prompt.
        (
            JOINED.replace("assistant\n' }}", "assistant' }}"),
            [*turns("a", "b"), turns("a", "c")[1]],
            "header is not recognised.*So: ",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(source: str, messages: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match=why):
        prepared(tmp_path, {"messages": messages}, with_template(source))
    if "So: " not in why:
        data = prepared(tmp_path, {"messages": messages}, with_template(source), prompt_form="template")
        assert all_runs(data) == ["b<|im_end|>"] and data.prompts[0].endswith(START)


def test_a_system_prompt_in_the_last_turn_only(tmp_path: Path) -> None:
    """D4: the prompt that inference gives has it, and so has every example."""
    # As the last turn the assistant's would get it too: only the inference prompt is right.
    messages = turns("a", "b", "c", "d", system="Be brief.")
    data = prepared(tmp_path, {"messages": messages}, with_template(SYSTEM_LAST))
    assert len(data.examples) == 2 and all("Be brief.\n" in prompt for prompt in data.prompts)


@pytest.mark.parametrize(
    ("variables", "why"),
    [({"messages": "x"}, "messages is set by graftune"), ({"thinkng": 1}, "reads no variable 'thinkng'")],
)
def test_variables_that_a_template_does_not_read(variables: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match=why):
        prepared(tmp_path, {"messages": TWO}, with_template(EMPTY_BLOCKS), template_vars=variables)


def test_reasoning_behind_a_token_across_the_border(tmp_path: Path) -> None:
    """Vocabularies of today take two line breaks as one token: "<think>\\n" and "\\n</think>" share one."""
    backend = tokenizers.Tokenizer.from_str(tokenizer().backend.to_str())
    backend.add_tokens([tokenizers.AddedToken("\n\n", normalized=False)])
    source = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    chat = dataclasses.replace(with_template(source), backend=backend)
    for choice, trained in (
        ("all", "\n</think>\n\nb<|im_end|>"),
        ("not_empty", "b<|im_end|>"),
        ("none", "b<|im_end|>"),
    ):
        data = prepared(tmp_path, {"messages": turns("a", "b")}, chat, train_reasoning=choice)
        example, inference = data.examples[0], chat.encode(data.prompts[0])
        assert list(example.tokens[: len(inference)]) == inference
        assert chat.decode([t for t, on in zip(example.tokens, example.supervised, strict=True) if on]) == trained
        assert data.summary.notes.keys() == {OTHER_PROMPT["inference"], CLOSED_AT_ONCE, ACROSS}
    data = prepared(tmp_path, {"messages": turns("a", "<think>\nwhy\n</think>\n\nb")}, chat)
    assert not any("reasoning" in note for note in data.summary.notes), "it is rendered, behind the prompt's own tag"


def test_a_token_across_prompt_and_answer(tmp_path: Path) -> None:
    """The prompt keeps the tokens that it has at inference, the answer begins after them, and the row is counted."""
    chat = with_template(CHATML)
    for answer in ("\n\nTwo lines down", "  spaces"):
        record = {"messages": turns("a", answer)}
        data = prepared(tmp_path, record, chat)
        inference = tokenizer().encode(data.prompts[0])
        example = data.examples[0]
        assert list(example.tokens[: len(inference)]) == inference and not any(example.supervised[: len(inference)])
        assert all(example.supervised[len(inference) :]) and all_runs(data) == [answer + "<|im_end|>"]


def test_one_huge_row_is_refused_by_itself(tmp_path: Path) -> None:
    """D13: not the file, and not in the template's name."""
    path = tmp_path / "data.jsonl"
    rows = [{"messages": turns("x" * 5_000_000, "b")}, {"messages": turns("a", "b")}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows.append(
        {"messages": [*turns("a"), {"role": "assistant", "content": "b", "reasoning_content": "x" * 5_000_000}]}
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare(str(path), with_template(CHATML), DataConfig())
    assert len(data) == 1 and data.summary.refused == {"too long to render": 2}
