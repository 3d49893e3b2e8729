"""The chat box and the pages of data: what the server asks of its processes, and what those answer.

Here the server's process is a few lines of Python that speak its protocol, and the real one runs in this process over a
tiny run: both halves, without another import of torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graftune.api import train
from graftune.cli import worker as worker_process
from graftune.cli.worker import open_chat, open_preview
from graftune.dashboard import runs as runs_module
from graftune.dashboard import worker as asking
from graftune.dashboard.chat import Chat
from graftune.dashboard.preview import Previews
from graftune.dashboard.worker import Worker
from graftune.data.token_text import Pieces
from graftune.errors import GraftuneError
from graftune.io.lock import FolderLock
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.settings.config import Config
from graftune.training import preview as preview_module
from graftune.weights.base import open_base
from tests.dashboard.folders import client, end, start, step, write_run
from tests.support.worker_answers import answers
from tests.training.runs import write_data

# Answers with what it was started for; "die" ends it, "long" goes on until it is stopped.
STANDIN = """
import json, os, queue, sys, threading
key, stopped = json.loads(sys.argv[-1]), threading.Event()
def say(**document): print(json.dumps(document), flush=True)
waiting = queue.Queue()
def read():
    for line in sys.stdin:
        request = json.loads(line)
        stopped.set() if "stop" in request else waiting.put(request)
    os._exit(0)
threading.Thread(target=read, daemon=True).start()
while True:
    request = waiting.get()
    stopped.clear()
    text, number = request["messages"][-1]["content"], request["number"]
    if text == "die": os.kill(os.getpid(), 9)
    for who in ("base", "tuned"):
        say(number=number, who=who, text=f"{key['checkpoint']} {os.getpid()}")
    if text == "long": stopped.wait(30)
    say(number=number, end=True)
"""


@pytest.fixture(scope="module")
def run(tiny_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a tiny model, with 19 examples to train on."""
    folder = tmp_path_factory.mktemp("chat")
    settings = {
        "base": str(tiny_folder("llama-shallow")), "data": str(write_data(folder / "data.jsonl", rows=24)),
        "out": str(folder / "runs" / "r"), "device": "cpu", "compute_dtype": "fp32", "max_steps": 2, "lr": 0.05,
        "tokens_per_step": 128, "samples": 2, "sample_tokens": 2,
    }  # fmt: skip
    return train(Config.of(settings), console=Console(quiet=True)).folder


