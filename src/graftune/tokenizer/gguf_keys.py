"""Reads a GGUF file's tokenizer keys with their types checked: a wrong value is refused in one sentence.

Purpose: a vocabulary is the part of a GGUF file most often damaged by converters, and a wrong one trains without an
error. Method: every key is read through `Keys`, which names the key, the fault and the way out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graftune.errors import GraftuneError

_PREFIX = "tokenizer.ggml."
_FIX = "convert the model again with a recent llama.cpp, or use its Hugging Face folder as the base"
_REQUIRED: Any = object()


class Keys:
    """The keys `tokenizer.ggml.*` of one file's metadata."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata

    def fault(self, key: str, what: str, fix: str = _FIX) -> GraftuneError:
        return GraftuneError(what, where=f"GGUF key {_PREFIX}{key}", fix=fix)

    def read(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        value = self.metadata.get(_PREFIX + key)
        if value is None:
            if default is _REQUIRED:
                raise self.fault(key, "the key is missing")
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fault(key, f"the value is {type(value).__name__}, not {kind.__name__}")
        return value

    def read_list(self, key: str, kind: type, default: Any = _REQUIRED) -> list[Any]:
        values = self.read(key, list, default)
        accepted = {int, float} if kind is float else {kind}
        if not set(map(type, values)) <= accepted:
            position, wrong = next((at, type(value)) for at, value in enumerate(values) if type(value) not in accepted)
            raise self.fault(key, f"entry {position} is {wrong.__name__}, not {kind.__name__}")
        return values

    def tokens(self) -> list[str]:
        # An empty text would match everywhere; llama.cpp gives it the same stand-in.
        tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(self.read_list("tokens", str))]
        if not tokens:
            raise self.fault("tokens", "the vocabulary is empty")
        try:
            "".join(tokens).encode()
        except UnicodeEncodeError as error:
            raise self.fault("tokens", "a token is not valid UTF-8") from error
        if len(set(tokens)) < len(tokens):
            last = {text: id for id, text in enumerate(tokens)}
            first = next(id for id, text in enumerate(tokens) if last[text] != id)
            text = tokens[first]
            raise self.fault("tokens", f"the token {text!r} occurs twice (ids {first} and {last[text]})")
        return tokens

    def per_token(self, key: str, kind: type, tokens: Sequence[str], default: Any = _REQUIRED) -> list[Any]:
        """A list with one entry for each token."""
        values = self.read_list(key, kind, default)
        if len(values) != len(tokens):
            raise self.fault(key, f"there are {len(values)} entries for {len(tokens)} tokens")
        return values

    def merges(self, vocabulary: Mapping[str, int], *, raw: bool = False) -> list[tuple[str, str]]:
        """The pairs in order of rank. A pair listed twice keeps its first rank.

        `raw`: pieces spell a blank as U+2581. Converters list runs of blanks as tokens with real ones, which are found
        before any merging, so that a merge into such a run has no token; it is skipped.
        """
        pairs: dict[tuple[str, str], None] = {}
        for position, line in enumerate(self.read_list("merges", str)):
            at = line.find(" ", 1)  # from the second character on: a piece may itself be a blank
            left, right = line[:at], line[at + 1 :]
            if at > 0 and left in vocabulary and right in vocabulary and left + right in vocabulary:
                pairs[left, right] = None
            elif not (raw and at > 0 and (left + right).replace("\u2581", " ") in vocabulary):
                raise self.fault(
                    "merges", f"merge {position} ({line!r}) is not a pair of tokens whose joint text is a token"
                )
        if not pairs and any(len(text) > 1 for text in vocabulary):
            raise self.fault("merges", "the list is empty, so that no token longer than one byte could ever be made")
        return list(pairs)

    def token_id(self, name: str, size: int, default: int | None = None) -> int | None:
        key = f"{name}_token_id"
        id = self.read(key, int, None)
        if id is None:
            return default if default is not None and default < size else None
        if not 0 <= id < size:
            raise self.fault(key, f"id {id} is outside the vocabulary of {size} tokens")
        return id

    def wanted(self, key: str, default: bool, id: int | None) -> bool:
        """Whether the model expects the token `id` around its text: as the file says, else the default."""
        stated = self.read(key, bool, None)
        if stated and id is None:
            raise self.fault(key, f"the file asks for {key} but names no such token")
        return id is not None and (default if stated is None else stated)
