"""Converts another tool's settings into ours: what is taken, from which name, and what is left out and why.

Names, reasons and most values are in other_tools.py, which answers mistyped settings too; here are the functions that
it names, for values that need more. A setting that the file does not give gets the other tool's default, where that
differs from ours, so that the run is the same. Data is converted by tool_data.py.

The defaults are those of the tools' sources: transformers 5.23, PEFT 0.21, TRL 1.10, and Axolotl, LLaMA-Factory and
Unsloth of July and August 2026.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graftune.errors import GraftuneError
from graftune.settings import other_tools
from graftune.settings.config import Config, leaves
from graftune.settings.targets import SPELLINGS, TARGET_SHORTHANDS, is_target
from graftune.settings.tool_data import DATA_NAMES, convert_data
from graftune.settings.tool_files import COMPUTED, ToolFile, preference

TITLES = {"axolotl": "Axolotl", "llama-factory": "LLaMA-Factory", "trl": "TRL", "unsloth": "Unsloth"}
MANY_EPOCHS = 1000.0
MEAN_LENGTH = 512  # tokens of a sequence, assumed where sequences are not packed
# transformers' TrainingArguments. `batch`: sequences of a micro-batch, and micro-batches of a step.
_TRAINER: dict[str, Any] = {
    **{"lr": 5e-5, "epochs": 3.0, "schedule": "linear", "warmup": 0.0, "min_lr": 0.0, "weight_decay": 0.0, "seed": 42},
    **{"batch": (8, 1), "val_split": 0.0, "patience": 0},
}
# PEFT's LoraConfig. The targets depend on the model there: these are for nearly all decoders.
_PEFT: dict[str, Any] = {"rank": 8, "alpha": 8.0, "dropout": 0.0, "targets": "qv"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    # Axolotl requires a learning rate, and rank, alpha and targets for an adapter. It warms up 100 steps at most.
    "axolotl": _TRAINER
    | {"lr": "auto", "method": "full", "epochs": 1.0, "schedule": "cosine", "warmup": 0.03, "batch": (1, 1)}
    | {"max_seq_len": 512},
    "llama-factory": _TRAINER | {"rank": 8, "max_seq_len": 2048},
    "trl": _TRAINER
    | _PEFT
    | {"lr": 2e-5, "method": "full", "rank": 16, "alpha": 32.0, "dropout": 0.05, "max_seq_len": 1024},
    # Unsloth replaces defaults of TRL's SFTConfig by its own.
    "unsloth": _TRAINER
    | {"warmup": 0.1, "weight_decay": 0.001, "seed": 3407, "batch": (4, 2), "base_dtype": "nf4", "method": "full"}
    | {"rank": 16, "alpha": 16.0, "max_seq_len": 2048},
}
# The calls in a script that have defaults of their own, whichever tool it is for.
_OF_CALLS = {"TrainingArguments": _TRAINER, "LoraConfig": _PEFT}
# Other spellings of our values.
_SPELLED = {
    "schedule": {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"},
    "base_dtype": {"True": "nf4", "4": "nf4"},
    "init": {"True": "kaiming"},
    "method": {"qlora": "lora"},
    "compute_dtype": {
        **dict.fromkeys(("bfloat16", "pure_bf16"), "bf16"),
        **dict.fromkeys(("float16", "half"), "fp16"),
        **dict.fromkeys(("float32", "float"), "fp32"),
    },
}
_ONLY_RESPONSES = ("assistant_only_loss", "completion_only_loss", "train_on_responses_only")
_OURS = {leaf.name for leaf in leaves()}
_TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass
class Conversion:
    """The result for a file. `settings`: ours, with a comment each. `assumed`: assumptions that may change the result.
    `left_out`: names and reasons. `off`: names that are switched off or empty in the file."""

    file: ToolFile
    settings: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    off: list[str] = field(default_factory=list)
    not_taken: set[str] = field(default_factory=set)  # ours, for which the file has a value that was left out

    @property
    def title(self) -> str:
        return TITLES[self.file.tool]

    @property
    def defaults(self) -> dict[str, Any]:
        found = dict(_DEFAULTS[self.file.tool])
        for call in _OF_CALLS.keys() & self.file.calls:
            found |= _OF_CALLS[call]
        return found

    def put(self, ours: str, value: Any, name: str, assumed: str = "") -> None:
        """Take a setting. A value that is not allowed here, or contradicts one before it, is left out instead."""
        value = _SPELLED.get(ours, {}).get(str(value), value)
        try:
            Config.of({ours: value})
        except GraftuneError as error:
            self.leave(name, f"{error.what}; {error.fix}", ours)
            return
        if ours in self.settings:
            if self.settings[ours] != value:
                self.leave(name, f"{ours} is {self.settings[ours]} already, from {self.comments[ours]}")
            return
        self.settings[ours], self.comments[ours] = value, f"{name}: {assumed}" if assumed else name
        if assumed:
            self.assumed.append(f"{ours} is {value}, from {name}: {assumed}")

    def leave(self, name: str, reason: str = "", ours: str = "") -> None:
        """Leave a name out, for a reason. `ours`: the setting that it means, which keeps our default instead of the
        other tool's."""
        last = other_tools.plain(str(name).rpartition(".")[2])  # of datasets[1].split
        reason = reason or re.sub(r"[{}]", "", other_tools.CLASHES.get(last, ""))
        reason = reason or other_tools.answer(last, flags=False) or "graftune has no such setting"
        if ours and ours not in self.settings:
            self.not_taken.add(ours)
            reason = f"{reason}; {ours} is left at {Config().flat()[ours]}"
        self.left_out.append((str(name), reason.removesuffix("; remove it")))


