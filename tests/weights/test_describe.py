"""graftune doctor BASE: what a base is, whether it opens or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from graftune.cli import main
from tests.weights import tiny_gguf

Capture = pytest.CaptureFixture[str]


def test_doctor_explains_a_base(tiny_folder: Any, tmp_path: Path, capsys: Capture) -> None:
    folder = tiny_folder("mistral-window")
    assert main(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "mistral" in said and "It can be trained." in said and "3, of which 3 see 5 tokens back" in said
    assert main(["doctor", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["trainable"] and facts["architecture"] == "mistral" and facts["weights"].startswith("F32 ")
    assert facts["parameters"] > 0 and facts["files"] == 1 and facts["held"]
    assert main(["doctor", "", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "gguf" and "Q4_1" in facts["weights"] and facts["architecture"] == "llama"

    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    for flags in ([], ["--json"]):
        assert main(["doctor", str(other), *flags]) == 2
        said = capsys.readouterr()
        assert "mamba" in said.out and said.err.startswith("graftune: ") and said.err.count("\n") == 1
        assert "architecture 'mamba' has Mamba layers, which are not supported" in said.err
    facts = json.loads(said.out)
    assert not facts["trainable"] and "not supported" in facts["why_not"] and facts["weights"].startswith("F32 ")
    assert main(["doctor", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_doctor_explains_files_that_do_not_open(tmp_path: Path, capsys: Capture) -> None:
    """Headers still tell something, or nothing; it is one sentence either way."""
    path = tiny_gguf.write(tmp_path / "m.gguf", metadata={"general.architecture": "mamba", "general.name": "Snake"})
    assert main(["doctor", str(path), "--json"]) == 2
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert facts["architecture"] == "mamba" and facts["name"] == "Snake" and "F32" in facts["weights"]
    assert "architecture 'mamba' has Mamba layers, which are not supported" in said.err and said.err.count("\n") == 1
    whole = path.read_bytes()
    for keep in (0, 3, 50, len(whole) // 2):
        path.unlink()
        path.write_bytes(whole[:keep])
        assert main(["doctor", str(path)]) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and str(path) in said.err


def test_doctor_of_an_adapter_names_its_base(tiny_folder: Any, tmp_path: Path, capsys: Capture) -> None:
    from graftune import api

    base = tiny_folder("llama")
    adapter = api.open(str(base), device="cpu", rank=4).save(tmp_path / "run" / "adapter")
    apr = api.export(str(adapter), "apr", out=str(tmp_path / "a.apr")).path
    for name in (adapter, adapter.parent, apr):
        assert main(["doctor", str(name)]) == 2
        said = capsys.readouterr()
        assert "is not a base but an adapter" in said.err and str(base) in said.err and "rank" in said.out


def test_doctor_tries_the_template(tiny_folder: Any, tmp_path: Path, capsys: Capture) -> None:
    base = shutil.copytree(tiny_folder("llama"), tmp_path / "base")
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    assert main(["doctor", str(base), "--json"]) == 0
    assert "leaves out the answer" in json.loads(capsys.readouterr().out)["template"]
    (base / "chat_template.jinja").write_text("{{ 'a' * 999999999 }}")
    assert main(["doctor", str(base), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["template"]
    assert "the chat template is refused: it exhausts the memory" in found and "--template" in found
