"""Every setting, declared once as a field of its section: type, default, range, help, and whether it may change on a
resume. config.py puts the sections together and reads files and flags into them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from graftune.settings.sources import DataValue

LENGTH, SHORTEST = 2048, 8  # tokens of an example: the longest unless set, and the least that may be set

LossName = Literal[
    "cross_entropy", "anchored", "dpo", "dpo_norm", "ipo", "hinge", "robust", "apo_zero", "simpo", "orpo", "kto",
    "kto_zero", "importance_sampling", "ppo", "cispo",
]  # fmt: skip
# The settings that decide what is minimised. Which loss uses which: losses/__init__.py.
LOSS_SETTINGS = (
    "loss", "anchor", "beta", "gamma", "label_smoothing", "sft_share", "desirable_weight", "undesirable_weight",
    "reference", "reference_pass", "clip_low", "clip_high", "ratios", "divide", "divide_by", "kl", "temperature",
)  # fmt: skip
# Settings that reinforcement learning does not use: those of data with answers, and of runs over such data.
NOT_FOR_REWARDS = (
    *("train_on", "prompt_form", "train_reasoning", "append_eos", "tokens_per_step", "anchor", "beta", "gamma"),
    *("label_smoothing", "sft_share", "desirable_weight", "undesirable_weight", "reference_pass", "shard_base"),
    *("metric", "metric_goal", "metric_records", "metric_seconds", "best", "score", "score_records", "sample_every"),
    *("sample_tokens", "trace_steps", "profile_every", "deadline", "wait_gpu", "memory_share"),
)

# The settings of the machine that a run is on.
OF_MACHINE = ("device", "compute_dtype", "base_dtype", "base_on", "embedding_on", "shard_base", "threads")

# Whether a resumed run may have another value. fixed: no, since it decides what the run computes. content: a file or
# folder that may have moved; a digest of its content is compared instead. stored: yes, and config.yaml keeps the new
# value. free: yes, for this time only; the value does not decide what the run computes.
Resume = Literal["fixed", "content", "stored", "free"]


def opt(
    default: Any,
    help: str,
    *,
    resume: Resume,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
) -> Any:
    """A field with its help text, its inclusive range (`above` is an exclusive lower bound) and whether it may change
    when a run is resumed."""
    metadata = {"help": help, "resume": resume, "min": min, "max": max, "above": above}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class BaseConfig:
    base: str = opt(
        "",
        "Hugging Face name (owner/name; of a GGUF owner/name:Q4_K_M or owner/name/x.gguf) or folder, or a .gguf file; "
        "empty: the bundled SmolLM2-135M-Instruct",
        resume="content",
    )
    revision: str = opt("", "Hub revision of the base", resume="fixed")
    base_dtype: Literal["auto", "keep", "bf16", "fp16", "fp32", "nf4", "fp8"] = opt(
        "auto",
        "how the frozen weights are held: bf16, fp16, fp32, nf4 (4 bits: QLoRA), fp8 (8 bits) or keep (as in the "
        "file); auto: the compute dtype if it fits, else nf4, or a GGUF's own blocks",
        resume="fixed",
    )
    base_on: Literal["auto", "device", "host"] = opt(
        "auto",
        "where the frozen weights lie: on the device, or on host, in host memory, from which each block is fetched "
        "while the one before it computes; auto: on the device if that fits",
        resume="free",
    )
    embedding_on: Literal["device", "host"] = opt(
        "device",
        "where the embedding lies, if the head is another tensor, and the per-layer embeddings of Gemma 4: on the "
        "device, or on host, in host memory, from which the GPU reads the rows of a batch",
        resume="free",
    )
    shard_base: Literal["auto", "yes", "no"] = opt(
        "auto",
        "under torchrun, keep an equal part of the frozen weights on each rank and gather each block while the one "
        "before it computes; auto: if a device cannot hold them all",
        resume="free",
    )
    device: str = opt("auto", "auto, cpu, cuda, cuda:N, xpu or mps", resume="fixed")
    compute_dtype: Literal["auto", "bf16", "fp16", "fp32"] = opt(
        "auto", "dtype of the matrix products; fp16 comes with a dynamic loss scale", resume="fixed"
    )
    threads: int = opt(0, "CPU threads; 0: as many as there are cores", resume="free", min=0, max=4096)
    any_base: bool = opt(
        False, "take an adapter although it was trained on other weights than this base's", resume="free"
    )


@dataclass(frozen=True)
class LoraConfig:
    rank: int = opt(16, "adapter rank", resume="fixed", min=1, max=4096)
    alpha: float = opt(
        0.0, "adapter scale numerator: the product is scaled by alpha/rank; 0: twice the rank", resume="fixed", min=0
    )
    targets: tuple[str, ...] = opt(
        ("all_linear",),
        "projections to adapt: names, or paths as mlp.gate_proj; or all_linear, attention, qv, mlp",
        resume="fixed",
    )
    dropout: float = opt(0.0, "dropout on the adapter's input", resume="fixed", min=0, max=0.99)
    rslora: bool = opt(False, "scale by alpha/sqrt(rank) instead of alpha/rank", resume="fixed")
    init: Literal["kaiming", "gaussian"] = opt(
        "kaiming", "how A starts: as PEFT's, uniform within 1/sqrt(inputs); or Gaussian of std 1/rank", resume="fixed"
    )
    init_scale: float = opt(1.0, "multiplies A's starting values", resume="fixed", above=0)
    train_norms: bool = opt(False, "also train the norm weights", resume="fixed")
    new_tokens: tuple[str, ...] = opt((), "tokens to add; their embedding and head rows are trained", resume="fixed")
    adapter: str = opt("", "an adapter folder (ours or PEFT's) to continue from", resume="fixed")

    def resolved(self) -> LoraConfig:
        """A copy with an unset alpha filled in. It stays 0 until here, because a run that continues an adapter takes
        the adapter's alpha and has to know whether another one was asked for."""
        return self if self.alpha else dataclasses.replace(self, alpha=2.0 * self.rank)


