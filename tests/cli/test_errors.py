"""Every mistake: exit code 2, one sentence on stderr that names what is wrong, nothing on stdout, no traceback."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from graftune.cli import failures, main
from graftune.errors import GraftuneError
from tests.cli.conftest import Engine

MISTAKES: list[tuple[list[str], list[str]]] = [
    (["trian"], ["unknown command 'trian'", "did you mean train?"]),
    (["nonsense"], ["unknown command 'nonsense'", "graftune --help"]),
    (["--bogus"], ["unknown option '--bogus'"]),
    (["train", "--rnak", "3"], ["unknown option '--rnak'", "did you mean --rank?"]),
    (["train", "--rnak=3"], ["unknown option '--rnak'", "did you mean --rank?"]),
    (["train", "--zzzzzz"], ["unknown option '--zzzzzz'", "graftune train --help"]),
    (["train", "-x"], ["unknown option '-x'"]),
    (["train", "--empty-targets"], ["unknown option '--empty-targets'"]),
    (["train", "--rank"], ["--rank needs a value"]),
    (["train", "--rank", "--lr", "1"], ["--rank needs a value"]),
    (["train", "--rank", "x"], ["--rank is 'x'; it must be a whole number"]),
    (["train", "--rank", "1.5"], ["--rank is '1.5'; it must be a whole number"]),
    (["train", "--rank", "1_6"], ["--rank is '1_6'; it must be a whole number"]),
    (["train", "--rank", "0"], ["--rank is 0; it must be at least 1 and at most 4096"]),
    (["train", "--rank", "3", "--rank", "4"], ["--rank is given twice"]),
    (["train", "--lr", "fast"], ["--lr is 'fast'; it must be a number"]),
    (["train", "--lr", "-1"], ["--lr is -1.0; it must be at least 0"]),
    (["train", "--lr", "nan"], ["--lr is nan", "finite"]),
    (["train", "--max-seq-len", "1"], ["--max-seq-len is 1; it must be at least 8"]),
    (["train", "--schedule", "exp"], ["--schedule is 'exp'; it must be one of cosine, linear, constant"]),
    (["train", "--strict=maybe"], ["--strict is 'maybe'; it must be true or false"]),
    (["train", "--targets", "q_proj,zz"], ["--targets: unknown projection 'zz'"]),
    (["eval", "a", "b", "c"], ["'c' is one argument too many"]),
    (["train", "a", "--base", "b"], ["BASE is 'a' but --base is 'b'"]),
    (["train", "-c", "/nowhere/run.yaml"], ["/nowhere/run.yaml", "cannot be read"]),
    (["train", "--resume", "/nowhere"], ["/nowhere", "no such run folder"]),
    (["train", "--resume", "/"], ["is not a run folder"]),
    (["chat"], ["TARGET is missing", "graftune chat --help"]),
    (["chat", "x", "--temperature", "-1"], ["--temperature is -1.0; it must be at least 0"]),
    (["chat", "x", "--temperature", "nan"], ["--temperature is nan"]),
    (["chat", "x", "--top-p", "0"], ["--top-p is 0.0; it must be above 0 and at most 1"]),
    (["chat", "x", "--max-new-tokens", "0"], ["--max-new-tokens is 0"]),
    (["chat", "x", "--seed", "a"], ["--seed is 'a'; it must be a whole number"]),
    (["chat", "x", "--prompt", " "], ["--prompt is blank"]),
    (["eval"], ["TARGET is missing"]),
    (["eval", "x"], ["DATA is missing"]),
    (["data", "--show", "-1"], ["--show is -1; it must be at least 0"]),
    (["data", "x", "--rank", "3"], ["unknown option '--rank'"]),
    (["doctor", "x", "y"], ["'y' is one argument too many"]),
]


def said(capsys: pytest.CaptureFixture[str], code: int) -> str:
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("graftune: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_one_sentence(
    engine: Engine, capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    err = said(capsys, main(arguments))
    assert all(part in err for part in parts), err
    assert not engine.calls, "the engine must not be reached"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rnak: 3", "unknown key 'rnak'"),
        ("rank: x", "rank is 'x'"),
        ("rank: 0", "rank is 0"),
        ("a: [", "not valid YAML"),
        ("- a", "keys and values"),
    ],
)
def test_bad_config_files(
    engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, part: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    err = said(capsys, main(["train", "-c", str(path)]))
    assert part in err and str(path) in err


@pytest.mark.parametrize(
    ("raised", "part"),
    [
        (GraftuneError("holds\nno rows", where="a.jsonl", fix="give one"), "a.jsonl: holds no rows; give one"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a/x"), "runs/a/x: no space left"),
        (OSError(errno.ENOSPC, "No space left on device"), "no space left"),
        (OSError(errno.EROFS, "Read-only file system", "runs"), "runs: the file system is read-only"),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), "runs: permission denied"),
        (PermissionError(errno.EPERM, "Operation not permitted", "runs"), "runs: not permitted"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.gguf"), "a.gguf: no such file"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), "a/b: a part of the path is a file"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "a"), "a: is a folder"),
    ],
)
def test_what_the_engine_raises(
    engine: Engine, capsys: pytest.CaptureFixture[str], raised: BaseException, part: str
) -> None:
    engine.raises = raised
    assert part in said(capsys, main(["eval", "x", "y"]))


def test_bugs_keep_their_traceback(engine: Engine) -> None:
    for bug in (RuntimeError("ours"), ValueError("ours"), OSError("without a number"), TypeError("ours")):
        engine.raises = bug
        with pytest.raises(type(bug)):
            main(["eval", "x", "y"])


def test_interrupt_before_training_is_130(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.raises = KeyboardInterrupt()
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "graftune: interrupted\n"


def test_warnings_are_one_line(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    monkeypatch.setattr(engine, "describe", lambda: warnings.warn("slow here", stacklevel=1) or {"adapter": "a"})
    assert main(["eval", "x", "y", "--base-too", "--quiet"]) == 0
    assert capsys.readouterr().err == "warning: slow here\n"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m graftune"
    return subprocess.run(["bash", "-c", command.replace("graftune", program)], capture_output=True, text=True)


def test_as_a_process() -> None:
    done = shell("graftune train --rnak 3")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "graftune: unknown option '--rnak'; did you mean --rank?\n"


def test_a_reader_that_leaves_is_no_news() -> None:
    done = shell("set -o pipefail; graftune train --help | true")
    assert done.stderr == "" and done.returncode in (0, 141)


def test_a_closed_stdout_is_no_error() -> None:
    done = shell("graftune --version >&-; echo $? >&2; graftune train --rnak 3 --json >&-; echo $? >&2")
    assert done.stderr == "0\ngraftune: unknown option '--rnak'; did you mean --rank?\n2\n"


def test_an_interrupt_while_modules_are_imported_ends_the_process_quietly() -> None:
    """Ctrl-C within the first tenths of a second has no traceback: the signal's own action is in force."""
    from graftune.cli import _interruptible

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with _interruptible():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = "import sys; import graftune.cli; print('cyclopts' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", "the command line is imported under that protection only"


