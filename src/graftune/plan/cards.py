"""GPUs by name, for plans made on another machine: memory as CUDA reports it, compute capability, multiprocessors and
L2 cache; and the rates of compute and links, from which a plan says whether fetched weights arrive in time:

    bytes / the link's rate        2 * parameters * tokens / the card's rate, times SUSTAINED

A forward pass and a backward pass fetch the same bytes and, with frozen weights, compute about the same.

The numbers are published ones; this project has run only on the H200. The memory is an estimate of what the driver and,
on server cards, error correction leave of the nominal size. A GPU of this machine is queried instead; --memory
overrides the table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.kernels.rehearsal import Device
from graftune.observe.memory import human_bytes
from graftune.plan.counting import MIB
from graftune.weights.base import Base
from graftune.weights.placement import Placement, held_bytes, table_bytes

SUSTAINED = 0.6  # share of the published rate that long products reach


@dataclass(frozen=True)
class Card:
    """The GPU that a plan is for, in this machine or another: some kernels size their grids and buffers by it."""

    device: Device
    free: int
    total: int
    rate: float = 0.0  # FLOP/s, published; 0: unknown
    link: float = 0.0  # bytes/s from host memory
    peers: float = 0.0  # bytes/s from other cards


def _card(
    name: str,
    gib: float,
    capability: tuple[int, int],
    processors: int,
    cache_mib: int,
    tflops: float,
    link: float,
    peers: float = 0.0,
) -> Card:
    """`tflops`: bf16 (fp16 before Ampere) with sums in fp32, dense. `link`: GB/s from pinned host memory, about four
    fifths of PCIe's rate. `peers`: GB/s from other cards of the machine, over NVLink; 0: over the same link."""
    device, memory = Device("cuda", name, capability, processors, cache_mib * MIB, here=False), int(gib * 1024 * MIB)
    return Card(device, memory, memory, rate=tflops * 1e12, link=link * 1e9, peers=(peers or link) * 1e9)


CARDS = {
    "t4": _card("T4", 14.5, (7, 5), 40, 4, 65, 12),
    "2080ti": _card("RTX 2080 Ti", 10.7, (7, 5), 68, 5, 54, 12),
    "v100-16": _card("V100 16GB", 15.7, (7, 0), 80, 6, 112, 12, 120),
    "v100": _card("V100 32GB", 31.7, (7, 0), 80, 6, 112, 12, 120),
    "a100-40": _card("A100 40GB", 39.3, (8, 0), 108, 40, 312, 25, 250),
    "a100": _card("A100 80GB", 79.1, (8, 0), 108, 40, 312, 25, 250),
    "a10": _card("A10", 22.0, (8, 6), 72, 6, 125, 25),
    "a10g": _card("A10G", 22.0, (8, 6), 80, 6, 70, 25),
    "a40": _card("A40", 44.3, (8, 6), 84, 6, 150, 25),
    "a6000": _card("RTX A6000", 47.4, (8, 6), 84, 6, 155, 25),
    "3060": _card("RTX 3060 12GB", 11.6, (8, 6), 28, 3, 25, 25),
    "3080": _card("RTX 3080 10GB", 9.6, (8, 6), 68, 5, 60, 25),
    "3090": _card("RTX 3090", 23.5, (8, 6), 82, 6, 71, 25),
    "4060ti": _card("RTX 4060 Ti 16GB", 15.5, (8, 9), 34, 32, 44, 12),
    "4070": _card("RTX 4070", 11.6, (8, 9), 46, 36, 58, 25),
    "4080": _card("RTX 4080", 15.6, (8, 9), 76, 64, 97, 25),
    "4090": _card("RTX 4090", 23.5, (8, 9), 128, 72, 165, 25),
    "l4": _card("L4", 22.0, (8, 9), 58, 48, 121, 25),
    "l40": _card("L40", 44.3, (8, 9), 142, 96, 181, 25),
    "l40s": _card("L40S", 44.3, (8, 9), 142, 96, 362, 25),
    "6000ada": _card("RTX 6000 Ada", 47.4, (8, 9), 142, 96, 364, 25),
    "h100": _card("H100 80GB", 79.1, (9, 0), 132, 50, 989, 50, 350),
    "h200": _card("H200", 139.8, (9, 0), 132, 60, 989, 50, 350),
    "gh200": _card("GH200 96GB", 94.5, (9, 0), 132, 50, 989, 350, 350),
    "b200": _card("B200", 178.3, (10, 0), 148, 126, 2250, 50, 700),
    "5070ti": _card("RTX 5070 Ti", 15.5, (12, 0), 70, 48, 88, 50),
    "5080": _card("RTX 5080", 15.5, (12, 0), 84, 64, 113, 50),
    "5090": _card("RTX 5090", 31.3, (12, 0), 170, 96, 210, 50),
    "pro6000": _card("RTX PRO 6000", 94.9, (12, 0), 188, 128, 503, 50),
}
_PLAIN = re.compile(r"nvidia|geforce|quadro|rtx|tesla|gpu|sxm\d?|pcie|hbm\w*|blackwell|workstation")


def find(asked: str) -> Card:
    """The card with this name, all of its memory free. Any spelling: `4090`, `RTX 4090`, `nvidia a100 80GB`."""
    name = re.sub(r"(\d)\s*gi?b\b", r"\1", _PLAIN.sub(" ", asked.lower()))
    parts = [part for part in re.split(r"[\s_-]+", name) if part]
    for key in ("-".join(parts), "".join(parts)):
        if key in CARDS:
            return CARDS[key]
    card = CARDS.get("".join(parts[:-1]))
    if card is not None and parts[-1].isdigit() and abs(card.total / (int(parts[-1]) << 30) - 1) < 0.12:
        return card  # the name ends with the card's memory size
    raise GraftuneError(
        f"--gpu is {asked!r}, which is not known here",
        fix=f"give one of {', '.join(CARDS)}, or set device to cuda and give its memory, as in --memory 24GiB",
    )


def transfer_note(base: Base, placement: Placement, compute: torch.dtype, tokens: int, card: Card | None) -> str:
    """A sentence that says whether computing a micro-batch hides the transfer of fetched weights; empty if all weights
    are on the device."""
    if not placement.fetched:
        return ""
    about = base, placement.base_dtype, compute
    moved = held_bytes(*about) - table_bytes(*about)  # a tied table stays; of two, a pass fetches one
    place = "host memory" if placement.on_host else f"{placement.ranks} ranks"
    passes = "in a forward pass, in a backward pass and for every token of an answer"
    sentence = f"frozen weights come from {place}, {human_bytes(moved)} {passes}"
    if card is None or not card.link or not card.rate:
        return f"{sentence}; how long that takes here is not known"
    own = moved / max(1, placement.ranks)
    from_host, from_ranks = own / card.link, (moved - own) / card.peers
    link = max(from_host if placement.on_host else 0.0, from_ranks if placement.ranks else 0.0)  # of the slower one
    spec = base.spec
    layers = sum(count * sum(part.active_values for part in kind.parts) for kind, count in spec.kinds.items())
    computing = 2 * (layers + spec.vocab * spec.width) * tokens / (SUSTAINED * card.rate)
    sentence += f": {link:.2g} s over the link, where {tokens} tokens compute for about {computing:.2g} s"
    if link <= computing:
        return f"{sentence}, so the transfer hides behind the compute"
    enough = ceil_div(int(tokens * link / computing), 512) * 512
    return f"{sentence}, so a step waits for the link; from about {enough} tokens a micro-batch on it would not"