@dataclass(frozen=True)
class DataConfig:
    data: DataValue = opt(  # noqa: RUF009 (an alias of immutable types)
        "",
        "file (.jsonl, .json, .csv, .tsv, .parquet), folder, glob or Hub data set (owner/name:split); in YAML also a "
        "list of {path, weight, split, subset, map}; empty: the bundled sample",
        resume="content",
    )
    eval_data: DataValue = opt(  # noqa: RUF009
        "", "validation data, given like data; empty: split off the training data", resume="content"
    )
    val_split: float = opt(0.2, "share of the data held out for validation", resume="fixed", min=0, max=0.9)
    eval_examples: int = opt(0, "use at most this many validation examples; 0: all", resume="stored", min=0)
    map: dict[str, str] = opt(  # noqa: RUF009 (opt makes a default_factory)
        {},
        "which column is which, as prompt=Question,response=Answer; empty: recognised by their names",
        resume="fixed",
    )
    max_seq_len: int = opt(
        0,
        "longest example in tokens, at least 8; 0: 2048, or the base's context where that is shorter",
        resume="fixed",
        min=0,
    )
    train_on: Literal["assistant", "last", "flagged"] = opt(
        "assistant",
        "which turns are trained: every assistant turn (but those with weight 0 or train: false), the last one, or "
        "only those flagged with train: true",
        resume="fixed",
    )
    prompt_form: Literal["inference", "template"] = opt(
        "inference",
        "text before an answer: the prompt as inference gives it, or the conversation as the template renders it",
        resume="fixed",
    )
    template_vars: dict[str, Any] = opt(  # noqa: RUF009
        {}, "variables given to the chat template, as enable_thinking=false,reasoning_effort=high", resume="fixed"
    )
    train_reasoning: Literal["auto", "all", "none", "not_empty"] = opt(
        "auto",
        "which reasoning (thinking) blocks are trained: all, none, or those that are not empty; auto: not_empty where "
        "the template writes empty blocks (Qwen3 and later), else all",
        resume="fixed",
    )
    date: str = opt(
        "", "date that a chat template prints, as 2026-11-17; empty: the day the run starts", resume="fixed"
    )
    template: str = opt(
        "auto", "chat template: auto (the model's own), none (prompt ++ response), or a Jinja file", resume="content"
    )
    append_eos: bool = opt(False, "append EOS to turns of a template that has no end token", resume="fixed")
    strict: bool = opt(False, "stop at the first bad row instead of counting it", resume="fixed")
    max_unpacked: float = opt(
        64.0,
        "GiB that a compressed or Parquet file may come to when it is unpacked; a larger one is refused",
        resume="free",
        above=0,
    )

    def longest(self, context: int = LENGTH) -> int:
        """max_seq_len, with 0 resolved for a base of that context."""
        return self.max_seq_len or min(LENGTH, context)


