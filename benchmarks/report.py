"""The tables of README.md and docs/benchmarks.md, from the records in benchmarks/results: tools/readme.py puts them
into the documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import PEERS, SWEEPS

from benchmarks import measure

IMAGES = measure.ROOT / "docs" / "images"
ABSENT = "not measured yet"
# The README's rows: a case, and what it is in words.
SPEED = {
    "8b-4x2048": "8B LoRA, bf16, 8,192 tokens per step",
    "8b-1x512": "8B LoRA, bf16, 512 tokens per step",
    "9b-4x2048": "Qwen3.5-9B's shape, LoRA, bf16, 8,192 tokens per step",
    "12b-4x2048": "Gemma-4-12B's shape, LoRA, bf16, 8,192 tokens per step",
    "8b-nf4-4x2048-offload": "8B QLoRA (NF4), 8,192 tokens, recomputing from host memory",
    "350m-full-4x512x4": "350M, every weight, 4 x 2,048 tokens",
    "30ba3b-l24-4x2048": "Qwen3-30B-A3B's shape with 24 of its 48 layers, LoRA on attention and experts, 8,192 tokens",
    "8b-dpo-4x1024": "8B DPO, four pairs of 2 x 1,024 tokens, the reference in each step",
}
PEER_NAMES = {
    "unsloth": "Unsloth",
    "peft": "PEFT",
    "liger": "PEFT + Liger",
    "hf-compiled": "transformers, compiled",
    "trl-liger-bf16": "TRL + Liger, bf16 adapters",
}
# What the project sets out to reach on an H200. `floor`: ours over it, at most; a peer's name: its time over ours, at
# least, and `best_peer`: that of the fastest; peak_gib, ms, start_s: at most. `ours@CASE`: ours over our own time of
# that case, at most; `PEER@CASE`: that peer's time there over ours here, at least; `peak_gib@CASE`: our peak over our
# own of that case, at most. All three only within one run.
GOALS: dict[str, dict[str, float]] = {
    "8b-4x2048": {"floor": 1.12, "unsloth": 1.12, "liger": 1.3, "peak_gib": 43.0},
    "8b-1x512": {"floor": 1.15, "best_peer": 6.7},
    "1b-1x512": {"floor": 1.35, "best_peer": 14.0, "start_s": 10.0},
    "1b-4x2048": {"floor": 1.18, "best_peer": 1.27, "start_s": 10.0},
    "350m-full-4x512x4": {"hf-compiled": 4.0},
    "8b-nf4-4x2048": {"ours@8b-4x2048": 1.06},
    "8b-nf4-4x2048-full": {"peak_gib": 9.5, "ms": 620.0},
    "8b-nf4-4x2048-offload": {"peak_gib": 8.2, "ms": 650.0},
    "1.5b-nf4-qv-4x512": {"floor": 1.3, "best_peer": 4.0},
    "8b-fp8-4x2048": {"floor": 1.25, "unsloth@8b-4x2048": 1.7},
    "70b-nf4-1x2048-full": {"peak_gib": 139.0},
    "9b-4x2048": {"floor": 1.2, "best_peer": 1.0},
    "9b-1x2048-full": {"peak_gib": 19.55},
    "30ba3b-4x2048": {"floor": 1.35},
    "30ba3b-l24-4x2048": {"best_peer": 2.0},  # of 48, which no peer was asked for (PEFT takes 108.9 GiB for these)
    "30ba3b-nf4-4x2048": {"ours@30ba3b-4x2048": 1.2},
    "30ba3b-attention-1x2048-full": {"peak_gib": 58.6},
    "30ba3b-nf4-attention-1x2048-full": {"peak_gib": 18.6},
    "20b-mxfp4-4x2048": {"floor": 1.35},
    "20b-mxfp4-attention-1x2048-full": {"peak_gib": 14.7},
    "12b-4x2048": {"floor": 1.15, "best_peer": 1.0},
    "8b-dpo-4x1024": {"floor": 1.12, "best_peer": 1.15, "trl-none": 1.6, "trl": 2.0, "peak_gib@8b-8x1024": 1.02},
    "8b-dpo-stored-4x1024": {"ours@8b-8x1024": 1.05, "peak_gib@8b-8x1024": 1.02},
    "8b-nf4-dpo-4x1024": {"best_peer": 1.15, "trl-none": 1.6, "trl": 2.0, "peak_gib@8b-nf4-8x1024": 1.02},
    "8b-nf4-dpo-stored-4x1024": {"ours@8b-nf4-8x1024": 1.05, "peak_gib@8b-nf4-8x1024": 1.02},
    "8b-dpo-drawn-8x1024": {"best_peer": 2.0},
    "135m-dpo-4x1024": {"best_peer": 10.0},
}
EVERYWHERE = {"host_ms": 2.0, "syncs": 0}  # what the host may spend on a step, and how often it may wait for the GPU
OWN = {
    "peak_gib": "peak GiB",
    "start_s": "seconds to the first step",
    "ms": "ms per step",
    "host_ms": "host ms per step",
    "syncs": "host syncs in the steps",
}
# Other parts of a record with goals: where they are, and what they are in words.
CHECKS = {
    ("checks", "graph, 1b-4x512"): "graph against eager, 1b-4x512 (`step.py --who ours,eager`)",
    ("checks", "graph, 1.5b-4x512"): "graph against eager, 1.5b-4x512 (`step.py --who ours,eager`)",
    ("checks", "graph, 350m-full-4x512"): "accumulation, 350m-full-4x512 (`step.py 350m-full-4x512 350m-full-4x512x4`)",
    ("checks", "curves"): "SmolLM2 on GSM8K, 200 steps, against the CPU in fp32 (`curves.py`)",
    ("checks", "curves, quantised"): "over NF4 and the file's blocks against both dequantised, 100 steps",
    ("kernels",): "dequantisation of every kind, to the bit and near a copy's speed (`kernels.py`)",
    ("delta",): "the gated delta rule, against its reference and published times (`delta.py`)",
    ("plan",): "memory planned against measured (`plan.py`)",
    ("checks", "refusal"): "a run that does not fit is refused, and the one suggested instead runs (tests/gpu)",
}
Record = Mapping[str, Any]


def records(kind: str = "") -> list[dict[str, Any]]:
    """The records that have such a part, by name."""
    found = [measure.read(path) for path in sorted(measure.RESULTS.glob("*.json"))]
    return [record for record in found if kind in record]


def reliability() -> str:
    """The long checks of tests/soak, each with its command, its count and its outcome."""
    lines = ["| check | times | outcome | commit |", "|---|---|---|---|"]
    for record in records("reliability"):
        for row in record["reliability"]:
            check = f"{row['check']}<br>`{row['command']}`"
            lines.append(f"| {check} | {row['tried']:,} | {row['found']} | {row['commit']} |")
    return "\n".join(lines)


def speed() -> str:
    """Rows for the README, each from one machine with its fastest peer."""
    lines = ["| one step | graftune | fastest peer beside it | ratio |", "|---|---|---|---|"]
    found = {name: case for record in records("steps") for name, case in record["steps"].items()}
    for name, words in SPEED.items():
        who = found[name]["participants"]
        peers = {peer: figures for peer, figures in who.items() if peer in PEER_NAMES and "ms" in figures}
        best = min(peers, key=lambda peer: peers[peer]["ms"])
        ours = peers[best].get("beside", who["ours"])
        columns = [words, _figures(ours), f"{PEER_NAMES[best]}: {_figures(peers[best])}"]
        lines.append("| " + " | ".join([*columns, f"{peers[best]['ms'] / ours['ms']:.2f}x"]) + " |")
    return "\n".join(lines)


def _figures(found: Record) -> str:
    return f"{found['tok_s']:,.0f} tokens/s, {found['peak_gib']:.1f} GiB"


def gpu() -> str:
    return _steps() + "\n\n" + _goals()


def _steps() -> str:
    peers = "peers, ms (as multiples of ours)"
    lines = [f"| GPU, case | ours: ms, tok/s, peak | floor, ms | ours / floor | {peers} | commit |"]
    lines.append("|---|---|---|---|---|---|")
    for record in records("steps"):
        for name, case in record["steps"].items():
            who = case["participants"]
            ours, floor = who.get("ours", {}), who.get("floor", {}).get("ms")
            if "ms" not in ours:
                continue
            own = f"{ours['ms']:.1f}, {ours['tok_s'] / 1000:.1f}k, {ours['peak_gib']:.1f} GiB"
            others = [n for n in PEERS if "ms" in who.get(n, {})]
            beside = ", ".join(f"{n} {who[n]['ms']:.0f} ({_beside(who[n], ours)})" for n in others) or "-"
            share = [f"{floor:.1f}", f"{ours['ms'] / floor:.2f}"] if floor else ["-", "-"]
            if floor and "ms_sustained" in ours:
                share[1] += f" (sustained {ours['ms_sustained'] / floor:.2f})"
            lines.append("| " + " | ".join([f"{record['gpu']}, {name}", own, *share, beside, case["commit"]]) + " |")
    return "\n".join(lines)


def _beside(peer: Record, ours: Record) -> str:
    """How many times as long as ours. A peer that was measured in an earlier run than the row has ours of that run
    beside it, and its commit, because machines differ."""
    return f"{peer['ms'] / peer.get('beside', ours)['ms']:.2f}x" + (f"; {peer['commit']}" if "commit" in peer else "")


def _goals() -> str:
    """One row a case or part, measured or not."""
    lines = ["| to be reached on an H200 | goal | measured |", "|---|---|---|"]
    record = next((found for found in records("gpu") if "H200" in found["gpu"]), {})
    for name in GOALS:
        lines.append(_row(f"`{name}`", goals(name, record.get("steps", {}))))
    for place, what in CHECKS.items():
        part: Any = record
        for key in place:
            part = part.get(key, {})
        lines.append(_row(what, part.get("goals", [])))
    return "\n".join(lines)


def goals(name: str, steps: Mapping[str, Record]) -> list[dict[str, Any]]:
    """What the case has to reach, with what it did."""
    case = steps.get(name, {})
    times = {who: figures["ms"] for who, figures in case.get("participants", {}).items() if "ms" in figures}
    own, ours = case.get("participants", {}).get("ours", {}), times.get("ours")
    rows = []
    for key, bound in GOALS[name].items():
        who, _, other = key.partition("@")
        if key in OWN:
            rows.append(measure.goal(OWN[key], "at most", bound, own.get(key)))
        elif other:
            there = steps.get(other, {})
            same = case.get("run") and there.get("run") == case["run"]
            if who == "peak_gib":
                peak = there["participants"].get("ours", {}).get(who) if same else None
                rows.append(_ratio(f"peak / {other}'s", own.get(who), peak, bound, True))
                continue
            theirs = there["participants"].get(who, {}).get("ms") if same else None
            what = f"ours / {other}" if who == "ours" else f"{who}, {other} / ours"
            rows.append(_ratio(what, *((ours, theirs) if who == "ours" else (theirs, ours)), bound, who == "ours"))
        elif key == "floor":
            rows.append(_ratio("ours / floor", ours, times.get("floor"), bound, True))
        else:
            peers = {who: ms for who, ms in times.items() if who in PEERS}
            who = min(peers, key=lambda peer: peers[peer], default="") if key == "best_peer" else key
            beside = case["participants"][who].get("beside", own)["ms"] if who in peers else None
            rows.append(_ratio(f"{key.replace('_', ' ')} / ours", peers.get(who), beside, bound, False))
    if own:
        rows += [measure.goal(OWN[key], "at most", bound, own.get(key)) for key, bound in EVERYWHERE.items()]
    return rows


def _ratio(what: str, above: float | None, below: float | None, bound: float, most: bool) -> dict[str, Any]:
    value = round(above / below, 5) if above and below else None
    return measure.goal(what, "at most" if most else "at least", bound, value)


def _row(what: str, goals: Sequence[Record]) -> str:
    asked = [f"{goal['what']} {'≤' if goal['rule'] == 'at most' else '≥'} {goal['bound']:g}" for goal in goals]
    if not goals or all(goal["is"] is None for goal in goals):
        measured = [ABSENT]
    elif len(goals) > 7:
        asked, missed = [f"{len(goals)} of them"], [goal for goal in goals if not goal["met"]]
        measured = [f"{len(goals) - len(missed)} reached", *(f"{goal['what']}: missed" for goal in missed)]
    else:
        words = {True: "reached", False: "missed"}
        measured = [ABSENT if g["is"] is None else f"{g['is']:.5g} ({words[g['met']]})" for g in goals]
    return f"| {what} | {', '.join(asked) or '-'} | {', '.join(measured)} |"


def sampling() -> str:
    """Tokens sampled per second and rounds of reinforcement learning, with what was to be reached."""
    lines = ["| GPU, base:sequences | tokens/s | goal | with the prompts | transformers | log p off by | commit |"]
    lines.append("|---|---|---|---|---|---|---|")
    for record in records("sampling"):
        found = record["sampling"]
        for name, case in found["cases"].items():
            theirs = f"{case['transformers_tok_s']:,}" if "transformers_tok_s" in case else "-"
            speed = [f"{case['tok_s']:,}", _outcome(found, f"{name}, tokens/s"), f"{case['whole_tok_s']:,}", theirs]
            off = f"{case['off']:.3f} ({_outcome(found, f'{name}: off by')})"
            commit = case.get("commit", found["commit"])[:7]
            lines.append("| " + " | ".join([f"{record['gpu']}, {name}", *speed, off, commit]) + " |")
    lines += ["", "| GPU, base | round, s | sampling, s | training, s | peak, GiB | TRL, s | TRL / ours | commit |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for record in records("rounds"):
        found = record["rounds"]
        for name, who in found["cases"].items():
            times = [str(who["ours"][key]) for key in ("round_s", "sample_s", "train_s", "peak_gib")]
            beside = ["-", "-"]
            if "trl" in who and "round_s" not in who["trl"]:
                beside = [f"first {who['trl']['first_round_s']}; {who['trl']['error']}", "-"]
            elif "trl" in who:
                ratio = who["trl"]["round_s"] / who["ours"]["round_s"]
                beside = [str(who["trl"]["round_s"]), f"{ratio:.2f} ({_outcome(found, f'{name}: trl')})"]
            commit = who.get("commit", found["commit"])[:7]
            lines.append("| " + " | ".join([f"{record['gpu']}, {name}", *times, *beside, commit]) + " |")
    if not records("rounds"):
        lines.append(f"| - | {ABSENT} | - | - | - | - | ≥ 3 | - |")
    return "\n".join(lines)


def _outcome(part: Record, what: str) -> str:
    """The goal whose description contains `what`, and whether it was reached."""
    goal = next((goal for goal in part["goals"] if what in goal["what"]), None)
    if goal is None:
        return "-"
    sign, met = "≤" if goal["rule"] == "at most" else "≥", "reached" if goal["met"] else "missed"
    return f"{sign} {goal['bound']:,g}: {met}"


def cpu() -> str:
    lines = ["| machine | ours, tok/s | PEFT bf16 | PEFT fp32 | floor | ratio to PEFT bf16 / to the faster PEFT |"]
    lines.append("|---|---|---|---|---|---|")
    for result in records("ratio_best"):
        speed = result["tok_s"]
        ours = next(n for n in speed if n.startswith("graftune"))
        ratios = f"{result['ratio']} / {result['ratio_best']}"
        figures = [speed[name] for name in (ours, "PEFT bf16", "PEFT fp32", "floor")]
        columns = [f"{result['cpu']} ({ours.split()[-1]})", *figures, ratios]
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    return "\n".join(lines)


def start() -> str:
    """From command to adapter, phase by phase."""
    lines = []
    for record in records("start"):
        found = record["start"]["ways"]
        ways = list(found)
        phases = list(dict.fromkeys(phase for way in ways for phase in found[way]["phases"]))
        lines += [f"| {record.get('gpu') or record.get('cpu', 'CPU')}, seconds | " + " | ".join(ways) + " |"]
        lines += ["|---" * (1 + len(ways)) + "|"]
        for phase in phases:
            lines.append(f"| {phase} | " + " | ".join(f"{found[w]['phases'].get(phase, 0):.2f}" for w in ways) + " |")
        sums = {"adapter": "command to adapter, beyond `import torch`", "end": "to the end, likewise", "total": "all"}
        for key, words in sums.items():
            lines.append(f"| **{words}** | " + " | ".join(f"**{found[way][key]:.2f}**" for way in ways) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() or f"({ABSENT})"


def sweeps() -> str:
    """The images that there are, each with what its record holds."""
    parts = []
    for path in sorted(IMAGES.glob("sweeps-*.png")):
        record = measure.read(measure.RESULTS / path.name.replace("sweeps-", "").replace(".png", ".json"))
        *most, last = [axis for axis in SWEEPS if axis in record["sweeps"]]
        said = f"The same step as {', '.join(most)} and {last} grow" if most else f"The same step as {last} grows"
        said += ", beside the floor of each size."
        image = f"![Milliseconds of a step and its multiple of the floor as sizes grow](images/{path.name})"
        parts.append(f"{image}\n\n{said}")
    return "\n\n".join(parts)


# What leaving the plain path costs: (case, participant), what it is beside, and both in words.
RANKED = [
    ("8b-4x2048", "ranked", "8b-4x2048", "8B, bf16: the only rank of a run over NCCL, its all-reduce in the graph"),
    ("1b-1x512", "ranked", "1b-1x512", "1B, 512 tokens: the same"),
    ("8b-shard-4x2048", "ours", "8b-4x2048", "8B, bf16: every block gathered, as `shard_base` does it"),
    ("8b-nf4-host-4x2048", "ours", "8b-nf4-4x2048", "8B, NF4: fetched from host memory (`base_on: host`)"),
]


def ranked() -> str:
    lines = ["| NVIDIA H200 | ms per step | plain run | beside it | GiB | plain run |", "|---|---|---|---|---|---|"]
    found = next((record["ranks"] for record in records("ranks")), {})
    for case, who, beside, words in RANKED:
        if case in found and beside in found:
            one, plain = found[case]["participants"][who], found[beside]["participants"]["ours"]
            times = f"{one['ms']:.2f} | {plain['ms']:.2f} | {one['ms'] / plain['ms'] - 1:+.1%}"
            lines.append(f"| {words} | {times} | {one['peak_gib']:.1f} | {plain['peak_gib']:.1f} |")
    return "\n".join(lines) if lines[2:] else ABSENT


def scale() -> str:
    """The model's curves at three sizes of a cluster."""
    columns = [("InfiniBand", 8), ("InfiniBand", 64), ("InfiniBand", 1024), ("Ethernet", 64), ("Ethernet", 1024)]
    found: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    needs: dict[tuple[str, str], str] = {}
    for curve in _scale()["curves"]:
        row = curve["model"], curve["way"]
        for ranks, ms, share in zip(curve["ranks"], curve["step_ms"], curve["share"], strict=True):
            found.setdefault(row, {})[curve["network"], ranks] = f"{ms / 1e3:.3g} s, {100 * share:.1f}%"
        needs.setdefault(row, f"{curve['gb_a_gpu'][0]:.0f} on {curve['ranks'][0]}, {curve['gb_a_gpu'][-1]:.0f} on 1024")
    named = " | ".join("8 (NVLink)" if ranks == 8 else f"{ranks} ({network})" for network, ranks in columns)
    lines = [f"| model | base | GB a GPU | {named} |", "|---" * (3 + len(columns)) + "|"]
    for (model, way), cells in found.items():
        shown = [cells.get(column, "does not fit") for column in columns]
        lines.append("| " + " | ".join([_model(model), way, needs[model, way], *shown]) + " |")
    return "\n".join(lines)


