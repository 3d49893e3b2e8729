"""The flags are exactly those of the config tree, and the set of them changes only on purpose.

The lists are written out: adding, renaming or dropping a setting changes them, where a reviewer sees it.
"""

from __future__ import annotations

import shlex

import pytest

from graftune.cli import help, main
from graftune.cli.app import app
from graftune.settings.config import leaves

FROZEN = {
    "train": """--adapter --alpha --anchor --any-base --append-eos --base --base-dtype --base-on --best --beta --beta1
        --beta2 --clip --clip-high --clip-low --clip-mode --compute-dtype --config --data --date --deadline
        --desirable-weight --deterministic --device --divide --divide-by --documents-per-micro-batch --dropout
        --embedding-on --epochs --eps --eval-data --eval-every --eval-examples --gamma --graph --init --init-scale
        --json --keep-last --kl --label-smoothing --loss --lr --map --max-seq-len --max-skipped --max-steps
        --max-unpacked --memory-share --method --metric --metric-goal --metric-records --metric-seconds --min-lr
        --new-tokens --no-any-base --no-append-eos --no-deterministic --no-graph --no-rslora --no-score
        --no-stop-on-warning --no-strict --no-train-norms --out --patience --print-config --profile-every
        --prompt-form --quiet --rank --ratios --recompute --reference --reference-pass --resume --revision
        --rows-per-micro-batch --rslora --sample-every --sample-tokens --samples --save-every --save-minutes
        --schedule --score --score-records --seed --sft-share --shard-base --stop-on-warning --stop-within
        --strict --targets --temperature --template --template-vars --threads --tokens-per-micro-batch
        --tokens-per-step --trace-steps --track --train-norms --train-on --train-reasoning --undesirable-weight
        --val-split --wait-gpu --warmup --watch --weight-decay -c BASE DATA MORE""",
    "chat": """--any-base --append-eos --base --base-dtype --base-on --compare --compute-dtype --date --device
        --embedding-on --json --max-new-tokens --no-any-base --no-append-eos --prompt --quiet --revision --seed
        --shard-base --system --temperature --template --template-vars --threads --top-k --top-p TARGET""",
    "eval": """--any-base --append-eos --base --base-dtype --base-on --base-too --compute-dtype --date --device
        --embedding-on --json --map --max-seq-len --max-unpacked --metric --metric-records --metric-seconds
        --no-any-base --no-append-eos --no-strict --prompt-form --quiet --revision --sample-tokens --shard-base
        --strict --template --template-vars --threads --train-on --train-reasoning DATA TARGET""",
    "data": """--append-eos --base --config --date --json --map --max-seq-len --max-unpacked --no-append-eos
        --no-strict --prompt-form
        --revision --show --strict --template --template-vars --train-on --train-reasoning -c DATA MORE""",
    "plan": """--adapter --advantage-scale --alpha --anchor --answer-tokens --any-base --append-eos --base
        --base-dtype --base-on --beta --beta1 --beta2 --clip --clip-high --clip-low --clip-mode
        --compute-dtype --config --data --date --desirable-weight --deterministic --device --divide
        --divide-by --documents-per-micro-batch --dropout --embedding-on --epochs --eps --eval-data
        --eval-every --eval-examples --gamma --gpu --graph --group --init --init-scale --json
        --keep-last --kl --label-smoothing --loss --lr --map --max-seq-len --max-steps
        --max-unpacked --memory --method --metric --metric-records --min-lr --new-tokens
        --no-any-base --no-append-eos --no-deterministic --no-graph --no-rslora --no-score
        --no-strict --no-train-norms --patience --print-config --prompt-form --prompts-per-round
        --rank --ratios --recompute --reference --reference-pass --revision --reward
        --reward-seconds --rows-per-micro-batch --rslora --sample-tokens --samples --samples-at-once
        --save-every --save-minutes --schedule --score --score-records --seed --sft-share
        --shard-base --strict --targets --temperature --template --template-vars --threads
        --tokens-per-micro-batch --tokens-per-step --train-norms --train-on --train-reasoning
        --undesirable-weight --updates-per-round --val-split --warmup --weight-decay -c BASE DATA
        MORE""",
    "profile": """--adapter --alpha --anchor --any-base --append-eos --base --base-dtype --base-on --beta --beta1
        --beta2 --clip --clip-high --clip-low --clip-mode --compute-dtype --config --data --date --desirable-weight
        --deterministic --device --divide --divide-by --documents-per-micro-batch --dropout --embedding-on
        --epochs --eps --eval-data --eval-every --eval-examples --gamma --graph --init --init-scale --json
        --keep-last --kl --label-smoothing --loss --lr --map --max-seq-len --max-steps --max-unpacked --method
        --min-lr --new-tokens --no-any-base --no-append-eos --no-deterministic --no-graph --no-rslora --no-strict
        --no-train-norms --patience --prompt-form --quiet --rank --ratios --recompute --reference --reference-pass
        --revision --rows-per-micro-batch --rslora --save-every --save-minutes --schedule --seed --sft-share
        --shard-base --steps --strict --targets --temperature --template --template-vars --threads
        --tokens-per-micro-batch --tokens-per-step --trace --train-norms --train-on --train-reasoning
        --undesirable-weight --val-split --warmup --weight-decay -c DATA TARGET""",
    "rl": """--adapter --advantage-scale --alpha --answer-tokens --any-base --base --base-dtype --base-on --beta1
        --beta2 --clip --clip-high --clip-low --clip-mode --compute-dtype --config --data --date
        --deterministic --device --divide --divide-by --documents-per-micro-batch --dropout
        --embedding-on --epochs --eps --eval-data --eval-every --eval-examples --graph --group
        --init --init-scale --json --keep-last --kl --loss --lr --map --max-seq-len --max-skipped
        --max-steps --max-unpacked --method --min-lr --new-tokens --no-any-base --no-deterministic
        --no-graph --no-rslora --no-stop-on-warning --no-strict --no-train-norms --out --patience
        --print-config --prompts-per-round --quiet --rank --ratios --recompute --reference --resume
        --revision --reward --reward-seconds --rows-per-micro-batch --rslora --samples
        --samples-at-once --save-every --save-minutes --schedule --seed --stop-on-warning
        --stop-within --strict --targets --temperature --template --template-vars --threads
        --tokens-per-micro-batch --track --train-norms --updates-per-round --val-split --warmup
        --watch --weight-decay -c BASE DATA MORE""",
    "init": """--append-eos --base-dtype --date --device --eval-data --eval-examples --force --json --map --max-seq-len
        --max-unpacked --no-append-eos --no-strict --out --prompt-form --revision --strict --template --template-vars
        --train-on --train-reasoning --val-split BASE DATA MORE""",
    "doctor": "--json --revision BASE",
    "export": """--adapter-names --add --any-base --base --force --json --no-any-base --out --quiet --revision --to
        --type TARGET""",
    "import": "--from --json --out FILE",
    "runs": "--json FOLDER",
    "watch": "--device --host --port --quiet --token FOLDER",
    "schema": "",
    "completion": "SHELL",
}