@dataclass(frozen=True)
class OptimConfig:
    lr: float | Literal["auto"] = opt(
        "auto",
        "peak learning rate; auto: by the size of the model and the method, for preferences 1e-5 (docs/choosing.md)",
        resume="fixed",
        min=0,
    )
    schedule: Literal["cosine", "linear", "constant"] = opt("cosine", "shape after warm-up", resume="fixed")
    warmup: float = opt(0.1, "share of the steps spent warming up", resume="fixed", min=0, max=1)
    min_lr: float = opt(1e-6, "learning rate the schedule goes down to", resume="fixed", min=0)
    beta1: float = opt(0.9, "AdamW's first-moment decay", resume="fixed", min=0, max=0.9999)
    beta2: float = opt(0.999, "AdamW's second-moment decay", resume="fixed", min=0, max=0.999999)
    eps: float = opt(1e-8, "AdamW's epsilon", resume="fixed", above=0)
    weight_decay: float = opt(0.01, "decoupled weight decay", resume="fixed", min=0)
    clip: float = opt(1.0, "gradient norm limit; 0: no clipping", resume="fixed", min=0)
    clip_mode: Literal["global", "layer"] = opt(
        "global", "one norm over all gradients, or one per layer", resume="fixed"
    )

    @property
    def peak_lr(self) -> float:
        """lr, once `auto` is resolved (settings/auto.py)."""
        assert not isinstance(self.lr, str), "lr is resolved when a session is opened"
        return self.lr


