"""Encoded data on disk: the same examples as in memory, found again only while nothing that decides them changed, and
never believed when damaged."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from benchmarks.synthetic import dataset_of
from hypothesis import given, settings
from hypothesis import strategies as st

from graftune.batch import Example
from graftune.data import cached, dataset, row_encoder
from graftune.data.dataset import prepare
from graftune.data.encoded import Examples, TokenStore, distinct_tokens, take
from graftune.data.pack import pack
from graftune.data.writer import NewExample, StoreWriter
from graftune.errors import GraftuneError
from graftune.io import digest
from graftune.observe.console import Console
from graftune.settings.sections import DataConfig
from graftune.tokenizer import Tokenizer
from tests.data.helpers import CHATML, jsonl, tokenizer, turns, with_template

CHAT = with_template(CHATML)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever texts are encoded."""
    found: list[int] = []
    plain = row_encoder.RowEncoder.chunks

    def counted(self: Any, rows: Any) -> Any:
        found.append(1)
        return plain(self, rows)

    monkeypatch.setattr(row_encoder.RowEncoder, "chunks", counted)
    return found


ROWS = [{"messages": turns(f"What is {i}?", f"It is {i}.")} for i in range(20)]


def entries(files: list[Path]) -> list[Path]:
    return [path for path in files if path.suffix == cached.SUFFIX]


def kept() -> list[Path]:
    return entries(list(cached.folder().iterdir()))


examples_of = st.lists(
    st.lists(st.tuples(st.integers(0, 70000), st.booleans()), min_size=1, max_size=40), min_size=1, max_size=9
).map(lambda docs: [Example([t for t, _ in doc], [on for _, on in doc], i + 1) for i, doc in enumerate(docs)])


@settings(max_examples=60, deadline=None)
@given(examples=examples_of, small=st.booleans(), chunk=st.integers(1, 4), times=st.integers(1, 3))
def test_what_is_written_is_read(examples: list[Example], small: bool, chunk: int, times: int) -> None:
    if small:
        examples = [dataclasses.replace(e, tokens=[t % 500 for t in e.tokens]) for e in examples]
    writer = StoreWriter(500 if small else 70001)
    for start in range(0, len(examples), chunk):
        part = examples[start : start + chunk]
        details = [(e.row, f"why {e.row}\nä") for e in part]
        writer.add([NewExample(e, f"p{e.row}ü", "r", [{"role": "user", "content": "é"}], times) for e in part], details)
    store = writer.in_memory(fact=1)
    found = Examples(store)
    want = [example for example in examples for _ in range(times)]
    assert list(found) == want and found == want and found != want[1:] and store.header["fact"] == 1
    assert found.column("responses").tolist() == [e.response_tokens for e in want]
    assert store.text(0, "prompt") == "p1ü" and json.loads(store.text(0, "messages"))[0]["content"] == "é"
    assert list(store.details()) == [(e.row, f"why {e.row}\nä") for e in examples]
    assert distinct_tokens(found) == len({token for e in examples for token in e.tokens})
    order = list(range(len(want)))[::-2]
    ours, plain = pack(take(found, order)), pack([want[i] for i in order])
    for name in ("tokens", "positions", "cu_seqlens", "rows", "labels"):
        assert getattr(ours, name).equal(getattr(plain, name))
    assert ours.lengths == plain.lengths and ours.response_tokens == plain.response_tokens


def test_a_second_start_finds_what_the_first_one_made(tmp_path: Path, encoded: list[int]) -> None:
    path = jsonl(tmp_path / "d.jsonl", *ROWS, {"nope": 1})
    first, second = (prepare(path, CHAT, DataConfig()) for _ in range(2))
    assert len(encoded) == 1 and first.examples == second.examples and first.digest == second.digest
    assert first.summary == second.summary and list(second.details()) == first.summary.details != []
    assert second.prompts[3] == first.prompts[3] != "" and second.references[3] == "It is 3."
    moved = jsonl(tmp_path / "elsewhere.jsonl", *ROWS, {"nope": 1})
    assert prepare(moved, CHAT, DataConfig()).digest == first.digest and len(encoded) == 1, "content, not place"


# What is prepared after a first time with ROWS, CHAT and a max_seq_len of 64.
CHANGED: dict[str, tuple[list[Any], Tokenizer, int]] = {
    "data": ([*ROWS, ROWS[0]], CHAT, 64),
    "tokenizer": (ROWS, dataclasses.replace(CHAT, backend=tokenizer().with_tokens(["<new>"]).backend), 64),
    "template": (ROWS, with_template(CHATML.replace("m.role", "'x' + m.role")), 64),
    "setting": (ROWS, CHAT, 32),
    "file template": (ROWS, CHAT, 64),
    "code": (ROWS, CHAT, 64),
}


