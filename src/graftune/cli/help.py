"""What --help shows of a command besides its parameters: a usage line, two or three examples, and of its settings the
common ones; --help-all shows every setting.
"""

from __future__ import annotations

from typing import Any, ClassVar

# Command -> what follows its name in the usage line, and examples.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "init": (
        "BASE DATA [OPTIONS]",
        (
            "graftune init Qwen/Qwen3-4B my.jsonl",
            "graftune init model.gguf my.csv --map prompt=Q,response=A --out run.yaml",
        ),
    ),
    "train": (
        "BASE DATA [OPTIONS]",
        (
            "graftune train Qwen/Qwen3-4B my.jsonl --epochs 2",
            "graftune train -c run.yaml --rank 32 --out runs/rank-32",
            "graftune train --resume runs/NAME --epochs 4",
        ),
    ),
    "rl": (
        "BASE DATA --reward FILE.py [OPTIONS]",
        (
            "graftune rl Qwen/Qwen3-4B prompts.jsonl --reward reward.py",
            "graftune rl model.gguf prompts.jsonl --reward checks.py:correct",
            "graftune rl --resume runs/NAME",
        ),
    ),
    "chat": (
        "TARGET [OPTIONS]",
        ("graftune chat runs/NAME --compare", 'graftune chat runs/NAME@best --prompt "Where is my order?"'),
    ),
    "eval": (
        "TARGET DATA [OPTIONS]",
        ("graftune eval runs/NAME test.jsonl --base-too", 'graftune eval "" test.jsonl --json'),
    ),
    "data": (
        "DATA [OPTIONS]",
        (
            "graftune data my.jsonl --base Qwen/Qwen3-4B",
            "graftune data my.csv --map prompt=Question,response=Answer --show 10",
        ),
    ),
    "plan": (
        "BASE [DATA] [OPTIONS]",
        (
            "graftune plan Qwen/Qwen3-4B my.jsonl",
            "graftune plan Qwen/Qwen3-8B my.jsonl --gpu 4090",
            "graftune plan model.gguf --device cuda --memory 16GiB --max-seq-len 4096",
        ),
    ),
    "profile": (
        "TARGET [DATA] [OPTIONS]",
        ("graftune profile runs/NAME", "graftune profile Qwen/Qwen3-4B my.jsonl --steps 50 --trace trace.json"),
    ),
    "export": (
        "TARGET --to FORMAT [OPTIONS]",
        (
            "graftune export runs/NAME --to gguf-lora",
            "graftune export runs/NAME@best --to merged --out my-model",
            "graftune export runs/NAME --to gguf --type Q4_K_M",
        ),
    ),
    "import": (
        "FILE [OPTIONS]",
        ("graftune import axolotl.yaml", "graftune import train.sh --out run.yaml"),
    ),
    "watch": ("[FOLDER] [OPTIONS]", ("graftune watch", "graftune watch runs/NAME --port 9000")),
    "runs": ("[FOLDER] [OPTIONS]", ("graftune runs", "graftune runs experiments --json")),
    "doctor": ("[BASE] [OPTIONS]", ("graftune doctor", "graftune doctor Qwen/Qwen3-4B")),
    "schema": ("", ("graftune schema", "graftune schema > graftune.schema.json")),
    "completion": (
        "SHELL",
        ("graftune completion bash >> ~/.bash_completion", "graftune completion zsh > ~/.zfunc/_graftune"),
    ),
}
COMMON = {
    "base", "base_dtype", "device", "rank", "alpha", "targets", "adapter", "data", "eval_data", "val_split", "map",
    "max_seq_len", "train_on", "template", "lr", "schedule", "warmup", "method", "epochs", "max_steps",
    "tokens_per_step", "recompute", "eval_every", "save_every", "patience", "seed", "out", "samples", "metric", "track",
    "reward", "prompts_per_round", "group", "answer_tokens", "temperature", "updates_per_round",
}  # fmt: skip


def help_of(command: str) -> dict[str, str]:
    """The usage line and the text below the parameters, as cyclopts' keywords."""
    usage, examples = COMMANDS[command]
    lines = ["Examples:", *(f"  {example}" for example in examples)]
    return {"usage": f"graftune {command} {usage}".strip(), "help_epilogue": "\n".join(lines)}


class SettingsPanel:
    """Formats one section of settings: the common ones, or all of them."""

    everything: ClassVar[bool] = False  # set for each command line, by --help-all

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        from cyclopts.help.formatters import DefaultFormatter

        entries = [entry for entry in panel.entries if self.everything or _is_common(entry)]
        if left := len(panel.entries) - len(entries):
            panel = panel.copy(entries=entries, title=f"{panel.title} ({left} more with --help-all)")
        if entries:
            DefaultFormatter()(console, options, panel)


def _is_common(entry: Any) -> bool:
    return any(name.removeprefix("--").replace("-", "_") in COMMON for name in entry.names)