@dataclass(frozen=True)
class TrainConfig:
    method: Literal["lora", "full", "scratch"] = opt(
        "lora",
        "what trains: adapters, every weight of the base, or every weight from random ones (base: a config)",
        resume="fixed",
    )
    loss: LossName = opt(  # noqa: RUF009 (an alias of names)
        "cross_entropy",
        "what is minimised: cross-entropy of the response tokens, or with a penalty on moving away from the base "
        "(anchored); preferences from dpo, policy gradients from importance_sampling on",
        resume="fixed",
    )
    anchor: float = opt(
        0.1,
        "anchored: factor of the squared difference to the base's log-probability of each response token",
        resume="fixed",
        min=0,
    )
    beta: float = opt(
        0.0,
        "preferences: how strongly a difference in log-probability counts; 0: 0.1, of simpo 2.5",
        resume="fixed",
        min=0,
    )
    gamma: float = opt(1.375, "simpo: margin by which the chosen answer has to win", resume="fixed", min=0)
    label_smoothing: float = opt(
        0.1, "robust: share of the pairs that are taken to be the wrong way round", resume="fixed", min=0, max=0.49
    )
    sft_share: float = opt(
        0.0,
        "pairs: factor of the chosen answer's cross-entropy, its mean per answer, that is added to the loss",
        resume="fixed",
        min=0,
    )
    desirable_weight: float = opt(1.0, "kto: weight of answers that are rated good", resume="fixed", min=0)
    undesirable_weight: float = opt(1.0, "kto: weight of answers that are rated bad", resume="fixed", min=0)
    reference: Literal["base", "start"] = opt(
        "base",
        "preferences: the model that log-probabilities are compared with: the base without adapters, or the weights at "
        "the start of the run (an adapter that is continued; method full)",
        resume="fixed",
    )
    reference_pass: Literal["stored", "each"] = opt(
        "stored",
        "losses with a reference: compute its log-probabilities once, before the first step, and store them with the "
        "encoded data; or in each step, with one more forward pass",
        resume="fixed",
    )
    clip_low: float = opt(0.2, "ppo: the ratio counts down to 1 less this", resume="fixed", min=0, max=1)
    clip_high: float = opt(
        0.0, "ppo, cispo: the ratio counts up to 1 plus this; 0: 0.28, of cispo 4", resume="fixed", min=0
    )
    ratios: Literal["token", "sequence"] = opt(
        "token",
        "policy gradients: ratio to the sampled log-probabilities of each token, or of each answer, the mean over its "
        "tokens (GSPO)",
        resume="fixed",
    )
    divide: Literal["tokens", "answers", "constant"] = opt(
        "tokens",
        "policy gradients: divide by the tokens of a step (DAPO), by the tokens of each answer and the number of "
        "answers (GRPO), or by the answers times divide_by (constant; Dr. GRPO)",
        resume="fixed",
    )
    divide_by: float = opt(256.0, "divide constant: tokens that every answer counts for", resume="fixed", above=0)
    kl: float = opt(
        0.0, "policy gradients: factor of the KL divergence from the reference; 0: no reference", resume="fixed", min=0
    )
    temperature: float = opt(
        1.0,
        "policy gradients: temperature that the answers were sampled at; divides the logits",
        resume="fixed",
        above=0,
    )
    epochs: float = opt(3.0, "passes over the data; 0.5 is half a pass", resume="stored", above=0)
    max_steps: int = opt(0, "stop after this many optimizer steps; 0: let epochs decide", resume="stored", min=0)
    tokens_per_step: int | Literal["auto"] = opt(
        "auto",
        "tokens of one optimizer step; auto: few enough for about 100 steps, at most what suits the size of the model "
        "(docs/choosing.md)",
        resume="fixed",
        min=8,
    )
    tokens_per_micro_batch: int = opt(
        0,
        "tokens of a forward and backward, at least the longest example; 0: as many as fit, up to tokens_per_step and "
        "8192 (on a CPU 1024)",
        resume="fixed",
        min=0,
    )
    documents_per_micro_batch: int = opt(
        0,
        "documents of a micro-batch of examples that a loop of your own gives, on CUDA; 0: as the first batch needs, "
        "rounded up to a power of two",
        resume="free",
        min=0,
    )
    rows_per_micro_batch: int = opt(
        0,
        "trained tokens of a micro-batch of examples that a loop of your own gives, on CUDA; 0: as the first batch "
        "needs, rounded up to a power of two",
        resume="free",
        min=0,
    )
    eval_every: int = opt(
        0, "evaluate every N steps, besides before the first and after each epoch; 0: off", resume="stored", min=0
    )
    save_every: int = opt(0, "checkpoint every N steps, besides after each epoch; 0: off", resume="stored", min=0)
    save_minutes: float = opt(15.0, "checkpoint after this many minutes without one; 0: off", resume="stored", min=0)
    keep_last: int = opt(2, "checkpoints kept beside the best one", resume="stored", min=1)
    patience: int = opt(5, "evaluations without improvement before stopping; 0: never", resume="stored", min=0)
    seed: int = opt(42, "seed of split, shuffle, adapters and dropout", resume="fixed", min=0, max=2**63 - 1)
    deterministic: bool = opt(False, "bit-identical reruns on every device", resume="fixed")
    graph: bool = opt(True, "on CUDA, replay steps from CUDA graphs", resume="free")
    recompute: Literal["auto", "none", "selective", "full", "offload"] = opt(
        "auto",
        "what the backward pass computes again to save memory: none, gate and up (selective), whole blocks (full, or "
        "offload: from host memory); auto: the least that fits",
        resume="free",
    )

    @property
    def step_tokens(self) -> int:
        """tokens_per_step, once `auto` is resolved (settings/auto.py)."""
        assert not isinstance(self.tokens_per_step, str), "tokens_per_step is resolved once the data is known"
        return self.tokens_per_step


