"""The peers of preference cases: TRL's DPOTrainer on PEFT, and the same trainer with Unsloth's model and patches.
Imported only inside a worker process of step.py.

    trl             TRL's defaults: blocks recomputed, adapters in fp32 (over a 4-bit base TRL casts them to bf16)
    trl-none        the same without recomputation
    trl-liger-bf16  without recomputation, adapters in bf16, Liger's kernels for rope, norms and the MLP
    unsloth         Unsloth's model, without recomputation

A step is what `Trainer.train` does for a batch: `training_step` with DPOTrainer's loss and its figures, gradient
clipping, the trainer's own fused AdamW. Batches come from the trainer's collator, before the first step: its time is
not counted. `stored` cases take the reference model's log-probabilities from the trainer's own method, once.

Unsloth 2026.10.9 refuses TRL above 1.15, so TRL is taken for each from its own folder (PYTHONPATH_TRL in step.py). The
DPO loss is the same code in 1.15 and 1.16.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch
from benchmarks.cases import BATCHES, Case, Pair, pairs
from benchmarks.measure import Runner
from benchmarks.peers import lora_config, nf4_llama, random_llama, unsloth_model


def build(name: str, case: Case, device: torch.device) -> Runner:
    if name == "unsloth":
        return unsloth_runner(case, device)
    return trl_runner(case, device, recompute=name == "trl", liger_bf16=name == "trl-liger-bf16")


def trl_runner(case: Case, device: torch.device, *, recompute: bool, liger_bf16: bool) -> Runner:
    nf4 = case.base == "nf4"
    model = nf4_llama(case, device) if nf4 else random_llama(case.shape, device, torch.bfloat16)
    more = {"use_liger_kernel": liger_bf16, "gradient_checkpointing": recompute}
    trainer = make_trainer(case, device, model, peft_config=lora_config(case), **more)
    if liger_bf16:
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters() if p.requires_grad})
    notes = [f"adapters {' and '.join(kinds)}", "sdpa", *(["blocks recomputed"] if recompute else [])]
    return runner(trainer, case, ", ".join([*notes, *(["Liger's layers"] if liger_bf16 else [])]))


def unsloth_runner(case: Case, device: torch.device) -> Runner:
    model, note = unsloth_model(case, device)
    return runner(make_trainer(case, device, model, gradient_checkpointing=False), case, note)


def make_trainer(
    case: Case,
    device: torch.device,
    model: Any,
    *,
    peft_config: Any = None,
    use_liger_kernel: bool = False,
    **more: Any,
) -> Any:
    """A DPOTrainer of the model. Its data is one pair of words, since batches are given to its steps directly."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        output_dir="trainer",
        per_device_train_batch_size=case.rows,
        max_length=case.length,
        learning_rate=case.hyper["lr"],
        adam_beta1=case.hyper["beta1"],
        adam_beta2=case.hyper["beta2"],
        adam_epsilon=case.hyper["eps"],
        weight_decay=case.hyper["weight_decay"],
        max_grad_norm=case.hyper["clip"],
        bf16=device.type == "cuda",
        use_cpu=device.type == "cpu",
        report_to="none",
        use_liger_kernel=use_liger_kernel,
        **more,
    )
    data = Dataset.from_list([{"prompt": "w1 w2", "chosen": " w3 w4", "rejected": " w5 w6"}])
    given = {"peft_config": peft_config} if peft_config is not None else {}
    trainer = DPOTrainer(model, args=args, train_dataset=data, processing_class=words(), **given)
    begin(trainer)
    return trainer


def begin(trainer: Any) -> None:
    """What `Trainer.train` does before its first step."""
    args = trainer.args
    if args.use_liger_kernel:
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(trainer.model, args.liger_kernel_config)
    if args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
    trainer.current_gradient_accumulation_steps = 1


def runner(trainer: Any, case: Case, note: str) -> Runner:
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped, trainer.optimizer = model, optimizer
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    batches = [[trainer.data_collator([_row(pair) for pair in micro]) for micro in batch] for batch in pairs(case)]
    if case.reference == "stored":
        trainer.precompute_ref_logps = True
        for batch in (micro for each in batches for micro in each):
            found = trainer.compute_ref_log_probs(model, trainer._prepare_inputs(batch))
            batch |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), (one.cpu() for one in found), strict=True))
    trainer.current_gradient_accumulation_steps = case.micro

    def step(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        losses = [trainer.training_step(model, dict(batch)) for batch in batches[index % BATCHES]]
        norm = trainer.accelerator.clip_grad_norm_(trained, trainer.args.max_grad_norm)
        optimizer.step()
        model.zero_grad()
        return torch.stack(losses).sum(), norm.detach()

    return Runner(step, lambda: trained, lambda: f"trl {metadata.version('trl')}, {note}")


def _row(pair: Pair) -> dict[str, list[int]]:
    return {"prompt_ids": pair.prompt, "chosen_ids": pair.chosen, "rejected_ids": pair.rejected}


def words() -> Any:
    """A tokenizer of a few words, for the trainer's pair."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    vocabulary = {word: number for number, word in enumerate([*special.values(), *(f"w{i}" for i in range(1, 7))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