def test_an_error_with_json_is_an_object_on_stdout_too(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.raises = GraftuneError("holds no rows", where="a.jsonl", fix="give one")
    assert main(["eval", "x", "y", "--json"]) == 2
    out, err = capsys.readouterr()
    sentence = "a.jsonl: holds no rows; give one"
    parts = {"message": sentence, "what": "holds no rows", "where": "a.jsonl", "fix": "give one"}
    assert json.loads(out) == {"error": parts} and err == "graftune: a.jsonl: holds no rows; give one\n"
    assert main(["train", "--rnak", "--json"]) == 2
    assert "--rank" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert main(["chat", "x", "--", "--json"]) == 2
    assert capsys.readouterr().out == "", "behind -- it is no option"


def test_verbose_shows_the_traceback_and_the_sentence(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.raises = GraftuneError("holds no rows")
    for line in (["eval", "x", "y", "--verbose"], ["--verbose", "eval", "x", "y"]):
        assert main(line) == 2
        err = capsys.readouterr().err
        assert "Traceback" in err and err.endswith("graftune: holds no rows\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_a_full_disk_under_stdout() -> None:
    done = shell("graftune --version > /dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("graftune: no space left") and done.stderr.count("\n") == 1


def test_a_terminal_without_unicode() -> None:
    done = shell("PYTHONIOENCODING=ascii graftune train --help")
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rank: 3")
    path.chmod(0)
    assert "cannot be read" in said(capsys, main(["train", "-c", str(path)]))


def test_memory_that_is_used_up_is_one_sentence():
    import torch

    text = failures.sentence(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert text is not None and "--tokens-per-micro-batch" in text and "\n" not in text


def test_names_of_files_have_no_power_over_the_terminal(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b[2J\x07\u202e"
    engine.raises = OSError(errno.EACCES, "Permission denied", f"a{evil}b")
    assert main(["eval", "runs/a", "d.jsonl"]) == 2
    engine.raises = None
    monkeypatch.setattr(engine, "describe", lambda: warnings.warn(f"token {evil}", stacklevel=1) or {"adapter": "a"})
    assert main(["eval", "runs/a", "d.jsonl", "--base-too"]) == 0
    err = capsys.readouterr().err
    assert "permission denied" in err and "warning: token" in err
    assert not any(character in err for character in evil if character not in "[2J")