def convert(file: ToolFile) -> Conversion:
    """All settings of a file that have a counterpart, and the reasons why others have none."""
    result = Conversion(file)
    for name, reason in file.left_out:
        ours = _OF_RULES.get(_rule(name), _rule(name).partition("=")[0]) if reason == COMPUTED else ""
        result.leave(name, reason, ours if ours in _OURS else "")
    for name, value in sorted(file.given.items(), key=lambda item: _order(_rule(item[0]))):
        plain, rule = other_tools.plain(str(name)), _rule(name)
        if plain in DATA_NAMES[file.tool] or rule in ("batch", "warmup_steps"):
            continue
        if value is None and rule == "max_seq_len":
            result.leave(name, "there it means that sequences have any length", rule)
        elif value in (None, "", [], {}, -1) or (value is False and plain not in _MEANT_FALSE):
            result.off.append(name)  # -1: no limit
        elif rule in _FUNCTIONS:
            _FUNCTIONS[rule](result, name, value)
        elif rule:
            setting, _, fixed = rule.partition("=")
            _take(result, setting, name, fixed or value)
        else:
            result.leave(name)
    convert_data(result)
    if file.tool in ("trl", "unsloth") and not any(file.given.get(name) for name in _ONLY_RESPONSES):
        reason = f"without it {result.title} trains on whole conversations; here only responses are trained"
        result.leave(_ONLY_RESPONSES[0], reason)
    _steps(result)
    _add_defaults(result)
    result.left_out = list(dict.fromkeys(result.left_out))
    Config.of(result.settings)
    return result


def _order(rule: str) -> int:
    """A rule with a value comes before lists of values, and what is added to other values comes last."""
    return 0 if "=" in rule else 2 if rule == "parameters" else 1


def _rule(name: Any) -> str:
    """How a name is converted: a function of this module, our setting, or our setting with its value (a=b). A switch
    (a=b) is stronger than a list: Axolotl's lora_target_linear adds all projections to those of a list."""
    plain = other_tools.plain(str(name))
    if plain in other_tools.CLASHES:
        return other_tools.CLASHES_CONVERTED_BY.get(plain, "")
    ours = plain if plain in _OURS else other_tools.same(plain)
    return other_tools.CONVERTED_BY.get(plain) or (ours if ours in _OURS else "") or ""


