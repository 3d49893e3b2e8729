"""The ledger of reserved memory: never over-granted, first come first served, whatever others do to it."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graftune import errors
from graftune.errors import GraftuneError, one_line
from graftune.ledger import LEASE, Claim, Ledger, Memory, book, entry, store
from graftune.training.reserve import described

GPU, ALL = "GPU-0", Memory(100, 100)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    said: list[str] = []
    found = Ledger(tmp_path / "ledger", tell=said.append)
    found.said = said  # type: ignore[attr-defined]
    return found


def claim(ledger: Ledger, size: int, memory: Memory = ALL, **more: object) -> Claim:
    made = ledger.claim(GPU, size, task="test", **more)  # type: ignore[arg-type]
    made.take(memory)
    return made


@pytest.fixture(scope="module")
def helper() -> Iterator[subprocess.Popen[str]]:
    """A small process, without torch, that takes claims as it is told: a line of folder and size."""
    code = (
        "import sys; from graftune.ledger import Ledger, Memory\n"
        "assert 'torch' not in sys.modules\n"
        "for line in sys.stdin:\n"
        "    folder, size = line.split(); claim = Ledger(folder).claim('GPU-0', int(size), task='helper')\n"
        "    claim.take(Memory(100, 100)); print(claim.granted, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def ask(helper: subprocess.Popen[str], ledger: Ledger, size: int) -> bool:
    assert helper.stdin is not None and helper.stdout is not None
    helper.stdin.write(f"{ledger.store.folder} {size}\n")
    helper.stdin.flush()
    return helper.stdout.readline() == "True\n"


def test_racing_processes_are_never_granted_more_than_there_is(tmp_path: Path) -> None:
    """The short form of tests/soak/soak_ledger.py. Half of the winners are killed: what they held is free again."""
    line = [sys.executable, "-m", "tests.support.ledger_race", str(tmp_path / "ledger"), "20", "6"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
    found = json.loads(done.stdout)
    assert found["granted"] == {"1": 20} and found["left"] == 0


def test_what_is_left(ledger: Ledger) -> None:
    first = claim(ledger, 95)
    assert first.granted, "alone: all that is free"
    assert not claim(ledger, 1).granted, "beside another: 85% of it"
    first.release()
    first = claim(ledger, 60)
    assert not claim(ledger, 26).granted and claim(ledger, 25).granted
    assert not claim(ledger, 1).granted
    assert claim(ledger, 10, share=0.95).granted
    assert ledger.room(GPU, ALL).left == 0 and ledger.room("GPU-1", ALL).left == 100
    assert next((e.booked, e.user) for e in ledger.entries()) == (60, entry._user())


def test_memory_of_programs_that_reserve_nothing_counts(ledger: Ledger) -> None:
    assert not claim(ledger, 41, Memory(100, 40)).granted
    first = claim(ledger, 30, Memory(100, 40))
    assert first.granted
    assert ledger.room(GPU, Memory(100, 40)).left == 10, "30 of the 40 are promised"
    first.beat(30)
    assert ledger.room(GPU, Memory(100, 10)).left == 10, "and taken now"
    first.beat(70)
    assert ledger.room(GPU, Memory(100, 30)).left == 15, "a plan that was wrong: what is measured is booked"


def test_ranks_of_a_run_are_not_in_each_others_way(ledger: Ledger) -> None:
    assert claim(ledger, 50, group="run").granted and claim(ledger, 50, group="run").granted
    assert not claim(ledger, 1, group="run").granted
    other = Memory(1000, 1000)  # beside a stranger all that the run has counts
    for size, group in ((300, "a stranger"), (400, "run")):
        assert claim(ledger, size, other, group=group).granted
    assert not claim(ledger, 151, other, group="run").granted and claim(ledger, 50, other, group="run").granted


def test_a_dead_process_holds_nothing(ledger: Ledger, helper: subprocess.Popen[str]) -> None:
    """Neither one that was killed nor a later one of its number; but one that was stopped does."""
    assert ask(helper, ledger, 60)
    theirs = ledger.entries()[0]
    assert theirs.pid == helper.pid and not claim(ledger, 60).granted
    assert not replace(theirs, began="1").lives(entry.clock()), "another process of the same number"
    os.kill(helper.pid, signal.SIGSTOP)
    assert theirs.lives(theirs.expires + 1e6), "it keeps its memory, however long it was stopped"
    assert not replace(theirs, granted=False).lives(theirs.expires + 1), "but not a place in the queue"
    os.kill(helper.pid, signal.SIGCONT)
    child = os.fork()
    if not child:
        try:
            held = ledger.claim(GPU, 25, task="child")
            held.take(ALL)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended and nobody has asked how
    assert json.loads(ledger.store.path.read_text())["entries"][-1]["task"] == "child"
    assert ledger.room(GPU, ALL).left == 25, "for a plan, too"
    assert claim(ledger, 25).granted
    os.waitpid(child, 0)


def test_a_process_that_is_hidden_holds_as_long_as_it_renews(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc does not show the processes of others."""
    theirs = replace(entry.new_entry(GPU, 60, "test", ""), granted=True)
    monkeypatch.setattr(entry, "process_start", lambda pid: "")
    assert theirs.lives(theirs.expires - 1) and not theirs.lives(theirs.expires + 1)


