"""Converts another tool's settings into ours: what is taken, from which name, and what is left out and why.

Names and reasons are in other_tools.py, which answers mistyped settings too; here are the functions that it names, for
values that need more than another name. A setting that the file does not give has the other tool's default, where that
differs from ours: the run is to be the same. Data is converted by tool_data.py.

The defaults are those of the tools' sources: transformers 5.23, PEFT 0.21, TRL 1.10, and Axolotl, LLaMA-Factory and
Unsloth of July and August 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graftune.errors import GraftuneError
from graftune.settings import other_tools
from graftune.settings.config import TARGET_SHORTHANDS, TARGETS, Config, leaves
from graftune.settings.tool_data import DATA_NAMES, convert_data
from graftune.settings.tool_files import ToolFile, preference

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
_OF_LORA = ("rank", "alpha", "dropout", "targets")
_SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "pure_bf16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
}
_ONLY_RESPONSES = ("assistant_only_loss", "completion_only_loss", "train_on_responses_only")
_TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass
class Conversion:
    """`settings`: ours, with a comment each. `assumed`: what was assumed and may change the result. `left_out`: names
    and reasons. `off`: names that are switched off or empty in the file."""

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
        """The other tool's defaults."""
        found = dict(_DEFAULTS[self.file.tool])
        for call in _OF_CALLS.keys() & self.file.calls:
            found |= _OF_CALLS[call]
        return found

    def put(self, ours: str, value: Any, name: str, assumed: str = "") -> None:
        """Take a setting. A value that is not allowed here, or contradicts one before it, is left out instead."""
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
        """`ours`: the setting that it would have been; it keeps our default, not the other tool's."""
        name = str(name)
        self.not_taken.add(ours)
        reason = reason or other_tools.CLASHES.get(other_tools.plain(name), "").replace("{", "").replace("}", "")
        reason = reason or other_tools.answer(name, flags=False) or "graftune has no such setting"
        self.left_out.append((name, reason.removesuffix("; remove it")))


def convert(file: ToolFile) -> Conversion:
    """All settings of a file that have a counterpart, and the reasons why others have none."""
    result = Conversion(file, left_out=list(file.left_out))
    ours = {leaf.name for leaf in leaves()}
    for name, value in file.given.items():
        plain = other_tools.plain(str(name))
        function = other_tools.CLASHES_CONVERTED_BY.get(plain) or other_tools.CONVERTED_BY.get(plain)
        same = plain if plain in ours else other_tools.same(plain)
        if plain in DATA_NAMES[file.tool] or function in ("batch", "warmup"):
            continue
        if value in (None, "", [], {}) or (value is False and plain not in _MEANT_FALSE):
            if value is None and same == "max_seq_len":
                result.leave(name, "there it means that sequences have any length", same)
            else:
                result.off.append(name)
        elif function:
            _FUNCTIONS[function](result, name, value)
        elif plain in other_tools.CLASHES or same not in ours:
            result.leave(name)
        else:
            _put_same(result, str(same), name, value)
    convert_data(result)
    if file.tool in ("trl", "unsloth") and not any(file.given.get(name) for name in _ONLY_RESPONSES):
        reason = f"without it {result.title} trains on whole conversations; here only responses are trained"
        result.leave(_ONLY_RESPONSES[0], reason)
    _steps(result)
    _add_defaults(result)
    result.left_out = list(dict.fromkeys(result.left_out))
    Config.of(result.settings)
    return result


def _put_same(result: Conversion, ours: str, name: str, value: Any) -> None:
    """A name with the same meaning; some values are spelled differently."""
    if ours == "schedule":
        if str(value) not in _SCHEDULES:
            result.leave(name, f"{value} is not one of cosine, linear and constant; {ours} is left at cosine", ours)
            return
        if value == "constant":
            result.put("warmup", 0.0, name)  # the one without a warm-up
        value = _SCHEDULES[str(value)]
    elif ours == "targets":
        given = [str(target).strip() for target in (value if isinstance(value, list) else str(value).split(","))]
        given = ["all_linear" if target in ("all", "all-linear") else target for target in given]
        known = [target for target in given if target in (*TARGETS, *TARGET_SHORTHANDS)]
        if len(known) < len(given):
            result.leave(name, f"no adapter is trained on {', '.join(t for t in given if t not in known)}")
        if not known:
            return
        value = ",".join(known)
    elif ours in ("max_steps", "eval_every", "save_every", "threads") and isinstance(value, int | float) and value < 0:
        result.off.append(name)  # -1: no limit
        return
    elif ours in ("out", "base", "adapter", "revision") and isinstance(value, list):
        value = value[0]
    result.put(ours, value, name)


# The functions that other_tools.py names: each takes one name with its value.


def _four_bits(result: Conversion, name: str, value: Any) -> None:
    if value is True or value == 4:
        result.put("base_dtype", "nf4", name)
    else:
        result.leave(name)


def _precision(result: Conversion, name: str, value: Any) -> None:
    asked = other_tools.plain(name) if value is True or value == "full" else str(value).removeprefix("torch.")
    if asked in _DTYPES:
        result.put("compute_dtype", _DTYPES[asked], name)
    elif asked == "auto":
        result.off.append(name)
    else:
        result.leave(name)


