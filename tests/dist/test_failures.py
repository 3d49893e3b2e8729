"""What goes wrong with one rank ends all of them, soon, with one sentence and one exit code; and the same command, that
a launcher starts anew, goes on from the last checkpoint and ends in the same adapter."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from graftune.observe.events import read_events
from tests.dist import cases
from tests.dist.launcher import Launcher, losses, trained, wait_for

MORE = [*cases.LORA, "--dropout", "0.2", "--epochs", "9", "--max-steps", "9", "--save-every", "2", "--deadline", "5"]
RESTARTED = {str(rank): {"TORCHELASTIC_RESTART_COUNT": "1"} for rank in range(2)}


@pytest.fixture(scope="module")
def straight(launcher: Launcher, base: Path, data: Path) -> Path:
    out = launcher.root / "undisturbed"
    cases.run(launcher, 0, *cases.line(base, data, launcher.root / "alone", *MORE))
    cases.run(launcher, 2, *cases.line(base, data, out, *MORE))
    return out


def equal(left: Path, right: Path) -> bool:
    one, other = trained(left), trained(right)
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_a_killed_rank_ends_all_and_a_restart_goes_on(
    launcher: Launcher, base: Path, data: Path, straight: Path
) -> None:
    out = launcher.root / "killed"
    ended = launcher.run(2, *cases.line(base, data, out, *MORE), misbehave={"1": ["kill", 5]})
    assert ended.codes == [1, -signal.SIGKILL] and ended.seconds[0] - ended.seconds[1] < 30, ended
    (said,) = ended.sentences
    assert "rank 1 has not answered" in said and "out-of-memory" in said and "--resume" in said, said
    ended = launcher.run(2, *cases.line(base, data, out, *MORE), environment=RESTARTED)
    assert ended.codes == [0, 0], ended.said
    resumed = [event["step"] for event in read_events(out / "metrics.jsonl") if event["event"] == "resume"]
    assert resumed == [4] and losses(out) == losses(straight) and equal(out, straight)


def test_a_signal_stops_all_after_the_same_step(launcher: Launcher, base: Path, data: Path, straight: Path) -> None:
    """Only one of them gets it, and not the one that writes."""
    out = launcher.root / "stopped"
    pids = launcher.start(2, *cases.line(base, data, out, *MORE), misbehave={"1": ["slow", 3]})
    wait_for(lambda: (out / "checkpoints" / "step-2").exists())
    os.kill(pids[1], signal.SIGTERM)
    ended = launcher.wait()
    assert ended.codes == [128 + signal.SIGTERM] * 2 and "graftune train --resume" in ended.said[0], ended
    end = read_events(out / "metrics.jsonl")[-1]
    assert end["event"] == "run_end" and end["stopped"] == "interrupted" and 2 <= end["step"] < 9
    cases.run(launcher, 2, "train", "--resume", str(out))
    assert losses(out) == losses(straight) and equal(out, straight)


@pytest.mark.thorough
def test_a_signal_stops_ranks_that_hear_of_it_at_different_steps(launcher: Launcher, base: Path, data: Path) -> None:
    """As GPUs do: rank 0 is given figures two steps late, rank 1 at once. No rank waits in a step that others left."""
    out = launcher.root / "heard late"
    pids = launcher.start(2, *cases.line(base, data, out, *MORE), misbehave={"0": ["late", 9], "1": ["late", 0]})
    wait_for(lambda: (out / "checkpoints" / "step-2").exists())
    os.kill(pids[1], signal.SIGTERM)
    ended = launcher.wait()
    assert ended.codes == [128 + signal.SIGTERM] * 2, ended
    assert read_events(out / "metrics.jsonl")[-1]["stopped"] == "interrupted"


@pytest.mark.thorough
def test_a_signal_before_the_first_step_stops_all(launcher: Launcher, base: Path, data: Path) -> None:
    out = launcher.root / "not begun"
    pids = launcher.start(2, *cases.line(base, data, out, *MORE), misbehave={"0": ["reads", 3]})
    wait_for(lambda: "gradients added up" in launcher.said(0))
    os.kill(pids[1], signal.SIGTERM)
    ended = launcher.wait()
    assert ended.codes == [128 + signal.SIGTERM] * 2 and not out.exists(), ended
    assert ended.sentences == ["graftune: rank 1 was stopped by SIGTERM before the first step"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("who", "said"),
    [
        ({"1": ["absent", 4]}, "step 4 has not finished within 2 s: rank 1 has not begun it"),
        ({rank: ["hang", 4] for rank in "01"}, "step 4 has not finished within 2 s, and every rank has begun it"),
    ],
    ids=["one", "all"],
)
def test_a_hung_step_is_named(launcher: Launcher, base: Path, data: Path, who: dict[str, list[object]], said: str):
    """Every process answers, but a step does not end: as a collective in a graph would hang."""
    line = cases.line(base, data, launcher.root / f"hung {len(who)}", *MORE[:-1], "2")
    ended = launcher.run(2, *line, misbehave=who, constants={"graftune.dist.watch.SLACK": 0.0})
    assert ended.codes == [1, 1] and len(ended.sentences) == 1, ended
    assert said in ended.sentences[0]


def test_weights_that_drift_apart_end_the_run(launcher: Launcher, base: Path, data: Path) -> None:
    ended = launcher.run(
        2,
        *cases.line(base, data, launcher.root / "drifting", *MORE),
        misbehave={"1": ["drift", 3]},
        constants={"graftune.step.pipeline.FINGERPRINT_EVERY": 1},
    )
    assert ended.codes == [1, 1] and len(ended.sentences) == 1, ended
    assert "weights have drifted apart" in ended.sentences[0]


def test_updates_skipped_because_of_one_rank_stop_all(launcher: Launcher, base: Path, data: Path) -> None:
    out = launcher.root / "overflowing"
    line = cases.line(base, data, out, *MORE)
    ended = launcher.run(2, *line, "--max-skipped", "2", misbehave={"1": ["inf", 4]})
    assert ended.codes == [2, 2] and len(ended.sentences) == 1, ended
    assert "2 updates in a row (steps 4 to 5) were skipped" in ended.sentences[0], ended.sentences
    assert "step 3, from before them, is saved" in ended.sentences[0]
    assert (out / "checkpoints" / "step-3").exists() and not (out / "checkpoints" / "step-4").exists()


def test_a_bug_on_one_rank_keeps_its_traceback(launcher: Launcher, base: Path, data: Path) -> None:
    ended = launcher.run(2, *cases.line(base, data, launcher.root / "bug", *MORE), misbehave={"1": ["raise", 2]})
    assert ended.codes == [1, 1] and "Traceback" in ended.said[1] and "Traceback" not in ended.said[0], ended
    assert ended.sentences == ["graftune: rank 1: ArithmeticError: one rank computes nonsense"]


@pytest.mark.few(2)
@pytest.mark.parametrize("what", ["settings", "data", "version", "missing", "port", "device"])
def test_what_does_not_fit_is_refused_by_all(launcher: Launcher, base: Path, data: Path, what: str) -> None:
    out = launcher.root / f"other {what}"
    line = cases.line(base, data, out, *MORE)
    constants = {"graftune.dist.world.JOIN_SECONDS": 2.0, "graftune.dist.watch.LINGER": 1.0}
    more: dict[str, object] = {"constants": constants}
    if what == "settings":
        more["lines"] = {"1": ["0.5" if part == "1e-3" else part for part in line]}
    elif what == "data":
        folders = [launcher.root / name for name in ("here", "there")]
        for seed, folder in enumerate(folders):
            folder.mkdir()
            cases.write_data(folder / "data.jsonl", rows=40, seed=seed)
        line[2] = "data.jsonl"
        more["folders"] = {str(rank): str(folder) for rank, folder in enumerate(folders)}
    elif what == "version":
        more["own"] = {"1": {"graftune.dist.world.__version__": "0.0.1"}}
    elif what == "missing":
        more["environment"] = {str(rank): {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"} for rank in range(2)}
    elif what == "port":
        more["environment"] = {"1": {"MASTER_PORT": "1"}}
    else:
        line = ["cuda:7" if part == "cpu" else part for part in line]
    ended = launcher.run(2, *line, **more)
    assert ended.codes == [2, 2] and "Traceback" not in "".join(ended.said), ended
    said = "\n".join(ended.sentences)
    expected = {
        "settings": "rank 1 has 0.5 lr where rank 0 has 0.001",
        "data": "rank 1 has other training data than rank 0",
        "version": "graftune's version is 0.0.1 on rank 1",
        "missing": "rank 2 is not here after 2 s, of 3 in all",
        "port": "rank 1: the rendezvous at 127.0.0.1:1 cannot be reached",
        "device": "device cuda:7",
    }
    assert expected[what] in said, said
    assert len(ended.sentences) == (2 if what == "port" else 1), said  # who cannot be reached can only speak for itself
    assert not out.exists(), "nothing is left behind"
