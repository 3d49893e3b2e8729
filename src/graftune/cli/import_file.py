"""graftune import: converts another tool's file of settings into ours, and lists what was left out and why.

The YAML goes to stdout or into a file, with a comment for each key; the list is in the YAML's comments and on stderr.
The file is only read: a script is never run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from graftune.cli.settings import Switch
from graftune.errors import GraftuneError, one_line
from graftune.io.files import write_file
from graftune.io.yaml_file import HEADER, dump_values
from graftune.observe.console import Console
from graftune.settings.config import leaves
from graftune.settings.converting import Conversion, convert
from graftune.settings.tool_files import read_tool_file

Tool = Literal["axolotl", "llama-factory", "trl", "unsloth"]
WIDTH = 120  # a longer line has its comment above


def import_file(
    file: str,
    /,
    *,
    from_: Annotated[Tool | None, Parameter(name="--from", show_default=False)] = None,
    out: Annotated[str, Parameter(show_default=False)] = "",
    json: Switch = False,
) -> int:
    """Convert another tool's FILE of settings into a YAML file for graftune train -c, and list what was left out.

    Axolotl and LLaMA-Factory YAML, TRL's YAML, JSON or command line (.sh), Unsloth scripts and notebooks (read, never
    run).

    Parameters
    ----------
    file
        .yaml, .json, .sh, .py or .ipynb file.
    from_
        The tool it is for; without it, recognised by the names in the file.
    out
        File to write; without it the YAML is printed.
    json
        Print settings, comments and what was left out as one JSON document to stdout.
    """
    console = Console(json=json)
    if out and Path(out).exists():
        raise GraftuneError("exists already", where=out, fix="remove it, or give another path with --out")
    found = convert(read_tool_file(file, from_))
    text = rendered(found)
    if out:
        write_file(out, text)
    elif not json:
        console.stream(text)
    console.result(
        {
            "tool": found.file.tool,
            "settings": found.settings,
            "comments": found.comments,
            "assumed": found.assumed,
            "left_out": [{"name": name, "reason": reason} for name, reason in found.left_out],
            "off": found.off,
        }
    )
    _report(console, found, out)
    return 0


def rendered(found: Conversion) -> str:
    """The settings as YAML in the order of docs/settings.md, with a comment each."""
    lines = [HEADER.rstrip("\n"), f"# Converted by graftune import from {found.title}'s {one_line(found.file.path)}."]
    section = ""
    for leaf in leaves():
        if leaf.name not in found.settings:
            continue
        if leaf.section != section:
            lines.append("")
            section = leaf.section
        dumped = dump_values({leaf.name: found.settings[leaf.name]}).rstrip("\n")
        comment = f"# {one_line(found.comments[leaf.name])}"
        fits = "\n" not in dumped and len(dumped) + len(comment) + 2 <= WIDTH
        lines += [f"{dumped}  {comment}"] if fits else [comment, dumped]
    if found.left_out:
        lines += ["", "# Left out:", *(f"#   {one_line(f'{name}: {reason}')}" for name, reason in found.left_out)]
    if found.off:
        lines += ["", f"# Off or empty there, and not needed here: {one_line(', '.join(map(str, found.off)))}"]
    return "\n".join(lines) + "\n"


def _report(console: Console, found: Conversion, out: str) -> None:
    wrote = f" written to {out}" if out else ""
    console.note(f"{len(found.settings)} settings of {found.title}'s {found.file.path}{wrote}")
    for text in found.assumed:
        console.note(f"assumed: {one_line(text)}")
    if not out and sys.stdout.isatty():
        return  # the list has just been printed with the YAML
    for name, reason in found.left_out:
        console.note(f"left out: {one_line(f'{name}: {reason}')}")
    if out:
        console.note(f"next: graftune train -c {out}")