def _take(result: Conversion, ours: str, name: str, value: Any) -> None:
    if ours == "targets":
        given = [str(target).strip() for target in (value if isinstance(value, list) else str(value).split(","))]
        given = [SPELLINGS.get(target, target) for target in given]
        known = [target for target in given if is_target(target) or target in TARGET_SHORTHANDS]
        if len(known) < len(given):
            result.leave(name, f"no adapter is trained on {', '.join(t for t in given if t not in known)}")
        if not known:
            return
        value = ",".join(known)
    result.put(ours, value, name)
    if ours == "schedule" and value == "constant":
        result.put("warmup", 0.0, name)  # constant_with_warmup is the one with a warm-up


# The functions that other_tools.py names: each takes one name with its value.


def _precision(result: Conversion, name: str, value: Any) -> None:
    asked = other_tools.plain(name) if value is True or value == "full" else str(value).removeprefix("torch.")
    if asked == "auto":
        result.off.append(name)
    else:
        result.put("compute_dtype", asked, name)


def _tracker(result: Conversion, name: str, value: Any) -> None:
    plain = other_tools.plain(name)
    asked = [str(one) for one in (value if isinstance(value, list) else [value])] if plain == "report_to" else [plain]
    known = [tracker for one in asked for tracker in _TRACKERS if tracker in one]
    if known:
        result.put("track", known[0], name)
        if len(known) > 1:
            result.leave(name, f"one tracker is written to; {', '.join(known[1:])} is left out")
        if plain != "report_to" and isinstance(value, str):
            result.leave(name, f"the name {value!r} is not taken: figures go into the project graftune")
    elif asked == ["none"]:
        result.off.append(name)
    if asked != ["none"] and len(known) < len(asked):
        result.leave(name)


def _training_method(result: Conversion, name: str, value: Any) -> None:
    if isinstance(value, bool):
        value = "full" if value is (other_tools.plain(name) == "full_finetuning") else "lora"
    result.put("method", value, name)
    if value == "qlora":
        result.put("base_dtype", "nf4", name)


def _stage(result: Conversion, name: str, value: Any) -> None:
    if value not in ("sft", "pt", True):
        raise preference(f"{name}: {value}", result.file.path)
    result.leave(name)


def _jinja_file(result: Conversion, name: str, value: Any) -> None:
    if isinstance(value, str) and value.endswith((".jinja", ".jinja2", ".j2")) and len(value) < 1000:
        result.put("template", value, name)
    else:
        result.leave(name)


def _template_variable(result: Conversion, name: str, value: Any) -> None:
    variables = dict(result.settings.pop("template_vars", {}))
    result.put("template_vars", {**variables, other_tools.plain(name): value}, name)


def _least_lr(result: Conversion, name: str, value: Any) -> None:
    rate = result.file.given.get("learning_rate")
    if isinstance(value, dict) and isinstance(value.get("min_lr"), int | float | str):
        result.put("min_lr", value["min_lr"], f"{name}: min_lr")
        return
    share = value.get("min_lr_rate") if isinstance(value, dict) else value
    try:
        result.put("min_lr", float(str(share)) * float(str(rate)), f"{name} x learning_rate")
    except ValueError:
        result.leave(name)


def _parameters(result: Conversion, name: str, value: Any) -> None:
    """Takes the parameters of experts, which PEFT adapts beside the modules of the targets."""
    given = [str(one) for one in (value if isinstance(value, list) else [value])]
    known = [one for one in given if is_target(one)]
    if len(known) < len(given):
        rest = ", ".join(one for one in given if one not in known)
        result.leave(name, f"not taken: {rest} (adapters are on all layers)")
    before = result.settings.get("targets", "")
    if known and not before:
        result.put("targets", ",".join(known), name)
    elif known and before != "all_linear":
        result.settings["targets"] = ",".join((before, *known))


