"""How far curves and first gradients are apart, and whether that will do: the verdicts of curves.py.

"Equal within bf16 noise" means that every step's loss is within 0.5%, and every tensor's first gradient within 2% in
norm and 0.999 in cosine. Beside those goals stand weaker ones (means over the steps, the norm of all gradients), and
neither answers for the other. bf16 by itself may not meet them: where it was measured, a goal carries as `noise` how
far two runs in bf16 are apart that round elsewhere, or, of gradients against fp32, transformers' in bf16 from its own
in fp32 (noise.py). It changes no verdict.
"""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import report

NOISE = {"loss": 0.005, "norm": 0.02, "cosine": 0.999}  # of bf16
FP32 = {"loss": 0.001, "norm": 0.001}
WINDOW = 20  # steps over which a curve is smoothed
SCRATCH_FALL = 0.5  # of the first loss: what the last may be
EARLY = 20  # steps of a model from scratch that are judged: after them the last bit of a sum has grown to percents
BESIDE = {"fp8": "bf16", "keep": "bf16", "nf4": "dequantised"}  # measured by what
YARDSTICK = Path(__file__).resolve().parent / "results" / "noise.json"  # made by noise.py

Gradients = dict[str, torch.Tensor]


def losses_apart(here: list[float], there: list[float]) -> dict[str, Any]:
    """Step by step, relative; and the curves smoothed, means of WINDOW steps."""
    apart = [abs(a - b) / b for a, b in zip(here, there, strict=False)]
    starts = range(0, len(apart), WINDOW)
    smooth = [abs(sum(here[i : i + WINDOW]) / sum(there[i : i + WINDOW]) - 1) for i in starts]
    return {
        "steps": len(apart),
        "loss_apart_mean": round(sum(apart) / len(apart), 5),
        "loss_apart_most": round(max(apart), 5),
        "smooth_apart_most": round(max(smooth), 5),
        "total_apart": round(abs(sum(here[: len(apart)]) / sum(there[: len(apart)]) - 1), 5),
        "losses_within_noise": sum(share <= NOISE["loss"] for share in apart),
    }


def norms_off(here: dict[str, float], there: dict[str, float], bound: float) -> dict[str, Any]:
    """Of each tensor's first gradient."""
    off = {name: abs(here.get(name, 0.0) / norm - 1) for name, norm in there.items()}
    by_kind = collections.defaultdict(list)
    for name, share in off.items():
        by_kind[name.split(".")[-3]].append(share)
    return {
        "tensors": len(off),
        "tensors_beyond": sum(share > bound for share in off.values()),
        "bound": bound,
        "worst_by_projection": {kind: round(max(shares), 5) for kind, shares in sorted(by_kind.items())},
    }


def gradients_off(here: Gradients, there: Gradients) -> dict[str, Any]:
    """Tensor by tensor, of those that both have."""
    both = {name: (here[name].flatten(), grad.flatten()) for name, grad in there.items() if name in here}
    norms = {name: abs(float(a.norm() / b.norm()) - 1) for name, (a, b) in both.items()}
    cosines = [float(torch.nn.functional.cosine_similarity(a, b, 0)) for a, b in both.values()]
    return {
        "tensors": len(there),
        "tensors_with": len(both),
        "tensors_beyond": sum(share > NOISE["norm"] for share in norms.values()),
        "norm_off": round(max(norms.values()), 5),
        "cosine": round(min(cosines), 6),
        "worst": max(norms, key=lambda name: norms[name]),
    }


def beside_noise(what: str, rule: str, bound: float, value: Any, noise: Any) -> dict[str, Any]:
    return report.goal(what, rule, bound, value) | {"noise": noise}


def said(goal: dict[str, Any]) -> str:
    """A goal in one line, with what bf16 itself comes to."""
    noise = goal.get("noise")
    return report.said(goal) + ("" if noise is None else f" (bf16 by itself: {noise:g})")


def falls(made: dict[str, Any]) -> dict[str, Any]:
    share = round(made["losses"][-1] / made["losses"][0], 4)
    return report.goal("scratch: last loss over the first", "at most", SCRATCH_FALL, share)


def of_others() -> dict[str, Any]:
    """How far transformers' first gradients in bf16 are from its own in fp32."""
    return json.loads(YARDSTICK.read_text()).get("bf16", {}) if YARDSTICK.is_file() else {}