def said(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def conversation(text: str, **more: Any) -> dict[str, Any]:
    return {"run": "r", "checkpoint": "step-1", "messages": [{"role": "user", "content": text}], **more}


def test_the_server_asks_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "r", start(1), step(1), end(1))
    for name in ("step-1", "step-2"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    with client(tmp_path) as page:
        server: Any = page.app.state.server  # type: ignore[attr-defined]
        server.chat = Chat(server.runs, worker=Worker("chat", [sys.executable, "-c", STANDIN]))
        first = said(page.post("/api/chat", json=conversation("Hi")))
        assert [one["who"] for one in first] == ["base", "tuned"] and first[0]["text"].startswith("step-1 ")
        assert said(page.post("/api/chat", json=conversation("Again"))) == first, "the same process has it open"
        other = said(page.post("/api/chat", json=conversation("Hi", checkpoint="step-2")))
        assert other[0]["text"].startswith("step-2 ") and other[0]["text"] != first[0]["text"]
        (gone,) = said(page.post("/api/chat", json=conversation("die")))
        assert gone["error"].startswith("the process that answers ended by signal 9; ")
        pid = int(said(page.post("/api/chat", json=conversation("Hi")))[0]["text"].split()[1])
        assert server.chat._key(server.runs.get("r"), "adapter")["device"] == "auto"
        assert not server.chat.occupies_needed_gpu({"device": "auto"})
        with FolderLock(write_run(tmp_path / "live", start(1))):
            monkeypatch.setattr(runs_module, "FRESH", 0.0)
            assert server.chat.occupies_needed_gpu({"device": "auto"}) and not server.chat.occupies_needed_gpu(
                {"device": "cpu"}
            )
            assert server.chat._key(server.runs.get("r"), "adapter")["device"] == "cpu", "the GPU is the training's"
        for wrong, status in (
            (conversation("x", checkpoint="step-9"), 404), (conversation("x", checkpoint="../.."), 404),
            (conversation("x", run="../r"), 404), (conversation("x", temperature=-1), 400), ([], 400),
            (conversation("x", max_new_tokens=10**6), 400), (conversation("x", messages=[]), 400),
            (conversation("x", messages=[{"role": "user", "content": 5}]), 400), ({"messages": "x"}, 400),
            (conversation("x", temperature=float("nan")), 400), (conversation("x", messages=[{"role": "x"}]), 400),
        ):  # fmt: skip
            answer = page.post("/api/chat", content=json.dumps(wrong), headers={"content-type": "application/json"})
            assert answer.status_code == status and list(answer.json()) == ["error"], (wrong, answer.text)
        assert page.post("/api/chat", content="{}").status_code == 415
    with pytest.raises(ProcessLookupError):  # it ended with the server
        os.kill(pid, signal.SIGTERM)


def test_an_idle_process_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LOOK", 0.01)

    async def talk() -> int | None:
        worker = Worker("chat", [sys.executable, "-c", STANDIN], must_end=lambda key: key == {"checkpoint": "x"})
        async for _ in worker.ask({"checkpoint": "x"}, {"messages": [{"content": "Hi"}]}):
            process = worker._process
        assert process is not None
        return await asyncio.wait_for(process.wait(), 20)

    assert asyncio.run(talk()) == -signal.SIGKILL


def test_an_answer_that_nobody_reads_is_stopped() -> None:
    async def talk() -> tuple[str, str]:
        worker, key = Worker("chat", [sys.executable, "-c", STANDIN]), {"checkpoint": "x"}
        texts = []
        for text in ("long", "Hi"):
            answer = worker.ask(key, {"messages": [{"content": text}]})
            texts.append((await anext(answer))["text"])
            await answer.aclose()  # type: ignore[attr-defined]
        await worker.end()
        return texts[0], texts[1]

    first, second = asyncio.run(asyncio.wait_for(talk(), 25))  # or it would have gone on for 30 seconds
    assert first == second, "the process lives on"


def test_base_and_tuned_answer_in_turn(run: Path) -> None:
    messages = [{"role": "user", "content": "abc"}]
    request = {"messages": messages, "temperature": 0.0, "max_new_tokens": 4}
    key = {"run": str(run), "checkpoint": "step-2", "device": "cpu"}
    found = answers(lambda: open_chat(key), request, {**request, "stopped": True})
    mine = [one for one in found if one["number"] == 1]
    done = [one for one in mine if one.get("done")]
    assert {one["who"] for one in done} == {"base", "tuned"} and mine[-1] == {"number": 1, "end": True}
    texts = {who: "".join(one.get("text", "") for one in mine if one.get("who") == who) for who in ("base", "tuned")}
    import graftune

    session = graftune.open(str(run), quiet=True, device="cpu")
    assert texts["tuned"] == session.chat(messages, max_new_tokens=4)
    assert texts["base"] == session.chat(messages, max_new_tokens=4, adapted=False)
    assert [one for one in found if one["number"] == 2] == [{"number": 2, "end": True}], "stopped before it began"
    (error, _) = answers(lambda: open_chat({**key, "checkpoint": "step-77"}), request)
    assert "has no checkpoint of step 77" in error["error"]


def test_failures_of_a_process_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    def refuses() -> Any:
        raise GraftuneError("is not here", where="x")

    def broken() -> Any:
        raise KeyError("bug")

    assert answers(refuses, {})[0]["error"] == "x: is not here"
    assert "failed inside graftune (KeyError)" in answers(broken, {})[0]["error"]
    assert "KeyError: 'bug'" in capsys.readouterr().err


def test_a_run_keeps_a_preview_of_its_data(run: Path, tiny_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = client(run.parent)
    shown = page.get("/api/runs/r/preview?size=5&page=1").json()
    assert (shown["total"], shown["page"], shown["source"], len(shown["examples"])) == (19, 1, "preview.jsonl", 5)
    assert shown["note"] == "All examples are in the run folder." and shown["examples"][0]["index"] == 5
    asked = next(event for event in read_events(run / "metrics.jsonl") if event["event"] == "sample")
    assert len(asked["references"]) == len(asked["prompts"]) == 2 and shown["examples"][0]["row"] >= 1
    first = page.get("/api/runs/r/preview").json()["examples"][0]
    text = "".join(first["tokens"])
    trained = "".join(token for token, on in zip(first["tokens"], first["trained"], strict=True) if on)
    rows = map(json.loads, (run.parents[1] / "data.jsonl").read_text().splitlines())
    row = next(row for row in rows if row["response"] in trained)
    assert row["prompt"] in text and trained.startswith(row["response"]) and not first["truncated"]
    found = page.get(f"/api/runs/r/preview?search={row['response'].upper()}").json()
    assert 0 < found["total"] < 19 and all(row["response"] in "".join(one["tokens"]) for one in found["examples"])
    # The same examples from the token cache, by the process that reads it.
    start_event = read_events(run / "metrics.jsonl")[0]
    key = {"run": str(run), "encoded": start_event["encoded"]}
    (cached, _) = answers(lambda: open_preview(key), {"page": 1, "size": 5, "search": ""})
    assert cached["examples"] == shown["examples"] and cached["total"] == 19
    (matching, _) = answers(lambda: open_preview(key), {"page": 0, "size": 50, "search": row["response"].upper()})
    assert matching["examples"] == found["examples"]
    # A folder that holds less than all asks that process, and says so where the cache is not here.
    (run / "preview.jsonl").write_bytes(b"\n".join((run / "preview.jsonl").read_bytes().split(b"\n")[:6]))
    asked = []

    class StandIn:
        async def ask(self, key: Any, request: Any) -> Any:
            asked.append(request)
            yield {"total": 19, "examples": [], "searched": 7, "of": 19}

    page = client(run.parent)
    page.app.state.server.previews = Previews(StandIn())  # type: ignore[attr-defined, arg-type]
    assert page.get("/api/runs/r/preview?size=5").json()["note"].endswith("the rest comes from the token cache.")
    beyond = page.get("/api/runs/r/preview?size=5&page=1").json()
    assert asked == [{"page": 1, "size": 5, "search": ""}] and beyond["source"] == "cache"
    assert beyond["note"] == "Only the first 7 of 19 examples were searched: it took too long."
    monkeypatch.setenv("GRAFTUNE_CACHE", str(run.parent / "elsewhere"))
    away = page.get("/api/runs/r/preview?size=5&page=1").json()
    assert (away["source"], away["total"], len(asked)) == ("preview.jsonl", 5, 1)
    assert away["note"].startswith("The run folder holds the first 5 of 19 examples; the token cache of this machine")


def test_a_preview_is_small(run: Path, tiny_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graftune.batch import Example

    tokenizer = open_base(str(tiny_folder("llama-shallow"))).tokenizer
    ids = tokenizer.encode("x é 日本 😀 \ufffd <b>")
    assert "".join(Pieces(tokenizer).of(ids)) == tokenizer.decode(ids)
    example = Example(ids, [place % 2 == 1 for place in range(len(ids))], weights=[0.5] * len(ids))
    monkeypatch.setattr(preview_module, "TOKENS", 7)
    monkeypatch.setattr(preview_module, "LARGEST", 1500)
    preview_module.write_preview(tmp_path / "p.jsonl", [example] * 50, tokenizer)
    written = (tmp_path / "p.jsonl").read_bytes()
    lines = [json.loads(line) for line in written.splitlines()]
    assert len(written) <= 1500 and 1 < len(lines) < 50 and lines[0]["truncated"] and len(lines[0]["tokens"]) == 7
    assert lines[0]["weights"] == [0.5] * 7 and worker_process.LONGEST_SEARCH > 0
    brief = [Example(ids[:3], [True] * 3, shortened=shortened) for shortened in (False, True)]
    shown = [preview_module.shown_example(0, each, Pieces(tokenizer)) for each in brief]
    assert [each["truncated"] for each in shown] == [False, True], "shortened to fit max_seq_len"
    said = []
    run: Any = SimpleNamespace(
        folder=tmp_path / "no" / "folder", ranks=SimpleNamespace(leads=True),
        parts=SimpleNamespace(tokenizer=tokenizer), report=SimpleNamespace(warn=said.append),
    )  # fmt: skip
    hook = preview_module.Preview([example])
    hook.start(run)
    hook.finish(run)
    assert said == ["preview.jsonl was not written: No such file or directory"]
