"""The ledger of reserved memory: it never grants too much, serves its queue in order, and survives damage."""

from __future__ import annotations

import json
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

import pytest

from graftune.errors import GraftuneError
from graftune.ledger import LEASE, Claim, Ledger, Memory, reservation
from graftune.ledger import ledger as ledger_file
from graftune.training.reserve import described
from tests.support.thorough import THOROUGH

GPU, ALL = "GPU-0", Memory(100, 100)


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def ledger(tmp_path: Path, warnings: list[str]) -> Ledger:
    return Ledger(tmp_path / "ledger", warn=warnings.append)


def claim(ledger: Ledger, size: int, memory: Memory = ALL, **more: object) -> Claim:
    made = ledger.claim(GPU, size, task="test", **more)  # type: ignore[arg-type]
    made.take(memory)
    return made


def queued(ledger: Ledger, size: int, task: str) -> Claim:
    made = ledger.claim(GPU, size, task=task)
    made.take(ALL, queue=True)
    return made


@pytest.fixture(scope="module")
def helper() -> Iterator[subprocess.Popen[str]]:
    """A small process, without torch, that claims memory: it reads lines of folder and size."""
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
    helper.stdin.write(f"{ledger.folder} {size}\n")
    helper.stdin.flush()
    return helper.stdout.readline() == "True\n"


