"""Stores what TRL's GRPOTrainer and PEFT compute in fp32: the advantages of rewards, and for each policy loss its
value, its figures and every LoRA gradient.

    PYTHONPATH=src:. python tools/store_policy.py      with trl 1.16.0, datasets 4.3.0, pandas and peft 0.21.2 installed

The advantages are those of TRL's own `_generate_and_score_completions`, which calls the reward functions; only the
generation is replaced. The loss is that of `_compute_loss`, with advantages per token. It has no unclipped importance
sampling: there its limits are so far apart that nothing is clipped. Its cispo limits the ratio itself, and ours the
ratio less 1.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file
from tests.losses import given_rewards, preferred, sampled
from tests.support import oracle, tiny
from tools.store_preferences import SingleProcess, trainer

from graftune.batch import Example

FIGURES = {"clip_ratio/region_mean": "clipped", "cispo_clip_ratio": "clipped", "kl": "kl"}


class OneProcess(SingleProcess):
    num_processes, process_index, sync_gradients, is_main_process = 1, 0, True, False

    def reduce(self, value: Any, reduction: str = "sum") -> Any:
        return value

    autocast = staticmethod(nullcontext)


def padded(rows: list[list[float]], left: bool, kind: torch.dtype) -> torch.Tensor:
    width = max(map(len, rows))
    filled = [[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows]
    return torch.tensor(filled, dtype=kind)


def inputs_of(data: list[Example]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left and answers on the right, as GRPOTrainer makes them."""
    starts = [e.supervised.index(True) for e in data]

    def answers(values: Any, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return padded([values(e)[start:] for e, start in zip(data, starts, strict=True)], False, kind)

    def numbers(name: str) -> Any:
        def of(example: Example) -> list[float]:
            value = example.numbers[name]
            return value if isinstance(value, list) else [value] * len(example.tokens)

        return of

    prompts = [e.tokens[:start] for e, start in zip(data, starts, strict=True)]
    mask = answers(lambda e: [1] * len(e.tokens), torch.int64)
    return {
        "prompt_ids": padded(prompts, True, torch.int64),  # type: ignore[arg-type]
        "prompt_mask": padded([[1] * len(p) for p in prompts], True, torch.int64),
        "completion_ids": answers(lambda e: e.tokens, torch.int64),
        "completion_mask": mask,
        "advantages": answers(numbers("advantages")),
        "old_per_token_logps": answers(numbers("logprobs")),
        "num_items_in_batch": mask.sum().float(),
    }


def advantages(scale: str) -> list[list[float]]:
    """Of each group of `sampled.rewarded_answers`."""
    from accelerate import PartialState
    from trl.trainer.grpo_trainer import GRPOTrainer

    groups = sampled.rewarded_answers()
    texts, size = [text for group in groups for text in group], len(groups[0])
    functions = [getattr(given_rewards, name) for name in sampled.WEIGHTS]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    PartialState()  # TRL's logger needs it
    made = trainer(
        GRPOTrainer, SimpleNamespace(training=True, is_gradient_checkpointing=False), accelerator=OneProcess(),
        environment_factories=None, environments=None, tools=None, pad_to_multiple_of=None, use_vllm=False, beta=0.0,
        mask_truncated_completions=False, num_iterations=1, _tokenizer=SimpleNamespace(pad_token_id=0),
        num_generations=size, scale_rewards=scale, multi_objective_aggregation="sum_then_normalize", async_loop=loop,
        reward_funcs=functions, reward_weights=torch.tensor(list(sampled.WEIGHTS.values())),
        reward_func_names=list(sampled.WEIGHTS), reward_processing_classes=[None] * len(functions),
        _pending_extra_logs={}, _pending_metrics={}, state=SimpleNamespace(global_step=0),
        _logs=defaultdict(list) | {"rewards": defaultdict(list)}, log_multimodal=False,
        _generate=lambda prompts: ([[1]] * len(texts), [[2]] * len(texts), None, texts, None, {}, None, None),
        args=SimpleNamespace(
            per_device_train_batch_size=len(texts), gradient_checkpointing_kwargs=None, steps_per_generation=1,
            gradient_accumulation_steps=1, report_to=[],
        ),
    )  # fmt: skip
    found = made._generate_and_score_completions([{"prompt": ""} for _ in texts])["advantages"]
    loop.call_soon_threadsafe(loop.stop)
    return found.view(-1, size).tolist()


def computed(family: str, name: str, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    ours, how = preferred.ours_of(family, folder), sampled.CASES[name]
    model = tiny.load_hf(folder)
    add_fused_lm_head(model, temperature=how.get("temperature", 1.0), outputs=("log_probs", "entropy"))
    model = oracle.peft_model(model, ours).train()
    limits = (how.get("clip_low", 0.2), how.get("clip_high", 0.28))
    low, high = {"cispo": (0.0, 1 + limits[1]), "importance_sampling": (1e9, 1e9)}.get(how["loss"], limits)
    made = trainer(
        GRPOTrainer, model, epsilon_high=high, accelerator=OneProcess(), top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=how.get("ratios", "token"), beta=how.get("kl", 0.0), epsilon_low=low,
        loss_type={"importance_sampling": "dapo"}.get(name, name.split(",")[0]), use_vllm=False,
        vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        max_completion_length=how.get("divide_by", 0.0),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1, report_to=[]),
        state=SimpleNamespace(global_step=0),
    )  # fmt: skip
    inputs = inputs_of(sampled.answers())
    if how.get("kl"):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad(), model.disable_adapter():
            count = inputs["completion_ids"].shape[1]
            inputs["ref_per_token_logps"] = made._get_per_token_logps_and_entropies(model, ids, mask, count)[0]
    loss = made._compute_loss(model, inputs)
    loss.backward()
    held = made._metrics["train"]
    figures = {ours: held[theirs][0] for theirs, ours in FIGURES.items() if held.get(theirs)}
    if how.get("ratios") == "sequence":
        figures.pop("clipped")  # TRL's is a share of answers, ours one of tokens
    known = {oracle.peft_name(n): n for n in ours.arena.slots}
    named = model.named_parameters()
    grads = {f"{family}/{name}/{known[n]}": p.grad.contiguous() for n, p in named if n in known}
    return {"loss": float(loss.detach()), "figures": figures}, grads


def main() -> None:
    import peft
    import trl

    made: dict[str, Any] = {"trl": trl.__version__, "peft": peft.__version__, "torch": torch.__version__}
    made["advantages"] = {scale: advantages(scale) for scale in sampled.SCALES}
    every: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in preferred.FAMILIES:
            made[family] = {}
            for name in sampled.CASES:
                made[family][name], grads = computed(family, name, Path(folder) / family)
                every |= grads
    save_file(every, sampled.GRADS)
    sampled.STORED.write_text(json.dumps(made) + "\n")
    print(f"{sampled.STORED}: {sum(len(made[family]) for family in preferred.FAMILIES)} cases")


if __name__ == "__main__":
    main()
