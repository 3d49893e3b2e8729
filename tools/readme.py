"""Writes the generated parts of README.md: the table of settings from the code, the benchmark table from its data.

python tools/readme.py          rewrites README.md in place; a test checks that nothing is left to rewrite
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from graftune.config import leaves

ROOT = Path(__file__).resolve().parents[1]


def settings() -> str:
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    section = ""
    for leaf in leaves():
        if leaf.section != section:
            section = leaf.section
            lines.append(f"| **{section}** | | |")
        default = ", ".join(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
        shown = f"`{default}`" if default not in ("", ()) else "(empty)"
        lines.append(f"| `{leaf.name}` | {shown} | {leaf.help} |")
    return "\n".join(lines)


def cpu() -> str:
    lines = ["| machine | ours, tok/s | PEFT bf16 | PEFT fp32 | floor | ratio to PEFT bf16 / to the faster PEFT |"]
    lines.append("|---|---|---|---|---|---|")
    for path in sorted((ROOT / "benchmarks" / "results").glob("cpu-*.json")):
        result = json.loads(path.read_text())
        speed = result["tok_s"]
        ours = next(n for n in speed if n.startswith("graftune"))
        dtype = ours.split()[-1]
        ratios = f"{result['ratio']} / {result['ratio_best']}"
        figures = [speed[name] for name in (ours, "PEFT bf16", "PEFT fp32", "floor")]
        columns = [f"{result['cpu']} ({dtype})", *figures, ratios]
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    return "\n".join(lines)


def rewritten(text: str) -> str:
    for name, make in (("settings", settings), ("cpu", cpu)):
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)"
        text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, count=1, flags=re.S)
    return text


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(rewritten(path.read_text()))
