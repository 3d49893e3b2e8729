"""graftune doctor: what was found on this machine, what is missing, and what will be used.

Reads and reports, changes nothing. It has to run on the machines where things are missing, so every package is looked
for before it is imported, torch included.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graftune import __version__
from graftune.cli.settings import Switch
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.settings import recognise

# Import name -> distribution name.
REQUIRED = {
    "torch": "torch", "numpy": "numpy", "safetensors": "safetensors", "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface_hub", "gguf": "gguf", "jinja2": "jinja2", "yaml": "pyyaml", "rich": "rich",
    "regex": "regex", "matplotlib": "matplotlib",
}  # fmt: skip
# Import name -> distribution, graftune's extra that installs it, and what is missing without it.
OPTIONAL = {
    "pyarrow": ("pyarrow", "parquet", "no .parquet data and few Hub data sets"),
    "zstandard": ("zstandard", "zstd", "no .zst data"),
}
GPU = {"cudnn": ("nvidia-cudnn-frontend", "gpu", "slower attention on H100, H200 and B200")}


@dataclass(frozen=True)
class Missing:
    what: str
    effect: str
    fix: str
    required: bool = False


def doctor(base: str | None = None, /, *, revision: str = "", json: Switch = False) -> int:
    """What was found on this machine, what is missing, what will be used; or, given a BASE, what that is and whether it
    can be trained. Exit code 2 if graftune cannot train here, or not this base.

    Parameters
    ----------
    base
        Hugging Face name or folder, or a .gguf file ("" for the bundled one).
    revision
        Hub revision of the base.
    json
        Print one JSON document to stdout.
    """
    console = Console(json=json)
    if base is not None:
        return _explain(base, revision, console)
    report, missing = examine()
    console.result({**report, "missing": [asdict(one) for one in missing]})
    if not json:
        console.table("Found", ("item", "value"), list(_rows(report)))
        if report["ledger"]["reservations"]:
            columns = ("device", "process", "user", "task", "reserved", "taken", "since", "state")
            console.table("Memory that runs have reserved", columns, _reserved(report))
        if missing:
            console.table("Missing", ("item", "effect", "fix"), [(m.what, m.effect, m.fix) for m in missing])
        console.line(f"Will be used: {report['use']}" if report["use"] else "graftune cannot train here.")
    return 2 if any(one.required for one in missing) else 0


def _explain(name: str, revision: str, console: Console) -> int:
    """Prints the facts, and raises for a base that cannot be trained."""
    from graftune.observe.memory import human_bytes
    from graftune.runtime import resolve
    from graftune.weights.describe import describe
    from graftune.weights.placement import choose_placement

    facts, base, error = describe(name, revision)
    if base is not None:
        facts |= {"held": choose_placement(base, "auto", resolve()).describe()}
    console.result({**facts, "trainable": error is None, "why_not": str(error) if error else None})
    if facts and not console.json:
        shown = {key: human_bytes(value) if key == "bytes" else value for key, value in facts.items()}
        shown |= {"parameters": f"{facts['parameters']:,}"} if "parameters" in facts else {}
        console.table("Base", ("item", "value"), list(shown.items()))
        console.line("It can be trained." if error is None else "It cannot be trained.")
    if error is None:
        return 0
    if console.json:  # the JSON document has the reason already
        console.note(f"graftune: {error}")
        return 2
    raise error


def examine() -> tuple[dict[str, Any], list[Missing]]:
    packages = {
        name: _version(name) for name in [*REQUIRED.values(), *(dist for dist, *_ in (OPTIONAL | GPU).values())]
    }
    missing = [
        Missing(dist, "graftune cannot run", f"pip install {dist}", required=True)
        for module, dist in REQUIRED.items()
        if importlib.util.find_spec(module) is None
    ]
    missing += _without(OPTIONAL)
    report: dict[str, Any] = {
        "graftune": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count()},
        "disk_free_bytes": shutil.disk_usage(".").free,
        "packages": packages,
        "extras": {extra: bool(packages[dist]) for dist, extra, _ in (OPTIONAL | GPU).values()},
        "devices": [],
        "ledger": _ledger(),
        "default_base": None,
        "use": None,
    }
    if not any(one.required for one in missing):
        _examine_torch(report)
        if any(device["device"].startswith("cuda") for device in report["devices"]):
            missing += _without(GPU)
        try:
            report["default_base"] = str(recognise.default_base())
        except GraftuneError as error:
            missing.append(Missing("default base", "BASE must be given", error.fix or "give a model"))
    return report, missing


def _without(optional: dict[str, tuple[str, str, str]]) -> list[Missing]:
    return [
        Missing(dist, effect, f"pip install {dist} (or graftune's extra {extra})")
        for module, (dist, extra, effect) in optional.items()
        if importlib.util.find_spec(module) is None
    ]


def _examine_torch(report: dict[str, Any]) -> None:
    import torch

    from graftune.ledger import HOST
    from graftune.observe.memory import available_bytes, device_bytes, total_bytes
    from graftune.runtime import available_devices, device_name, device_uuid, has_fast_bf16, resolve

    report["memory"] = {"total_bytes": total_bytes(), "available_bytes": available_bytes()}
    report["cpu"] |= {
        "threads": torch.get_num_threads(),
        "bf16": has_fast_bf16(torch.device("cpu")),
        "vector_units": torch.backends.cpu.get_cpu_capability(),
    }
    for kind in available_devices():
        count = torch.get_device_module(kind).device_count() if kind in ("cuda", "xpu") else 1
        for index in range(count):
            device = torch.device(kind, index) if kind in ("cuda", "xpu") else torch.device(kind)
            memory = device_bytes(device)
            report["devices"].append(
                {
                    "device": str(device),
                    "name": device_name(device),
                    "free_bytes": memory.free,
                    "total_bytes": memory.total,
                    "bf16": has_fast_bf16(device),
                    "uuid": device_uuid(device) if kind == "cuda" else HOST if kind == "cpu" else None,
                }
            )
    report["use"] = resolve().describe()


def _ledger() -> dict[str, Any]:
    """The reservations of memory on this machine: holders, and the queue in order."""
    from graftune.ledger import shared_ledger

    found = shared_ledger()
    report: dict[str, Any] = {"path": str(found.path) if found else None, "reservations": []}
    try:
        report["reservations"] = [one.document() for one in found.reservations()] if found else []
    except (GraftuneError, OSError) as error:
        report["error"] = str(error)
    return report


def _reserved(report: dict[str, Any]) -> list[tuple[str, ...]]:
    from graftune.observe.memory import human_bytes

    names = {device["uuid"]: device["device"] for device in report["devices"]}
    rows, waiting = list[tuple[str, ...]](), Counter[str]()
    for entry in report["ledger"]["reservations"]:
        device = names.get(entry["device"], entry["device"])
        waiting[device] += not entry["granted"]
        state = "holds it" if entry["granted"] else f"waits, number {waiting[device]}"
        sizes = human_bytes(entry["planned"]), human_bytes(entry["measured"])
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["started"]))
        rows.append((device, str(entry["pid"]), entry["user"], entry["task"], *sizes, since, state))
    return rows


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    from graftune.observe.memory import human_bytes

    cpu, rows = report["cpu"], [(name, report[name]) for name in ("graftune", "python", "system")]
    bf16 = {True: ", bf16 units", False: ", no bf16 units (fp32 is used)"}.get(cpu.get("bf16"), "")
    rows.append(("cpu", f"{cpu['name']}, {cpu['cores']} cores{bf16}"))
    if memory := report.get("memory"):
        free, total = human_bytes(memory["available_bytes"]), human_bytes(memory["total_bytes"])
        rows.append(("memory", f"{free} available of {total}"))
    if error := report["ledger"].get("error"):
        rows.append(("ledger", error))
    rows.append(("disk here", f"{human_bytes(report['disk_free_bytes'])} free"))
    for device in report["devices"]:
        if device["device"] != "cpu":
            free, total = human_bytes(device["free_bytes"]), human_bytes(device["total_bytes"])
            rows.append((device["device"], f"{device['name']}, {free} free of {total}"))
    rows += [(name, version) for name, version in report["packages"].items() if version]
    extras = ", ".join(
        f"{name} ({'installed' if there else 'not installed'})" for name, there in report["extras"].items()
    )
    rows.append(("extras", f"{extras}; graftune[all] has all of them"))
    rows.append(("default base", report["default_base"] or "not installed"))
    return rows


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The name from Linux on x86; elsewhere the architecture."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)", path.read_text(errors="replace") if path.exists() else "", re.M)
    return found[1] if found else platform.processor() or platform.machine()