def test_racing_processes_never_get_more_than_there_is(tmp_path: Path) -> None:
    """Half of the winners are killed; their memory is free again. So are processes that write the ledger."""
    rounds, processes, kills = (1000, 32, 2000) if THOROUGH else (20, 6, 20)
    how = map(str, (tmp_path / "ledger", rounds, processes, kills))
    line = [sys.executable, "-m", "tests.support.ledger_race", *how]
    done = subprocess.run(line, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
    found = json.loads(done.stdout)
    assert found["granted"] == {"1": rounds} and found["left"] == 0 and not found["faults"]


def test_bytes_left_of_a_device(ledger: Ledger) -> None:
    first = claim(ledger, 95)
    assert first.granted, "alone: all free memory"
    assert not claim(ledger, 1).granted, "with another run: 85% of the memory for both"
    first.release()
    first = claim(ledger, 60)
    assert not claim(ledger, 26).granted and claim(ledger, 25).granted
    assert not claim(ledger, 1).granted
    assert claim(ledger, 10, share=0.95).granted
    assert ledger.available(GPU, ALL).left == 0 and ledger.available("GPU-1", ALL).left == 100
    assert next((one.booked, one.user) for one in ledger.reservations()) == (60, reservation._user())


def test_memory_of_programs_that_reserve_nothing_counts(ledger: Ledger) -> None:
    assert not claim(ledger, 41, Memory(100, 40)).granted
    first = claim(ledger, 30, Memory(100, 40))
    assert first.granted
    assert ledger.available(GPU, Memory(100, 40)).left == 10, "30 of the 40 are reserved"
    first.renew(30)
    assert ledger.available(GPU, Memory(100, 10)).left == 10, "and allocated now"
    first.renew(70)
    assert ledger.available(GPU, Memory(100, 30)).left == 15, "the plan was too small: the measured bytes are booked"


def test_ranks_of_a_run_do_not_wait_for_each_other(ledger: Ledger) -> None:
    assert claim(ledger, 50, group="run").granted and claim(ledger, 50, group="run").granted
    assert not claim(ledger, 1, group="run").granted
    other = Memory(1000, 1000)  # with another run on the device, all claims of this run count
    for size, group in ((300, "another run"), (400, "run")):
        assert claim(ledger, size, other, group=group).granted
    assert not claim(ledger, 151, other, group="run").granted and claim(ledger, 50, other, group="run").granted


def test_a_dead_process_holds_nothing(ledger: Ledger, helper: subprocess.Popen[str]) -> None:
    """A killed process holds nothing, nor does a later one of its number. A stopped process keeps its memory."""
    assert ask(helper, ledger, 60)
    theirs = ledger.reservations()[0]
    assert theirs.pid == helper.pid and not claim(ledger, 60).granted
    assert not replace(theirs, process_start="1").is_alive(reservation.clock()), "another process of the same number"
    os.kill(helper.pid, signal.SIGSTOP)
    assert theirs.is_alive(theirs.expires + 1e6)
    assert not replace(theirs, granted=False).is_alive(theirs.expires + 1), "it loses its place in the queue"
    os.kill(helper.pid, signal.SIGCONT)
    child = os.fork()
    if not child:
        try:
            claim(ledger, 25)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert [one["pid"] for one in json.loads(ledger.path.read_text())][-1] == child
    assert ledger.available(GPU, ALL).left == 25 and claim(ledger, 25).granted
    os.waitpid(child, 0)


def test_an_invisible_process_holds_memory_while_it_renews(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another container, or where /proc hides the processes of others. The date does not matter."""
    elsewhere = ledger.claim(GPU, 60, task="elsewhere")
    elsewhere.reservation = replace(elsewhere.reservation, machine="host pid:[1]", pid=1, process_start="1")
    elsewhere.take(ALL)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert not claim(ledger, 60).granted
    later = reservation.clock() + LEASE - 1
    monkeypatch.setattr(ledger_file, "clock", lambda: later)
    elsewhere.renew(0)
    later += LEASE - 1
    assert not claim(ledger, 60).granted, "it has been renewed"
    later += 2
    assert elsewhere.reservation.started > 0 and claim(ledger, 60).granted
    assert not replace(elsewhere.reservation, expires=later + 1e9).is_alive(later), "no lease is that long"
    mine = replace(reservation.new_reservation(GPU, 60, "test", ""), granted=True)
    monkeypatch.setattr(reservation, "process_start", lambda pid: "")
    assert mine.is_alive(mine.expires - 1) and not mine.is_alive(mine.expires + 1)


def test_a_forked_child_releases_nothing(ledger: Ledger) -> None:
    """A worker process has a copy of the claim and of the exit callbacks."""
    held = claim(ledger, 60)
    child = os.fork()
    if not child:
        try:
            held.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert [one.id for one in ledger.reservations()] == [held.reservation.id]
    held.release()
    held.renew(0)  # from a heartbeat that was about to run
    assert ledger.reservations() == []


def test_the_queue_is_first_come_first_served(ledger: Ledger) -> None:
    held, order = claim(ledger, 80), []
    attempts: dict[int, threading.Event] = {}

    def waits(size: int) -> None:
        mine = ledger.claim(GPU, size, task=f"waits for {size}")
        found = mine.wait(lambda: ALL, 60, lambda _: attempts[size].set())
        assert mine.granted and not found.ahead
        order.append(size)
        mine.release()

    threads = []
    for size in (90, 10, 30):  # the small ones would fit before the large one
        attempts[size] = threading.Event()
        threads.append(threading.Thread(target=waits, args=(size,)))
        threads[-1].start()
        assert attempts[size].wait(30)
    found = ledger.available(GPU, ALL)
    assert [one.planned for one in found.ahead] == [90, 10, 30] and [one.planned for one in found.holders] == [80]
    assert not claim(ledger, 1).granted, "no claim overtakes"
    held.release()
    for thread in threads:
        thread.join(60)
    assert order[0] == 90 and sorted(order) == [10, 30, 90]


def test_a_waiting_claim_leaves_the_queue_at_its_timeout_and_when_it_dies(
    ledger: Ledger, helper: subprocess.Popen[str]
) -> None:
    held = claim(ledger, 60)
    mine = ledger.claim(GPU, 60, task="waits")
    found = mine.wait(lambda: ALL, 0.01)
    assert not mine.granted and [one.pid for one in found.holders] == [os.getpid()]
    assert [one.id for one in ledger.reservations()] == [held.reservation.id]
    queued(ledger, 70, "a large one, which then dies")
    assert not ask(helper, ledger, 10)
    with ledger.locked() as reservations:
        reservations[-1] = replace(reservations[-1], process_start="1")
    assert ask(helper, ledger, 10)


def test_claims_of_one_run_have_one_place_in_the_queue(ledger: Ledger) -> None:
    """Otherwise a run's second claim would wait for a run that waits for its first."""
    first = claim(ledger, 50, group="run")
    other = queued(ledger, 50, "other")
    assert claim(ledger, 50, group="run").granted and not other.granted and first.granted


def test_a_heartbeat_restores_a_lost_reservation_and_the_queue_keeps_its_order(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "HEARTBEAT", 0.01)
    held = claim(ledger, 60)
    waits = queued(ledger, 90, "waits")
    allocated = [5]
    held.keep(lambda: allocated[0])
    allocated[0] = 25
    ledger.path.unlink()  # as programs do that clean /tmp
    limit = time.monotonic() + 20
    while [one.measured for one in ledger.reservations()] != [20] and time.monotonic() < limit:
        time.sleep(0.01)
    assert [(one.id, one.planned) for one in ledger.reservations()] == [(held.reservation.id, 60)]
    later = queued(ledger, 1, "comes later")
    waits.take(ALL, queue=True)
    assert [one.task for one in later.take(ALL, queue=True).ahead] == ["waits"]
    later.release(), waits.release(), held.release()
    assert ledger.reservations() == []


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"\0" * 4096, b'{"version": 1}', b"7", b"[{}]"])
def test_a_damaged_ledger_is_moved_aside(content: bytes, ledger: Ledger, warnings: list[str]) -> None:
    held = claim(ledger, 60)
    ledger.path.write_bytes(content)
    with pytest.raises(GraftuneError, match="is damaged"):
        ledger.reservations()
    ledger.check()
    (text,) = warnings
    assert "was damaged and moved to" in text
    assert next(ledger.folder.glob("*.damaged")).read_bytes() == content
    held.renew(0)
    assert [one.id for one in ledger.available(GPU, ALL).holders] == [held.reservation.id] and len(warnings) == 1