def _model(name: str) -> str:
    return name.replace("b ", "B, ").replace("nf4", "NF4")


def _scale() -> dict[str, Any]:
    return dict(measure.read(Path(measure.RESULTS) / "scale.json")["scale"])


def fit() -> str:
    """For the README: the least memory of each precision, and the quickest way."""
    lines = ["| model | LoRA, bf16 | QLoRA, NF4 |", "|---|---|---|"]
    for name, row in _fit().items():
        bf16 = f"{_gib(row['bf16 full'])} to {_gib(row['bf16 none'])}"
        lines.append(f"| {name} | {bf16} | {_gib(row['nf4 offload'])} to {_gib(row['nf4 none'])} |")
    return "\n".join(lines)


def fit_by_policy() -> str:
    """For docs/memory.md: every way that was planned."""
    ways = list(next(iter(_fit().values())))
    lines = ["| model | " + " | ".join(f"`{way.replace(' ', '`, `')}`" for way in ways) + " |"]
    lines.append("|---" * (1 + len(ways)) + "|")
    for name, row in _fit().items():
        lines.append("| " + " | ".join([name, *(_gib(row[way]) for way in ways)]) + " |")
    return "\n".join(lines)


def _fit() -> dict[str, dict[str, int]]:
    return dict(measure.read(Path(measure.RESULTS) / "fit.json")["rows"])


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
