"""The names of a tensor: ours is Hugging Face's without the prefix of the text model. The families hold the names that
differ, and GGUF's.

layers.3.self_attn.q_proj.weight                        ours
model.layers.3.self_attn.q_proj.weight                  a text model
model.language_model.layers.3.self_attn.q_proj.weight   the text model of a text-and-vision checkpoint
language_model.model.layers.3.self_attn.q_proj.weight   the same in older files, with language_model.lm_head.weight
blk.3.attn_q.weight                                     a GGUF

Adapters have the names of the class that they are attached to, behind `base_model.model.`: transformers' modules have
no `language_model.model.`, whatever the file says, but adapters of older versions do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PEFT_PREFIX = "base_model.model."
_HEAD = "lm_head."


@dataclass(frozen=True)
class NamingScheme:
    """How a file names the tensors of its text model."""

    prefix: str = "model."
    head: str = _HEAD

    def of(self, ours: str) -> str:
        return self.head + ours.removeprefix(_HEAD) if ours.startswith(_HEAD) else self.prefix + ours

    def ours(self, name: str) -> str | None:
        """Our name of a tensor; None for one outside the text model."""
        if name.startswith(self.head):
            return _HEAD + name.removeprefix(self.head)
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None


TEXT = NamingScheme()
MULTIMODAL = NamingScheme("model.language_model.")
OLDER = NamingScheme("language_model.model.", "language_model.lm_head.")
SCHEMES = (MULTIMODAL, OLDER, TEXT)  # TEXT last: its prefix is the beginning of another


def scheme_of(stored: Iterable[str]) -> NamingScheme:
    """The scheme of a folder's tensors, by the names of its layers."""
    stored = list(stored)
    return next((s for s in SCHEMES if any(n.startswith(f"{s.prefix}layers.") for n in stored)), TEXT)


def from_hf(name: str) -> str:
    """Our name of a tensor that is named by any of the schemes."""
    return next((ours for scheme in SCHEMES if (ours := scheme.ours(name)) is not None), name)


def to_peft(ours: str, scheme: NamingScheme = TEXT) -> str:
    return PEFT_PREFIX + scheme.of(ours)


def from_peft(name: str) -> str:
    return from_hf(name.removeprefix(PEFT_PREFIX))
