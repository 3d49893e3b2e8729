"""Habits from other tools: each gets the right setting of ours, by flag and in a file, and never a wrong guess."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from graftune.cli import main
from graftune.errors import GraftuneError
from graftune.settings import other_tools
from graftune.settings.config import Config, flatten, leaves
from tests.cli.conftest import Engine

Capture = pytest.CaptureFixture[str]
NAMES = {leaf.name for leaf in leaves()}

# What is typed, and what the answer must name. The first sixty mistakes of people who come from elsewhere.
ANSWERED: list[tuple[str, str]] = [
    ("batch_size", "tokens_per_step"),
    ("per_device_train_batch_size", "tokens_per_step"),
    ("micro_batch_size", "tokens_per_micro_batch"),
    ("gradient_accumulation_steps", "tokens_per_step"),
    ("warmup_steps", "warmup"),
    ("load_in_4bit", "base_dtype"),
    ("load_in_8bit", "base_dtype"),
    ("bnb_4bit_quant_type", "base_dtype"),
    ("quantization_bit", "base_dtype"),
    ("bf16", "compute_dtype"),
    ("fp16", "compute_dtype"),
    ("torch_dtype", "compute_dtype"),
    ("gradient_checkpointing", "recompute"),
    ("use_gradient_checkpointing", "recompute"),
    ("grad_checkpoint", "recompute"),
    ("flash_attention", "attention"),
    ("packing", "packed"),
    ("sample_packing", "packed"),
    ("train_on_inputs", "train_on"),
    ("train_on_responses_only", "train_on"),
    ("mask_prompt", "train_on"),
    ("finetuning_type", "method"),
    ("fine_tune_type", "method"),
    ("stage", "loss"),
    ("reward_funcs", "graftune rl"),
    ("optimizer", "AdamW"),
    ("report_to", "track"),
    ("wandb_project", "track"),
    ("logging_steps", "metrics.jsonl"),
    ("push_to_hub", "graftune export"),
    ("hub_model_id", "graftune export"),
    ("deepspeed", "torchrun"),
    ("fsdp", "shard_base"),
    ("nproc_per_node", "torchrun"),
    ("device_map", "device"),
    ("val_set_size", "val_split"),
    ("resume_from_checkpoint", "--resume"),
    ("iters", "max_steps"),
    ("num_layers", "targets"),
    ("modules_to_save", "train_norms"),
    ("use_dora", "rank"),
    ("neftune_noise_alpha", "dropout"),
    ("datasets", "data"),
    ("dataset", "data"),
    ("dataset_text_field", "map"),
    ("chat_template", "template"),
    ("trust_remote_code", "no code"),
    ("save_strategy", "save_every"),
    ("eval_strategy", "eval_every"),
    ("init_lora_weights", "init"),
    ("lora_parameters", "alpha"),
    ("unsloth", "kernels"),
    ("rate", "lr"),
]
TAKEN: list[tuple[str, str, str]] = [
    ("learning_rate", "lr", "0.001"),
    ("num_train_epochs", "epochs", "0.5"),
    ("num_epochs", "epochs", "2"),
    ("lora_r", "rank", "8"),
    ("r", "rank", "8"),
    ("lora_rank", "rank", "8"),
    ("lora_alpha", "alpha", "16"),
    ("lora_dropout", "dropout", "0.1"),
    ("target_modules", "targets", "q_proj,v_proj"),
    ("lora_target", "targets", "all"),
    ("max_seq_length", "max_seq_len", "1024"),
    ("cutoff_len", "max_seq_len", "1024"),
    ("sequence_len", "max_seq_len", "1024"),
    ("output_dir", "out", "x"),
    ("warmup_ratio", "warmup", "0.03"),
    ("lr_scheduler_type", "schedule", "linear"),
    ("adam_beta1", "beta1", "0.8"),
    ("max_grad_norm", "clip", "0.5"),
    ("save_steps", "save_every", "100"),
    ("eval_steps", "eval_every", "100"),
    ("base_model", "base", "a/b"),
    ("model_name_or_path", "base", "a/b"),
    ("save_total_limit", "keep_last", "3"),
    ("random_state", "seed", "3407"),
]
# None of ours, and not a slip of one either: no guess is better than a wrong one.
STRANGE = ["--gamma-ray", "--loss-fn", "--foo", "--name", "--my-option", "--data-augmentation", "--teacher"]
# Other tools' names, misspelt: the name that was meant, and what it is here.
MISSPELT = [
    ("learning_rat", "learning_rate", "lr"),
    ("lora_rr", "lora_r", "rank"),
    ("load_in_4bits", "load_in_4bit", "base_dtype"),
    ("gradient_acumulation_steps", "gradient_accumulation_steps", "tokens_per_step"),
    ("eval_step", "eval_steps", "eval_every"),
]


def typed(value: str) -> object:
    return float(value) if "." in value else int(value) if value.isdigit() else value


@pytest.mark.parametrize(("name", "part"), ANSWERED)
def test_an_answer_names_the_setting(engine: Engine, capsys: Capture, name: str, part: str) -> None:
    if (name, part) in ANSWERED[::7]:  # the command line asks for the same answer, whatever the name
        assert main(["train", "--" + name.replace("_", "-"), "2"]) == 2
        err = capsys.readouterr().err
        shown = "--" + part.replace("_", "-") if part in NAMES else part
        assert shown in err and "did you mean" not in err and not engine.calls, err
    assert other_tools.answer(f"--{name}", flags=True) == other_tools.answer(f"--{name.replace('_', '-')}", flags=True)
    with pytest.raises(GraftuneError) as caught:
        flatten({name: 2}, "run.yaml")
    text = str(caught.value)
    assert part in text and f"unknown key '{name}'" in text and "did you mean" not in text


@pytest.mark.parametrize(("name", "ours", "value"), TAKEN)
def test_a_synonym_is_taken_and_said(engine: Engine, capsys: Capture, name: str, ours: str, value: str) -> None:
    assert main(["train", "--" + name.replace("_", "-"), value]) == 0
    assert f"--{name.replace('_', '-')} is taken as --{ours.replace('_', '-')}" in capsys.readouterr().err
    told: list[str] = []
    file = Config.of({name: value if ours == "targets" else typed(value)}, where="run.yaml", note=told.append)
    assert told == [f"run.yaml: {name} is taken as {ours}"]
    ((flags,), _) = engine.of("train")[0]
    assert flags == file and (value == "all" or flags != Config())  # all projections are the default


def test_both_spellings_are_one_too_many(engine: Engine, capsys: Capture, tmp_path: Path) -> None:
    assert main(["train", "--lr", "1", "--learning_rate", "2"]) == 2
    assert "--lr and --learning_rate are the same setting" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("lr: 1\noptim: {learning_rate: 2}\n")
    assert main(["train", "-c", str(tmp_path / "run.yaml")]) == 2
    assert "lr is given twice (as lr and learning_rate)" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "intended", "ours"), MISSPELT)
def test_another_tools_name_misspelt_gets_a_guess(name: str, intended: str, ours: str) -> None:
    with pytest.raises(GraftuneError) as caught:
        flatten({name: 2}, "run.yaml")
    assert f"did you mean {intended}?" in str(caught.value) and ours in str(caught.value)
    flags = other_tools.advice("--" + name.replace("_", "-"), ["--rank", "--lr"], flags=True)
    assert f"did you mean --{intended.replace('_', '-')}?" in flags and f"--{ours.replace('_', '-')}" in flags


@pytest.mark.parametrize("option", STRANGE)
def test_no_guess_is_better_than_a_wrong_one(engine: Engine, capsys: Capture, option: str) -> None:
    assert main(["train", option]) == 2
    assert "did you mean" not in capsys.readouterr().err.lower()


def test_all_unknown_keys_of_a_file_are_listed(tmp_path: Path) -> None:
    with pytest.raises(GraftuneError) as caught:
        flatten({"bf16": True, "packing": True, "lora": {"wandb": 1, "r": 8}, "zzz": 1}, "run.yaml", note=str)
    head, *lines = str(caught.value).split("\n")
    assert head == "run.yaml: 4 unknown keys; change or remove them"
    assert [line.split(":")[0].strip() for line in lines] == ["bf16", "packing", "lora.wandb", "zzz"]
    assert "compute_dtype" in lines[0] and "track" in lines[2] and "docs/settings.md" in lines[3]


def test_all_unknown_options_are_answered_at_once(engine: Engine, capsys: Capture) -> None:
    assert main(["train", "--bf16", "--report-to", "wandb", "--rnak=3", "--zzz", "--json"]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert lines[0].startswith("graftune: 4 unknown options") and len(lines) == 5 and not engine.calls
    parts = ["--compute-dtype", "--track", "did you mean --rank?", "nothing like it"]
    assert all(part in line for line, part in zip(lines[1:], parts, strict=True))
    assert len(json.loads(out)["error"]["lines"]) == 4


def test_a_file_of_another_tool_is_answered_with_import(engine: Engine, capsys: Capture, tmp_path: Path) -> None:
    (path := tmp_path / "run.yaml").write_text("base_model: a/b\nsample_packing: true\nbf16: auto\nrank: 3\n")
    assert main(["train", "-c", str(path)]) == 2
    assert f"2 unknown keys; graftune import {path} converts such a file" in capsys.readouterr().err


def test_a_section_that_is_given_another_tools_value(tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match=r"optim is 'adamw_torch'.*always AdamW"):
        Config.of({"optim": "adamw_torch"})
    with pytest.raises(
        GraftuneError, match=r"train is True, which is a setting of another tool; graftune train trains"
    ):
        Config.of({"train": True})


def test_the_table_is_sound() -> None:
    assert len(other_tools.SAME) + len(other_tools.ANSWERS) >= 150
    assert not set(other_tools.SAME) & set(other_tools.ANSWERS)
    assert not (set(other_tools.SAME) | set(other_tools.ANSWERS)) & NAMES, "a name of ours needs no answer"
    assert set(other_tools.SAME.values()) - NAMES == {"max_new_tokens", "system"}
    assert not set().union(*other_tools.SIGNS.values()) & NAMES, "a file of ours would be taken for another tool's"
    assert other_tools.same("--profile") == "trace_steps", "a name of an earlier version"
    named = {name for text in other_tools.ANSWERS.values() for name in re.findall(r"\{(\w+)\}", text)}
    assert named <= NAMES, named - NAMES


def test_habits_of_typing(engine: Engine) -> None:
    line = ["train", "--targets", "q_proj", "v_proj", "b.gguf", "d.jsonl", "--rslora", "True", "--max_steps=3"]
    assert main([*line, "--strict", "false", "--template-vars", "enable_thinking=false", "effort=2"]) == 0
    config = engine.of("train")[0][0][0]
    assert config.lora.targets == ("q_proj", "v_proj") and config.lora.rslora and not config.data.strict
    assert (config.base.base, config.data.data, config.train.max_steps) == ("b.gguf", "d.jsonl", 3)
    assert config.data.template_vars == {"enable_thinking": False, "effort": 2}


def test_text_that_looks_like_a_flag_stays_text(engine: Engine) -> None:
    assert main(["chat", "runs/a", "--prompt", "--learning-rate", "--max-tokens", "5"]) == 0
    ((messages,), how) = engine.of("chat")[0]
    assert messages[-1]["content"] == "--learning-rate" and how["max_new_tokens"] == 5
