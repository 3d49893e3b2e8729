"""Making long conversations fit, splitting, and the account that is kept of both."""

from __future__ import annotations

import dataclasses
import functools
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.synthetic import dataset_of
from hypothesis import given, settings
from hypothesis import strategies as st

from graftune.data import fit
from graftune.data.dataset import Dataset, split
from graftune.data.fit import Fitter
from graftune.data.row_encoder import windows
from graftune.data.template import chat_format
from graftune.errors import GraftuneError
from graftune.settings.sections import DataConfig
from tests.data import helpers
from tests.data.helpers import CHATML, shipped, tokenizer, trained_runs, turns, with_template

BOS_CHATML = "{{ bos_token }}" + CHATML


def load(tmp_path: Path, *rows: Any, chat: Any = None, **config: Any) -> Dataset:
    return helpers.load(tmp_path, *rows, chat=chat or with_template(BOS_CHATML), **config)


def text_of(data: Dataset, index: int = 0) -> str:
    return tokenizer().decode(data.examples[index].tokens)


def test_early_turns_go_first_and_are_trained_on_their_own(tmp_path: Path) -> None:
    texts = [f"{name} turn {i}" for i in range(6) for name in ("question", "answer")]
    data = load(tmp_path, {"messages": turns(*texts, system="Be brief.")}, max_seq_len=128)
    runs = [run for example in data.examples for run in trained_runs(example)]
    assert runs == [f"answer turn {i}<|im_end|>" for i in range(6)], "every answer is trained once, in order"
    assert len(data.examples) > 1 and max(len(e.tokens) for e in data.examples) <= 128
    for i in range(len(data.examples)):
        assert text_of(data, i).startswith("<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nquestion")
    assert data.summary.truncated == {fit.TURNS: len(data.examples) - 1}
    assert [example.shortened for example in data.examples] == [False] + [True] * (len(data.examples) - 1)
    assert data.summary.notes == {"conversations divided into several examples": 1}


def test_then_the_question_from_its_left(tmp_path: Path) -> None:
    question = " ".join(str(i) for i in range(300))
    data = load(tmp_path, {"messages": turns("old", "older", question, "Right.", system="S")}, max_seq_len=100)
    assert [trained_runs(e) for e in data.examples] == [["older<|im_end|>"], ["Right.<|im_end|>"]]
    last = text_of(data, 1)
    assert last.startswith("<s><|im_start|>system\nS<|im_end|>\n<|im_start|>user\n")
    assert last.endswith(" 298 299<|im_end|>\n<|im_start|>assistant\nRight.<|im_end|>")
    assert 95 <= len(data.examples[1].tokens) <= 100
    assert data.prompts[1] + "Right.<|im_end|>" == last and data.references[1] == "Right."
    assert data.summary.truncated == {fit.QUESTION: 1} and data.summary.dropped == {}
    assert [example.shortened for example in data.examples] == [False, True]


def test_a_system_turn_merged_into_a_question_stays(tmp_path: Path) -> None:
    source = CHATML.replace(
        "{% for m", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for m"
    )
    question = " ".join(str(i) for i in range(300))
    record = {"messages": turns("old", "older", question, "Right.", system="Be brief.")}
    data = load(tmp_path, record, chat=with_template(source), max_seq_len=100, train_on="last")
    assert text_of(data).startswith("<|im_start|>user\nBe brief.\n\n")
    assert text_of(data).endswith(" 299<|im_end|>\n<|im_start|>assistant\nRight.<|im_end|>")


def test_then_the_prompt_behind_bos(tmp_path: Path) -> None:
    data = load(tmp_path, {"messages": turns("why?", "Right.", system="very long " * 50)}, max_seq_len=40)
    assert len(data.examples[0].tokens) == 40 and trained_runs(data.examples[0]) == ["Right.<|im_end|>"]
    assert text_of(data).startswith("<s>") and text_of(data).endswith("assistant\nRight.<|im_end|>")
    assert data.summary.truncated == {fit.PROMPT: 1}


def test_a_response_that_does_not_fit_is_dropped_and_counted(tmp_path: Path) -> None:
    long = {"prompt": "a", "response": "z" * 200}
    data = load(tmp_path, {"prompt": "a", "response": "b"}, long, max_seq_len=64)
    assert data.summary.dropped == {fit.TOO_LONG: 1} and data.summary.details == [(2, fit.TOO_LONG)]
    assert data.summary.rows == 2 and data.summary.examples == 1 and data.summary.refused == {}
    with pytest.raises(GraftuneError, match=r"none of the 1 rows.*longer than max_seq_len"):
        load(tmp_path, long, max_seq_len=64)


