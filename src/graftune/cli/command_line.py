"""Rewrites a command line to the flags that the commands declare.

Users have habits from other tools: underscores in flags, `--bf16 True`, `--targets q_proj v_proj`, other names. A word
with one possible meaning is rewritten here, before cyclopts parses it, and a note says which setting another tool's
name became. Unknown options are answered here, all at once. Everything else is unchanged, and failures.py words
cyclopts' errors.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graftune.cli.settings import flag
from graftune.errors import GraftuneError
from graftune.settings import other_tools
from graftune.settings.config import leaves, section_of
from graftune.settings.targets import TARGET_SHORTHANDS, is_target

VERBATIM = ("--prompt", "--system")  # the next word is text, even if it looks like a flag
GLOBAL = ("--verbose",)
HELP = ("--help", "-h", "--version")
HELP_ALL = "--help-all"  # --help with every setting


@dataclass
class CommandLine:
    """The command's name with its arguments, and notes about them for the user."""

    arguments: list[str]
    notes: list[str] = field(default_factory=list)
    verbose: bool = False
    help_all: bool = False

    def has(self, name: str) -> bool:
        before = self.arguments[: self.arguments.index("--")] if "--" in self.arguments else self.arguments
        return name in before


def read_line(arguments: Sequence[str], flags_of: Callable[[str], set[str]]) -> CommandLine:
    """`flags_of` returns the flags of a command; empty for an unknown one."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    verbose, help_all = any(word in GLOBAL for word in words[:end]), HELP_ALL in words[:end]
    line = CommandLine([], verbose=verbose, help_all=help_all)
    words[:end] = ["--help" if word == HELP_ALL else word for word in words[:end]]
    words = [word for place, word in enumerate(words) if place >= end or word not in GLOBAL]
    command = next((word for word in words if not word.startswith("-")), "")
    known = flags_of(command)
    if not known:
        line.arguments = words
        return line
    spelled: dict[str, str] = {}
    unknown: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--":
            line.arguments += [word, *words]
            break
        if not word.startswith("--"):
            line.arguments.append(word)
            continue
        typed, equals, value = word.partition("=")
        name = _ours(typed, known)
        if spelled.get(name, typed) != typed:
            raise GraftuneError(f"{spelled[name]} and {typed} are the same setting", fix="give one of the two")
        if name != typed and name != typed.replace("_", "-"):
            line.notes.append(f"{typed} is taken as {name}")
        spelled[name] = typed
        if name not in known and name not in HELP:
            unknown.append(typed)
        line.arguments += _with_values(name, equals + value, words)
    if unknown and not any(line.has(word) for word in HELP):
        raise _unknown_options(command, unknown, sorted(known))
    return line


def _unknown_options(command: str, typed: list[str], known: list[str]) -> GraftuneError:
    answers = [_instead(name, known) for name in typed]
    see = f"graftune {command} --help lists the options"
    if len(typed) == 1:
        return GraftuneError(f"unknown option {typed[0]}", fix=answers[0] or see)
    lines = [f"{name}: {answer or 'there is nothing like it'}" for name, answer in zip(typed, answers, strict=True)]
    return GraftuneError(f"{len(typed)} unknown options", fix=see, lines=lines)


def _instead(typed: str, known: list[str]) -> str:
    """What to use instead of an option that this command does not have."""
    ours = other_tools.same(typed) or other_tools.plain(typed)
    section = section_of().get(ours)
    if section is not None and flag(ours) not in known:
        return f"that is {flag(ours)} of graftune {'rl' if section == 'rl' else 'train'}"
    return other_tools.advice(typed, [name for name in known if name.startswith("--")], flags=True)


def _ours(typed: str, known: set[str]) -> str:
    """The flag of ours that has this meaning; the typed word if there is none."""
    hyphened = typed.replace("_", "-")
    if typed in known or hyphened in known:
        return typed if typed in known else hyphened
    same = other_tools.same(typed)
    return flag(same) if same and flag(same) in known else typed


def _with_values(name: str, given: str, words: list[str]) -> list[str]:
    """The flag with its values, which are removed from `words`."""
    if name in VERBATIM and not given and words:
        return [name, words.pop(0)]
    if name in _SWITCHES and not given and words and words[0].lower() in ("true", "false"):
        return [f"{name}={words.pop(0).lower()}"]
    fits = _LISTS.get(name)
    if fits is None:
        return [name + given]
    values = [given[1:]] if given else []
    while words and not words[0].startswith("-") and (not values or fits(words[0])):
        values.append(words.pop(0))
    return [f"{name}={','.join(values)}"] if values else [name]


def _is_target(word: str) -> bool:
    """Names of projections, also misspelled ones: a base or a file is not named like that."""
    parts = [part for part in word.split(",") if part]
    return all(is_target(part) or part in TARGET_SHORTHANDS or part.endswith("_proj") for part in parts)


def _is_pair(word: str) -> bool:
    return re.match(r"[A-Za-z_]\w*=", word) is not None


_SWITCHES = {flag(leaf.name) for leaf in leaves() if leaf.type is bool}
_LISTS: dict[str, Callable[[str], bool]] = {
    flag("targets"): _is_target,
    **{flag(leaf.name): _is_pair for leaf in leaves() if typing.get_origin(leaf.type) is dict},
}
