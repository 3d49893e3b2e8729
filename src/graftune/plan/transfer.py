"""Compares the time to fetch the frozen weights of a pass with the time that the pass computes.

    bytes / the link's rate        2 * parameters * tokens / the card's rate

Both rates are published numbers (cards.py), the card's times SUSTAINED, the share that long products reach. A forward
pass and a backward pass fetch the same bytes and, with frozen weights, compute about the same.
"""

from __future__ import annotations

from graftune.arithmetic import ceil_div
from graftune.model.spec import ModelSpec
from graftune.observe.memory import human_bytes
from graftune.plan.cards import Card
from graftune.plan.rehearse import Setup
from graftune.weights.placement import held_bytes, table_bytes

SUSTAINED = 0.6


def sentence(setup: Setup) -> str:
    """A sentence that says whether computing hides the transfer; empty if all weights are on the device."""
    placement, base, card = setup.placement, setup.base, setup.card
    if not placement.fetched:
        return ""
    about = base, placement.base_dtype, setup.runtime.compute
    moved = held_bytes(*about) - table_bytes(*about)  # a tied table stays; of two, a pass fetches one
    whence = "host memory" if placement.on_host else f"{placement.ranks} ranks"
    passes = "in a forward pass, in a backward pass and for every token of an answer"
    said = f"frozen weights come from {whence}, {human_bytes(moved)} {passes}"
    link, rate = _link(moved, placement.on_host, placement.ranks, card), card.rate if card else 0.0
    if not link or not rate:
        return f"{said}; how long that takes here is not known"
    tokens = setup.shape.capacity
    computing = 2 * active_parameters(base.spec) * tokens / (SUSTAINED * rate)
    said += f": {link:.2g} s over the link, where {tokens} tokens compute for about {computing:.2g} s"
    if link <= computing:
        return f"{said}, so the transfer hides behind the compute"
    enough = ceil_div(int(tokens * link / computing), 512) * 512
    return f"{said}, so a step waits for the link; from about {enough} tokens a micro-batch on it would not"


def _link(moved: int, on_host: bool, ranks: int, card: Card | None) -> float:
    """Seconds of a pass on the slower link; 0: unknown."""
    if card is None or not card.link:
        return 0.0
    own = moved / max(1, ranks)
    return max(own / card.link if on_host else 0.0, (moved - own) / card.peers if ranks else 0.0)


def active_parameters(spec: ModelSpec) -> int:
    """Parameters of the projections that a token passes through, and of the head."""
    count = spec.vocab * spec.width
    for kind, layers in spec.kinds.items():
        count += layers * sum(part.active_values for part in kind.parts)
    return count
