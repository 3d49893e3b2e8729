"""Converts PEFT adapters whose modules differ to one rank and one scale, which is what the engine trains.

PEFT may give each module its own rank and alpha (rank_pattern, alpha_pattern), choose modules by expressions and leave
some out. The tensors show the modules and their ranks; the settings give only the alphas. Smaller ranks are padded with
zeros in A and B, which stay zero: for such a rank A x and dy B are zero, and so are both gradients. A scale other than
the most common one is multiplied into B. A module that is missing in some layers gets an adapter of zeros there, which
stays zero for the same reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.model.families import MODULES, short_targets
from graftune.model.lora import targets_of
from graftune.model.spec import ModelSpec
from graftune.settings.targets import TARGETS, is_target, ordered_targets
from graftune.weights import names

MOST_PATTERNS = 4000  # one for each module of a model, and more
SECONDS = 1.0  # for an expression and a name; real ones take microseconds


def with_uniform_rank(
    tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], refuse: Callable[[str], GraftuneError], where: str
) -> tuple[dict[str, torch.Tensor], int, float, tuple[str, ...], bool]:
    """(tensors, rank, alpha, targets, whether modules may be missing in some layers). `values`: PEFT's settings."""
    downs = {n.removesuffix(".lora_A.weight"): t for n, t in tensors.items() if n.endswith(".lora_A.weight")}
    for module in downs:
        first, _, rest = module.partition(".")
        number, _, inner = rest.partition(".")
        parent, _, target = inner.rpartition(".")
        if first != "layers" or not number.isdecimal() or parent not in MODULES.get(target, ()):
            raise refuse(f"adapters on {module}")
    if not downs:
        raise GraftuneError("holds no A and B of any module", where=where, fix="copy the adapter again")
    ranks = {module: len(down) for module, down in downs.items()}
    alphas = _values(values.get("alpha_pattern"), ranks, values["lora_alpha"])
    rank, found = max(ranks.values()), {module.split(".", 2)[2] for module in downs}
    named = values.get("target_modules")
    words = {path.rpartition(".")[2] for path in found}
    listed = {each for each in named if is_target(each)} if isinstance(named, list) else set()
    listed = words if named == "all-linear" else listed
    partial = bool(
        values.get("exclude_modules")
        or values.get("layers_to_transform") is not None
        or (isinstance(named, str) and named != "all-linear")
        or (isinstance(named, list) and set(named) - listed)
    )
    listed &= words | found if partial else {*TARGETS} | found
    # If experts exist and have no adapters here, a name means only the dense projections: use those projections' paths.
    nested = {path.rpartition(".")[2] for path in found if path.count(".") > 1}
    listed = (listed - nested) | {path for path in found if path.rpartition(".")[2] in nested}
    others = {path for path in found if not {path, path.rpartition(".")[2]} & listed}
    targets = ordered_targets({*short_targets(others), *listed})
    if len(set(ranks.values())) == len(set(alphas.values())) == 1:
        return dict(tensors), rank, next(iter(alphas.values())), targets, partial

    def per_rank(of: float) -> float:
        return math.sqrt(of) if values.get("use_rslora") else of

    scales = {module: alphas[module] / per_rank(ranks[module]) for module in downs}
    ((usual, _),) = Counter(scale or 1.0 for scale in scales.values()).most_common(1)  # never 0: a divisor below
    made = dict(tensors)
    for module, down in downs.items():
        up = tensors.get(f"{module}.lora_B.weight")
        if up is None or up.dim() != 2 or up.shape[1] != ranks[module]:
            continue  # refused by its shape
        more = rank - ranks[module]
        made[f"{module}.lora_A.weight"] = torch.nn.functional.pad(down, (0, 0, 0, more))
        made[f"{module}.lora_B.weight"] = torch.nn.functional.pad(up * (scales[module] / usual), (0, more))
    return made, rank, usual * per_rank(rank), targets, partial


def filled(tensors: Mapping[str, torch.Tensor], spec: ModelSpec, lora: Any) -> dict[str, torch.Tensor]:
    """The tensors, with zeros where an adapter leaves out a module of its targets."""
    made, targets = dict(tensors), targets_of(spec, lora)
    for layer, kind in enumerate(spec.layers):
        for target, (out, into) in kind.projections.items():
            for matrix, size in (("A", (lora.rank, into)), ("B", (out, lora.rank))) if target in targets else ():
                made.setdefault(f"layers.{layer}.{target}.lora_{matrix}.weight", torch.zeros(size))
    return made


def _values(pattern: Any, modules: Mapping[str, Any], default: float) -> dict[str, float]:
    """The value of each module: that of the first expression that matches the end of its name, as in PEFT. Expressions
    come from an adapter's file and may take for ever: the `regex` package has a time limit, which `re` has not."""
    if not pattern:
        return dict.fromkeys(modules, float(default))
    if not isinstance(pattern, dict) or not all(isinstance(v, int | float) for v in pattern.values()):
        raise ValueError("alpha_pattern is not a table of numbers")
    if len(pattern) > MOST_PATTERNS:
        raise ValueError(f"it has {len(pattern)} patterns")
    import regex

    found = {}
    try:
        keys = [(regex.compile(rf"(.*\.)?({key})$"), float(value)) for key, value in pattern.items()]
        for module in modules:
            paths = (names.TEXT.of(module), names.MULTIMODAL.of(module))
            fitting = (value for key, value in keys if any(key.match(path, timeout=SECONDS) for path in paths))
            found[module] = next(fitting, float(default))
    except (regex.error, OverflowError, RecursionError, TimeoutError) as error:
        raise ValueError(f"a pattern of its modules cannot be matched: {error}") from None
    return found