_FUNCTIONS: dict[str, Callable[[Conversion, str, Any], None]] = {
    "jinja_file": _jinja_file,
    "least_lr": _least_lr,
    "parameters": _parameters,
    "precision": _precision,
    "stage": _stage,
    "template_variable": _template_variable,
    "tracker": _tracker,
    "training_method": _training_method,
}
# The setting that a rule of several names or of a function decides.
_OF_RULES = {
    **{"batch": "tokens_per_step", "warmup_steps": "warmup", "least_lr": "min_lr", "precision": "compute_dtype"},
    **{"tracker": "track", "training_method": "method", "jinja_file": "template"},
}
_MEANT_FALSE = {"use_peft", "use_lora", "enable_thinking", "thinking"}  # names whose `false` is a setting


# What several names decide together.


def _steps(result: Conversion) -> None:
    """Batch sizes in sequences -> tokens_per_step, and warm-up steps -> a share of all steps."""
    if result.settings.get("max_steps"):
        if "epochs" in result.settings:
            result.leave(result.comments["epochs"], "max_steps overrides it there")
        result.settings["epochs"], result.comments["epochs"] = MANY_EPOCHS, "max_steps decides alone there"
    sizes: dict[str, int] = {}
    given, defaults = result.file.given, result.defaults
    for name, value in given.items():
        if (rule := _rule(name)) == "warmup_steps":
            _warmup_steps(result, name, value)
        elif rule == "batch" and isinstance(value, int) and value > 0:
            sizes[name] = value
        elif rule == "batch":
            result.leave(name, "", "tokens_per_step")
    if "tokens_per_step" in result.not_taken:  # a product of which a factor is not known
        for name in sizes:
            result.leave(name, "another factor of the batch is not known", "tokens_per_step")
        return
    for kind, size in zip(("batch", "accumulation"), defaults["batch"], strict=True):
        if not any(kind in name for name in sizes):
            sizes[f"{result.title}'s default {kind}"] = size
    sequences = math.prod(sizes.values())
    longest = result.settings.get("max_seq_len") or defaults["max_seq_len"]
    packs = any(given.get(name) is True for name in ("packing", "sample_packing", "neat_packing"))
    packs = packs or (given.get("stage") == "pt" and given.get("packing") is None)  # LLaMA-Factory's pre-training
    length = longest if packs else min(MEAN_LENGTH, longest)
    shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
    what = f"{sequences} sequences of {length} tokens"
    why = "full since they are packed there" if packs else "an assumed mean length (graftune data shows yours)"
    result.put("tokens_per_step", max(8, sequences * length), shown, f"{what}, {why}; times the number of GPUs there")


def _warmup_steps(result: Conversion, name: str, value: Any) -> None:
    steps = result.settings.get("max_steps", 0)
    if value is None or (value == 0 and "warmup" in result.settings):
        result.off.append(name)
    elif isinstance(value, int | float) and 0 <= value < 1:
        result.put("warmup", float(value), name)
    elif isinstance(value, int) and steps:
        result.put("warmup", min(1.0, round(value / steps, 4)), f"{name} {value} of max_steps {steps}")
    else:
        result.leave(name, "here it is a share of all steps, whose number only the data decides", "warmup")


def _add_defaults(result: Conversion) -> None:
    """The other tool's defaults where they differ from ours."""
    ours, defaults, given = Config().flat(), result.defaults, result.file.given
    full = result.settings.get("method", defaults.get("method")) == "full"
    unneeded = {
        "base_dtype": full
        or any((key == "load_in_4bit") != bool(given[key]) for key in given if "load_in" in str(key)),
        "val_split": "eval_data" in result.settings,
        **dict.fromkeys(("rank", "alpha", "dropout", "targets"), full),
    }
    for name, value in defaults.items():
        decided = name in result.settings or name in result.not_taken or unneeded.get(name, False)
        if name in ours and not decided and value != ours[name]:
            result.put(name, value, f"{result.title}'s default")
