"""The projections that adapters may be on: their names, the shorthands for several of them, and paths."""

from __future__ import annotations

from collections.abc import Collection

from graftune.errors import GraftuneError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Projections that some families fuse, where the adapter is on the fused one: its name, and its parts in other families.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Names in the gated delta nets of Qwen3.5 and Qwen3-Next, beside out_proj.
DELTA_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba")
# LFM's and Granite 4's.
OTHER_PROJECTIONS = ("in_proj", "out_proj", "w1", "w3", "w2", "g_proj", "input_linear", "output_linear")
PER_LAYER_PROJECTIONS = ("per_layer_input_gate", "per_layer_projection")  # Gemma 4's
TARGETS = (*PROJECTIONS, *FUSED, *OTHER_PROJECTIONS, *DELTA_PROJECTIONS, *PER_LAYER_PROJECTIONS)
TARGET_SHORTHANDS = {
    "all_linear": PROJECTIONS,
    "attention": PROJECTIONS[:4],
    "qv": ("q_proj", "v_proj"),
    "mlp": PROJECTIONS[4:],
}
PARTS = {"all_linear", "attention", "mlp"}  # shorthands for whatever projections a layer has there
SPELLINGS = {"all-linear": "all_linear", "all": "all_linear"}  # PEFT's and LLaMA-Factory's


def is_target(name: str) -> bool:
    """Whether it is the name of a projection, alone or behind the modules that it is in (self_attn.gate_proj)."""
    *modules, last = name.split(".")
    return last in TARGETS and all(module.isidentifier() for module in modules)


def ordered_targets(names: Collection[str]) -> tuple[str, ...]:
    """The names in the order of TARGETS; paths follow the name that they end in."""
    return tuple(sorted(names, key=lambda name: (TARGETS.index(name.rpartition(".")[2]), "." in name, name)))


def expand_targets(targets: tuple[str, ...], where: str | None = None) -> tuple[str, ...]:
    """Shorthands -> names and paths of projections, in the model's own order."""
    if not targets:
        raise GraftuneError("targets is empty", where=where, fix="name at least one projection, or all_linear")
    wanted: set[str] = set()
    for target in targets:
        if target in TARGET_SHORTHANDS:
            wanted.update(TARGET_SHORTHANDS[target])
        elif is_target(target):
            wanted.add(target)
        else:
            raise GraftuneError(
                f"targets: unknown projection {target!r}",
                where=where,
                fix=f"use {', '.join(TARGETS)} or {', '.join(TARGET_SHORTHANDS)}",
            )
    return ordered_targets(wanted)