def _last_turn(result: Conversion, name: str, value: Any) -> None:
    result.put("train_on", "last", name)


def _tracker(result: Conversion, name: str, value: Any) -> None:
    plain = other_tools.plain(name)
    asked = [str(one) for one in (value if isinstance(value, list) else [value])] if plain == "report_to" else [plain]
    known = [tracker for one in asked for tracker in _TRACKERS if tracker in one]
    if known:
        result.put("track", known[0], name)
    elif asked == ["none"]:
        result.off.append(name)
    if asked != ["none"] and len(known) < len(asked):
        result.leave(name)


def _method(result: Conversion, name: str, value: Any) -> None:
    if value is True or value is False:
        full = value is (other_tools.plain(name) == "full_finetuning")
        result.put("method", "full" if full else "lora", name)
    elif value in ("lora", "full"):
        result.put("method", value, name)
    else:
        result.leave(name, f"{value} does not exist here; {other_tools.answer(name, flags=False)}")


def _adapter_kind(result: Conversion, name: str, value: Any) -> None:
    """Axolotl's `adapter: qlora`; a folder is an adapter to continue from, as here."""
    if value in ("lora", "qlora"):
        result.put("method", "lora", f"{name}: {value}")
        if value == "qlora":
            result.put("base_dtype", "nf4", f"{name}: {value}")
    else:
        result.put("adapter", value, name)


def _stage(result: Conversion, name: str, value: Any) -> None:
    if value not in ("sft", "pt", True):
        raise preference(f"{name}: {value}", result.file.path)
    result.leave(name)


def _template(result: Conversion, name: str, value: Any) -> None:
    if isinstance(value, str) and value.endswith((".jinja", ".jinja2", ".j2")) and len(value) < 1000:
        result.put("template", value, name)
    else:
        result.leave(name)


def _template_variable(result: Conversion, name: str, value: Any) -> None:
    variables = dict(result.settings.pop("template_vars", {}))
    result.put("template_vars", {**variables, other_tools.plain(name): value}, name)


def _val_split(result: Conversion, name: str, value: Any) -> None:
    if isinstance(value, int | float) and value < 1:
        result.put("val_split", float(value), name)
    else:
        reason = f"{other_tools.answer(name, flags=False)}; it is left at {Config().data.val_split}"
        result.leave(name, reason, "val_split")


def _all_linear(result: Conversion, name: str, value: Any) -> None:
    """Axolotl trains all of them beside those that it is given."""
    result.settings.pop("targets", None)
    result.put("targets", "all_linear", name)


def _new_tokens(result: Conversion, name: str, value: Any) -> None:
    result.put("new_tokens", value if isinstance(value, list) else str(value).split(","), name)


def _init(result: Conversion, name: str, value: Any) -> None:
    if value in (True, "gaussian"):
        result.put("init", "kaiming" if value is True else value, name)
    else:
        result.leave(name)


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


def _cpu(result: Conversion, name: str, value: Any) -> None:
    result.put("device", "cpu", name)


_FUNCTIONS: dict[str, Callable[[Conversion, str, Any], None]] = {
    "adapter_kind": _adapter_kind,
    "all_linear": _all_linear,
    "cpu": _cpu,
    "four_bits": _four_bits,
    "init": _init,
    "last_turn": _last_turn,
    "least_lr": _least_lr,
    "method": _method,
    "new_tokens": _new_tokens,
    "precision": _precision,
    "stage": _stage,
    "template": _template,
    "template_variable": _template_variable,
    "tracker": _tracker,
    "val_split": _val_split,
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
    for name, value in result.file.given.items():
        function = other_tools.CONVERTED_BY.get(other_tools.plain(str(name)))
        if function == "batch" and isinstance(value, int) and value > 0:
            sizes[name] = value
        elif function == "warmup":
            _warmup(result, name, value)
        elif function == "batch":
            result.leave(name)
    given, defaults = result.file.given, result.defaults
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


def _warmup(result: Conversion, name: str, value: Any) -> None:
    steps = result.settings.get("max_steps", 0)
    if value is None or (value == 0 and "warmup" in result.settings):
        result.off.append(name)
    elif isinstance(value, int | float) and 0 <= value < 1:
        result.put("warmup", float(value), name)
    elif isinstance(value, int) and steps:
        result.put("warmup", min(1.0, round(value / steps, 4)), f"{name} {value} of max_steps {steps}")
    else:
        left = result.settings.get("warmup", Config().optim.warmup)
        reason = f"here it is a share of all steps, whose number only the data decides; warmup is left at {left}"
        result.leave(name, reason, "warmup")


def _add_defaults(result: Conversion) -> None:
    """The other tool's defaults where they differ from ours."""
    ours, defaults = Config().flat(), result.defaults
    loads = {name: value for name, value in result.file.given.items() if str(name).startswith("load_in")}
    method = result.settings.get("method", defaults.get("method", "lora"))
    for name, value in defaults.items():
        given = name in result.settings or name in result.not_taken or name not in ours
        if given or (name in _OF_LORA and method != "lora") or (name == "val_split" and "eval_data" in result.settings):
            continue
        unquantised = method == "full" or any((key == "load_in_4bit") != bool(loads[key]) for key in loads)
        if value != ours[name] and not (name == "base_dtype" and unquantised):
            result.put(name, value, f"{result.title}'s default")