def against(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """How far a record is from its reference: in fp32, in bf16, and two runs in bf16 from each other."""
    there = reference["global"]
    runs = {name: losses_apart(found[name]["losses"], there["losses"]) for name in ("fp32", "global", "rounded")}
    between = losses_apart(found["rounded"]["losses"], found["global"]["losses"])
    exact = norms_off(found["first_norms_fp32"], reference["first_norms"], FP32["norm"])
    rounded = norms_off(found["first_norms"], reference["first_norms"], NOISE["norm"])
    norm = found["global"]["norms"][0] / there["norms"][0] - 1
    others, loss = of_others(), NOISE["loss"]
    made = {
        "fp32": runs["fp32"] | exact,
        "bf16": runs["global"] | rounded | {"first_norm": [found["global"]["norms"][0], there["norms"][0]]},
        "bf16, rounded elsewhere": runs["rounded"],
        "the two in bf16": between,
        "goals": [
            report.goal("fp32: loss apart, most", "at most", FP32["loss"], runs["fp32"]["loss_apart_most"]),
            report.goal("fp32: first gradients beyond 0.1%", "at most", 0, exact["tensors_beyond"]),
            report.goal("bf16: loss apart, mean", "at most", loss, runs["global"]["loss_apart_mean"]),
            report.goal("bf16: first gradient norm off", "at most", NOISE["norm"], round(abs(norm), 5)),
            _step_goal("bf16", runs["global"], between),
            beside_noise(
                "bf16: first gradients beyond 2%", "at most", 0, rounded["tensors_beyond"], others.get("tensors_beyond")
            ),
            beside_noise(  # to those of this device: of the reference there are norms
                "bf16: first gradients, cosine to fp32",
                "at least",
                NOISE["cosine"],
                found["first_gradients"]["cosine"],
                others.get("cosine"),
            ),
        ],
    }
    if "scratch_fp32" in found:
        made["goals"] += _scratch_goals(made, found, reference["scratch"])
    return made


def _scratch_goals(made: dict[str, Any], found: dict[str, Any], there: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures go into `made`; a reference of other settings is another curve, and measures nothing."""
    bf16 = fp32 = between = dict.fromkeys(("loss_apart_mean", "loss_apart_most"))
    if _but_steps(there) == _but_steps(found["scratch"]):
        names = {"scratch, fp32": "scratch_fp32", "scratch, bf16": "scratch"}
        made |= {what: losses_apart(found[name]["losses"], there["losses"]) for what, name in names.items()}
        pair = [found[name]["losses"] for name in ("scratch_rounded", "scratch")]
        made["scratch, the two in bf16"] = losses_apart(*pair)
        bf16, fp32 = (
            losses_apart(found[name]["losses"][:EARLY], there["losses"]) for name in ("scratch", "scratch_fp32")
        )
        between = losses_apart(*(losses[:EARLY] for losses in pair))
    early = f"first {EARLY} steps apart"
    return [
        report.goal(f"scratch, fp32: {early}, most", "at most", FP32["loss"], fp32["loss_apart_most"]),
        report.goal(f"scratch, bf16: {early}, mean", "at most", NOISE["loss"], bf16["loss_apart_mean"]),
        beside_noise(
            f"scratch, bf16: {early}, most",
            "at most",
            NOISE["loss"],
            bf16["loss_apart_most"],
            between["loss_apart_most"],
        ),
    ]


def _but_steps(curve: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in curve.get("settings", {}).items() if name != "max_steps"}


def _step_goal(name: str, apart: dict[str, Any], noise: dict[str, Any]) -> dict[str, Any]:
    what, most = f"{name}: loss apart, most", "loss_apart_most"
    return beside_noise(what, "at most", NOISE["loss"], apart[most], noise.get(most))


def compared(found: dict[str, Any], kind: str, grads: dict[str, Gradients]) -> dict[str, Any]:
    """A kind against what it is measured by: losses, and the first gradients tensor by tensor. (Those of fp8 are
    reported only: its products are of 3 bits, and its losses are told as they are.)"""
    other, curves = BESIDE[kind], found["curves"]
    apart = losses_apart(curves[kind]["losses"], curves[other]["losses"])
    off = gradients_off(grads[kind], grads[other])
    noise, noise_off = {}, {}
    if "rounded" in curves and "bf16" in curves:
        noise = losses_apart(curves["rounded"]["losses"], curves["bf16"]["losses"])
        noise_off = gradients_off(grads["rounded"], grads["bf16"])
    goals = []
    if kind != "fp8":
        goals = [
            report.goal(f"{kind}: loss apart, mean", "at most", NOISE["loss"], apart["loss_apart_mean"]),
            _step_goal(kind, apart, noise),
        ]
        rows = [
            ("first gradient, norm off", "at most", NOISE["norm"], "norm_off"),
            ("first gradients beyond 2%", "at most", 0, "tensors_beyond"),
            ("first gradient, cosine", "at least", NOISE["cosine"], "cosine"),
        ]
        goals += [beside_noise(f"{kind}: {what}", *rule, off[key], noise_off.get(key)) for what, *rule, key in rows]
        goals.append(report.goal(f"{kind}: tensors with a gradient", "at least", off["tensors"], off["tensors_with"]))
    return {"beside": other} | apart | off | {"goals": goals}