def flags(command: str) -> list[str]:
    arguments = app[command].assemble_argument_collection()
    return sorted(name for argument in arguments for name in argument.names if name != "*")


def test_commands_are_frozen() -> None:
    assert sorted(name for name in app if not name.startswith("-")) == sorted(FROZEN)


@pytest.mark.parametrize("command", FROZEN)
def test_flags_are_frozen(command: str) -> None:
    assert flags(command) == FROZEN[command].split()


@pytest.mark.parametrize("command", FROZEN)
def test_help_names_the_arguments_and_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    usage, examples = out.splitlines()[0], out.partition("Examples:")[2].strip().splitlines()
    positional = [name for name in flags(command) if name.isupper() and name != "MORE"]
    assert "ARGS" not in usage and all(name in usage for name in positional)
    assert 2 <= len(examples) <= 3 and all(f"graftune {command}" in example for example in examples)
    for example in examples:
        words = [word.partition("=")[0] for word in shlex.split(example) if word.startswith("-")]
        assert set(words) <= set(flags(command)), "the examples' flags exist"


def test_help_is_short_and_help_all_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    short = capsys.readouterr().out
    assert main(["train", "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert len(short.splitlines()) <= 120 < len(whole.splitlines())
    assert "Usage: graftune train BASE DATA" in short and "more with --help-all" in short
    assert "--rank" in short and "--beta1" not in short and "--beta1" in whole
    assert {leaf.name for leaf in leaves()} >= help.COMMON
