"""Writes the generated parts of README.md: the table of settings from the code, the benchmark tables from their data.

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


def gpu() -> str:
    lines = ["| GPU, case | ours: ms, tok/s, peak | floor, ms | ours / floor | peers, ms (as multiples of ours) |"]
    lines.append("|---|---|---|---|---|")
    for path in sorted((ROOT / "benchmarks" / "results").glob("step-*.json")):
        record = json.loads(path.read_text())
        for name, case in record["cases"].items():
            who = case["participants"]
            ours, floor = who.get("ours", {}), who.get("floor", {}).get("ms")
            if "ms" not in ours:
                continue
            own = f"{ours['ms']:.1f}, {ours['tok_s'] / 1000:.1f}k, {ours['peak_gib']:.1f} GiB"
            others = [n for n in who if n not in ("ours", "floor", "floor_own") and "ms" in who[n]]
            beside = ", ".join(f"{n} {who[n]['ms']:.0f} ({who[n]['ms'] / ours['ms']:.2f}x)" for n in others) or "-"
            share = [f"{floor:.1f}", f"{ours['ms'] / floor:.2f}"] if floor else ["-", "-"]
            lines.append("| " + " | ".join([f"{record['gpu']}, {name}", own, *share, beside]) + " |")
    return "\n".join(lines)


def rewritten(text: str) -> str:
    for name, make in (("settings", settings), ("cpu", cpu), ("gpu", gpu)):
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)"
        text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, count=1, flags=re.S)
    return text


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(rewritten(path.read_text()))
