"""The settings as keyword arguments, for type checkers and completion.

Written by tools/readme.py from the fields of sections.py: do not edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class Settings(TypedDict, total=False):
    revision: str
    base_dtype: Literal["auto", "keep", "bf16", "fp16", "fp32", "nf4", "fp8"]
    base_on: Literal["auto", "device", "host"]
    embedding_on: Literal["device", "host"]
    shard_base: Literal["auto", "yes", "no"]
    device: str
    compute_dtype: Literal["auto", "bf16", "fp16", "fp32"]
    threads: int
    any_base: bool
    rank: int
    alpha: float
    targets: Sequence[str]
    dropout: float
    rslora: bool
    init: Literal["kaiming", "gaussian"]
    init_scale: float
    train_norms: bool
    new_tokens: Sequence[str]
    data: str | PathLike[str] | Iterable[Mapping[str, Any]]
    eval_data: str | PathLike[str] | Iterable[Mapping[str, Any]]
    val_split: float
    eval_examples: int
    map: Mapping[str, str]
    max_seq_len: int
    train_on: Literal["assistant", "last", "flagged"]
    prompt_form: Literal["inference", "template"]
    template_vars: Mapping[str, Any]
    train_reasoning: Literal["auto", "all", "none", "not_empty"]
    date: str
    template: str | PathLike[str]
    append_eos: bool
    strict: bool
    max_unpacked: float
    lr: float | Literal["auto"]
    schedule: Literal["cosine", "linear", "constant"]
    warmup: float
    min_lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float
    clip_mode: Literal["global", "layer"]
    method: Literal["lora", "full", "scratch"]
    anchor: float
    beta: float
    gamma: float
    label_smoothing: float
    sft_share: float
    desirable_weight: float
    undesirable_weight: float
    reference: Literal["base", "start"]
    reference_pass: Literal["stored", "each"]
    clip_low: float
    clip_high: float
    ratios: Literal["token", "sequence"]
    divide: Literal["tokens", "answers", "constant"]
    divide_by: float
    kl: float
    temperature: float
    epochs: float
    max_steps: int
    tokens_per_step: int | Literal["auto"]
    tokens_per_micro_batch: int
    documents_per_micro_batch: int
    rows_per_micro_batch: int
    eval_every: int
    save_every: int
    save_minutes: float
    keep_last: int
    patience: int
    seed: int
    deterministic: bool
    graph: bool
    recompute: Literal["auto", "none", "selective", "full", "offload"]
    out: str | PathLike[str]
    samples: int
    sample_every: int
    sample_tokens: int
    score: bool
    metric: str
    best: str
    metric_goal: Literal["max", "min"]
    metric_records: int
    metric_seconds: float
    score_records: int
    trace_steps: int
    profile_every: int
    stop_within: float
    track: Literal["none", "tensorboard", "wandb", "trackio", "mlflow"]
    max_skipped: int
    stop_on_warning: bool
    deadline: float
    wait_gpu: float
    memory_share: float
    reward: Sequence[str]
    reward_seconds: float
    prompts_per_round: int
    group: int
    answer_tokens: int
    samples_at_once: int
    updates_per_round: int
    advantage_scale: Literal["group", "none"]
