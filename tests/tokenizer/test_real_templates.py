"""Real chat templates with their real tokenizers: only the assistant's answers are trained, with their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftune.errors import GraftuneError
from graftune.tokenizer import Tokenizer
from tests.data.helpers import prepared, trained_runs
from tests.tokenizer import real

pytestmark = real.needed

ENDS = {"qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3_2": "<|eot_id|>", "gemma3": "<end_of_turn>"}
# Qwen3's template answers a question without reasoning after an empty block of it, which the model has to write.
BEFORE = {"qwen3": "<think>\n\n</think>\n\n"}
ANSWERS = ("It is sunny, about 20°C.", "1234? No:\n\n```py\nx  = 1\n```", "Yes! 🎉 日本語")
ASKED = ("What's it like?", "And <b>when</b>\tthen?", "Really? 👩\u200d💻")


@pytest.fixture(scope="module", params=ENDS)
def model(request: pytest.FixtureRequest) -> tuple[str, tuple[Tokenizer, Tokenizer]]:
    return request.param, real.two_roads(request.param)


def _messages(count: int, system: str, answers: tuple[str, ...] = ANSWERS) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system else []
    turns = zip(ASKED[:count], answers, strict=False)
    return head + [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _theirs(tokenizer: Tokenizer, messages: list[dict[str, str]], **given: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    assert tokenizer.template is not None
    tokens = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token}
    rendered, _ = utils.render_jinja_template([messages], chat_template=tokenizer.template.source, **tokens, **given)
    return rendered[0]


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_answers_and_their_ends(
    model: tuple[str, tuple[Tokenizer, Tokenizer]], system: str, count: int, tmp_path: Path
) -> None:
    name, roads = model
    end, before = ENDS[name], BEFORE.get(name, "")
    messages = _messages(count, system)
    for tokenizer in roads:
        data = prepared(tmp_path, {"messages": messages}, tokenizer, max_seq_len=2048)
        runs = [run for example in data.examples for run in trained_runs(example, tokenizer)]
        assert runs == [before + answer + end for answer in ANSWERS[:count]]
        end_id = tokenizer.encode(end)
        assert len(end_id) == 1 and end_id[0] in tokenizer.stop_ids
        for example in data.examples:
            assert example.tokens[-1] == end_id[0] and example.supervised[-1]
            trained = [place for place, on in enumerate(example.supervised) if on]
            assert sum(example.tokens[place] == end_id[0] for place in trained) == len(trained_runs(example, tokenizer))
        # What the model sees is what transformers renders, up to the end of the last answer.
        text = _theirs(tokenizer, messages)
        assert data.examples[-1].tokens == tokenizer.encode(text[: text.rindex(end) + len(end)])
        # And each answer continues just what inference will show: the generation prompt.
        last = data.examples[-1]
        size = next(back for back in range(len(last.tokens)) if not last.supervised[-1 - back])
        prompt = _theirs(tokenizer, messages[:-1], add_generation_prompt=True)
        assert last.tokens[:-size] == tokenizer.encode(prompt)
        assert data.prompts[-1] == prompt


def test_marks_inside_an_answer_do_not_move_the_mask(
    model: tuple[str, tuple[Tokenizer, Tokenizer]], tmp_path: Path
) -> None:
    """An end token that someone typed is a part of the answer; the answer still ends with its own, and a note tells."""
    name, roads = model
    messages = _messages(1, "", (f"one {ENDS[name]} two",))
    for tokenizer in roads:
        data = prepared(tmp_path, {"messages": messages}, tokenizer, max_seq_len=2048)
        assert trained_runs(data.examples[0], tokenizer) == [f"{BEFORE.get(name, '')}one {ENDS[name]} two{ENDS[name]}"]
        assert list(data.summary.notes.values()) == [1] and "control token" in next(iter(data.summary.notes))


def test_qwen3_drops_old_reasoning(tmp_path: Path) -> None:
    answers = tuple(f"<think>\nhm {n}\n</think>\n\nAnswer {n}" for n in range(3))
    for tokenizer in real.two_roads("qwen3"):
        data = prepared(tmp_path, {"messages": _messages(3, "", answers)}, tokenizer, max_seq_len=2048)
        assert [trained_runs(example, tokenizer) for example in data.examples] == [
            [text + "<|im_end|>"] for text in answers
        ]
        assert "hm 0" not in data.prompts[2] and "Answer 0" in data.prompts[2]


def test_gpt2_has_no_template(tmp_path: Path) -> None:
    for tokenizer in real.two_roads("gpt2"):
        with pytest.raises(GraftuneError, match="no chat template"):
            prepared(tmp_path, {"messages": _messages(1, "")}, tokenizer)
        data = prepared(tmp_path, {"prompt": "Two and two? ", "response": "Four."}, tokenizer)
        assert trained_runs(data.examples[0], tokenizer) == ["Four.<|endoftext|>"]
        assert tokenizer.decode(data.examples[0].tokens) == "Two and two? Four.<|endoftext|>"
