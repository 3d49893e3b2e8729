"""Writes the generated parts of README.md and docs/: the table of settings from the code, the benchmark and memory
tables from their records, and the image of the sweeps where it was drawn.

python tools/readme.py          rewrites the documents in place; a test checks that nothing is left to rewrite

A part stands between `<!-- name -->` and `<!-- end name -->`, in any document. What was to be reached on a GPU is
listed whether or not there is a record of it: what has none is `not measured yet`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import api_docs

from benchmarks import report
from graftune.model.families import FAMILIES
from graftune.settings.config import leaves

ROOT = Path(__file__).resolve().parents[1]


def settings() -> str:
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    section = ""
    for leaf in leaves():
        if leaf.section != section:
            section = leaf.section
            lines.append(f"| **{section}** | | |")
        default = ", ".join(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
        shown = f"`{default}`" if default not in ("", (), {}) else "(empty)"
        lines.append(f"| `{leaf.name}` | {shown} | {leaf.help} |")
    return "\n".join(lines)


def layers() -> str:
    """The rows that tests/test_layers.py enforces, the highest first."""
    rows = list(enumerate(importlib.import_module("tests.test_layers").ROWS))
    there = {path.name.removesuffix(".py") for path in (ROOT / "src" / "graftune").iterdir()}
    shown = [f"{number}  {'  '.join(name for name in row if name in there)}" for number, row in reversed(rows)]
    return "\n".join(["```", *shown, "```"])


# Popular models that load under another name than their own. Only models whose config.json names the family are listed.
MODELS = {
    "llama": "Llama 2 to 3.3, SmolLM2, TinyLlama, Yi, Code Llama, Vicuna, DeepSeek-R1-Distill-Llama",
    "mistral": "Mistral Nemo, Codestral, OpenHermes 2.5, Zephyr",
    "qwen2": "Qwen 2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    "qwen3": "DeepSeek-R1-0528-Qwen3",
    "qwen3_5": "Qwen 3.6, Qwen 3.8 (dense)",
    "qwen3_5_moe": "Qwen 3.6-35B-A3B",
    "glm4_moe": "GLM-4.5 to 4.7 (not Flash)",
    "phi3": "Phi 3.5 mini, Phi 4, Phi 4 mini",
    "gemma": "CodeGemma",
    "gemma4": "Gemma 4 E2B, E4B, 26B-A4B, 31B",
    "gemma4_unified": "Gemma 4 12B",
    "glm4": "GLM-4-0414, GLM-Z1-0414",
    "granitemoehybrid": "Granite 4.0 Micro",
}


def families() -> str:
    """Every family, and models that load under another family's name."""
    dense, mixtures = (
        ", ".join(f"`{name}`" for name, family in sorted(FAMILIES.items()) if bool(family.experts_key) == experts)
        for experts in (False, True)
    )
    others = "; ".join(f"`{name}`: {models}" for name, models in MODELS.items() if name in FAMILIES)
    listed = f"Families: {dense}; with experts: {mixtures}; of text-and-vision models the text model."
    return f"{listed} Among the models that load under such a name are {others}."


PARTS: dict[str, Callable[[], str]] = {
    "families": families,
    "api": api_docs.api,
    "layers": layers,
    "settings": settings,
    "cpu": report.cpu,
    "gpu": report.gpu,
    "sweeps": report.sweeps,
    "sampling": report.sampling,
    "start": report.start,
    "speed": report.speed,
    "ranked": report.ranked,
    "scale": report.scale,
    "reliability": report.reliability,
    "fit": report.fit,
    "fit by policy": report.fit_by_policy,
}


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rewritten(text: str) -> str:
    for name, make in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        if begin not in text:
            continue
        made = make()
        whole = begin + (f"{made}\n" if made else "") + end
        text = re.sub(f"{begin}.*?{end}", lambda _, whole=whole: whole, text, count=1, flags=re.S)
    return text


if __name__ == "__main__":
    api_docs.SETTINGS.write_text(api_docs.settings_file())
    for path in documents():
        path.write_text(rewritten(path.read_text()))
