"""Reads checked values of a configuration with Hugging Face's keys, and refuses what no family supports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from graftune.errors import GraftuneError

FileConfig = Mapping[str, Any]
MOST_LAYERS = MOST_EXPERTS = 1 << 16  # of a sane file
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}


class Getter:
    """Reads values of a configuration. `spelled` gives the names that they have in the file, for messages."""

    def __init__(self, config: FileConfig, where: str, spelled: Mapping[str, str]):
        self.config, self.where, self.spelled = config, where, spelled

    def whole(self, key: str) -> int:
        """A whole number that must be there and be positive."""
        value = self.config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            name = self.spelled.get(key, key)
            raise GraftuneError(
                f"{name} is {value!r}", where=self.where, fix="it must be there, a whole number above 0"
            )
        return value

    def number(self, key: str, default: float) -> float:
        """A value that may be missing or null."""
        value = self.config.get(key)
        return default if value is None else float(value)

    def experts(self, count_key: str, chosen_key: str) -> tuple[int, int]:
        """How many experts a mixture has, and how many of them are chosen for a token."""
        count, chosen = self.whole(count_key), self.whole(chosen_key)
        if not chosen <= count <= MOST_EXPERTS:
            raise GraftuneError(
                f"chooses {chosen} of {count} experts", where=self.where, fix="download the model again"
            )
        return count, chosen

    def layers(self) -> int:
        count = self.whole("num_hidden_layers")
        if count > MOST_LAYERS:
            raise GraftuneError(
                f"its configuration says {count} layers", where=self.where, fix="download the model again"
            )
        return count

    def by_layer(self, values: Sequence[Any], known: Collection[str] | None = None) -> list[Any]:
        """Checks that a list has one entry for each layer, and only `known` entries where these are given."""
        if len(values) != self.layers() or (known is not None and not set(known).issuperset(values)):
            raise self.refused("kinds of layers")
        return list(values)

    def activation(self) -> str:
        found = self.config.get("hidden_activation") or self.config.get("hidden_act") or "silu"
        if found not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise GraftuneError(f"activation {found!r} is not known", where=self.where, fix=f"known are {known}")
        return ACTIVATIONS[found]

    def refused(self, what: str) -> GraftuneError:
        return GraftuneError(
            f"its configuration makes no sense ({what})", where=self.where, fix="download the model again"
        )


_REFUSED_KEYS = (
    "attention_bias", "attention_out_bias", "mlp_bias", "conv_bias", "use_bias", "use_bidirectional_attention",
)  # fmt: skip


def check_supported(config: FileConfig, where: str, *, bias: bool) -> None:
    """Refuse what no family here computes; `bias`: whether the family's queries, keys and values have one."""
    for key in _REFUSED_KEYS:
        if config.get(key) and not (bias and key == "attention_bias"):
            raise GraftuneError(f"{key} is set, which is not supported", where=where, fix="use a base without it")
