"""Stores what TRL and PEFT compute for the preference losses: loss, figures and every LoRA gradient, in fp32 on a CPU.

    PYTHONPATH=src:. python tools/store_preferences.py      with trl 1.16.0, datasets 4.3.0 and peft 0.21.2 installed

TRL is no dependency of the tests: they compare with tests/fixtures/preferences.*, which this writes. The loss is
that of TRL's own `_compute_loss` (DPOTrainer, KTOTrainer); SimPO is that of CPOTrainer's `cpo_loss`. ORPO is the
formula that LLaMA-Factory 0.9.5 documents, -log p(c)/|c| - beta log sigmoid(log odds(c) - log odds(r)).
TRL's `sft` share is a mean over the tokens of a batch and ours a mean per answer: there each pair is a batch of its
own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.losses import preferred
from tests.support import oracle, tiny

from graftune.batch import Example

KINDS = {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "kto_zero": "apo_zero_unpaired"}
FIGURES = {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"}
FIGURES |= {"rewards/accuracies": "accuracy", "kl": "kl"}


def padded(examples: list[Example], prefix: str = "") -> dict[str, torch.Tensor]:
    """Right-padded, as TRL's collators make them."""
    width = max(len(e.tokens) for e in examples)

    def rows(values: Callable[[Example], list[int]]) -> torch.Tensor:
        return torch.tensor([values(e) + [0] * (width - len(e.tokens)) for e in examples])

    return {
        f"{prefix}input_ids": rows(lambda e: e.tokens),
        f"{prefix}attention_mask": rows(lambda e: [1] * len(e.tokens)),
        f"{prefix}completion_mask": rows(lambda e: [int(on) for on in e.supervised]),
    }


class SingleProcess:
    """Stands for accelerate's Accelerator in one process."""

    device = torch.device("cpu")

    def gather(self, value: Any) -> Any:
        return value

    gather_for_metrics = unwrap_model = gather


def trainer(kind: type, model: Any, **attributes: Any) -> Any:
    """A trainer without its constructor, which wants files and data sets."""
    made = kind.__new__(kind)
    common = {
        "model": model, "accelerator": SingleProcess(), "_metrics": {"train": defaultdict(list)},
        "aux_loss_enabled": False,
        "ref_model": None, "precompute_ref_logps": False, "_total_train_tokens": 0, "_tp_size": 1,
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
    }  # fmt: skip
    made.__dict__.update(common | attributes)
    return made


def patched(model: Any) -> Any:
    """The model with TRL's head, which returns log-probabilities."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return model


def of_pairs(model: Any, data: list[Example], how: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    from trl.trainer.dpo_trainer import DPOTrainer

    share = how.get("sft_share", 0.0)
    kinds = [KINDS.get(how["loss"], how["loss"]), *(["sft"] if share else [])]
    made = trainer(
        DPOTrainer, model, loss_types=kinds, loss_weights=[1.0, share][: len(kinds)], ld_alpha=None, beta=how["beta"],
        f_divergence_type="reverse_kl", label_smoothing=how.get("label_smoothing", 0.0), use_weighting=False,
    )  # fmt: skip
    groups = [data[i : i + 2] for i in range(0, len(data), 2)] if share else [data]
    found = [made._compute_loss(model, padded([*group[::2], *group[1::2]]), False) for group in groups]
    return torch.stack(found).mean(), means(made)


def of_rated(model: Any, data: list[Example], how: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    from trl.trainer.kto_trainer import KTOTrainer

    weights = {name: how[name] for name in ("desirable_weight", "undesirable_weight")}
    kl = how["loss"] == "kto"
    made = trainer(
        KTOTrainer, model, loss_type=KINDS.get(how["loss"], how["loss"]), beta=how["beta"], calculate_KL=kl, **weights
    )
    inputs = padded(data) | {"label": torch.tensor([bool(e.numbers["label"]) for e in data])}
    if kl:
        answers = [[t for t, on in zip(e.tokens, e.supervised, strict=True) if on] for e in data]
        others = [answers[-1], *answers[:-1]]  # as TRL rotates them
        prompts = [[t for t, on in zip(e.tokens, e.supervised, strict=True) if not on] for e in data]
        mixed = [Example(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, others, strict=True)]
        inputs |= padded(mixed, "KL_")
    return made._compute_loss(model, inputs, False), means(made)


def means(made: Any) -> dict[str, float]:
    held = made._metrics["train"]
    return {ours: sum(held[theirs]) / len(held[theirs]) for theirs, ours in FIGURES.items() if held.get(theirs)}


def without_reference(model: Any, data: list[Example], how: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    """SimPO by TRL's CPOTrainer, ORPO by LLaMA-Factory's formula, over the mean log p of each answer."""

    def mean(example: Example) -> torch.Tensor:
        tokens = torch.tensor([example.tokens])
        log_p = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        return log_p[torch.tensor(example.supervised[1:])].mean()

    chosen, rejected = (torch.stack([mean(e) for e in data[side::2]]) for side in (0, 1))
    if how["loss"] == "simpo":
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        options = {"loss_type": "simpo", "beta": how["beta"], "simpo_gamma": how["gamma"]}
        made = trainer(CPOTrainer, model, label_smoothing=0.0, alpha=0.0, **options)
        losses, *rewards = made.cpo_loss(chosen, rejected)
    else:
        odds = [value - torch.log1p(-value.exp()) for value in (chosen, rejected)]
        losses = -chosen - how["beta"] * F.logsigmoid(odds[0] - odds[1])
        rewards = [how["beta"] * chosen, how["beta"] * rejected]
    margin = rewards[0] - rewards[1]
    values = {"chosen": rewards[0], "rejected": rewards[1], "margin": margin, "accuracy": (margin > 0).float()}
    return losses.mean(), {name: float(value.mean()) for name, value in values.items()}


def computed(family: str, name: str, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Loss and figures, and the gradients by the names of the fixture."""
    ours, how = preferred.ours_of(family, folder), preferred.settings(name)
    model = tiny.load_hf(folder)
    bare = how["loss"] in ("simpo", "orpo")
    model = oracle.peft_model(model if bare else patched(model), ours).train()
    of = without_reference if bare else of_rated if how["loss"].startswith("kto") else of_pairs
    loss, figures = of(model, preferred.data_of(name), how)
    loss.backward()
    known = {oracle.peft_name(n): n for n in ours.arena.slots}
    named = model.named_parameters()
    grads = {f"{family}/{name}/{known[n]}": p.grad.contiguous() for n, p in named if n in known}
    assert len(grads) == len(ours.arena.slots)
    return {"loss": float(loss.detach()), "figures": figures}, grads


def main() -> None:
    import peft
    import trl

    made: dict[str, Any] = {"trl": trl.__version__, "peft": peft.__version__, "torch": torch.__version__}
    every: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in preferred.FAMILIES:
            made[family] = {}
            for name in preferred.CASES:
                made[family][name], grads = computed(family, name, Path(folder) / family)
                every |= grads
    preferred.STORED.parent.mkdir(exist_ok=True)
    save_file(every, preferred.GRADS)
    preferred.STORED.write_text(json.dumps(made) + "\n")
    print(f"{preferred.STORED}: {sum(len(made[family]) for family in preferred.FAMILIES)} cases")


if __name__ == "__main__":
    main()
