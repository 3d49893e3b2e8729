"""The stages of a session: which commands, and how long each takes.

The seconds are those of an H200 with cold kernel caches: measured where docs/log.md and earlier records have them,
estimated from those where not. A call may take nine minutes, so each stage takes less. Of a case one entry times those
that its goals ask for; who else runs it is said by cases.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CALL_S = 540  # what a call may take, stages together


@dataclass(frozen=True)
class Command:
    """`words` behind the Python interpreter. {data}, {base} and their like are the session's settings, {json} is where
    the command's record goes; `result` names the record that is kept of it."""

    name: str
    words: tuple[str, ...]
    seconds: int
    result: str = ""
    slack: float = 2.0  # times the seconds expected: when it is stopped

    @property
    def limit(self) -> float:
        return max(60.0, self.slack * self.seconds)

    @property
    def needs(self) -> list[str]:
        return [name for name in ("data", "scratch", "reference") if f"{{{name}}}" in self.words]


@dataclass(frozen=True)
class Stage:
    name: str
    about: str
    commands: tuple[Command, ...]
    at_once: int = 1

    @property
    def seconds(self) -> int:
        total = sum(command.seconds for command in self.commands)
        return max(total // self.at_once, max(command.seconds for command in self.commands))


def timed(name: str, who: str, seconds: int, *more: str) -> Command:
    """A case of step.py."""
    words = ("benchmarks/step.py", "--cases", name, "--who", who, *more)
    return Command(name, words, seconds, "step")


def swept(axes: str, seconds: int) -> Command:
    return Command(f"sweep {axes}", ("benchmarks/step.py", "--sweep", axes, "--steps", "3"), seconds, "step")


def script(name: str, result: str, seconds: int, *words: str) -> Command:
    return Command(name, (*words, "--json", "{json}"), seconds, result)


def tested(path: str, seconds: int, *more: str) -> Command:
    name = " ".join((path, *more[1:]))
    return Command(name, ("-m", "pytest", "-p", "no:cacheprovider", "--tb=short", path, *more), seconds, slack=4.0)


def _tests() -> tuple[Command, ...]:
    """The longest first; the plan has a stage of its own."""
    slow = {"test_attention.py": 150, "test_quantised.py": 200, "test_run.py": 120, "test_full.py": 120}
    slow |= {"test_families.py": 120, "test_moe.py": 90, "test_fp8_kernel.py": 120, "test_fp8_weight.py": 60}
    # Hundreds of variants of a kernel, each compiled: by parts.
    parts = {"test_lora_linear_kernel.py": ("up_backward", "up_grad", "not up_backward and not up_grad")}
    files = [path for folder in ("gpu", "kernels") for path in (ROOT / "tests" / folder).glob("test_*.py")]
    found = [
        tested(str(path.relative_to(ROOT)), slow.get(path.name, 60), *(("-k", part) if part else ()))
        for path in files
        if path.relative_to(ROOT).as_posix() != "tests/gpu/test_plan.py"
        for part in parts.get(path.name, ("",))
    ]
    return tuple(sorted(found, key=lambda command: (-command.seconds, command.name)))


FP8_SIZE = ("--shapes", "8b", "--tokens", "8192", "--quick")
CURVES = ("benchmarks/curves.py", "{data}", "--base", "{base}", "--device", "{device}")
STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            "issue3-step",
            "bf16 steps beside the floor and the peers",
            (
                timed("8b-4x2048", "floor,ours,liger,unsloth", 230),
                timed("8b-1x512", "floor,ours,peft", 70),
                Command(
                    "1b, kernels warmed",
                    ("benchmarks/step.py", "--cases", "1b-1x512,1b-4x2048", "--who", "ours", "--steps", "1"),
                    45,
                ),
                timed("1b-1x512", "floor,ours,liger", 60),
                timed("1b-4x2048", "floor,ours,unsloth", 112),
            ),
        ),
        Stage(
            "issue3-graph",
            "captured against eager, accumulation, every parameter",
            (
                script("graph", "graph", 60, "benchmarks/graph.py"),
                timed("350m-full-4x512x4", "floor,ours,hf-compiled", 180),
            ),
        ),
        Stage(
            "issue3-curves",
            "SmolLM2 against the CPU's fp32 curve, clips, graph off, a model from scratch",
            (script("gsm8k", "gsm8k", 180, *CURVES, "--reference", "{reference}", "--scratch", "{scratch}"),),
        ),
        Stage(
            "issue3-sweep",
            "how a step grows with rank, layers and documents",
            (swept("rank", 55), swept("layers", 60), swept("documents", 85)),
        ),
        Stage("issue3-tokens", "how a step grows with tokens, 512 to 65,536", (swept("tokens", 340),)),
        Stage(
            "issue4-kernels",
            "dequantisation: bits, and share of the memory's speed",
            (script("dequantisation", "kernels", 100, "-m", "benchmarks.quant_kernels"),),
        ),
        Stage(
            "issue4-step",
            "NF4 steps beside our bf16, the floor and Unsloth",
            (
                timed("8b-4x2048", "ours", 40),
                timed("8b-nf4-4x2048", "ours", 50),
                timed("8b-nf4-4x2048-full", "ours", 50),
                timed("8b-nf4-4x2048-offload", "ours,unsloth", 180),
                timed("1.5b-nf4-qv-4x512", "floor,ours,unsloth", 110),
            ),
        ),
        Stage("issue4-70b", "70B in NF4 takes optimizer steps", (timed("70b-nf4-1x2048-full", "ours", 95),)),
        Stage(
            "issue4-fp8",
            "FP8 steps beside the fp8 floor and Unsloth's bf16, and the kernels",
            (
                timed("8b-4x2048", "ours,unsloth", 150),
                timed("8b-fp8-4x2048", "floor,ours", 80),
                script("fp8 kernels", "fp8", 80, "-m", "benchmarks.fp8", *FP8_SIZE),
            ),
        ),
        Stage(
            "issue4-plan",
            "planned against measured memory, and refusals",
            (
                script("plan", "plan", 200, "-m", "benchmarks.plan", "--jobs", "4"),
                tested("tests/gpu/test_plan.py", 40, "-k", "not within_three_percent"),
            ),
        ),
        Stage(
            "issue4-curves",
            "SmolLM2 over FP8, NF4 and its own blocks against bf16",
            (
                script("fp8 against bf16", "bases-fp8", 90, *CURVES, "--base-dtype", "fp8", "--steps", "200"),
                script("nf4 and blocks", "bases-quantised", 110, *CURVES, "--base-dtype", "nf4,keep", "--steps", "100"),
            ),
        ),
        Stage("tests", "tests/gpu and tests/kernels on the device", _tests(), at_once=12),
    )
}  # fmt: skip