@functools.cache
def formed(template: str) -> tuple[Any, Any]:
    source = {"bos": BOS_CHATML, "plain": CHATML}.get(template)
    chat = with_template(source) if source else shipped(template)
    form = chat_format(chat, DataConfig(append_eos=True))
    assert form is not None
    return chat, form


@settings(max_examples=80, deadline=None)
@given(
    texts=st.lists(st.text("ab é\n", min_size=1, max_size=60).filter(str.strip), min_size=2, max_size=10).map(
        lambda texts: texts[: len(texts) // 2 * 2]
    ),
    system=st.text("s ", max_size=40),
    limit=st.integers(8, 120),
    template=st.sampled_from(["bos", "plain", "llama-2-chat", "solar-instruct"]),
)
def test_making_fit_never_loses_a_response(texts: list[str], system: str, limit: int, template: str) -> None:
    chat, form = formed(template)
    messages: list[dict[str, Any]] = list(turns(*texts, system=system if system.strip() else ""))
    trained = [i for i, message in enumerate(messages) if message["role"] == "assistant"]

    def fitted(limit: int) -> list[fit.Built]:
        fitter = Fitter(form, chat, DataConfig(max_seq_len=limit))
        passages = fitter.passages(messages, None, trained)
        return [one for passage in passages for one in fitter.finish(passage, *fitter.encoded(passage.text))]

    runs = [run for one in fitted(10**6) for run in trained_runs(one.example)]  # type: ignore[arg-type]
    sizes = [len(tokenizer().encode(run)) for run in runs]
    built = fitted(limit)
    kept = [run for one in built if one.example for run in trained_runs(one.example)]
    dropped = sum(bool(one.dropped) for one in built)
    assert len(kept) + dropped == len(runs)
    # What fits with one prompt token (and BOS) before it is kept; what does not is dropped and nothing else is.
    assert [run for run in kept if run not in runs] == []
    assert all(size + 2 > limit for run, size in zip(runs, sizes, strict=True) if runs.count(run) > kept.count(run))
    assert all(len(one.example.tokens) <= limit and not one.example.supervised[0] for one in built if one.example)


@pytest.mark.parametrize("add_bos", [False, True])
def test_long_texts_are_divided_and_every_token_predicted_once(add_bos: bool) -> None:
    chat = dataclasses.replace(tokenizer(), add_bos=add_bos)
    text = " ".join(str(i) for i in range(100))
    made = [built.example for built in windows(text, chat.encode(text), chat, 32)]
    targets = [token for example in made if example for token in example.tokens[1:]]
    whole = [*chat.encode(text), chat.eos_id]
    assert targets == (whole if add_bos else whole[1:])
    assert all(example and len(example.tokens) <= 32 for example in made)


def test_summary_adds_up(tmp_path: Path) -> None:
    data = load(tmp_path, {"prompt": "a", "response": "b"}, {"text": "one two"}, {"x": 1})
    summary = data.summary
    assert (summary.rows, summary.examples) == (3, 2) and sum(summary.kinds.values()) + 1 == 3
    assert summary.tokens == sum(len(e.tokens) for e in data.examples)
    assert summary.response_tokens == sum(e.response_tokens for e in data.examples)
    assert summary.supervised_share == summary.response_tokens / summary.tokens
    assert summary.longest == max(len(e.tokens) for e in data.examples)
    assert data.messages[0] == [{"role": "user", "content": "a"}] and data.references[0] == "b" and len(data) == 2


def dataset(rows: list[int]) -> Dataset:
    from graftune.batch import Example

    examples = [Example([1, 2, 3 + i], [False, True, True], row) for i, row in enumerate(rows)]
    names = [str(i) for i in range(len(rows))]
    return dataset_of(examples, names, names, path="data.jsonl")


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    share=st.floats(0, 0.9),
    seed=st.integers(0, 2**32),
)
def test_split(rows: list[int], share: float, seed: int) -> None:
    data = dataset(rows)
    if share > 0 and len(set(rows)) < 2:
        with pytest.raises(GraftuneError, match="cannot be split"):
            split(data, share, seed)
        return
    train, val = split(data, share, seed)
    assert sorted([*train.prompts, *val.prompts]) == sorted(data.prompts)
    assert not {e.row for e in train.examples} & {e.row for e in val.examples}
    held = len({e.row for e in val.examples})
    assert held == (min(len(set(rows)) - 1, max(1, round(len(set(rows)) * share))) if share else 0)
    again = split(data, share, seed)
    assert again[0].examples == train.examples and again[1].prompts == val.prompts
    if share:
        assert train.summary.tokens == sum(len(e.tokens) for e in train.examples)


