"""Reads the settings of another tool's file: YAML, JSON, a shell command line, or a Python script or notebook.

A script is parsed and never run. Its settings are the keyword arguments of the calls that every such script has
(from_pretrained, get_peft_model, SFTConfig ...), with literal values or names to which the script assigns one. A value
that only running the script would give is reported as such.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.io.json_file import NotJson, parse_json
from graftune.io.yaml_file import read_text, read_yaml
from graftune.settings import other_tools
from graftune.settings.values import scalar

LARGEST_SCRIPT = 16 << 20  # bytes: a notebook has its images inside
COMPUTED = "its value is computed when the script runs; set it by hand"
# Calls whose keyword arguments are settings, and the names of the arguments that may come without one.
_CALLS = {
    "from_pretrained": ("model_name",),
    "get_peft_model": ("model",),
    "load_dataset": ("dataset_name", "dataset_config"),
    "get_chat_template": ("tokenizer", "chat_template"),
    "train_on_responses_only": ("trainer",),
    **dict.fromkeys(("SFTConfig", "TrainingArguments", "UnslothTrainingArguments"), ("output_dir",)),
    **dict.fromkeys(("SFTTrainer", "UnslothTrainer", "LoraConfig", "BitsAndBytesConfig"), ("model",)),
}
# Calls that are settings themselves.
_SWITCHES = {name: name for name in ("get_peft_model", "train_on_responses_only")} | {"LoraConfig": "get_peft_model"}
_RENAMED = {"name": "dataset_config", "path": "dataset_name", "split": "dataset_train_split"}  # of load_dataset
# Objects that are passed from one call to another.
_OBJECTS = {
    *("model", "tokenizer", "processing_class", "args", "trainer", "train_dataset", "eval_dataset", "peft_config"),
    *("quantization_config", "bnb_config", "instruction_part", "response_part", "token", "mapping", "return_tensors"),
}
_COMMANDS = {("trl", "sft"), ("llamafactory-cli", "train"), ("lmf", "train")}
# TRL's other commands and trainers (DPOTrainer).
_PREFERENCE = {
    *("dpo", "kto", "orpo", "grpo", "ppo", "rloo", "reward", "cpo", "bco", "gkd", "xpo", "prm", "onlinedpo", "nashmd"),
}


@dataclass
class ToolFile:
    """The settings in a tool's file. `given`: names and values, in the file's order. `left_out`: settings that could
    not be read, with the reason."""

    path: str
    tool: str
    given: dict[str, Any] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)  # the functions of a script that were read

    def put(self, name: str, value: Any) -> None:
        """The first of several values is taken."""
        if self.given.setdefault(name, value) != value:
            self.left_out.append((name, f"it is given again as {value!r}, and the first value is taken"))


def read_tool_file(path: str, tool: str | None = None) -> ToolFile:
    """Read a file of another tool. `tool`: the one that the user named; None: recognised by the names in the file."""
    ending = Path(path).suffix.lower()
    if ending in (".py", ".ipynb"):
        found = _script(path)
    elif ending in (".yaml", ".yml", ".json"):
        found = ToolFile(path, "", dict(read_object(path) if ending == ".json" else read_yaml(path)))
    else:
        found = _command_line(path)
    found.tool = tool or found.tool or other_tools.tool_of(found.given) or ""
    if not found.tool:
        raise GraftuneError(
            "has no setting by which its tool could be recognised",
            where=path,
            fix="say which tool it is for with `--from`: axolotl, llama-factory, trl or unsloth",
        )
    return found


def read_object(path: str) -> dict[str, Any]:
    try:
        value = parse_json(read_text(path, LARGEST_SCRIPT))
    except NotJson as error:
        raise GraftuneError(str(error), where=path, fix="fix the file") from None
    if not isinstance(value, dict):
        raise GraftuneError("must hold keys and values", where=path, fix="give the settings as one object")
    return value


# Command lines


def _command_line(path: str) -> ToolFile:
    """The flags of the last command line in the file that has any. `--config FILE` is read too; flags override it."""
    text = re.sub(r"\\\r?\n", " ", read_text(path))
    variables: dict[str, str] = {}
    words: list[str] = []
    for line in text.splitlines():
        try:
            parts = shlex.split(_expanded(line, variables), comments=True)
        except ValueError:  # a quote that is never closed
            continue
        while parts and (match := re.fullmatch(r"(\w+)=(.*)", parts[0], re.S)):
            variables[match[1]] = match[2]
            parts = parts[1:]
        words = parts if any(part.startswith("--") for part in parts) else words
    if not words:
        raise GraftuneError(
            "holds no command line with --flags", where=path, fix="give a .yaml, .json, .py, .ipynb or .sh file"
        )
    start = _after_command(words, path)
    found = ToolFile(path, "llama-factory" if {"llamafactory-cli", "lmf"} & set(words[:start]) else "")
    for name, _ in _flags([word for word in words[:start] if not word.endswith(".py")]):
        found.left_out.append((name, other_tools.answer(name, flags=False) or "it is a flag of the launcher"))
    for name, values in _flags(words[start:]):
        if name == "config" and isinstance(values, str):
            beside = next((p for p in (Path(values), Path(path).parent / values) if p.is_file()), Path(values))
            found.given = read_yaml(beside) | found.given
        else:
            found.given[name] = values
    return found


def _expanded(line: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), line)


def _after_command(words: list[str], path: str) -> int:
    """Where the flags of the training program start: a launcher before it has flags of its own."""
    for place, word in enumerate(words):
        if place and words[place - 1] == "trl" and word in _PREFERENCE:
            raise preference(f"trl {word}", path)
        if word.endswith(".py") or (place and (words[place - 1], word) in _COMMANDS):
            return place + 1
    return 0


def _flags(words: list[str]) -> Iterator[tuple[str, Any]]:
    words = [*words, "--"]
    name, values = "", list[Any]()
    for word in words:
        if not word.startswith("--"):
            values.append(scalar(word))
            continue
        if name:
            yield name, values[0] if len(values) == 1 else values or True
        typed, equals, value = word.removeprefix("--").partition("=")
        name, values = other_tools.plain(typed), [scalar(value)] if equals else []


def preference(what: str, path: str) -> GraftuneError:
    return GraftuneError(
        f"{what} is not supervised fine-tuning",
        where=path,
        fix="write its settings by hand: loss chooses dpo, simpo, orpo, kto and others (docs/preferences.md), and "
        "graftune rl trains on rewards (docs/rl.md)",
    )


# Scripts


class _Unknown(Exception):
    """A value that only running the script would give."""


def _script(path: str) -> ToolFile:
    found = ToolFile(path, "")
    tree = _notebook(found) if path.endswith(".ipynb") else _parsed(read_text(path, LARGEST_SCRIPT))
    if tree is None:
        raise GraftuneError("is not valid Python", where=path, fix="fix the file")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    trainers = [name for name in names if name.endswith("Trainer")]
    if wrong := sorted(name for name in trainers if name.removesuffix("Trainer").lower() in _PREFERENCE):
        raise preference(wrong[0], path)
    found.tool = "unsloth" if any(re.fullmatch(r"Fast\w*Model", name) for name in names) else "trl"
    constants = _constants(tree)
    for call in _calls(tree):
        if (function := _name(call.func)) in _CALLS and not _loads_tokenizer(call):
            found.calls.add(function)
            _read_call(found, call, function, constants)
        elif function == "map" and isinstance(call.func, ast.Attribute):  # of a data set
            found.calls.add(function)
    if not found.calls - {"map"}:
        raise GraftuneError(
            "has no call whose settings could be read", where=path, fix=f"it needs one of {', '.join(_CALLS)}"
        )
    if "map" in found.calls:
        found.left_out.append(("map(...)", other_tools.answer("formatting_func", flags=False) or ""))
    return found


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Outer calls before inner ones, in the order of the text."""
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)