def test_reservations_that_cannot_be_are_refused() -> None:
    good = reservation.new_reservation(GPU, 60, "test", "")
    assert described(reservation.read_reservation(good.document() | {"task": "\x1b[2J"})).isprintable()
    for name, value in (("planned", -60), ("measured", 2**63), ("ticket", -1), ("started", 1e300), ("task", 1)):
        with pytest.raises(ValueError, match=r"out of range|task is not of type str"):
            reservation.read_reservation({**good.document(), name: value})
    for wrong in ([], {}, None, good.document() | {"more": 1}):
        with pytest.raises(ValueError, match="other fields"):
            reservation.read_reservation(wrong)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as several users")
def test_several_users_share_it(helper: subprocess.Popen[str]) -> None:
    """The second user replaces the file of the first, whatever their umask is."""
    with tempfile.TemporaryDirectory() as whole:
        Path(whole).chmod(0o1777)
        ledger = Ledger(Path(whole) / "ledger")
        before = os.umask(0o077)
        try:
            assert as_user(1001, lambda: claim(ledger, 60).granted), "it dies with its process"
            assert as_user(1002, lambda: not ledger.reservations() and claim(ledger, 60).granted)
        finally:
            os.umask(before)
        assert ask(helper, ledger, 60), "of root"
        assert as_user(1001, lambda: not claim(ledger, 60).granted and claim(ledger, 20).granted)
        assert stat.S_IMODE(ledger.folder.stat().st_mode) == 0o777
        assert {stat.S_IMODE(path.stat().st_mode) for path in ledger.folder.iterdir()} == {0o666}
        ledger.folder.chmod(0o755)

        def refused() -> bool:
            with pytest.raises(GraftuneError, match=r"cannot be used \(Permission denied\); set GRAFTUNE_LEDGER to a"):
                claim(ledger, 1)
            return len(ledger.reservations()) == 1  # it can still be read

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


@pytest.mark.parametrize("kind", ["linked file", "linked lock"])
def test_nothing_is_written_through_a_link(kind: str, tmp_path: Path, ledger: Ledger) -> None:
    path, victim = ledger.path if kind == "linked file" else ledger.path.with_suffix(".lock"), tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    ledger.folder.mkdir()
    path.symlink_to(victim)
    if kind == "linked lock":
        with pytest.raises(GraftuneError, match="is a link"):
            ledger.check()
    else:
        ledger.check()
    assert victim.read_text() == "precious" and stat.S_IMODE(victim.stat().st_mode) == 0o600


def test_a_lock_that_is_kept_times_out(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "LOCK_TIMEOUT", 0.05)
    with ledger.locked(), pytest.raises(GraftuneError, match="another process has kept it locked"):
        Ledger(ledger.folder).check()
