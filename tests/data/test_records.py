"""Records as published data sets write them: every convention comes out as one shape, unusual spellings are noted, and
what has no place here is refused by its own name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftune.data.columns import refusal_of_all
from graftune.data.record import to_record
from graftune.data.row import Refusal
from graftune.data.source import rows, sources
from graftune.errors import GraftuneError
from tests.data.helpers import turns

ASKED = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
SHAREGPT = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}

SAME: dict[str, dict[str, Any]] = {
    "prompt/response": {"prompt": "What?", "response": "That."},
    "capitals and spaces": {" Prompt ": "What?", "Response": "That."},
    "question/answer": {"Question": "What?", "Answer": "That."},
    "query/response": {"query": "What?", "response": "That.", "type": "x"},
    "question/response": {"system_prompt": "", "question": "What?", "response": "That."},
    "input/output": {"input": "What?", "output": "That."},
    "dolly": {"instruction": "What?", "context": "", "response": "That.", "category": "qa"},
    "alpaca with its text": {"instruction": "What?", "input": "", "output": "That.", "text": "Below is ..."},
    "alpaca with its prompt": {"instruction": "What?", "input": "", "output": "That.", "prompt": "Below is ..."},
    "nulls": {"messages": None, "text": None, "prompt": "What?", "response": "That."},
    "messages": {"prompt": "What?", "prompt_id": "7", "messages": ASKED},
    "messages as text": {"messages": json.dumps(ASKED)},
    "conversations": {"conversations": SHAREGPT},
    "conversations with roles": {"conversations": ASKED},
    "messages with speakers": {"messages": SHAREGPT},
    "conversation": {"conversation": ASKED, "language": "English"},
    "roles in capitals": {"messages": [{**ASKED[0], "role": "User"}, {**ASKED[1], "role": "Assistant"}]},
    "ai": {"conversations": [{"from": "human", "value": "What?"}, {"from": "ai", "value": "That."}]},
    "bot": {"conversations": [{"from": "user", "value": "What?"}, {"from": "bot", "value": "That."}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"text": "at?"}]}, ASKED[1]]},
    "refusal": {"messages": [ASKED[0], {"role": "assistant", "content": None, "refusal": "That."}]},
    "TRL": {"prompt": ASKED[:1], "completion": ASKED[1:]},
    "TRL, text completion": {"prompt": ASKED[:1], "completion": "That."},
    "TRL, text prompt": {"prompt": "What?", "completion": ASKED[1:]},
    "of a server": {"messages": [ASKED[0], {**ASKED[1], "refusal": None, "tool_calls": None, "name": None}]},
    "history": {"instruction": "What?", "output": "That.", "history": [], "system": " "},
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_one_shape(name: str) -> None:
    assert to_record(SAME[name]).messages == ASKED


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("prompt/response", ()),
        ("query/response", ("column not used: type",)),
        ("conversations", ()),
        ("capitals and spaces", ("column ' Prompt ' read as prompt", "column 'Response' read as response")),
        ("question/response", ("columns 'question' and 'response' read as prompt and response",)),
        ("roles in capitals", ("turns of 'User' read as user", "turns of 'Assistant' read as assistant")),
        ("ai", ("turns of 'ai' read as assistant",)),
        ("refusal", ("'refusal' read as the assistant's text",)),
    ],
)
def test_unusual_spellings_are_noted(name: str, notes: tuple[str, ...]) -> None:
    assert to_record(SAME[name]).notes == notes


SYSTEM = {"role": "system", "content": "S"}
SPOKEN = [{"from": "system", "value": "S"}, *SHAREGPT]
SPOKEN_SYSTEM = [SYSTEM, *ASKED]
HISTORY = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "S"}
UNNAMED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
TWICE = [ASKED[0], {**ASKED[1], "weight": 0}, ASKED[0], {**ASKED[1], "train": True}, *ASKED]
FUNCTION = {"name": "f", "parameters": {}}
WRAPPED = {"type": "function", "function": FUNCTION}
# What else a row says: the messages that it becomes, and parts of the record.
MORE: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    # Of which the plain name is taken.
    "a name twice": ({"Prompt": "a", "prompt": "What?", "response": "That."}, ASKED,
                     {"notes": ("column not used: Prompt",)}),
    "dolly": (SAME["dolly"], ASKED, {"notes": ("column not used: category",)}),
    "alpaca with its prompt": (SAME["alpaca with its prompt"], ASKED, {"notes": ("column not used: prompt",)}),
    "context": ({**SAME["dolly"], "context": "Here."}, [{**ASKED[0], "content": "What?\n\nHere."}, ASKED[1]], {}),
    "history": (HISTORY, [SYSTEM, *turns("a", "b", "c", "d")], {}),
    "system prompt of a column": ({"system_prompt": "S", **SAME["question/answer"]}, SPOKEN_SYSTEM, {}),
    # The template's default would come back otherwise.
    "empty system turn": ({"messages": [{**SYSTEM, "content": ""}, *ASKED]}, [{**SYSTEM, "content": ""}, *ASKED], {}),
    "a column that agrees": ({"system": "S\n", "conversations": SPOKEN}, SPOKEN_SYSTEM, {}),
    "developer": ({"messages": [{**SYSTEM, "role": "developer"}, *ASKED]}, SPOKEN_SYSTEM,
                  {"notes": ("turns of 'developer' read as system",)}),
    "TRL trains the completion only": (
        {"prompt": [*ASKED, ASKED[0]], "completion": ASKED[1:]}, [*ASKED, *ASKED],
        {"flags": [None, False, None, None], "kind": "messages"},
    ),
    # A flag is no part of the message.
    "weights and flags": ({"messages": TWICE}, ASKED * 3, {"flags": [None, False, None, True, None, None]}),
    "text beside a call": (
        {"messages": [ASKED[0], {"role": "assistant", "content": "See", "tool_calls": [UNNAMED]}]},
        [ASKED[0], {"role": "assistant", "content": "See",
                    "tool_calls": [{**UNNAMED, "function": {"name": "f", "arguments": {}}}]}], {},
    ),
    "reasoning": ({"messages": [ASKED[0], {**ASKED[1], "reasoning_content": "hm", "name": None}]},
                  [ASKED[0], {**ASKED[1], "reasoning_content": "hm"}], {}),
    **{
        f"tools {number}": ({"messages": ASKED, "tools": given}, ASKED, {"tools": tools})
        for number, (given, tools) in enumerate((
            ([WRAPPED], [WRAPPED]), (json.dumps([FUNCTION]), [WRAPPED]), (json.dumps([WRAPPED]), [WRAPPED]), ("", None)
        ))
    },
    "bare tools": ({"messages": ASKED, "tools": [FUNCTION]}, ASKED, {
        "tools": [WRAPPED], "notes": ("tools given without 'type' and 'function', wrapped as OpenAI's are",),
    }),
    "tools of TRL": ({**SAME["TRL"], "tools": [FUNCTION]}, ASKED, {"tools": [WRAPPED]}),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_what_else_a_row_says(name: str) -> None:
    row, messages, parts = MORE[name]
    record = to_record(row)
    assert record.messages == messages and {part: getattr(record, part) for part in parts} == parts


TOOL_TURNS: dict[str, list[dict[str, Any]]] = {
    "tool_calls": [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "bare": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}],
    "text": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]}],
    "all as text": [{"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])}],
    "function_call": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}],
    "speaker": [{"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}],
    "speaker, a list": [{"from": "function_call", "value": '[{"name": "f", "arguments": {"x": 1}}]'}],
    "speaker, text": [{"from": "function_call", "value": json.dumps({"name": "f", "arguments": '{"x": 1}'})}],
}


@pytest.mark.parametrize("name", TOOL_TURNS)
@pytest.mark.parametrize("result", [{"role": "tool", "content": "2"}, {"from": "observation", "value": "2"}, {"role": "function", "name": "f", "content": "2"}, {"from": "function_response", "value": "2"}])  # fmt: skip # noqa: E501
def test_tool_calls(name: str, result: dict[str, Any]) -> None:
    record = to_record({"conversations": [SHAREGPT[0], *TOOL_TURNS[name], result, SHAREGPT[1]]})
    assert record.messages[1] == {"role": "assistant", "content": None, "tool_calls": [CALL]}, "null stays null"
    assert record.messages[2]["role"] == "tool" and record.messages[2]["content"] == "2"


def nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": [value]}
    return value


def call(**changes: Any) -> dict[str, Any]:
    return {"messages": [ASKED[0], {"role": "assistant", "content": None, **changes}]}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "two pairs": ({"prompt": "a", "response": "b", "completion": "c"},
                  "ambiguous columns: prompt/response or prompt/completion; say which with map, as prompt=prompt"),
    "history of text": ({**HISTORY, "history": ["a"]}, "'history' must be a list of"),
    "two system prompts": ({"system": "other", "conversations": SPOKEN},
                           "two system prompts: the column 'system' and the first turn differ"),
    "prompt and input": ({"prompt": "a", "input": "b", "outputs": "c"}, "a prompt needs a response"),
    "unknown": ({"foo\x1b[31m": 1}, r"unknown keys: found 'foo\x1b[31m'; expected"),
    "call without name": (call(tool_calls=[{"arguments": {}}]), "not an object with a function's name"),
    "call of text": (call(tool_calls=["f"]), "a tool call of message 2 is not an object"),
    "calls of text": (call(tool_calls="f"), "broken JSON: in the tool_calls of message 2"),
    "arguments": (call(tool_calls=[{"name": "f", "arguments": "{"}]), "broken JSON: in a tool call's"),
    "legacy arguments": (call(function_call={"name": "f", "arguments": "{"}), "broken JSON: in a tool call's"),
    "spoken call": ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": "f(1)"}]},
                    "broken JSON: in the function call of turn 2"),
    "calls of the user": ({"messages": [{**ASKED[0], "tool_calls": [CALL]}, ASKED[1]]}, "tool_calls in a turn"),
    "deep arguments": (call(tool_calls=[{"name": "f", "arguments": nest(60)}]), "nested too deeply: a tool call's"),
    "deep text": (call(tool_calls=[{"name": "f", "arguments": "[" * 100_000}]), "broken JSON: in a tool call's"),
    "deep tools": ({"messages": ASKED, "tools": [nest(60)]}, "nested too deeply: 'tools'"),
    "deep extra": ({"messages": [{**ASKED[0], "meta": nest(60)}, ASKED[1]]}, "nested too deeply: message 1"),
    "deep messages": ({"messages": "[" * 100_000}, "broken JSON: in column 'messages' (nested too deeply)"),
    "nothing said": (call(), "blank response: message 2"),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ASKED[1]]},
                "images (only text is supported): message 1 has a part of the type 'image_url'"),
    "picture without a type": ({"messages": [{"role": "user", "content": [{"image": "a.png"}]}, ASKED[1]]},
                               "images (only text is supported): message 1 has a part of the type 'image'"),
    "sound": ({"prompt": [{"role": "user", "content": [{"type": "input_audio"}]}], "completion": [ASKED[1]]},
              "audio (only text is supported): message 1 has a part of the type 'input_audio'"),
    "film of an answer": ({"messages": [ASKED[0], {**ASKED[1], "content": [{"type": "video"}]}]},
                          "video (only text is supported): message 2"),
    "pictures of a turn": ({"messages": [{**ASKED[0], "images": ["a.png"]}, ASKED[1]]},
                           "images (only text is supported): message 1 has 'images'"),
    "pictures of ShareGPT": ({"conversations": SHAREGPT, "images": ["a.png"]}, "supported): column 'images'"),
    "picture beside an answer": ({"prompt": "a", "response": "b", "Image": {"bytes": b"x", "path": None}},
                                 "images (only text is supported): column 'Image'"),
    "sound beside a text": ({"text": "a", "audio": "a.wav"}, "audio (only text is supported): column 'audio'"),
    "films of an alpaca": ({"instruction": "a", "output": "b", "videos": ["a.mp4"]}, "video (only text is supported)"),
    "something else": ({"messages": [{"role": "user", "content": [{"type": "file"}]}, ASKED[1]]},
                       "message 1 has content that is not text ('file')"),
    "bytes": ({"prompt": b"a", "response": "b"}, "'prompt' must be text, is bytes"),
    "tools of text": ({"messages": ASKED, "tools": ["f"]}, "'tools' must be a list of objects"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_by_a_true_reason(name: str) -> None:
    row, reason = BAD[name]
    with pytest.raises(Refusal) as caught:
        to_record(row)
    assert reason in caught.value.text


@pytest.mark.parametrize("empty", [None, "", [], {}, {"bytes": None, "path": None}, [None]])
def test_columns_for_pictures_without_one_are_no_reason(empty: Any) -> None:
    assert to_record({"prompt": "a", "response": "b", "images": empty}).messages
    assert to_record({"messages": [{**ASKED[0], "images": empty}, ASKED[1]]}).messages


HH = "\n\nHuman: Hi\n\nAssistant: "
PREFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "TRL": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "map, as response=chosen"),
    "TRL, turns": ({"prompt": ASKED[:1], "chosen": ASKED[1:], "rejected": ASKED[1:]}, "map, as response=chosen"),
    "HH": ({"chosen": HH + "b", "rejected": HH + "c"}, "map, as text=chosen"),
    "UltraFeedback": ({"prompt": "a", "chosen": ASKED, "rejected": ASKED, "messages": ASKED}, "as messages=chosen"),
    "LLaMA-Factory": ({"instruction": "a", "input": "", "Chosen": "b", "Rejected": "c"}, "as response=Chosen"),
    "LLaMA-Factory, turns": ({"conversations": SHAREGPT[:1], "chosen": {}, "rejected": {}}, "write them as"),
    "OpenAI": ({"input": {"messages": ASKED[:1]}, "preferred_output": ASKED[1:], "non_preferred_output": ASKED[1:]},
               "write them as"),
    "preferred": ({"prompt": "a", "preferred": "b", "rejected_response": "c"}, "map, as response=preferred"),
    "PKU": ({"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 0}, "response_0"),
}  # fmt: skip


@pytest.mark.parametrize("name", PREFERENCES)
@pytest.mark.parametrize("before", [0, 3])
def test_preference_data_is_refused_by_name(name: str, before: int, tmp_path: Path) -> None:
    row, hint = PREFERENCES[name]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in [{"text": "x"}] * before + [row]))
    with pytest.raises(GraftuneError, match=r"is preference data .*takes a preference loss") as caught:
        list(rows(sources(str(path)), refused=refusal_of_all))
    assert hint in str(caught.value) and str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    with pytest.raises(Refusal, match="preference data"):
        to_record(row)


@pytest.mark.parametrize("row", [
    {"prompt": "a", "completion": "b", "label": False}, {"messages": ASKED, "kto_tag": True},
    {"prompt": ASKED[:1], "completion": ASKED[1:], "label": True}, {"prompt": "a", "completion": "b", "label": "False"},
    {"prompt": "a", "completion": "b", "label": 0}, {"prompt": "a", "completion": "b", "label": 1.0},
    {"prompt": ASKED[:1], "completion": ASKED[1:], "label": "1"}, {"messages": ASKED, "kto_tag": 1},
])  # fmt: skip
def test_rated_answers_are_refused_by_name(row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(GraftuneError, match=r"answers rated good or bad \(KTO\), by its column"):
        list(rows(sources(str(path)), refused=refusal_of_all))
    with pytest.raises(Refusal, match="KTO"):
        to_record(row)
    for names in ({"response": "b", "label": "sport"}, {"response": "b", "label": 1}, {"completion": "b", "label": 2}):
        assert to_record({"prompt": "a", **names}).notes == ("column not used: label",), "a class of the data"
