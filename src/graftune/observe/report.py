"""report.html: a run in one file that opens anywhere, with the charts of the page and nothing to load.

The run folder is the only source, as for loss.png, so a resumed or an old run gives the same report. Its scripts are
the modules of the page, joined into one (page_files.py). The data is JSON in an element that browsers do not execute. A
policy in the file allows only the two scripts and the style, by their hashes: markup from a run could do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError, one_line, printable
from graftune.io.files import open_plain, write_file
from graftune.io.json_file import NotJson, read_json
from graftune.io.yaml_file import LARGEST, parse_yaml
from graftune.observe.events import (
    MOST_CURVES,
    NOT_CURVES,
    Event,
    evals,
    number,
    plain,
    read_events,
    resume_marks,
    sample_rows,
    standing,
    steps,
    worked_seconds,
)
from graftune.observe.page_files import asset, joined_script, joined_style

NAME = "report.html"
POINTS = 1000  # of a curve; a screen shows no more, and the file stays small
MOST_WARNINGS, LONGEST = 50, 20_000  # warnings, and characters of one text


def write_report(folder: Path) -> None:
    """Write the report of a run to its folder, replacing an earlier one by rename."""
    write_file(folder / NAME, report(folder), unique=True)


def report(folder: Path) -> str:
    charts, script, style = map(_safe, (asset("uPlot.iife.min.js"), joined_script("report"), joined_style()))
    policy = (
        f"default-src 'none'; script-src {_hash(charts)} {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(plain(document(folder)), allow_nan=False, separators=(",", ":"))  # in ASCII
    for character in "<>&":  # so that no text in it can end the element
        data = data.replace(character, f"\\u{ord(character):04x}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(printable(_text(folder.resolve().name)))}</title>\n<style>{style}</style>\n</head>\n"
        '<body>\n<main id="view"></main>\n<noscript>The charts need JavaScript.</noscript>\n'
        f'<script type="application/json" id="run">{data}</script>\n'
        f"<script>{charts}</script>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def document(folder: Path) -> dict[str, Any]:
    written = read_events(folder / "metrics.jsonl")
    events = standing(written)
    start, end = _last(events, "run_start") or {}, _last(events, "run_end")
    done = steps(events)
    extended = _last(events, "extend") or {}
    config = _read(folder / "config.yaml")
    settings = settings_of(config)
    warnings = [_text(e.get("text", "")) for e in events if e["event"] == "warning"]
    return {
        "name": _text(folder.resolve().name),
        "command": _text(start.get("command") or ""),
        "config": config,
        "base": _text(base_name(settings)),
        "data": _text(data_name(settings)),
        "device": _text(start.get("device") or ""),
        "clip": number(settings.get("clip")),
        "steps": extended.get("steps", start.get("steps")),
        "done": done[-1]["step"] if done else 0,
        "started": start.get("time"),
        "ended": events[-1].get("time") if events else None,
        "worked_s": worked_seconds(written),
        "stopped": end.get("stopped") if end else None,
        "plan": _plan(folder),
        "memory": _last(events, "memory"),
        "routing": _last(events, "routing"),
        "end": {key: end.get(key) for key in ("peak_device_memory", "peak_memory")} if end else None,
        "curves": _curves(done),
        "evals": [{name: e.get(name) for name in ("step", "loss", "metrics", "metric_failed")} for e in evals(events)],
        "marks": resume_marks(events),
        "samples": _samples(events),
        "warnings": warnings[-MOST_WARNINGS:],
        "warned": len(warnings),
    }


def _curves(done: list[Event]) -> dict[str, Any]:
    import numpy as np  # here: only a report needs it

    from graftune.observe.downsample import downsampled, numbers

    def figure(value: object) -> float:
        found = float(value) if isinstance(value, bool) else number(value)
        return float("nan") if found is None else found

    known = dict.fromkeys(name for e in done for name, value in e.items() if isinstance(value, int | float | None))
    names = [name for name in known if name not in NOT_CURVES][:MOST_CURVES]
    columns = {name: np.array([figure(e.get(name)) for e in done]) for name in names}
    at, values = downsampled(np.array([e["step"] for e in done], np.int64), columns, POINTS)
    shown = {name: [_short(value) for value in numbers(column)] for name, column in values.items()}
    return {"names": names, "steps": at.tolist(), "values": shown, "thinned": len(done) > POINTS}


def _short(value: float | None) -> float | None:
    """Six digits, which halves the file."""
    return None if value is None else float(f"{value:.6g}")


def _samples(events: list[Event]) -> list[dict[str, str]]:
    """Prompts with the answers of the base and the last answers of the tuned model."""
    rows = sample_rows(events)
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    return [{who: _text(row[who] or "") for who in ("prompt", "base", "tuned", "reference")} for row in last]


def _last(events: list[Event], kind: str) -> Event | None:
    return next((e for e in reversed(events) if e["event"] == kind), None)


def _plan(folder: Path) -> object:
    try:
        return read_json(folder / "plan.json")
    except (OSError, NotJson, GraftuneError):
        return None  # not our file: the report says that there is no plan


def _read(path: Path) -> str:
    """The text of the configuration; empty if there is no file."""
    if not path.is_file():
        return ""
    with open_plain(path) as file:
        return file.read(LARGEST).decode("utf-8", errors="replace")


def settings_of(config: str) -> dict[str, Any]:
    """The settings of a config.yaml by name, without their sections; none where the text is not YAML."""
    try:
        tree = parse_yaml(config, "config.yaml")
    except GraftuneError:
        return {}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(value if isinstance(value, dict) and name != "map" else {name: value})
    return plain(flat)


def base_name(settings: Mapping[str, Any]) -> str:
    """The base of a run for people; empty where its settings could not be read."""
    base = settings.get("base", "")
    return (base if isinstance(base, str) and base else "bundled SmolLM2-135M-Instruct") if "base" in settings else ""


def data_name(settings: Mapping[str, Any]) -> str:
    """A short name of the training data; empty where the settings could not be read."""
    data = settings.get("data")
    if isinstance(data, list) and data:
        first = data[0].get("path") if isinstance(data[0], dict) else data[0]
        return one_line(str(first)) + (f" and {len(data) - 1} more" if len(data) > 1 else "")
    return (data if isinstance(data, str) and data else "bundled sample") if "data" in settings else ""


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} [... {len(text) - LONGEST} more characters]"


def _safe(text: str) -> str:
    if re.search(r"</(script|style)|<!--", text, re.IGNORECASE):
        raise GraftuneError("a script or style of the page cannot be put into a report", where="dashboard/static")
    return text


def _hash(text: str) -> str:
    """The hash by which a policy allows a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