def _parsed(text: str) -> ast.Module | None:
    """The syntax tree; None if the text is not valid Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _notebook(found: ToolFile) -> ast.Module:
    """The code of a notebook without its shell commands. A cell that is not valid Python is left out."""
    module = ast.Module([], [])
    cells = read_object(found.path).get("cells")
    for number, cell in enumerate(cells if isinstance(cells, list) else [], 1):
        source = cell.get("source") if isinstance(cell, dict) and cell.get("cell_type") == "code" else ""
        text = "".join(map(str, source)) if isinstance(source, list) else str(source)
        tree = _parsed(re.sub(r"^(\s*)[%!](?:.*\\\n)*.*", r"\1pass", text, flags=re.M))
        if tree is None:
            found.left_out.append((f"cell {number}", "it is not valid Python and was not read"))
        else:
            module.body += tree.body
    return module


def _read_call(found: ToolFile, call: ast.Call, function: str, constants: dict[str, ast.expr]) -> None:
    if function in _SWITCHES:
        found.given.setdefault(_SWITCHES[function], True)
    second = function == "load_dataset" and "dataset_name" in found.given
    positional = zip(_CALLS[function], call.args, strict=False)
    keywords = list[tuple[str, ast.expr]]()
    for keyword in call.keywords:
        try:
            keywords += [(keyword.arg, keyword.value)] if keyword.arg else _entries(keyword.value, constants).items()
        except _Unknown:
            found.left_out.append((f"**{ast.unparse(keyword.value)}", f"what it holds is not known: {COMPUTED}"))
    for name, node in [*positional, *keywords]:
        name = _RENAMED.get(name, name) if function == "load_dataset" else name
        try:
            value = _value(node, constants)
        except _Unknown:
            if name not in _OBJECTS:
                found.left_out.append((name, COMPUTED))
            continue
        if second:
            found.left_out.append((f"{name}={value!r}", "the script loads another data set, and the first is taken"))
        elif name not in _OBJECTS or (name == "model" and isinstance(value, str)):
            found.put("model_name" if name == "model" else name, value)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The values that the script assigns to names, the last of each, with the entries that it adds to a dict. A name
    whose object is changed by a method has no known value."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            target = node.target
        if isinstance(target, ast.Name):
            found[target.id] = node.value  # type: ignore[attr-defined]
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id in found:
            before = found[target.value.id]
            found[target.value.id] = ast.Dict([None, target.slice], [before, node.value])  # type: ignore[attr-defined]
    changed = [_name(call.func.value) for call in _calls(tree) if isinstance(call.func, ast.Attribute)
               and call.func.attr in ("update", "setdefault", "pop", "append", "extend")]  # fmt: skip
    changed += [_name(node.target) for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
    return {name: value for name, value in found.items() if name not in changed}


def _entries(node: ast.expr, constants: dict[str, ast.expr], depth: int = 5) -> dict[str, ast.expr]:
    """The names and values of `**node`."""
    if not depth:
        raise _Unknown
    if isinstance(node, ast.Name) and node.id in constants:
        return _entries(constants[node.id], constants, depth - 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _entries(node.left, constants, depth - 1) | _entries(node.right, constants, depth - 1)
    pairs: list[tuple[ast.expr | None, ast.expr]]
    if isinstance(node, ast.Dict):
        pairs = list(zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.Call) and _name(node.func) == "dict" and len(node.args) < 2:
        given = [(ast.Constant(keyword.arg) if keyword.arg else None, keyword.value) for keyword in node.keywords]
        pairs = [*((None, argument) for argument in node.args), *given]
    else:
        raise _Unknown
    found: dict[str, ast.expr] = {}
    for key, value in pairs:
        found |= _entries(value, constants, depth - 1) if key is None else {str(_value(key, constants)): value}
    return found


_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def _value(node: ast.expr, constants: dict[str, ast.expr], depth: int = 5) -> Any:
    if isinstance(node, ast.Name) and node.id in constants and depth:
        return _value(constants[node.id], constants, depth - 1)
    if isinstance(node, ast.Attribute) and _name(node.value) == "torch":
        return node.attr  # torch.bfloat16
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and depth:
        sides = [_value(side, constants, depth - 1) for side in (node.left, node.right)]
        if not all(type(side) in (int, float) and abs(side) < 1e9 for side in sides):
            raise _Unknown
        try:
            return _ARITHMETIC[type(node.op)](*sides)
        except ZeroDivisionError:
            raise _Unknown from None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise _Unknown from None


def _name(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _loads_tokenizer(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and _name(call.func.value) in ("AutoTokenizer", "AutoProcessor")
