"""Every mistake goes through the command line's own `main` and is judged the same way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from graftune.cli import main
from tests.training.runs import SETTINGS, write_data

Refuse = Callable[..., str]


@pytest.fixture
def base(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("llama-shallow")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data.jsonl")


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """`refuse(base, data, *flags)` -> the sentence. Exit code 2, one line that begins with the program's name, the last
    on stderr; nothing on stdout, no traceback, and no run folder."""

    def check(base: Path | str, data: Path | str, *flags: str, out: Path | None = None, keeps: bool = False) -> str:
        folder = out or tmp_path / "parent" / "run"
        line = ["train", str(base), str(data), *_without(flags), "--out", str(folder), *flags]
        code = main(line)
        said = capsys.readouterr()
        assert code == 2, said.err
        ours = [text for text in said.err.splitlines() if text.startswith("graftune: ")]
        assert len(ours) == 1 and said.err.endswith(ours[0] + "\n"), said.err
        assert said.out == "" and "Traceback" not in said.err
        sentence = ours[0].removeprefix("graftune: ")
        assert "; " in sentence and len(sentence) < 600, "what, where, and how to fix it"
        if not keeps:
            assert not folder.parent.exists() or out is not None, "a folder was left behind"
        return sentence

    return check


def rows(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def _without(flags: tuple[str, ...]) -> list[str]:
    """The usual settings less those that the test gives itself."""
    pairs = zip(SETTINGS[::2], SETTINGS[1::2], strict=True)
    return [word for pair in pairs if pair[0] not in flags for word in pair]