@pytest.mark.parametrize("change", CHANGED)
def test_whatever_decides_a_token_makes_another_entry(
    tmp_path: Path, encoded: list[int], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, template = jsonl(tmp_path / "d.jsonl", *ROWS), tmp_path / "t.jinja"
    template.write_text(CHATML)
    config = DataConfig(max_seq_len=64, template=str(template) if change == "file template" else "auto")
    prepare(path, CHAT, config)
    rows, chat, longest = CHANGED[change]
    jsonl(Path(path), *rows)
    template.write_text(CHATML.replace("endfor", "endfor ") + " ")
    if change == "code":
        monkeypatch.setattr(cached, "_code", lambda: "another version")
    config = dataclasses.replace(config, max_seq_len=longest)
    prepare(path, chat, config)
    assert len(encoded) == 2 and len(kept()) == 2
    apart = dataclasses.replace(config, val_split=0.4, eval_examples=3, date="2026-01-01")
    prepare(path, chat, apart)
    assert len(encoded) == 2, "how the data is divided decides no token"


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "index", "foreign", "trailer"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, encoded: list[int], damage: str) -> None:
    path = jsonl(tmp_path / "d.jsonl", *ROWS)
    want = prepare(path, CHAT, DataConfig()).digest
    (file,) = kept()
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[:-100]
    elif damage == "empty":
        content = bytearray()
    elif damage == "header":
        content[-150] ^= 1
    elif damage == "trailer":
        content[-3] ^= 1
    elif damage == "index":
        place = TokenStore(bytes(content)).header["arrays"]["tokens_end"][0]
        content[place] ^= 1
    else:
        prepare(jsonl(tmp_path / "other.jsonl", *ROWS[1:]), CHAT, DataConfig())
        encoded.pop()
        content = bytearray(next(f for f in kept() if f != file).read_bytes())
    file.write_bytes(bytes(content))
    assert prepare(path, CHAT, DataConfig()).digest == want and len(encoded) == 2
    assert prepare(path, CHAT, DataConfig()).digest == want and len(encoded) == 2, "it is whole again"


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [jsonl(tmp_path / f"{i}.jsonl", *ROWS[i:]) for i in range(3)]
    first, second = (prepare(path, CHAT, DataConfig()) for path in paths[:2])
    by_age = sorted(kept(), key=lambda file: file.stat().st_mtime_ns)
    for age, file in enumerate(reversed(by_age)):
        os.utime(file, (1000 - age, 1000 - age))
    prepare(paths[0], CHAT, DataConfig())  # used again: the other one is the oldest now
    half = cached.folder() / "left.123.part"
    half.write_text("half")
    os.utime(half, (5, 5))
    monkeypatch.setattr(cached, "LIMIT", sum(file.stat().st_size for file in kept()) + 100)
    prepare(paths[2], CHAT, DataConfig())
    left = {TokenStore.open(file).header["summary"]["rows"] for file in kept()}
    assert left == {20, 18} and not half.exists()
    assert [len(list(data.examples)) for data in (first, second)] == [20, 19], "what is in use stays readable"


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    data = prepare(jsonl(tmp_path / "d.jsonl", *ROWS), CHAT, DataConfig(), Console())
    assert len(data) == 20 and data.examples[0].tokens
    assert "encoded data cannot be kept" in capsys.readouterr().err


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: StoreWriter, name: str, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    path = jsonl(tmp_path / "d.jsonl", *ROWS)
    monkeypatch.setattr(StoreWriter, "_append", full)
    with pytest.raises(GraftuneError, match=r"No space left on device.*GRAFTUNE_CACHE"):
        prepare(path, CHAT, DataConfig())
    assert list(cached.folder().iterdir()) == []


def test_the_second_start_does_not_read_large_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "SMALLEST", 100)
    monkeypatch.setattr(digest, "SETTLED", -1.0)
    path = jsonl(tmp_path / "d.jsonl", *ROWS)
    want = prepare(path, CHAT, DataConfig()).digest
    monkeypatch.setattr(digest, "_computed", lambda files: pytest.fail("the data was read again"))
    monkeypatch.setattr(dataset, "rows", lambda *args: pytest.fail("the data was read again"))
    assert prepare(path, CHAT, DataConfig()).digest == want


def test_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*ROWS, {"text": "one two " * 90}, {"nope": 1}, {"messages": turns("a", "b", "c", "d")}]
    path = jsonl(tmp_path / "d.jsonl", *rows)
    want = prepare(path, CHAT, DataConfig(max_seq_len=48))
    monkeypatch.setattr(cached, "_code", lambda: "another version")
    monkeypatch.setattr(row_encoder, "CHUNK_ROWS", 3)
    monkeypatch.setattr(row_encoder, "CHUNK_CHARS", 200)
    found = prepare(path, CHAT, DataConfig(max_seq_len=48))
    assert found.examples == want.examples and found.summary == want.summary
    assert list(found.references) == list(want.references)


def test_identity_is_of_tokens_and_masks_alone() -> None:
    one, two = Example([1, 2, 3], [False, True, True], 1), Example([4, 5], [False, True], 2)
    same = dataset_of([one, two], ["a", "b"], ["c", "d"])
    assert same.digest == dataset_of([one, two]).digest, "texts beside them do not count"
    wide = dataset_of([one, two, Example([70000], [True], 3)]).subset([0, 1])
    assert wide.digest == same.digest, "nor does the width of a stored token"
    assert same.subset([1, 0]).digest != same.digest
    masked = dataclasses.replace(one, supervised=[False, False, True])
    assert dataset_of([masked, two]).digest != same.digest
    # Pinned: a run begun by one version must be resumed by the next.
    assert same.digest == "19dd8ae2ff4634cc44086d8bb7f0154c0ddcdaea95e936d074fb9df9904c17cd"
