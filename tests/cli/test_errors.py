"""Every mistake: exit code 2, one sentence on stderr that names what is wrong, nothing on stdout, no traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings

import pytest

from graftune.cli import failures, main
from graftune.errors import GraftuneError
from tests.cli.conftest import Engine

MISTAKES: list[tuple[list[str], list[str]]] = [
    (["trian"], ['Unknown command "trian"', "train"]),
    (["nonsense"], ['Unknown command "nonsense"', "graftune --help"]),
    (["--bogus"], ["--bogus"]),
    (["train", "--rnak", "3"], ["unknown option --rnak", "--rank"]),
    (["train", "--rnak=3"], ["unknown option --rnak", "--rank"]),
    (["train", "--zzzzzz"], ["unknown option --zzzzzz", "graftune train --help"]),
    (["train", "-x"], ["Unknown option: -x"]),
    (["train", "--empty-targets"], ["unknown option --empty-targets"]),
    (["train", "--rank"], ["--rank requires an argument"]),
    (["train", "--rank", "--lr", "1"], ["--rank requires an argument"]),
    (["train", "--rank", "x"], ['--rank: "x" is not a whole number']),
    (["train", "--rank", "1.5"], ['--rank: "1.5" is not a whole number']),
    (["train", "--rank", "1_6"], ['--rank: "1_6" is not a whole number']),
    (["train", "--rank", "0"], ["--rank is 0; it must be at least 1 and at most 4096"]),
    (["train", "--rank", "3", "--rank", "4"], ["--rank specified multiple times"]),
    (["train", "--lr", "fast"], ["--lr", "fast"]),
    (["train", "--lr", "-1"], ["--lr is -1.0; it must be at least 0"]),
    (["train", "--lr", "nan"], ["--lr is nan", "finite"]),
    (["train", "--max-seq-len", "1"], ["--max-seq-len is 1; it must be at least 8"]),
    (["train", "--schedule", "exp"], ["--schedule", "cosine", "linear", "constant"]),
    (["train", "--strict=maybe"], ["--strict", "maybe"]),
    (["train", "--targets", "q_proj,zz"], ["--targets: unknown projection 'zz'"]),
    (["eval", "a", "b", "c"], ["'c'", "graftune eval --help"]),
    (["train", "a", "--base", "b"], ["BASE is 'a' but --base is 'b'"]),
    (["train", "-c", "/nowhere/run.yaml"], ["/nowhere/run.yaml", "cannot be read"]),
    (["train", "--resume", "/nowhere"], ["/nowhere", "no such run folder"]),
    (["train", "--resume", "/"], ["is not a run folder"]),
    (["rl", "m.gguf", "d.jsonl"], ["there is no reward function; name one, as in --reward file.py"]),
    (["rl", "--resume", "runs/a"], ["runs/a: there is no reward function; resume it with graftune train --resume"]),
    (["chat"], ["TARGET requires", "graftune chat --help"]),
    (["chat", "x", "--temperature", "-1"], ["--temperature is -1.0; it must be at least 0"]),
    (["chat", "x", "--temperature", "nan"], ["--temperature is nan"]),
    (["chat", "x", "--top-p", "0"], ["--top-p is 0.0; it must be above 0 and at most 1"]),
    (["chat", "x", "--max-new-tokens", "0"], ["--max-new-tokens is 0"]),
    (["chat", "x", "--seed", "a"], ['--seed: "a" is not a whole number']),
    (["chat", "x", "--prompt", " "], ["--prompt is blank"]),
    (["eval"], ["TARGET requires"]),
    (["eval", "x"], ["DATA requires"]),
    (["data", "--show", "-1"], ["--show is -1; it must be at least 0"]),
    (["data", "x", "--rank", "3"], ["unknown option --rank"]),
    (["doctor", "x", "y"], ["'y'", "graftune doctor --help"]),
]


def said(capsys: pytest.CaptureFixture[str], code: int) -> str:
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("graftune: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_reported_in_one_sentence(
    engine: Engine, capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    err = said(capsys, main(arguments))
    assert all(part in err for part in parts), err
    assert not engine.calls, "the engine must not be reached"


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
def test_an_error_of_the_engine_is_reported_in_one_sentence(
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


def shell(command: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m graftune"
    return subprocess.run(["bash", "-c", command.replace("graftune", program)], capture_output=True, text=True)


MISTYPED = "graftune: unknown option --rnak; did you mean --rank?\n"
FULL_DISK = "graftune: no space left; free some, or give another folder with --out\n"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("command", "codes", "stderr"),
    [
        ("graftune train --rnak 3", (2,), MISTYPED),
        ("set -o pipefail; graftune train --help | true", (0, 141), ""),
        ("graftune --version >&-", (0,), ""),
        ("graftune train --rnak 3 --json >&-", (2,), MISTYPED),
        ("PYTHONIOENCODING=ascii graftune train --help", (0,), ""),
        ("graftune --version > /dev/full", (2,), FULL_DISK),
    ],
    ids=["mistake", "the reader leaves", "closed stdout", "mistake, closed stdout", "no Unicode", "full disk"],
)
def test_exit_code_and_stderr_of_a_process(command: str, codes: tuple[int, ...], stderr: str) -> None:
    if "/dev/full" in command and not os.path.exists("/dev/full"):
        pytest.skip("Linux only")
    done = shell(command)
    assert done.returncode in codes and done.stderr == stderr
    assert "--rnak" not in command or done.stdout == ""


def test_an_interrupt_while_modules_are_imported_ends_the_process_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.__import__", interrupted)
    assert main(["train"]) == 130


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


def test_memory_that_is_used_up_is_one_sentence():
    import torch

    text = failures.sentence(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert text is not None and "--tokens-per-micro-batch" in text and "\n" not in text


def test_file_names_and_warnings_cannot_control_the_terminal(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b[2J\x07\u202e"
    engine.raises = OSError(errno.EACCES, "Permission denied", f"a{evil}b")
    assert main(["eval", "runs/a", "d.jsonl"]) == 2
    engine.raises = None
    monkeypatch.setattr(engine, "describe", lambda: warnings.warn(f"token {evil}", stacklevel=1) or {"adapter": "a"})
    assert main(["eval", "runs/a", "d.jsonl", "--base-too", "--quiet"]) == 0
    err = capsys.readouterr().err
    assert "permission denied" in err and err.count("\n") == 2 and "\nwarning: token" in err, "a warning is one line"
    assert not any(character in err for character in evil if character not in "[2J")