def test_a_forked_child_gives_nothing_back(ledger: Ledger) -> None:
    """A worker process has a copy of the claim, and of what is done at the end."""
    held = claim(ledger, 60)
    child = os.fork()
    if not child:
        try:
            held.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert [e.id for e in ledger.entries()] == [held.entry.id]
    held.release()
    held.beat(0)  # of a thread that was about to
    assert ledger.entries() == []


def test_a_process_of_another_container_holds_as_long_as_it_renews(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = ledger.claim(GPU, 60, task="elsewhere")
    elsewhere.entry = replace(elsewhere.entry, namespace="pid:[1]", pid=1, began="1")
    elsewhere.take(ALL)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # a date that is set back, or on, ends and prolongs no lease
    assert not claim(ledger, 60).granted
    later = entry.clock() + LEASE - 1
    monkeypatch.setattr(book, "clock", lambda: later)
    elsewhere.beat(0)
    later += LEASE - 1
    assert not claim(ledger, 60).granted, "it has been renewed"
    later += 2
    assert elsewhere.entry.started > 0 and claim(ledger, 60).granted
    assert not replace(elsewhere.entry, expires=later + 1e9).lives(later), "no lease is that long"


def test_the_queue_is_first_come_first_served(ledger: Ledger) -> None:
    held, order = claim(ledger, 80), []
    looks: dict[int, threading.Event] = {}

    def waits(size: int) -> None:
        mine = ledger.claim(GPU, size, task=f"waits for {size}")
        room = mine.wait(lambda: ALL, 60, lambda _: looks[size].set())
        assert mine.granted and not room.ahead
        order.append(size)
        mine.release()

    threads = []
    for size in (90, 10, 30):  # the small ones would fit before the large one
        looks[size] = threading.Event()
        threads.append(threading.Thread(target=waits, args=(size,)))
        threads[-1].start()
        assert looks[size].wait(30)
    room = ledger.room(GPU, ALL)
    assert [e.planned for e in room.ahead] == [90, 10, 30] and [e.planned for e in room.holders] == [80]
    assert not claim(ledger, 1).granted, "nobody overtakes"
    held.release()
    for thread in threads:
        thread.join(60)
    assert order[0] == 90 and sorted(order) == [10, 30, 90]


def test_a_waiter_gives_up_its_place(ledger: Ledger, helper: subprocess.Popen[str]) -> None:
    held = claim(ledger, 60)
    mine = ledger.claim(GPU, 60, task="waits")
    room = mine.wait(lambda: ALL, 0.01)
    assert not mine.granted and [e.pid for e in room.holders] == [os.getpid()]
    assert [e.id for e in ledger.entries()] == [held.entry.id]
    waits = ledger.claim(GPU, 70, task="a large one, which then dies")
    waits.take(ALL, queue=True)
    assert not ask(helper, ledger, 10)
    with ledger.store.locked() as state:
        state.entries[-1] = replace(state.entries[-1], began="1")
    assert ask(helper, ledger, 10)


def test_claims_of_one_run_have_one_place_in_the_queue(ledger: Ledger) -> None:
    """Else a run's second claim would wait for somebody who waits for its first."""
    first = claim(ledger, 50, group="run")
    other = ledger.claim(GPU, 50, task="other")
    other.take(ALL, queue=True)
    assert claim(ledger, 50, group="run").granted and not other.granted and first.granted


def test_who_waited_before_the_ledger_was_lost_is_still_ahead(ledger: Ledger) -> None:
    claim(ledger, 80)
    waits = ledger.claim(GPU, 90, task="waits")
    waits.take(ALL, queue=True)
    for path in (ledger.store.path, ledger.store.path.with_name(ledger.store.name + ".copy")):
        path.unlink()  # as programs do that clear /tmp
    time.sleep(0.002)
    comes = ledger.claim(GPU, 1, task="comes later")
    assert comes.take(ALL, queue=True).settling and not comes.granted, "nobody knows who holds what"
    waits.take(ALL, queue=True)
    assert [e.task for e in comes.take(ALL, queue=True).ahead] == ["waits"]


def test_nothing_settles_for_ever(ledger: Ledger) -> None:
    with ledger.store.locked() as state:
        state.settles = entry.clock() + LEASE + 60
    assert claim(ledger, 60).granted


def test_a_heartbeat_keeps_a_claim_and_enters_what_was_lost(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "BEAT", 0.01)
    with claim(ledger, 60) as held:
        taken = [5]
        held.keep(lambda: taken[0])
        taken[0] = 25
        ledger.store.path.unlink()
        ledger.store.path.with_name(ledger.store.name + ".copy").unlink()
        limit = time.monotonic() + 20
        while [e.measured for e in ledger.entries()] != [20] and time.monotonic() < limit:
            time.sleep(0.01)
        assert [(e.id, e.measured, e.planned) for e in ledger.entries()] == [(held.entry.id, 20, 60)]
    assert ledger.entries() == []


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"\0" * 4096, b'{"crc32": 0}', b"x" * (store.LARGEST + 9)])
def test_a_damaged_ledger_is_put_aside(content: bytes, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    held = claim(ledger, 60)
    for path in (ledger.store.path, ledger.store.path.with_name(ledger.store.name + ".copy")):
        path.write_bytes(content)
    mine = ledger.claim(GPU, 60, task="test")
    assert mine.take(ALL).settling and not mine.granted, "nobody knows who holds what"
    (text,) = ledger.said  # type: ignore[attr-defined]
    assert "was damaged and is put aside as" in text
    aside = next(ledger.store.folder.glob("*.damaged-*"))
    assert aside.read_bytes() == content[: store.LARGEST + 1]
    held.beat(0)
    real = entry.clock
    monkeypatch.setattr(book, "clock", lambda: real() + 2 * book.BEAT + 0.1)
    room = mine.take(ALL)
    assert not room.settling and not mine.granted and [e.id for e in room.holders] == [held.entry.id]


@pytest.mark.parametrize("lost", ["damaged", "removed", "never there"])
def test_a_lost_ledger_settles_for_those_who_only_look(
    lost: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run looks at the room before it claims any: nobody enters anything, and it must end all the same."""
    claim(ledger, 60).release()
    for path in (ledger.store.path, ledger.store.path.with_name(ledger.store.name + ".copy")):
        path.write_bytes(b"garbage") if lost == "damaged" else path.unlink()
    if lost == "never there":
        os.truncate(ledger.store.path.with_name(ledger.store.name + ".lock"), 0)
    real, passed = entry.clock, 0.0
    for module in (book, store):
        monkeypatch.setattr(module, "clock", lambda: real() + passed)
    waits = 0
    while ledger.room(GPU, ALL).settling and waits < 20:
        waits, passed = waits + 1, passed + 1.0
    said = ledger.said  # type: ignore[attr-defined]
    if lost == "never there":
        assert (waits, said) == (0, [])
    else:
        assert waits in (6, 7) and len(said) == 1, "the time goes on, and it is said once"
        assert f"was {lost}" in said[0] and "enter it again within 6 s" in said[0]
    assert claim(ledger, 60).granted


def test_a_writer_that_was_killed_loses_nothing(ledger: Ledger) -> None:
    """Of the two copies one is whole, wherever it was killed. One that can be read need not be."""
    claim(ledger, 60)
    path = ledger.store.path
    whole = path.read_bytes()
    mixed = whole.replace(b'"planned": 60', b'"planned": 10')
    assert json.loads(mixed)["entries"][0]["planned"] == 10
    for torn, content in itertools.product(
        (path, path.with_name(path.name + ".copy")), (whole[: len(whole) // 2] + b"}", mixed)
    ):
        torn.write_bytes(content)
        assert [e.planned for e in ledger.entries()] == [60] and not claim(ledger, 60).granted
        torn.write_bytes(whole)
    assert not ledger.said  # type: ignore[attr-defined]


def test_hostile_ledgers_are_refused() -> None:
    """Whatever is in a field: an entry that is right, or ValueError and nothing else."""
    good, taken = entry.new_entry(GPU, 60, "test", ""), 0
    numbers = (-1, 0, 1, 2**31, 2**63, 10**400, -0.5, 1e300, math.inf, -math.inf, math.nan)
    others = (None, True, "", "\x1b[2J", "\ud800", "x" * 1000, [], [[]], {}, {"pid": 1})
    for name, value in itertools.product(good.document(), (*numbers, *others)):
        try:
            found = entry.read_entry({**good.document(), name: value})
        except ValueError:
            continue
        taken += 1
        assert getattr(found, name) == (one_line(value) if name in ("task", "user", "host") else value)
        assert store.parsed(store.written(store.State([found]))).entries == [found]
        found.lives(0.0)
        assert described(found).isprintable()
    assert 20 < taken < 100
    for name, value in (("planned", -60), ("measured", -1), ("measured", 2**61), ("ticket", -1), ("pid", 0)):
        with pytest.raises(ValueError, match="out of range"):
            entry.read_entry({**good.document(), name: value})
    for wrong in ([], {}, None, good.document() | {"more": 1}):
        with pytest.raises(ValueError, match="other fields"):
            entry.read_entry(wrong)
    for wrong in ("settles", "next_ticket", "entries", "version"):
        body = json.loads(store.written(store.State([good])))
        del body["crc32"]
        for value in ("1", 10**400, -1, None, math.inf):
            with pytest.raises(ValueError, match="no ledger"):
                store.parsed(signed(body | {wrong: value}).replace(b"Infinity", b"1e999"))


def signed(body: dict[str, Any]) -> bytes:
    return json.dumps({"crc32": store._checksum(body), **body}).encode()


def test_what_an_entry_shows_is_one_line_of_what_it_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that one process takes out of a text makes the ledger one that others refuse."""
    good = entry.new_entry(GPU, 60, "test", "").document()
    assert entry.read_entry({**good, "task": "a\nwarning: b\x1b[2J\u202e"}).task == "a warning: b\u241b[2J\ufffd"
    monkeypatch.setattr(errors, "_secrets", lambda: [("A_LONG_NAME_OF_A_" + "T" * 100, "secret78")])
    found = entry.read_entry({**good, "task": "secret78" * 25})
    assert len(found.task) <= entry.LONGEST_TEXT and entry.read_entry(found.document()) == found
    for name in ("id", "group", "device", "began", "namespace"):
        with pytest.raises(ValueError, match="not printable"):
            entry.read_entry({**good, name: "a\nb"})


def test_the_last_ticket_damages_nothing(ledger: Ledger) -> None:
    """Somebody wrote the highest number there may be: the next one would make a ledger that nobody reads."""
    with ledger.store.locked() as state:
        state.next_ticket = entry.MOST_NUMBER
    first, second = claim(ledger, 60), ledger.claim(GPU, 60, task="waits")
    second.take(ALL, queue=True)
    assert first.granted and [e.granted for e in ledger.entries()] == [True, False] and not ledger.said  # type: ignore[attr-defined]


def test_a_place_that_users_share(tmp_path: Path, ledger: Ledger) -> None:
    before = os.umask(0o077)
    try:
        claim(ledger, 1)
    finally:
        os.umask(before)
    folder = ledger.store.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777 and [path.name for path in tmp_path.iterdir()] == ["ledger"]
    ledger.store.path.chmod(0o600)  # as a process leaves it that is killed too early
    claim(ledger, 1)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666}


def test_of_two_who_make_the_folder_one_is_faster(ledger: Ledger) -> None:
    """An empty folder can be renamed over: whoever had opened the first one would have been left with none."""
    ledger.store._make_folder()
    first = ledger.store.folder.stat().st_ino
    ledger.store._make_folder()
    assert ledger.store.folder.stat().st_ino == first
    assert [path.name for path in ledger.store.folder.parent.iterdir()] == ["ledger"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")
def test_several_users_share_it(helper: subprocess.Popen[str]) -> None:
    """The second one writes to files of the first, in a folder where nobody may rename over those of another."""
    with tempfile.TemporaryDirectory() as whole:
        Path(whole).chmod(0o1777)
        ledger = Ledger(Path(whole) / "ledger")
        assert as_user(1001, lambda: claim(ledger, 60).granted), "it dies with its process"
        assert as_user(1002, lambda: not ledger.entries() and claim(ledger, 60).granted)
        assert ask(helper, ledger, 60), "of root"
        assert as_user(1001, lambda: not claim(ledger, 60).granted and claim(ledger, 20).granted)
        assert {path.stat().st_uid for path in ledger.store.folder.iterdir()} == {1001}
        ledger.store.folder.chmod(0o755)
        ledger.store.path.chmod(0o644)

        def refused() -> bool:
            with pytest.raises(GraftuneError, match=r"cannot be used \(Permission denied\); set GRAFTUNE_LEDGER to a"):
                ledger.check()
            return len(ledger.entries()) == 1  # but it can be read

        assert as_user(1002, refused)


def as_user(number: int, work: Callable[[], bool]) -> bool:
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setgid(number)
            os.setuid(number)
            code = int(not work())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", ["link", "pipe", "second name", "folder", "linked folder"])
def test_what_is_no_plain_file_is_refused(kind: str, tmp_path: Path, ledger: Ledger) -> None:
    folder, path, victim = ledger.store.folder, ledger.store.path, tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    if kind == "linked folder":
        (tmp_path / "real").mkdir()
        folder.symlink_to(tmp_path / "real")
    else:
        folder.mkdir()
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "second name":
        os.link(victim, path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(GraftuneError, match=r"cannot be used .*; set GRAFTUNE_LEDGER to a folder that everybody"):
        ledger.check()
    assert victim.read_text() == "precious" and stat.S_IMODE(victim.stat().st_mode) == 0o600


def test_a_lock_that_is_kept_stops_nobody_for_ever(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PATIENCE", 0.05)
    with ledger.store.locked(), pytest.raises(GraftuneError, match="another process has kept it locked"):
        Ledger(ledger.store.folder).check()


def test_a_forked_child_does_not_keep_the_lock(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process that is started at the wrong moment has the lock's file open as long as it lives."""
    monkeypatch.setattr(store, "PATIENCE", 0.05)
    with ledger.store.locked():
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        ledger.check()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_that_is_cleared_away_is_made_again(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it: a lock on no file would keep nobody out."""
    real, waited = store._wait_for, list[int]()

    def then_gone(handle: int, limit: float) -> None:
        real(handle, limit)
        if not waited:
            ledger.store.path.with_name(ledger.store.name + ".lock").unlink()
        waited.append(handle)

    monkeypatch.setattr(store, "_wait_for", then_gone)
    monkeypatch.setattr(store, "PATIENCE", 0.05)
    with ledger.store.locked(), pytest.raises(GraftuneError, match="another process has kept it locked"):
        Ledger(ledger.store.folder).check()


def test_a_full_ledger_takes_no_more_and_stays_whole(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_ENTRIES", 2)
    claim(ledger, 1), claim(ledger, 1)
    with pytest.raises(GraftuneError, match="File too large"):
        claim(ledger, 1)
    assert len(ledger.entries()) == 2 and not ledger.said  # type: ignore[attr-defined]


def test_ledgers_of_other_boots_go(ledger: Ledger) -> None:
    ledger.store.folder.mkdir()
    old, new = (ledger.store.folder / f"ledger-{name}.json" for name in ("old", "new"))
    old.touch(), new.touch()
    os.utime(old, (0, 0))
    ledger.check()
    assert new.exists() and not old.exists()
