"""graftune import: four files as other tools' documentation writes them are converted and train, and what is left out
is listed with a reason."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graftune.cli import main
from graftune.settings import converting, other_tools, tool_data
from graftune.settings.config import Config
from graftune.settings.tool_files import ToolFile, read_tool_file

Capture = pytest.CaptureFixture[str]
FILES = Path(__file__).parents[1] / "fixtures" / "other_tools"
PACKED = [{"path": "support.jsonl", "map": {"messages": "dialogue"}}, {"path": "facts.jsonl"}]
FAQ = {"path": "data/faq.json", "map": {"instruction": "question", "output": "reply"}}
HUB = {"path": "a/b", "split": "test", "subset": "c"}
# For each file: the tool, settings that it must become, and names that must be left out.
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "axolotl.yaml": (
        "axolotl",
        {
            **{"base_dtype": "nf4", "method": "lora", "rank": 4, "targets": "all_linear", "data": PACKED},
            **{"tokens_per_step": 2 * 256, "val_split": 0.25, "min_lr": 2e-5, "warmup": 0.1},
        },
        ["optimizer", "special_tokens", "datasets[2].type", "datasets[1].roles_to_train", "gradient_checkpointing"],
    ),
    "llama_factory.yaml": (
        "llama-factory",
        {
            **{"data": [FAQ, {"path": "data/talks.jsonl"}], "rank": 4, "targets": "q_proj,v_proj"},
            **{"tokens_per_step": 2 * 256, "train_on": "last"},
            **{"eval_every": 2, "lr": 1e-4, "weight_decay": 0.0},
        },
        ["max_samples", "template", "warmup_steps", "ddp_timeout", "trust_remote_code"],
    ),
    "trl.sh": (
        "trl",
        {
            **{"data": [{"path": "support.jsonl", "map": {"text": "transcript"}}], "alpha": 16, "dropout": 0.05},
            **{"schedule": "constant", "warmup": 0.3333, "max_steps": 3, "tokens_per_step": 4 * 256},
        },
        ["push_to_hub", "eos_token", "num_train_epochs"],
    ),
    "unsloth_script.py": (
        "unsloth",
        {
            **{"compute_dtype": "fp32", "alpha": 4, "targets": "q_proj,v_proj", "seed": 3407, "data": "facts.jsonl"},
            **{"warmup": 0.0833, "tokens_per_step": 2 * 256, "max_seq_len": 256},
        },
        ["fp16", "target_modules", "chat_template", "map(...)", "dataset_text_field", "optim"],
    ),
}


@pytest.fixture(scope="module")
def here(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four files with their data, for a tiny base of 512 tokens."""
    folder = tmp_path_factory.mktemp("here")
    base = Path(shutil.copytree(tiny_folder("llama"), folder / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    for path in FILES.iterdir():
        (folder / path.name).write_text(path.read_text().replace("BASE", str(base)))
    turns = [{"role": "user", "content": "Is it late?"}, {"role": "assistant", "content": "It is not."}]
    named = {"faq": {"file_name": "faq.json", "columns": {"prompt": "question", "response": "reply"}}}
    talks = {"file_name": "talks.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}}
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text(json.dumps(named | {"talks": talks}))
    rows: dict[str, list[dict[str, Any]]] = {
        "support.jsonl": [{"dialogue": turns, "transcript": f"It is {n} o'clock."} for n in range(24)],
        "facts.jsonl": [{"instruction": f"{n} and 1?", "input": "", "output": f"{n + 1}"} for n in range(24)],
        "data/faq.json": [{"question": f"{n} and 1?", "reply": f"{n + 1}"} for n in range(24)],
        "data/talks.jsonl": [{"messages": turns}] * 8,
    }
    for name, records in rows.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_a_file_is_imported_and_trains(name: str, here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    tool, expected, left_out = CASES[name]
    assert main(["import", name, "--out", f"{name}.yaml"]) == 0
    listed = capsys.readouterr().err
    text = (here / f"{name}.yaml").read_text()
    for missing in left_out:
        assert f"left out: {missing}: " in listed and f"#   {missing}: " in text, missing
    assert main(["import", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tool"] == tool and expected.items() <= found["settings"].items(), found["settings"]
    assert Config.load(f"{name}.yaml") == Config.of(found["settings"]) and set(found["comments"]) == set(
        found["settings"]
    )
    assert any(text.startswith("tokens_per_step") for text in found["assumed"]), "the length of a sequence is assumed"
    line = ["--max-steps", "3", "--device", "cpu", "--threads", "1", "--samples", "0", "--out", f"run-{tool}"]
    more = [] if "max_steps" in found["settings"] else ["--epochs", "9"]
    assert main(["train", "-c", f"{name}.yaml", *line, "--tokens-per-step", "256", *more]) == 0
    events = [json.loads(row) for row in (here / f"run-{tool}" / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]


def converted(given: dict[str, Any], tool: str) -> converting.Conversion:
    return converting.convert(ToolFile("run.yaml", tool, given))


DOWN = "mlp.experts.down_proj"
EXPERTS = [DOWN]


@pytest.mark.parametrize(
    ("tool", "given", "ours"),
    [
        ("trl", {"model_name_or_path": "a/b", "dataset_name": "c/d"}, {"method": "full", "lr": 2e-5, "val_split": 0.0}),
        ("trl", {"report_to": ["wandb"], "dataset_config": "main", "dataset_name": "c/d"}, {"track": "wandb"}),
        ("axolotl", {"base_model": "a/b", "adapter": "lora", "tokens": ["<x>"]}, {"new_tokens": ["<x>"]}),
        ("axolotl", {"base_model": "a/b", "lr_scheduler": "constant"}, {"method": "full", "warmup": 0.0}),
        ("llama-factory", {"dataset": "nowhere"}, {"data": "nowhere", "rank": 8, "base": tool_data.MISSING_BASE}),
        ("llama-factory", {"finetuning_type": "full", "use_cpu": True}, {"method": "full", "device": "cpu"}),
        ("llama-factory", {"enable_thinking": False}, {"template_vars": {"enable_thinking": False}}),
        ("unsloth", {"get_peft_model": True}, {"base_dtype": "nf4", "data": tool_data.MISSING_DATA}),
        ("unsloth", {"full_finetuning": True, "load_in_4bit": False}, {"method": "full"}),
        ("axolotl", {"datasets": [{"path": "a/b", "name": "c", "split": "test[:9%]"}]}, {"data": [HUB]}),
        (
            "axolotl",
            {"datasets": ["a/b"]},
            {"epochs": 1.0, "warmup": 0.03, "tokens_per_step": 512},
        ),
        ("axolotl", {"micro_batch_size": 2, "batch_size": 8}, {"tokens_per_step": 2 * 512}),
        ("axolotl", {"warmup_steps": 0}, {"warmup": 0.0}),
        ("axolotl", {"lora_target_modules": ["q_proj"], "lora_target_linear": True}, {"targets": "all_linear"}),
        (
            "axolotl",
            {"lora_target_parameters": EXPERTS, "lora_target_modules": "q_proj"},
            {"targets": f"q_proj,{DOWN}"},
        ),
        ("axolotl", {"lora_target_parameters": EXPERTS, "lora_target_linear": True}, {"targets": "all_linear"}),
        ("axolotl", {"lora_target_parameters": EXPERTS}, {"targets": DOWN}),
        ("llama-factory", {"stage": "pt"}, {"lr": 5e-5, "schedule": "linear", "tokens_per_step": 8 * 2048}),
        ("llama-factory", {"early_stopping_steps": 3, "val_size": 0.1}, {"patience": 3, "val_split": 0.1}),
        (
            "trl",
            {"use_peft": True},
            {"rank": None, "alpha": 32.0, "dropout": 0.05, "targets": "qv"},
        ),
        ("trl", {"dataset_name": "a/b", "eval_strategy": "steps"}, {"eval_data": [{"path": "a/b", "split": "test"}]}),
        ("trl", {"dataset_name": "a/b", "datasets": [{"path": "c/d"}]}, {"data": "c/d"}),
        ("trl", {"max_length": None}, {"max_seq_len": None}),
        ("unsloth", {"get_peft_model": True}, {"alpha": 16.0, "seed": 3407, "warmup": None, "weight_decay": 0.001}),
        ("unsloth", {"per_device_train_batch_size": 3}, {"lr": 5e-5, "tokens_per_step": 3 * 2 * 512}),
        ("unsloth", {"get_peft_model": True, "load_in_8bit": False}, {"base_dtype": "nf4"}),
        ("unsloth", {"get_peft_model": True, "load_in_16bit": True}, {"base_dtype": None}),
    ],
)
def test_values_and_defaults(tool: str, given: dict[str, Any], ours: dict[str, Any]) -> None:
    """None: our default is left."""
    found = converted(given, tool).settings
    assert {name: found.get(name) for name in ours} == ours, found
    assert "rank" not in found or found.get("method", "lora") == "lora"


LEFT = {"val_set_size": "val_split", "lr_scheduler": "schedule", "warmup_steps": "warmup", "num_epochs": "epochs"}


def test_a_value_that_is_left_out_leaves_our_default() -> None:
    given = {
        "val_set_size": 100,
        "lr_scheduler": "polynomial",
        "warmup_steps": 9,
        "num_epochs": "x",
        "datasets": ["a/b"],
    }
    found = converted(given, "axolotl")
    assert not {"val_split", "schedule", "warmup", "epochs"} & set(found.settings)
    assert {name for name, _ in found.left_out} == set(given) - {"datasets"}
    assert all(f" is left at {Config().flat()[ours]}" in dict(found.left_out)[name] for name, ours in LEFT.items())


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "stage: dpo\nmodel_name_or_path: a\n", "stage: dpo is not supervised fine-tuning"),
        ("a.sh", "trl dpo --model_name_or_path a\n", "trl dpo is not supervised fine-tuning"),
        ("a.py", "from trl import DPOTrainer\nDPOTrainer(model='a')\n", "DPOTrainer is not supervised"),
        ("a.py", "print(1)\n", "no call whose settings could be read"),
        ("a.py", "print(", "is not valid Python"),
        ("a.yaml", "colour: red\n", "could be recognised"),
        ("a.yaml", "- 1\n", "must hold keys and values"),
        ("a.json", "[1", "is not valid JSON"),
        ("a.txt", "hello\n", "no command line with --flags"),
        ("missing.yaml", "", "cannot be read"),
        (
            "a.py",
            "from trl import OnlineDPOTrainer\nOnlineDPOTrainer(model='a')\n",
            "OnlineDPOTrainer is not supervised",
        ),
    ],
)
def test_what_cannot_be_imported(name: str, text: str, said: str, tmp_path: Path, capsys: Capture) -> None:
    if text:
        (tmp_path / name).write_text(text)
    assert main(["import", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and out == ""


def test_other_forms_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook, a JSON of arguments, and a command line with a config of its own."""
    monkeypatch.chdir(tmp_path)
    cell = {"cell_type": "code", "source": ["!pip install \\\n  unsloth\n", "FastModel.from_pretrained('a/b', r=3)"]}
    Path("a.ipynb").write_text(
        json.dumps({"cells": [{"cell_type": "markdown", "source": "x y"}, cell, {**cell, "source": "f("}]})
    )
    found = read_tool_file("a.ipynb")
    assert found.given == {"model_name": "a/b", "r": 3} and [name for name, _ in found.left_out] == ["cell 3"]
    Path("a.json").write_text(json.dumps({"output_dir": "x", "max_steps": -1, "learning_rate": 1e-3}))
    made = converting.convert(read_tool_file("a.json"))
    assert made.settings["lr"] == 1e-3 and "max_steps" in made.off
    Path("a.yaml").write_text("model_name_or_path: a/b\nlearning_rate: 1\n")
    Path("a.sh").write_text("trl sft --config a.yaml --learning_rate 2 --use_peft\n")
    assert read_tool_file("a.sh").given == {"model_name_or_path": "a/b", "learning_rate": 2, "use_peft": True}


SCRIPT = """
model = FastLanguageModel.from_pretrained("a/b")
trainer = SFTTrainer(model, args=TrainingArguments(seed=1), peft_config=LoraConfig(r=4))
"""


def test_a_script_has_the_defaults_of_what_it_calls(tmp_path: Path) -> None:
    """TrainingArguments and LoraConfig are not changed by TRL and Unsloth."""
    for text in (SCRIPT, SCRIPT.replace("FastLanguageModel", "AutoModelForCausalLM")):
        (path := tmp_path / "a.py").write_text(text)
        found = converting.convert(read_tool_file(str(path))).settings
        assert found["lr"] == 5e-5 and found["warmup"] == 0.0 and found["tokens_per_step"] == 8 * 512
        assert found["rank"] == 4 and found["alpha"] == 8.0 and "dropout" not in found and found["weight_decay"] == 0.0


COMPUTING = """
micro, gpus = 2, 4
steps = 64 // (4 * 4)
cfg = dict(r=4, lora_alpha=64)
cfg["lora_dropout"] = 0.25
more = {"learning_rate": 3e-4, **{"num_train_epochs": 2}}
model = FastLanguageModel.from_pretrained("a/b")
model = FastLanguageModel.get_peft_model(model, **cfg)
SFTTrainer(model, args=SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=steps, **more))
"""


def test_settings_of_a_script_that_are_computed(tmp_path: Path) -> None:
    """Dicts and arithmetic of the script are read. Where a value is not known, it is listed, and no default of the
    tool's takes its place."""
    (path := tmp_path / "a.py").write_text(COMPUTING)
    found = converting.convert(read_tool_file(str(path))).settings
    assert (found["rank"], found["alpha"], found["dropout"]) == (4, 64, 0.25)
    assert found["lr"] == 3e-4 and found["epochs"] == 2 and found["tokens_per_step"] == 2 * 4 * 512
    text = COMPUTING.replace("64 // (4 * 4)", "64 // count()").replace("lora_alpha=64", "lora_alpha=f()")
    path.write_text(text.replace("**more", "**more()"))
    made = converting.convert(read_tool_file(str(path)))
    left = dict(made.left_out)
    assert not {"alpha", "tokens_per_step"} & made.settings.keys()
    assert "computed" in left["lora_alpha"] and "alpha is left at 0" in left["lora_alpha"]
    assert "tokens_per_step is left at auto" in left["gradient_accumulation_steps"]
    assert "another factor" in left["per_device_train_batch_size"] and "**more()" in left
    path.write_text(COMPUTING + "\ncfg.update(lora_alpha=1)\n")
    assert "**cfg" in dict(converting.convert(read_tool_file(str(path))).left_out)


def test_a_script_whose_tokenizer_is_another_models(tmp_path: Path) -> None:
    (path := tmp_path / "a.py").write_text('AutoTokenizer.from_pretrained("a/tokens")\n' + COMPUTING)
    assert converting.convert(read_tool_file(str(path))).settings["base"] == "a/b"


def test_names_of_projects_and_flags_of_launchers_are_listed(tmp_path: Path) -> None:
    found = converted({"wandb_project": "mine", "report_to": ["wandb", "tensorboard"]}, "trl")
    left = dict(found.left_out)
    assert found.settings["track"] == "wandb" and "'mine'" in left["wandb_project"]
    assert "tensorboard is left out" in left["report_to"]
    (path := tmp_path / "a.sh").write_text("torchrun --nproc_per_node 4 sft.py --model_name_or_path a/b --use_peft\n")
    assert [name for name, _ in read_tool_file(str(path)).left_out] == ["nproc_per_node"]


TRAINER, PEFT = converting._TRAINER, converting._PEFT
SOURCES: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        *("transformers", "training_args.py", "TrainingArguments"),
        {
            **{"learning_rate": TRAINER["lr"], "num_train_epochs": TRAINER["epochs"], "seed": TRAINER["seed"]},
            **{"lr_scheduler_type": TRAINER["schedule"], "warmup_steps": TRAINER["warmup"], "max_grad_norm": 1.0},
            **{"weight_decay": TRAINER["weight_decay"], "per_device_train_batch_size": TRAINER["batch"][0]},
            **{"gradient_accumulation_steps": TRAINER["batch"][1], "eval_strategy": "no"},
        },
    ),
    (
        *("peft", "tuners/lora/config.py", "LoraConfig"),
        {"r": PEFT["rank"], "lora_alpha": PEFT["alpha"], "lora_dropout": PEFT["dropout"], "target_modules": None},
    ),
]


@pytest.mark.parametrize(("package", "file", "kind", "expected"), SOURCES)
def test_defaults_are_those_of_the_installed_source(
    package: str, file: str, kind: str, expected: dict[str, Any]
) -> None:
    """The source is parsed, not imported: importing takes seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    fields = {ast.unparse(node.target): node.value for node in body if isinstance(node, ast.AnnAssign)}
    for name, value in expected.items():
        call = fields[name]
        assert isinstance(call, ast.Call)
        (default,) = (keyword.value for keyword in call.keywords if keyword.arg == "default")
        assert ast.literal_eval(default) == value, name


ODD: list[Any] = [None, True, False, -1, 0, 0.5, 7, 1e30, "", "x", "4", [], ["x"], [1, {}], {}, {"a": [1]}, {1: 2}]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_odd_values_are_converted_or_left_out(value: Any) -> None:
    """All names at once, but for those that may say that it is not supervised fine-tuning."""
    names = [*other_tools.SAME, *other_tools.ANSWERS, *other_tools.CLASHES, "seed", "zzz"]
    names = [name for name in names if other_tools.CONVERTED_BY.get(name) != "stage"]
    for tool in converting.TITLES:
        chosen = names if tool == "axolotl" else tool_data.DATA_NAMES[tool]
        found = converted(dict.fromkeys(chosen, value), tool)
        assert isinstance(Config.of(found.settings), Config) and all(reason for _, reason in found.left_out)


def test_the_file_is_not_overwritten(tmp_path: Path, capsys: Capture) -> None:
    (there := tmp_path / "run.yaml").write_text("rank: 3")
    assert main(["import", str(FILES / "axolotl.yaml"), "--out", str(there)]) == 2
    assert "exists already" in capsys.readouterr().err and there.read_text() == "rank: 3"
