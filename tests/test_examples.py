"""Every example is a settings file that a plan accepts, with a tiny model of the right family in its base's place."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import graftune
from graftune.observe.console import Console
from graftune.plan import resolve_auto
from graftune.settings.config import Config
from graftune.training.prepare import job_of

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
# ChatML with calls, as a model that knows tools has it: tools before everything, calls as JSON between two markers.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MEMORY = 24 << 30  # of a card that is not here


@pytest.fixture(scope="module")
def base(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3 with a context as long as the examples ask for. SmolLM2 is of another family, but the plan of a
    run over every weight asks for nothing that differs."""
    folder = Path(shutil.copytree(tiny_folder("qwen3"), tmp_path_factory.mktemp("base") / "qwen3"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": TEMPLATE}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_the_six_are_there():
    names = {"chat-qwen3", "qlora-8b-24gb", "gguf-laptop", "full-350m", "continue-adapter", "tools"}
    assert {path.stem for path in EXAMPLES} == names
    listed = (ROOT / "examples" / "README.md").read_text()
    assert all(f"({path.name})" in listed for path in EXAMPLES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_plan_accepts_it(path: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As `graftune plan` does it, but for the search of the largest micro-batch, which takes most of its time."""
    monkeypatch.chdir(ROOT)
    own: dict[str, Any] = {"base": str(base), "samples": 0}
    if "adapter" in yaml.safe_load(path.read_text()):
        own["adapter"] = str(adapter_for(base, tmp_path))
    config = Config.load(path, own)
    if config.base.device != "cpu":
        config = config.replace(device="cuda")
    job = job_of(config, Console(quiet=True), memory=MEMORY)
    found = resolve_auto(job)
    assert found.fits and found.settings["tokens_per_micro_batch"] <= max(job.config.train.step_tokens, job.longest)
    if config.base.base_dtype != "auto":
        assert found.settings["base_dtype"] == config.base.base_dtype


def adapter_for(base: Path, folder: Path) -> Path:
    run = graftune.open(str(base), rank=4, device="cpu")
    return run.save(folder / "adapter")


def test_the_policy_loop_runs(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With a tiny model in the base's place, for two rounds."""
    source = (ROOT / "examples" / "policy.py").read_text()
    changed = {
        'BASE = ""': f"BASE = {str(tiny_folder('llama-shallow'))!r}",
        "ROUNDS, GROUP, NEW_TOKENS = 14, 8, 10": "ROUNDS, GROUP, NEW_TOKENS = 2, 4, 6",
        # A random model writes no words, and nearly always the same: more is drawn at a high temperature.
        'word.startswith("s")': "len(word)",
        'loss="ppo"': 'loss="ppo", temperature=30.0',
        "temperature=1.0": "temperature=30.0",
    }
    for there, here in changed.items():
        assert source.count(there) == 1
        source = source.replace(there, here)
    names: dict[str, Any] = {}
    exec(compile(source, "policy.py", "exec"), names)
    figures = names["stats"].figures
    assert len(names["history"]) == 2 == names["session"].steps and names["stats"].grad_norm > 0
    assert figures["difference"] < 1e-4 and figures["ratio"] == pytest.approx(1, abs=1e-4), "sampled as it is trained"


def test_the_notebook_runs(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Its cells, in order, with a tiny model in the base's place."""
    cells = json.loads((ROOT / "examples" / "loop.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum('BASE = ""' in cell for cell in code) == 1 and not any(cell.get("outputs") for cell in cells)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in code:
        exec(compile(cell.replace('BASE = ""', f"BASE = {str(tiny_folder('llama'))!r}"), "loop.ipynb", "exec"), names)
    assert len(names["history"]) == names["steps"] > 1 and (tmp_path / "loop-adapter").is_dir()
    assert "EvalResult" in capsys.readouterr().out


def test_the_distillation_runs(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import distil

    found = distil.main(str(base), str(base), "2", device="cpu", rank=2, quiet=True)
    assert abs(found[0]) < 1e-4, "before the first step the teacher is the student"


def test_an_environment_of_verifiers_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is installed."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import verifiers_sums

    found = asyncio.run(verifiers_sums.reward(["5", "7.", "It is 7", "4"], task=[0, 3, 3, 0]))
    assert found == pytest.approx([0.1, 1.1, 0.0, 1.1])
    assert len(verifiers_sums.tasks()) == 100