@dataclass(frozen=True)
class RunConfig:
    out: str = opt("", "run folder; empty: runs/ and a name of its own", resume="free")
    samples: int = opt(
        4, "validation prompts answered by base and tuned model at the end; 0: none", resume="free", min=0
    )
    sample_every: int = opt(
        0,
        "also answer these prompts every N steps, so that the page shows how the answers change; 0: off",
        resume="free",
        min=0,
    )
    sample_tokens: int = opt(64, "longest sample answer, in tokens", resume="free", min=1)
    score: bool = opt(
        True, "score the answers where the data set brings a scorer (the bundled sample does)", resume="free"
    )
    metric: str = opt(
        "",
        "measures answers to held-out records and chooses the best checkpoint and the early stop: exact, sample (the "
        "bundled sample's scorer) or file.py:function; empty: the validation loss chooses",
        resume="fixed",
    )
    best: str = opt(
        "loss",
        "what chooses the best checkpoint and the early stop on validation data if metric is empty: loss, or a figure "
        "of the loss, as margin of dpo",
        resume="fixed",
    )
    metric_goal: Literal["max", "min"] = opt("max", "whether a larger or a smaller metric is better", resume="fixed")
    metric_records: int = opt(
        0,
        "held-out records that the metric is computed on; 0: 24 in a run, all in graftune eval",
        resume="stored",
        min=0,
    )
    metric_seconds: float = opt(10.0, "longest time of one call of file.py:function", resume="free", above=0)
    score_records: int = opt(0, "unseen records scored; 0: 24, or none if samples is 0", resume="free", min=0)
    trace_steps: int = opt(
        0, "trace the kernels of this many steps, starting at step 5, into trace.json.gz; 0: none", resume="free", min=0
    )
    profile_every: int = opt(
        0,
        "steps after which some are profiled, by phase, layer and operation, into profile.json; 0: never",
        resume="free",
        min=0,
    )
    stop_within: float = opt(
        5.0,
        "seconds after Ctrl-C, SIGTERM or SIGHUP in which the micro-batch, evaluation or answers under way may finish; "
        "then (on a CPU) they are given up and the last whole step is saved; 0: no limit",
        resume="free",
        min=0,
    )
    track: Literal["none", "tensorboard", "wandb", "trackio", "mlflow"] = opt(
        "none",
        "experiment tracker that is sent the figures of the run; each needs the extra of its name",
        resume="free",
    )
    max_skipped: int = opt(
        10,
        "stop after this many updates in a row were skipped because numbers were not finite; 0: never",
        resume="free",
        min=0,
    )
    stop_on_warning: bool = opt(
        False,
        "stop, with a checkpoint and an error, when the run warns of its own numbers: a loss spike, no gradient, other "
        "tokens than planned, weights that do not move, a validation loss above the first",
        resume="free",
    )
    deadline: float = opt(
        120.0,
        "several ranks: seconds after which a step that does not finish ends the run, or three times the longest step "
        "so far if that is more; 0: never",
        resume="free",
        min=0,
    )
    wait_gpu: float = opt(
        0.0,
        "seconds to wait for memory that other runs have reserved on the device, first come first served; 0: refuse at "
        "once",
        resume="free",
        min=0,
    )
    memory_share: float = opt(
        0.0,
        "share of the device's memory that runs may reserve together while there are several; 0: 0.85, or 0.6 where "
        "CPU and GPU share one memory",
        resume="free",
        min=0,
        max=1,
    )


@dataclass(frozen=True)
class RlConfig:
    reward: tuple[str, ...] = opt(
        (),
        "reward functions, each file.py:function, or file.py for its function named reward; with =WEIGHT if its weight "
        "is not 1",
        resume="fixed",
    )
    reward_seconds: float = opt(60.0, "longest time of one call of a reward function", resume="free", above=0)
    prompts_per_round: int = opt(8, "prompts that are answered in a round", resume="fixed", min=1)
    group: int = opt(8, "answers sampled to each prompt", resume="fixed", min=2)
    answer_tokens: int = opt(256, "longest sampled answer, in tokens", resume="fixed", min=1)
    samples_at_once: int = opt(
        0,
        "answers that are sampled at the same time, each with a share of the cache; 0: all of a round, or as many as "
        "memory allows beside training",
        resume="fixed",
        min=0,
        max=256,
    )
    updates_per_round: int = opt(
        1, "optimizer steps on the answers of a round, each over all of them", resume="fixed", min=1
    )
    advantage_scale: Literal["group", "none"] = opt(
        "group",
        "divide the advantages of a group by the standard deviation of its rewards, or leave them (Dr. GRPO)",
        resume="fixed",
    )
