"""Pairs and rated answers: every form of them, one prompt for both answers, and every refusal by its name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks.synthetic import dataset_of

from graftune.batch import Example
from graftune.data.dataset import Dataset
from graftune.data.encoded import groups_of, numbers_of, unit_of
from graftune.data.kind import DataKind
from graftune.data.pairs import PAIRS, RATED
from graftune.errors import GraftuneError
from tests.data.helpers import CHATML, load, tokenizer, trained_runs, turns, with_template
from tests.support.thorough import THOROUGH

PAIRS_MADE = 1000 if THOROUGH else 240  # a multiple of forty
ASKED = "<|im_start|>user\nSay it<|im_end|>\n<|im_start|>assistant\n"
USER, YES, NO = turns("Say it")[0], {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
WITH_CALLS = CHATML.replace("m.content", "(m.content or '') + (m.tool_calls | tojson if m.tool_calls else '')")


def prompt_of(example: Example) -> list[int]:
    return example.tokens[: example.supervised.index(True)]


def check_prompts(data: Dataset) -> None:
    for chosen, rejected in zip(data.examples[::2], data.examples[1::2], strict=True):
        assert prompt_of(chosen) == prompt_of(rejected) and chosen.group == rejected.group >= 0


FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Say it", "chosen": "yes", "rejected": "no"},
    "question": {"question": "Say it", "chosen": "yes", "rejected": "no"},
    "instruction": {"instruction": "Say it", "input": "", "chosen": "yes", "rejected": "no"},
    "names": {"Prompt": "Say it", "chosen_response": "yes", "rejected_response": "no"},
    "answers as messages": {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    "text and messages": {"prompt": "Say it", "chosen": [YES], "rejected": [NO]},
    "single turns": {
        "conversations": [{"from": "human", "value": "Say it"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    "messages and texts": {"messages": [USER], "chosen": "yes", "rejected": "no"},
    "conversations": {"chosen": [USER, YES], "rejected": [{"from": "human", "value": "Say it "}, NO]},
    "conversations with all else": {
        "prompt": "Say it",
        "messages": [USER, YES],
        "chosen": [USER, YES],
        "rejected": [USER, NO],
        "score_chosen": 8.0,
    },
    "transcripts": {"chosen": "\n\nHuman: Say it\n\nAssistant: yes", "rejected": "\n\nHuman: Say it\n\nAssistant: no"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_alike(form: str, tmp_path: Path) -> None:
    data = load(tmp_path, FORMS[form], kind=PAIRS, strict=True)
    assert [tokenizer().decode(example.tokens) for example in data.examples] == [
        f"{ASKED}{answer}<|im_end|>" for answer in ("yes", "no")
    ]
    assert [trained_runs(example) for example in data.examples] == [["yes<|im_end|>"], ["no<|im_end|>"]]
    assert data.kind == "pairs" and groups_of(data.examples).tolist() == [0, 0]
    unused = [note for note in data.summary.notes if note.startswith("column not used")]
    listed = ["messages", "score_chosen"] if form == "conversations with all else" else []
    assert unused == [f"column not used: {name}" for name in listed]


def test_earlier_answers_and_results_of_tools_are_context(tmp_path: Path) -> None:
    shared = turns("Hi", "Hello", "Look it up")
    results = [{"role": "tool", "content": text} for text in ("warm", "cold")]
    chosen, rejected = ([*shared, CALL, result, answer] for result, answer in zip(results, (YES, NO), strict=True))
    row = {"chosen": chosen, "rejected": rejected, "system": "Be brief."}
    chat = with_template(WITH_CALLS)
    # train_on concerns answers; of a pair every turn after the prompt is trained.
    data = load(tmp_path, row, chat=chat, kind=PAIRS, strict=True, train_on="last")
    for example, answer in zip(data.examples, ("yes", "no"), strict=True):
        call, last = trained_runs(example)
        assert "look" in call and last == f"{answer}<|im_end|>"
        prompt = tokenizer().decode(prompt_of(example))
        assert prompt.startswith("<|im_start|>system\nBe brief.") and "Hello" in prompt
        assert prompt.endswith("Look it up<|im_end|>\n<|im_start|>assistant\n")
    check_prompts(data)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "blank": ({"prompt": "Say it", "chosen": "yes", "rejected": " "}, "an empty side"),
    "null": ({"prompt": "Say it", "chosen": None, "rejected": "no"}, "an empty side"),
    "missing": ({"prompt": "Say it", "chosen": "yes"}, "an empty side"),
    "no turns": ({"prompt": "Say it", "chosen": [YES], "rejected": []}, "an empty side"),
    "a blank turn": ({"prompt": [USER], "chosen": [{**YES, "content": ""}], "rejected": "no"}, "an empty side"),
    "a blank transcript": (
        {"chosen": "Human: Say it\n\nAssistant: yes", "rejected": "Human: Say it\n\nAssistant:"},
        "an empty side",
    ),
    "half": ({"chosen": [USER], "rejected": [USER, NO]}, "an empty side"),
    "equal": ({"prompt": "Say it", "chosen": "yes", "rejected": "yes\n"}, "equal answers"),
    "equal conversations": ({"chosen": [USER, YES], "rejected": [USER, YES]}, "equal answers"),
    "prompts": ({"chosen": [USER, YES], "rejected": [*turns("Say no"), NO]}, "different prompts"),
    "longer": ({"chosen": [USER, YES], "rejected": [USER, YES, USER, NO]}, "different prompts"),
    "two prompts": ({"prompt": "Sing", "chosen": [USER, YES], "rejected": [USER, NO]}, "different prompts"),
    "no prompt": ({"chosen": "yes", "rejected": "no"}, "missing key"),
    "an answer as prompt": ({"messages": [USER, YES], "chosen": "yes", "rejected": "no"}, "the prompt ends with"),
    "the user's": ({"prompt": "Say it", "chosen": USER, "rejected": NO}, "wrong type"),
    "a number": ({"prompt": "Say it", "chosen": 1, "rejected": 2}, "wrong type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_pair_is_refused_by_name(name: str, tmp_path: Path) -> None:
    row, reason = REFUSED[name]
    data = load(tmp_path, FORMS["texts"], row, kind=PAIRS)
    assert len(data) == 2 and [key.startswith(reason) for key in data.summary.refused] == [True]
    assert list(data.summary.refused.values()) == [1]


def test_a_map_names_the_columns(tmp_path: Path) -> None:
    row = {"q": "Say it", "good": "yes", "bad": "no", "text": "Other", "id": 3}
    data = load(tmp_path, row, kind=PAIRS, map={"prompt": "q", "chosen": "good", "rejected": "bad"})
    assert [trained_runs(example) for example in data.examples] == [["yes<|im_end|>"], ["no<|im_end|>"]]


@pytest.mark.parametrize(
    ("row", "kind", "loss"),
    [
        (FORMS["texts"], RATED, "dpo"),
        ({"prompt": "Say it", "response": "yes"}, PAIRS, "cross_entropy"),
        ({"prompt": "Say it", "response": "yes"}, RATED, "cross_entropy"),
        ({"prompt": "Say it", "completion": "yes", "label": True}, PAIRS, "kto"),
    ],
)
def test_data_for_another_loss_is_refused_with_that_loss(
    row: dict[str, Any], kind: DataKind, loss: str, tmp_path: Path
) -> None:
    with pytest.raises(GraftuneError, match="and this loss takes") as caught:
        load(tmp_path, row, kind=kind)
    assert f"set loss: {loss}" in (caught.value.fix or "")


RATED_ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "Say it", "completion": "yes", "label": True},
    {"prompt": [USER], "completion": [NO], "label": 0},
    {"instruction": "Say it", "output": "yes", "kto_tag": "true"},
    {"conversations": [USER, NO], "kto_tag": False},
)


def test_rated_answers(tmp_path: Path) -> None:
    data = load(tmp_path, *RATED_ROWS, kind=RATED, strict=True)
    assert numbers_of(data.examples, "label", 9.0).tolist() == [1, 0, 1, 0]
    assert [trained_runs(example) for example in data.examples] == [[f"{a}<|im_end|>"] for a in ("yes", "no") * 2]
    assert not RATED.warning(data.examples)
    assert RATED.warning(data.examples[1::2]) == (
        "every answer is rated bad: a loss for ratings also needs some that are rated good"
    )
    several = {"messages": turns("Hi", "Hello", "Say it", "yes"), "label": True}
    bad = ({**RATED_ROWS[0], "label": None}, {**RATED_ROWS[0], "label": 3}, {"text": "so", "label": True})
    data = load(tmp_path, several, *bad, kind=RATED)
    assert trained_runs(data.examples[0]) == ["yes<|im_end|>"], "the answer is what follows the last question"
    assert data.summary.refused == {"no number": 1, "no label": 1, "missing key": 1}


def words(rng: random.Random, most: int) -> str:
    some = ["one", "two", "three", "four", "five", "six", "answer", "question", "weather", "short", "another", "quick"]
    return " ".join(rng.choice(some) for _ in range(rng.randint(1, most)))


def generated(rng: random.Random, number: int) -> dict[str, Any]:
    """A pair, of which about one in ten is none."""
    earlier = [words(rng, 20) for _ in range(2 * rng.randint(0, 3))]
    prompt = turns(*earlier, words(rng, 90), system=words(rng, 12) if number % 3 == 0 else "")
    chosen, rejected = (f"{which} {words(rng, 90)}" for which in ("yes", "no"))
    if number % 20 == 7:
        rejected = chosen if number % 40 == 7 else ""
    if number % 20 == 13:
        return {"chosen": [*prompt, YES], "rejected": [*prompt[:-1], *turns("Other"), NO]}
    if number % 2:
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return {name: [*prompt, {**YES, "content": text}] for name, text in (("chosen", chosen), ("rejected", rejected))}


@pytest.mark.few(1)
@pytest.mark.parametrize("template", ["{{ bos_token }}" + CHATML, None])
def test_many_pairs_over_max_seq_len(template: str | None, tmp_path: Path) -> None:
    """Every kept pair has one prompt, and every pair is accounted for."""
    rng = random.Random(35)
    rows = [generated(rng, number) for number in range(PAIRS_MADE)]
    chat = tokenizer() if template is None else with_template(template)
    settings = {"template": "none"} if template is None else {}
    data = load(tmp_path, *rows, chat=chat, kind=PAIRS, max_seq_len=96, **settings)
    summary = data.summary
    check_prompts(data)
    assert data.longest <= 96 and summary.rows == PAIRS_MADE and not summary.dropped
    assert len(data) // 2 + sum(summary.refused.values()) == PAIRS_MADE and len(data) % 2 == 0
    assert summary.left_out == sum(summary.refused.values()) == len(list(data.details()))
    assert summary.refused["equal answers"] == summary.refused["an empty side"] == PAIRS_MADE // 40
    assert summary.refused["different prompts"] == PAIRS_MADE // 20
    assert summary.refused["response longer than max_seq_len"] > PAIRS_MADE // 20
    assert set(summary.truncated) == {
        "early turns left out", "question cut from the left", "prompt cut from the left behind BOS",
    }  # fmt: skip
    originals = {number + 1: row for number, row in enumerate(rows)}
    for chosen, rejected in zip(data.examples[::2], data.examples[1::2], strict=True):
        row = originals[chosen.row]
        for example, side in ((chosen, row["chosen"]), (rejected, row["rejected"])):
            (answer,) = trained_runs(example)
            text = side if isinstance(side, str) else side[-1]["content"]
            assert answer.removesuffix("<|im_end|>").removesuffix("</s>") == text, "an answer is never cut"


def test_pairs_are_counted_as_pairs() -> None:
    """Both answers of a pair are examples; what is said of the data counts pairs."""
    pairs = dataset_of([Example([1, 2], [False, True], group=i // 2) for i in range(6)], kind=PAIRS)
    assert len(pairs) == 6 and pairs.count == "3 pairs" and pairs.subset([0, 1]).count == "1 pair"
    assert repr(pairs).startswith("Dataset(3 pairs, ") and unit_of(pairs.examples) == "answers"
    alone = dataset_of([Example([1, 2], [False, True])])
    assert (
        alone.count == "1 example" and unit_of(alone.examples) == "examples" and alone.subset([]).count == "0 examples"
    )