def test_only_the_first_window_of_a_long_text_has_a_prompt() -> None:
    text, chat = " ".join(str(i) for i in range(8_000)), tokenizer()
    built = list(windows(text, chat.encode(text), chat, 8))
    assert len(built) > 1000 and sum(len(one.prompt) for one in built) < len(text)
    assert [bool(one.prompt) for one in built[:2]] == [True, False] and not any(one.reference for one in built[1:])


@pytest.mark.parametrize("seed", range(6))
def test_repeats_stay_on_one_side(tmp_path: Path, seed: int) -> None:
    rows = [{"prompt": f"q{i % 12}", "response": f"a{i % 12}"} for i in range(40)]
    # Two conversations that share one of their examples are one group as well.
    rows += [{"messages": turns("x", "long " * 8, "y", f"z{i}")} for i in range(4)]
    data = load(tmp_path, *rows, max_seq_len=63)
    train, val = split(data, 0.25, seed)
    tokens = [{tuple(e.tokens) for e in side.examples} for side in (train, val)]
    assert not tokens[0] & tokens[1] and len(train) and len(val)
    assert len({e.row for e in val.examples}) <= round(44 * 0.25)
    assert data.summary.duplicates == 28 + 3 and "31 of 48 examples repeat earlier ones" in data.summary.sentences()[0]
    train, val = split(load(tmp_path, *rows[:1] * 5), 0.2, seed)
    assert (len(train), len(val)) == (4, 1) and train.shared_with(val) == 1, "where all are the same, it is said"


def test_without_repeats_the_split_is_what_it_always_was() -> None:
    """Pinned: a run that was begun before repeats were looked at still finds its rows."""
    train, val = split(dataset(list(range(1, 41))), 0.2, 42)
    order = np.random.default_rng([42, 0x5917]).permutation(40)
    assert [e.row for e in val.examples] == sorted(int(i) + 1 for i in order[:8])
    assert train.summary.duplicates == 0 and not train.summary.sentences()
    assert split(dataset(list(range(1, 41))), 0.2, 43)[1].prompts != val.prompts, "another seed, other rows"


def test_at_most_so_many_validation_examples() -> None:
    data = dataset(list(range(1, 101)))
    few = data.at_most(7, 3)
    assert len(few) == 7 and few.examples == data.at_most(7, 3).examples != data.at_most(7, 4).examples
    rows = [e.row for e in few.examples]
    assert rows == sorted(rows) and max(rows) > 20, "from all of the data, in its order"
    assert data.at_most(0, 3) is data and data.at_most(100, 3) is data


def test_what_max_seq_len_cuts_is_said_with_its_share(tmp_path: Path) -> None:
    short = [{"prompt": "a", "response": f"b{i}"} for i in range(6)]
    long = [{"prompt": f"why {i} " * 40, "response": "b"} for i in range(3)] + [{"prompt": "a", "response": "z" * 300}]
    data = load(tmp_path, *short, *long, max_seq_len=64)
    assert data.summary.needed == load(tmp_path, *short, *long, max_seq_len=2000).longest
    (warning,) = data.summary.warnings()
    assert warning == (
        f"40% of the examples are longer than max_seq_len 64 and were shortened or dropped; "
        f"max_seq_len {data.summary.needed} keeps all"
    )
    whole = load(tmp_path, *short, *long, max_seq_len=data.summary.needed)
    assert whole.summary.warnings() == [] and not whole.summary.truncated and not whole.summary.dropped
    assert load(tmp_path, *short, *long, max_seq_len=data.summary.needed - 1).summary.warnings()
    assert data.summary.kept() == {64: 0.6, 256: 0.9, data.summary.needed: 1.0}
    assert sum(count for _, _, count in data.summary.histogram()) == 10


def test_a_text_that_is_divided_loses_nothing_and_is_no_warning(tmp_path: Path) -> None:
    data = load(tmp_path, {"text": "one two three " * 80}, max_seq_len=32)
    assert len(data) > 5 and data.summary.warnings() == []


def test_details_of_many_refused_rows_are_counted_in_memory_and_listed_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftune.data.row_encoder.KEPT_DETAILS", 3)
    data = load(tmp_path, {"prompt": "a", "response": "b"}, *[{"x": i} for i in range(10)])
    assert len(data.summary.details) == 3 and data.summary.left_out == 10
    assert [row for row, _ in data.details()] == list(range(2, 12))


def test_refused_rows_take_no_memory(tmp_path: Path) -> None:
    """Each was kept, with its frames, until the last row was read: kilobytes for a row of two characters."""
    tracemalloc.start()
    try:
        data = load(tmp_path, {"prompt": "a", "response": "b"}, *[{}] * 12_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert data.summary.left_out == 12_000 and peak < 12 << 20, f"{peak >> 10} KiB"
