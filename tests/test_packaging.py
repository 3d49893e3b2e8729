"""What is shipped is whole, and container, CI and pre-commit call commands that exist.

No image is built and no workflow is run here: both files are parsed, and the make targets they name are run in a fresh
folder as far as that costs nothing (`make -n`, and `make train` with a flag that only prints).
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import graftune
from graftune.observe.trackers import TRACKERS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ROOT / "src" / "graftune"
TARGETS = ("setup", "train", "test", "page-test", "screenshots", "soak", "lint", "gpu-test", "clean")


def shipped() -> list[Path]:
    return [p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def test_every_file_of_the_package_gets_into_the_wheel():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["graftune"]
    others = [str(p.relative_to(PACKAGE)) for p in shipped() if p.suffix != ".py"]
    assert {"py.typed", "data/sample/support.jsonl", "data/sample/support.yaml"} <= set(others)
    assert {"dashboard/static/index.html", "dashboard/static/uPlot.LICENSE"} <= set(others)
    assert [name for name in others if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []
    folders = {p.parent for p in shipped() if p.suffix == ".py"}
    assert [str(f) for f in folders if not (f / "__init__.py").is_file()] == [], "packages.find passes these over"


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config):
    """pytest's own defaults leave out folders called dist or build, and say nothing."""
    left_out = pytestconfig.getini("norecursedirs")
    for file in (ROOT / "tests").rglob("test_*.py"):
        parts = file.relative_to(ROOT).parts
        assert not any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in left_out), file


def test_extras():
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"gpu", "parquet", "zstd", "all", "test"} <= set(extras)
    named = re.fullmatch(r"graftune\[(.+)\]", *extras["all"])
    apart = {"all", "test", "page-test", *TRACKERS}
    assert named is not None and set(named[1].split(",")) == set(extras) - apart


def test_version_and_changelog():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == graftune.__version__
    assert PROJECT["project"]["dynamic"] == ["version"] and PROJECT["project"]["classifiers"]


def docker_instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def test_the_container_calls_make():
    steps = docker_instructions()
    assert steps[0][0] == "FROM"
    assert ("COPY", ". .") in steps, "make needs the whole tree"
    assert [argument for name, argument in steps if name == "RUN"] == ["make setup GPU=1"]
    found = dict(steps)
    folder = found["WORKDIR"]
    assert json.loads(found["ENTRYPOINT"]) == ["make", f"--directory={folder}"] and json.loads(found["CMD"]) == [
        "train"
    ]
    assert f"{folder}/.venv/bin" in found["ENV"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    kept = (
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "src",
        "tests",
        "benchmarks",
        "tools",
    )
    assert not set(kept) & set(ignored) and ".venv" in ignored


def test_ci_calls_the_same_two_commands():
    flow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert "on" in flow or True in flow, "YAML 1.1 reads `on` as true"
    commands = {name: [s["run"] for s in job["steps"] if "run" in s] for name, job in flow["jobs"].items()}
    assert commands == {"test": ["make test"], "train": ["make train"]}
    uses = [step["uses"] for job in flow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", each) for each in uses)
    versions = flow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert all(f"Programming Language :: Python :: {v}" in PROJECT["project"]["classifiers"] for v in versions)


def test_pre_commit_runs_what_lint_runs():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].split()[0] for hook in repository["hooks"]]
    assert entries == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy", ".venv/bin/python"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"$(BIN)/{tool}" in makefile for tool in ("ruff check", "ruff format", "mypy"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone would hold of the files that make and set-up read."""
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine")
    folder = tmp_path_factory.mktemp("fresh") / "graftune"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(PACKAGE, folder / "src" / "graftune", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def make(folder: Path, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_targets_can_be_made_in_a_fresh_folder(fresh: Path, target: str):
    said = make(fresh, "-n", target)
    assert said
    if target in ("train", "test"):
        assert "-m venv --without-pip .venv" in said and "-c constraints.txt" in said, "sets itself up"
    if target == "train":
        (settings,) = re.findall(r"graftune train -c (\S+)", said)
        assert (fresh / settings).is_file()


def test_make_train_runs_its_command_in_a_fresh_folder(fresh: Path):
    """The real recipe in an environment that is already set up; `--help` ends it before anything is trained."""
    stamp = Path(sys.prefix) / "run.stamp"
    said = make(fresh, "train", f"VENV={sys.prefix}", "-o", str(stamp), "ARGS=--help")
    assert "graftune train" in said and "--tokens-per-step" in said
    assert not (fresh / "runs").exists()
