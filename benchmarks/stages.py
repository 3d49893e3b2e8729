"""The stages of a session: which commands, and how long each takes.

The seconds are those of an H200 with cold kernel caches: measured where docs/lessons.md and earlier records have them,
estimated from those where not. A call may take nine minutes, so each stage takes less. One run has three calls, with
the same --run and --out: `ours`, then `peers`, again if it has somebody left; the other stages are in any order.
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
    goes_on: bool = False  # a part of it is worth beginning: called again in the same run, it does the rest

    @property
    def limit(self) -> float:
        return max(60.0, self.slack * self.seconds)

    @property
    def least(self) -> int:
        """Seconds that must be left to begin it."""
        return min(60, self.seconds) if self.goes_on else self.seconds

    def after(self, option: str) -> str:
        return self.words[self.words.index(option) + 1] if option in self.words else ""

    @property
    def timed(self) -> list[tuple[str, str]]:
        """(case, who) of step.py: who is named behind the case, or by --who for all."""
        found = []
        for named in self.after("--cases").split(","):
            case, _, who = named.partition(":")
            found += [(case, one) for one in (who.split("+") if who else self.after("--who").split(",")) if case]
        return found

    @property
    def is_test(self) -> bool:
        return self.words[:2] == ("-m", "pytest")

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
    slow |= {"test_lora_linear_kernel.py": 150, "test_whole_step.py": 100, "test_rope_kernel.py": 80}
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


# Those that a goal asks for come first: a call that is cut short has them.
PEERS = (
    "8b-4x2048:unsloth", "350m-full-4x512x4:hf-compiled", "8b-4x2048:liger", "1b-4x2048:unsloth",
    "8b-nf4-4x2048-offload:unsloth", "1.5b-nf4-qv-4x512:unsloth", "8b-1x512:peft", "1b-1x512:liger",
    "8b-4x2048:peft", "8b-nf4-4x2048-full:liger", "1b-1x512:peft", "8b-1x512:unsloth",
    "8b-4x2048:liger-bf16", "1b-4x2048:liger", "1b-1x512:unsloth", "1.5b-nf4-qv-4x512:peft",
    "8b-1x512:liger", "1b-4x2048:peft", "1.5b-nf4-qv-4x512:liger",
)  # fmt: skip


def _peers(seconds: int) -> Command:
    words = ("benchmarks/step.py", "--cases", ",".join(PEERS), "--at-once", "5")
    return Command("peers", words, seconds, "step", goes_on=True)


BROKEN_DOWN = "8b-1x512,350m-full-4x512x4,1.5b-nf4-qv-4x512,8b-fp8-4x2048,8b-4x2048"
CURVES = ("benchmarks/curves.py", "{data}", "--base", "{base}", "--device", "{device}")
STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            "ours",
            "ours and the floor, each alone, in every case",
            (
                timed("8b-4x2048", "floor,ours", 85),
                timed("8b-1x512", "floor,ours", 40),
                Command(
                    "1b, kernels warmed",
                    ("benchmarks/step.py", "--cases", "1b-1x512,1b-4x2048", "--who", "ours", "--steps", "1"),
                    30,
                ),
                timed("1b-1x512", "floor,ours", 24),
                timed("1b-4x2048", "floor,ours", 30),
                timed("350m-full-4x512x4", "floor,ours", 38),
                timed("8b-nf4-4x2048", "ours", 26),
                timed("8b-nf4-4x2048-full", "ours", 27),
                timed("8b-nf4-4x2048-offload", "ours", 27),
                timed("1.5b-nf4-qv-4x512", "floor,ours", 40),
                timed("8b-fp8-4x2048", "floor,ours", 58),
            ),
        ),
        Stage("large", "ours at 70B", (timed("70b-nf4-1x2048-full", "ours", 95),)),
        Stage("peers", "the others, five at once, each timed alone", (_peers(400),)),
        Stage(
            "issue3-graph",
            "captured against eager, accumulation",
            (script("graph", "graph", 60, "benchmarks/graph.py"),),
        ),
        Stage(
            "issue3-breakdown",
            "which kind of kernel takes what, beside the floor",
            (script("breakdown", "breakdown", 60, "-m", "benchmarks.breakdown", BROKEN_DOWN),),
        ),
        Stage(
            "issue3-curves",
            "SmolLM2 against the CPU's fp32 curve, clips, graph off, a model from scratch",
            (script("gsm8k", "gsm8k", 220, *CURVES, "--reference", "{reference}"),),
        ),
        Stage(
            "issue3-sweep",
            "how a step grows with rank, layers and documents",
            (swept("rank", 60), swept("layers", 65), swept("documents", 50)),
        ),
        Stage("issue3-tokens", "how a step grows with tokens, 512 to 65,536", (swept("tokens", 340),)),
        Stage(
            "issue4-kernels",
            "dequantisation: bits, and share of the memory's speed",
            (
                script("dequantisation", "kernels", 100, "-m", "benchmarks.quant_kernels"),
            ),
        ),
        Stage(
            "issue4-plan",
            "planned against measured memory, and refusals",
            (
                script("plan", "plan", 300, "-m", "benchmarks.plan", "--jobs", "4"),
                script("refused on purpose", "refusal", 60, "-m", "benchmarks.refusal"),
                tested("tests/gpu/test_plan.py", 40, "-k", "not within_three_percent"),
            ),
        ),
        Stage(
            "issue4-curves",
            "SmolLM2 over FP8, NF4 and its own blocks against bf16",
            (
                script("fp8 against bf16", "bases-fp8", 180, *CURVES, "--base-dtype", "fp8", "--steps", "200"),
                script("nf4 and blocks", "bases-quantised", 150, *CURVES, "--base-dtype", "nf4,keep", "--steps", "100"),
            ),
        ),
        Stage("tests", "tests/gpu and tests/kernels on the device", _tests(), at_once=12),
    )
}  # fmt: skip
