"""Pipes, devices and links under the names of files: no reader waits for them, nothing is written through them, and no
private file is copied onward.

| finding | test |
|---|---|
| a link in a run folder is written through: .lock, metrics.jsonl, checkpoints | LINKS, sweeping |
| a link beside a tokenizer or a template copies a private file into an export | TEXTS, the exported adapter |
| a pipe in the place of a file keeps its reader waiting for ever | PIPES |
| a log that leads to /dev/zero takes all memory | a socket and a device |
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graftune.cli import main
from graftune.data import source
from graftune.data.find import files_of
from graftune.data.template import template_from_file
from graftune.errors import GraftuneError
from graftune.io.files import new_file, open_own
from graftune.io.lock import FolderLock
from graftune.observe.events import EventLog, read_events
from graftune.settings import recognise
from graftune.settings.config import Config
from graftune.settings.sources import Source
from graftune.training.folder import sweep
from graftune.weights import apr, checkpoint
from graftune.weights.base import open_base
from graftune.weights.gguf_io import is_adapter_file, read_gguf
from tests.fuzz import seeds

SECRET = "TOPSECRET {{ messages }}"
PATIENCE = 30  # seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = seeds.write_model(tmp_path_factory.mktemp("seeds") / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return seeds.write_adapter(model.parent / "adapter", model)


@pytest.fixture(scope="module")
def run(model: Path) -> Path:
    seeds.write_checkpoint(model.parent / "run", model)
    return model.parent / "run"


@pytest.fixture
def pipe() -> Iterator[Callable[[Path], Path]]:
    """Makes a pipe in the place of a file. A test that waits for one fails after a while."""

    def make(path: Path) -> Path:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return path

    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a reader waited for a pipe"))
    signal.alarm(PATIENCE)
    yield make
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def rows(path: Path) -> list[Any]:
    return list(source.rows(files_of(Source(str(path)), lambda said: None)))


# Pipes


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "generation_config.json", "special_tokens_map.json", "model.safetensors.index.json",
    ],
)  # fmt: skip
def test_a_pipe_in_a_model_folder(name: str, model: Path, tmp_path: Path, pipe: Any) -> None:
    place = pipe(copied(model, tmp_path) / name)
    with pytest.raises(GraftuneError, match=f"{name}: is a pipe, not a file; put a plain file"):
        open_base(str(place.parent))
    place.unlink()
    place.mkdir()
    with pytest.raises(GraftuneError, match="Is a directory"):
        open_base(str(place.parent))


PIPES: dict[str, Callable[[Path], object]] = {
    "m.gguf": read_gguf,
    "a.apr": apr.read,
    "c.yaml": Config.load,
    "d.jsonl": rows,
    "d.csv": rows,
    "d.json.gz": rows,
    "d.parquet": rows,
    "metrics.jsonl": read_events,
    "log.jsonl": EventLog,
    ".lock": lambda path: FolderLock(path.parent).acquire(),
    "t.jinja": lambda path: template_from_file(str(path), None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_the_place_of_a_file(name: str, tmp_path: Path, pipe: Any) -> None:
    place = pipe(tmp_path / name)
    with pytest.raises(GraftuneError, match="is a pipe, not a file"):
        PIPES[name](place)
    assert not is_adapter_file(place)


def test_pipes_in_a_checkpoint(run: Path, model: Path, tmp_path: Path, pipe: Any) -> None:
    """The checkpoint is set aside like any damaged one."""
    root = copied(run, tmp_path) / "checkpoints"
    place = pipe(next(root.iterdir()) / "state.safetensors").parent
    for read in (checkpoint.weights_of, lambda path: checkpoint.load(path, seeds.opened(model)[1])):
        with pytest.raises(checkpoint.DamagedCheckpoint, match="is a pipe"):
            read(place)
    pipe(place / "state.json")
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"state.json: is a pipe"):
        checkpoint.read_state(place)


def test_a_socket_and_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.gguf")
        with pytest.raises(GraftuneError, match="is a socket"):
            read_gguf("s.gguf")
    for read in (read_events, read_gguf):
        with pytest.raises(GraftuneError, match="is a device"):
            read("/dev/zero")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(GraftuneError, match=r"metrics.jsonl: is a device"):
        read_events(tmp_path / "metrics.jsonl")


def test_what_is_typed_may_be_a_pipe(tmp_path: Path, pipe: Any) -> None:
    """Data and models are read more than once, so a pipe is refused as what it is; settings are read once."""
    place = str(pipe(tmp_path / "p.jsonl"))
    for check in (recognise.check_base, recognise.check_data, recognise.check_target):
        with pytest.raises(GraftuneError, match="is a pipe, not a file; it is read more than once: write it to a file"):
            check(place)
    with pytest.raises(GraftuneError, match="is a pipe, not a file"):
        recognise.check_template(place)
    with pytest.raises(GraftuneError, match="/dev/null: is a device"):
        recognise.check_data("/dev/null")


def test_settings_of_a_process_substitution() -> None:
    """graftune train -c <(command): the shell hands an open pipe over."""
    take, give = os.pipe()
    os.write(give, b"rank: 7\n")
    os.close(give)
    assert Config.load(f"/dev/fd/{take}").lora.rank == 7
    os.close(take)


# Links that lead out


LINKS: dict[str, Callable[[Path], object]] = {
    ".lock": lambda folder: FolderLock(folder).acquire(),
    "metrics.jsonl": lambda folder: EventLog(folder / "metrics.jsonl"),
    "new.jsonl": lambda folder: open_own(folder / "new.jsonl"),
}


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_written_through_a_link(name: str, there: bool, tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "run"
    folder.mkdir()
    if there:
        victim.write_text("precious")
    (folder / name).symlink_to(victim)
    with pytest.raises(GraftuneError, match=f"{name}: is a link, and a run writes into its own folder only"):
        LINKS[name](folder)
    assert victim.read_text() == "precious" if there else not victim.exists()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "wandb"])
def test_a_run_does_not_write_into_another_folder(name: str, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    (outside / "step-3.part").mkdir(parents=True)
    folder.mkdir()
    (folder / name).symlink_to(outside)
    with pytest.raises(GraftuneError, match=f"{name}: is a link"):
        sweep(folder)
    assert (outside / "step-3.part").exists()


def test_a_checkpoint_that_is_a_link_is_none(run: Path, tmp_path: Path) -> None:
    root = copied(run, tmp_path) / "checkpoints"
    found = next(root.iterdir())
    outside = found.rename(tmp_path / found.name)
    found.symlink_to(outside)
    assert checkpoint.steps(root) == {}


def test_a_half_written_name_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "f.part").symlink_to(tmp_path / "victim")
    with new_file(tmp_path / "f") as aside:
        aside.write_text("new")
    assert (tmp_path / "victim").read_text() == "precious" and (tmp_path / "f").read_text() == "new"
    assert not (tmp_path / "f").is_symlink()


# Links to private files


TEXTS = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "config.json", "generation_config.json")


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_lies_elsewhere_is_not_taken(name: str, model: Path, tmp_path: Path) -> None:
    folder = copied(model, tmp_path)
    content = (folder / name).read_bytes()
    (tmp_path / "private").write_bytes(content)
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "private")
    with pytest.raises(
        GraftuneError, match=f"{name}: is a link to a file of another name outside of its folder; put a copy"
    ):
        open_base(str(folder))
    (folder / name).unlink()
    (folder / "inside").write_bytes(content)
    (folder / name).symlink_to("inside")
    open_base(str(folder))


def test_a_folder_of_links_to_a_models_files_is_a_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    for path in model.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    assert open_base(str(tmp_path / "links")).tensors


def test_weights_may_lie_on_another_disk(model: Path, tmp_path: Path) -> None:
    """They are no text that could be copied onward, and people put them where there is room."""
    folder = copied(model, tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "large")
    (folder / "model.safetensors").symlink_to(tmp_path / "large")
    assert open_base(str(folder)).tensors
    (tmp_path / "link").symlink_to(folder)
    assert open_base(str(tmp_path / "link")).tensors, "a link to the whole folder is what the user typed"


def test_the_hubs_cache_is_made_of_links(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert open_base(str(snapshot)).tensors
    (tmp_path / "disk").mkdir()
    repository.rename(tmp_path / "disk" / "moved")
    repository.symlink_to(tmp_path / "disk" / "moved")
    assert open_base(str(snapshot)).tensors, "moved to a disk with more room"


@pytest.mark.parametrize("name", ["chat_template.jinja", "adapter_config.json"])
def test_an_export_holds_no_private_file(
    name: str, adapter: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(adapter, tmp_path)
    (tmp_path / "private").write_text(SECRET)
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "private")
    out = tmp_path / "out"
    assert main(["export", str(folder), "--to", "peft", "--base", str(model), "--out", str(out)]) == 2
    assert "is a link to a file of another name outside" in capsys.readouterr().err
    assert not out.exists()


def test_an_export_goes_where_a_link_leads(adapter: Path, model: Path, tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "out"
    line = ["export", str(adapter), "--to", "peft", "--base", str(model), "--force", "--out"]
    assert main([*line, str(disk)]) == 0
    before = (disk / "adapter_config.json").stat().st_ino
    out.symlink_to(disk)
    assert main([*line, str(out)]) == 0
    assert out.is_symlink() and (disk / "adapter_config.json").stat().st_ino != before
