"""Runs reserve their memory: they share a device within their plans, wait for each other, and give it back."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graftune
from graftune.api import train
from graftune.errors import GraftuneError
from graftune.ledger import HOST, Claim, Ledger, Memory
from graftune.observe.console import Console
from graftune.observe.memory import total_bytes
from graftune.plan import card_here
from graftune.settings.config import Config
from graftune.training import reserve
from graftune.training.prepare import job_of
from tests.training.runs import write_data

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv("GRAFTUNE_LEDGER", str(tmp_path / "ledger"))
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def other(ledger: Ledger) -> Iterator[Claim]:
    """Half of the machine's memory, reserved by a claim that has allocated nothing yet."""
    claim = ledger.claim(HOST, total_bytes() // 2, task="train on another's data")
    claim.take(Memory(total_bytes(), total_bytes()))
    assert claim.granted
    yield claim
    claim.release()


def settings(tiny_folder: Any, out: Path, **more: Any) -> Config:
    values = {
        **{"base": str(tiny_folder("llama-shallow")), "data": str(write_data(out.parent / "data.jsonl"))},
        **{"out": str(out), "device": "cpu", "rank": 4, "max_steps": 1, "tokens_per_step": 64, "val_split": 0.0},
        **{"samples": 0},
    }
    return Config.of(values | more)


@pytest.mark.thorough
def test_two_runs_share_a_device_and_a_third_waits(tiny_folder, tmp_path) -> None:
    check_sharing("cpu", tiny_folder("llama-shallow"), tmp_path)


def check_sharing(device: str, base: Path, folder: Path) -> dict[str, Any]:
    line = [sys.executable, "-m", "tests.support.sharing", device, str(base), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    first, second, third = found["entries"]
    assert first["granted"] and second["granted"] and not third["granted"] and found["waited"]
    for entry in (first, second):
        assert 0 < entry["measured"] <= entry["planned"], "within their plans"
    assert found["codes"] == {"1": 0, "2": 0, "3": 0} and found["left"] == 0
    runs = found["runs"]
    assert runs["3"]["run_start"] > min(runs[name]["run_end"] for name in "12") > runs["2"]["run_start"]
    assert runs["1"]["losses"] == runs["2"]["losses"] == runs["3"]["losses"] != []
    assert f"process {first['pid']} of" in found["logs"]["3"], found["logs"]["3"]
    return found


def test_a_run_that_does_not_fit_is_refused_with_the_holders_names(ledger, other, tiny_folder, tmp_path) -> None:
    share = (other.reservation.planned + 1000) / total_bytes()
    for wait, when in ((0.0, "left: reserved by"), (0.05, "left after 0.05 s: reserved by")):
        with pytest.raises(GraftuneError) as caught:
            train(settings(tiny_folder, tmp_path / "run", memory_share=share, wait_gpu=wait), console=Console())
        said = str(caught.value)
        assert when in said and f"process {os.getpid()} of " in said and "(train on another's data, " in said
        assert "by setting wait_gpu to seconds" in said
    assert [one.id for one in ledger.reservations()] == [other.reservation.id] and not (tmp_path / "run").exists()


def test_the_plan_sees_what_others_leave(ledger, other, tiny_folder, tmp_path) -> None:
    share = other.reservation.planned / total_bytes() + 0.01
    seen = []

    def look(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            seen.extend(entry for entry in ledger.reservations() if entry.id != other.reservation.id)

    run = train(settings(tiny_folder, tmp_path / "run", memory_share=share), console=Console(), callbacks=[look]).folder
    plan = json.loads((run / "plan.json").read_text())
    assert plan["free"] == int(share * total_bytes()) - other.reservation.planned
    (mine,) = seen
    assert (mine.planned, mine.granted, mine.task) == (plan["needed"], True, "train llama-shallow")
    assert [one.id for one in ledger.reservations()] == [other.reservation.id], "given back"
    config = settings(tiny_folder, tmp_path / "none", memory_share=share)
    assert job_of(config, Console()).free == plan["free"], "graftune plan, which reserves nothing"


def test_a_run_that_fails_gives_its_memory_back(ledger, tiny_folder, tmp_path) -> None:
    def fails(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            assert [one.granted for one in ledger.reservations()] == [True]
            raise RuntimeError("a callback's mistake")

    with pytest.raises(RuntimeError, match="a callback's mistake"):
        train(settings(tiny_folder, tmp_path / "run"), console=Console(), callbacks=[fails])
    assert ledger.reservations() == []


def test_a_gpu_as_the_ledger_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is the same in every process; where it shares the CPU's memory, less of it may be reserved."""
    about = SimpleNamespace(uuid="1-2", is_integrated=0, name="a card", major=9, minor=0)
    about.multi_processor_count, about.L2_cache_size = 132, 1 << 20
    answers = {"get_device_properties": about, "mem_get_info": (30, 100), "memory_reserved": 9, "memory_allocated": 4}
    answers |= {"current_device": 0, "get_device_name": "a card"}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shared = reserve.SharedDevice.of(torch.device("cuda"), Config())
    assert (shared.name, shared.share, str(shared)) == ("GPU-1-2", 0.85, "a card")
    assert shared.memory == Memory(100, 35) and shared.measure() == 9
    assert card_here(torch.device("cuda"), shared.limit(20)).free == 20, "what a job takes for its limit"
    assert shared.limit(20, limit=70) == 70
    about.is_integrated = 1
    assert reserve.SharedDevice.of(torch.device("cuda"), Config()).share == 0.6
    assert reserve.SharedDevice.of(torch.device("cuda"), Config.of({"memory_share": 0.9})).share == 0.9
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7, MIG-8")
    assert reserve.SharedDevice.of(torch.device("cuda", 1), Config()).name == "MIG-8"


def test_a_signal_ends_the_wait_and_the_place_in_the_queue(ledger, other, tiny_folder, tmp_path) -> None:
    asked = settings(
        tiny_folder, tmp_path / "run", memory_share=other.reservation.planned / total_bytes(), wait_gpu=600
    )

    def stop() -> None:
        limit = time.monotonic() + 60
        while all(one.granted for one in ledger.reservations()) and time.monotonic() < limit:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    result = train(asked, console=Console(quiet=True))
    thread.join()
    assert (result.signal, result.started) == (signal.SIGTERM, False) and not (tmp_path / "run").exists()
    assert [one.id for one in ledger.reservations()] == [other.reservation.id]


def test_a_session_that_trains_nothing_enters_what_it_has_taken(ledger, tiny_folder) -> None:
    session = graftune.open(str(tiny_folder("llama-shallow")), device="cpu", quiet=True)
    reserve.register(session, Console(quiet=True), "chat llama-shallow")
    (entry,) = ledger.reservations()
    assert entry.granted and entry.task == "chat llama-shallow" and entry.planned == entry.measured > 1 << 20
    session.close()
    del session
    gc.collect()
    assert ledger.reservations() == []


def test_a_ledger_that_cannot_be_written_is_said(tiny_folder, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAFTUNE_LEDGER", str(tmp_path / "file" / "ledger"))
    said = io.StringIO()
    train(settings(tiny_folder, tmp_path / "run"), console=Console(stderr=said))
    assert "warning: the memory of this run is not reserved against other runs: " in said.getvalue()
    for place, text in ((os.environ["GRAFTUNE_LEDGER"], "cannot be used"), ("off", "GRAFTUNE_LEDGER is off")):
        monkeypatch.setenv("GRAFTUNE_LEDGER", place)
        with pytest.raises(GraftuneError, match=text):  # a run cannot queue there
            train(settings(tiny_folder, tmp_path / "other", wait_gpu=1), console=Console())
