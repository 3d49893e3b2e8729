"""Which checkpoint a resume takes, which ones are kept, and that what was written is what is read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftune import run_folder
from graftune.errors import GraftuneError
from graftune.model.arena import Arena, Slot
from graftune.weights import checkpoint
from graftune.weights.checkpoint import DamagedCheckpoint, Progress

IDENTITY, EPOCHS = {"data": "x"}, (3, 3)


def arena(*values: float) -> Arena:
    """With these in its weights and in the two moments."""
    made = Arena({"a": Slot("a", (5,), 0, 0, True)}, torch.device("cpu"), torch.float32)
    for buffer, value in zip((made.weights, made.m, made.v), values, strict=True):
        buffer.fill_(value)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 to 5, of which the third is the best since it was made."""
    for step in range(1, 6):
        place = Progress(step, step // 4, step - 3 * (step // 4), step, best_step=3 if step >= 3 else -1)
        checkpoint.save(tmp_path / "checkpoints", arena(step, step + 0.25, step + 0.5), place, IDENTITY)
    return tmp_path / "checkpoints"


def spoil(path: Path, name: str = checkpoint.TENSORS, at: int = -1) -> None:
    content = bytearray((path / name).read_bytes())
    content[at] ^= 1
    (path / name).write_bytes(content)


def newest(root: Path, identity: dict[str, Any] = IDENTITY, epochs: tuple[int, ...] = EPOCHS) -> str:
    found = checkpoint.newest_whole(root, identity, epochs, lambda text: None)
    assert found is not None
    return found.name


def test_all_three_buffers_come_back(root: Path) -> None:
    place = arena(0.0, 0.0, 0.0)
    assert checkpoint.load(root / "step-4", place).step == 4
    assert [float(buffer[-1]) for buffer in (place.weights, place.m, place.v)] == [4.0, 4.25, 4.5]


def test_a_resume_takes_the_newest_that_is_whole(root: Path) -> None:
    assert newest(root) == "step-5"
    spoil(root / "step-5")
    (root / "step-4" / checkpoint.TENSORS).unlink()
    assert newest(root) == "step-3"
    names = sorted(path.name for path in root.iterdir())
    assert names == ["step-1", "step-2", "step-3", "step-4.damaged", "step-5.damaged"], "set aside, not deleted"


def test_the_best_one_has_to_be_whole_too(root: Path) -> None:
    """The run's end needs it: from a step before it the run makes it again."""
    spoil(root / "step-3")
    assert newest(root) == "step-2"
    for step in (1, 2):
        spoil(root / f"step-{step}")
    with pytest.raises(GraftuneError, match="none of its checkpoints is whole together with the best one"):
        newest(root)
    assert (root / "step-5").exists(), "it is whole, and the user may restore the other"


def test_another_runs_checkpoint_is_refused_and_not_set_aside(root: Path) -> None:
    for identity in ({"data": "y"}, {"base": "z"}):
        with pytest.raises(GraftuneError, match=r"the (data|base) has changed since the run started"):
            newest(root, identity)
    assert len(checkpoint.steps(root)) == 5
    assert newest(root, epochs=(3, 1)) == "step-4", "no place in such a run"


@pytest.mark.parametrize(("part", "name", "value"), [("progress", "stale", 1), ("identity", "data", "y")])
def test_a_number_that_might_be_right_is_found_by_its_checksum(root: Path, part: str, name: str, value: object) -> None:
    file = root / "step-5" / checkpoint.STATE
    state = json.loads(file.read_text())
    state[part][name] = value
    file.write_text(json.dumps(state))
    for read in (checkpoint.read_state, checkpoint.check_whole):
        with pytest.raises(DamagedCheckpoint, match="its numbers are not those that were written"):
            read(root / "step-5")


def test_one_bit_anywhere_in_the_tensors_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a file that is taken in several pieces, by several threads."""
    for piece in (checkpoint._PIECE, 64):
        monkeypatch.setattr(checkpoint, "_PIECE", piece)
        path = checkpoint.save(root, arena(1.0, 2.0, 3.0), Progress(6), IDENTITY)
        size = (path / checkpoint.TENSORS).stat().st_size
        assert size > 3 * 64
        for at in (8, 63, 64, 128, size - 1):
            spoil(path, at=at)
            with pytest.raises(DamagedCheckpoint, match="its tensors are not those that were written"):
                checkpoint.check_whole(path)
            spoil(path, at=at)
        checkpoint.check_whole(path)


def test_the_last_few_and_the_best_are_kept(root: Path) -> None:
    (root / "step-9.part").mkdir()
    checkpoint.prune(root, 2, best_step=1)
    assert sorted(path.name for path in root.iterdir()) == ["step-1", "step-4", "step-5"]
    checkpoint.prune(root, 1, best_step=-1)
    assert [path.name for path in root.iterdir()] == ["step-5"]


def test_the_state_that_is_named_is_the_one_that_is_opened(root: Path) -> None:
    found = checkpoint.steps(root)
    chosen = {which: run_folder._choose(root.parent, which, found) for which in ("best", "", "last", "step-2")}
    assert {which: step for which, (step, _) in chosen.items()} == {"best": 3, "": 3, "last": 5, "step-2": 2}
    assert chosen["best"][1] == "step 3, the best on validation so far"
    with pytest.raises(FileNotFoundError):  # deleted since it was listed
        run_folder._choose(root.parent, "best", {5: found[5]})


def test_weights_of_another_size_are_refused(root: Path) -> None:
    """One number would fill all of them."""
    state: Any = SimpleNamespace(run=root.parent, step=5, base_sha256="", weights=torch.zeros(1))
    base: Any = SimpleNamespace(sha256="x", path="x")
    with pytest.raises(GraftuneError, match="holds other weights than the run's settings say"):
        run_folder._check(state, base, arena(1.0, 1.0, 1.0), any_base=True)


def test_the_fresh_one_of_two_counts(root: Path) -> None:
    (root / "step-2").rename(root / "step-5.old")
    (root / "step-1").rename(root / "step-7.old")
    assert checkpoint.steps(root) == {
        3: root / "step-3", 4: root / "step-4", 5: root / "step-5", 7: root / "step-7.old"
    }  # fmt: skip
    checkpoint.prune(root, 9, best_step=-1)
    assert sorted(path.name for path in root.iterdir()) == ["step-3", "step-4", "step-5", "step-7.old"]
