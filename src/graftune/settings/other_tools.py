"""The names that other tools use for their settings, and our name for each.

Unsloth, Axolotl, LLaMA-Factory, TRL and transformers (TrainingArguments, SFTConfig), PEFT (LoraConfig) and mlx-lm. A
plain synonym, with the same meaning and the same unit, is in SAME and is taken. Every other name is in ANSWERS, with
the sentence that says which setting does it here, or that nothing does and what to do instead; taking those too would
turn a batch of 2 examples into 2 tokens without a word. `{name}` in an answer is one of our settings: it is shown as a
key in a file and as a flag on the command line. Names are written with underscores and in lower case. `->` says how
such a name is converted when a whole file is imported: to a setting of ours, to a setting with that value, or by that
function of converting.py; without it the answer is the reason why it is left out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_SAME = """
base: model model_name model_name_or_path base_model pretrained_model_name_or_path model_path model_id hf_path
revision: model_revision revision_of_model
seed: random_state random_seed
rank: r lora_r lora_rank
alpha: lora_alpha
targets: target_modules lora_target lora_target_modules lora_targets
dropout: lora_dropout
rslora: use_rslora peft_use_rslora lora_use_rslora
adapter: adapter_name_or_path lora_model_dir resume_adapter_file peft_model_id
data: train_file train_data data_path dataset_path train_dataset training_data train_path
eval_data: validation_file eval_dataset val_data eval_file validation_data test_datasets val_file
max_seq_len: max_seq_length sequence_len cutoff_len max_length seq_len seq_length block_size model_max_length
lr: learning_rate
schedule: lr_scheduler_type lr_scheduler scheduler lr_schedule
warmup: warmup_ratio
min_lr: lr_min cosine_min_lr
beta1: adam_beta1
beta2: adam_beta2
eps: adam_epsilon adam_eps
clip: max_grad_norm gradient_clip gradient_clip_val grad_clip
epochs: num_train_epochs num_epochs n_epochs epoch
eval_every: eval_steps steps_per_eval
save_every: save_steps
keep_last: save_total_limit
patience: early_stopping_patience early_stopping_steps
out: output_dir output output_path save_dir
eval_examples: max_eval_samples
trace_steps: profile
threads: num_threads cpu_threads
template_vars: chat_template_kwargs template_kwargs
deterministic: full_determinism enable_full_determinism
max_new_tokens: max_tokens num_predict n_predict
temperature: temp
system: system_prompt
"""

_ANSWERS = """
per_device_train_batch_size train_batch_size micro_batch_size per_gpu_train_batch_size
gradient_accumulation_steps grad_accumulation_steps accumulation_steps gradient_accumulation -> batch
    here a batch is counted in tokens: {tokens_per_step} is what one optimizer step trains on (8 examples of 512
    tokens are 4096), and {tokens_per_micro_batch} is chosen automatically from the memory there is
batch_size bs per_device_eval_batch_size eval_batch_size global_batch_size auto_find_batch_size eval_accumulation_steps
    here a batch is counted in tokens: {tokens_per_step} for an optimizer step (8 examples of 512 tokens are 4096);
    {tokens_per_micro_batch}, also that of an evaluation, is chosen automatically from the memory there is
warmup_steps num_warmup_steps -> warmup_steps
    {warmup} is the share of all steps spent warming up (0.1: a tenth), not their number
warmup_epochs
    {warmup} is the share of all steps spent warming up (0.1: a tenth), not their number
load_in_4bit quantization_bit bits q_bits -> base_dtype
    set {base_dtype} to nf4 for QLoRA (4 bits, as bitsandbytes'); left at auto it is chosen where memory is short
quantize qlora bnb_4bit quantization quantization_config bnb_4bit_quant_type bnb_4bit_compute_dtype
bnb_4bit_use_double_quant double_quantization bnb_config bnb_4bit_quant_storage use_bnb_nested_quant
quantization_type bnb_config_kwargs
    set {base_dtype} to nf4 for QLoRA (4 bits, as bitsandbytes'); left at auto it is chosen where memory is short
quantization_method
    graftune export RUN --to gguf --type Q4_K_M writes a quantised model
load_in_8bit int8 gptq awq load_in_fp8
    there are no LLM.int8 weights here: set {base_dtype} to fp8 for 8 bits, or to nf4 for 4
bf16 fp16 bfloat16 float16 float32 half pure_bf16 dtype torch_dtype precision -> precision
    the precision is chosen by the device; set {compute_dtype} to bf16, fp16 or fp32 to force one
tf32 mixed_precision amp fp16_full_eval bf16_full_eval load_in_16bit float32_mixed_precision
    the precision is chosen by the device; set {compute_dtype} to bf16, fp16 or fp32 to force one
gradient_checkpointing grad_checkpoint use_gradient_checkpointing activation_offloading activation_checkpointing
offload gradient_checkpointing_kwargs disable_gradient_checkpointing gradient_checkpointing_use_reentrant
activation_checkpointing_kwargs use_reentrant_gc use_unsloth_gc selective_checkpointing layer_offloading
    {recompute} chooses what the backward pass computes again: auto (the least that fits), none, selective, full or
    offload; the result is the same
flash_attention flash_attn xformers_attention sdp_attention use_flash_attention_2 use_flash_attn attn_implementation
flash_attention_2 eager_attention sdpa_attention
    the fastest attention kernel is chosen automatically and printed at the start; remove it
packing sample_packing pad_to_sequence_len pad_to_max_length group_by_length neat_packing eval_sample_packing
eval_packing multipack_real_batches padding_free packing_strategy padding
    examples are always packed, without attention between them; remove it
mask_history -> train_on=last
    only responses are trained, always; {train_on} chooses which turns (assistant, last or flagged)
train_on_inputs train_on_prompt train_on_responses_only mask_prompt assistant_only_loss completion_only_loss
train_on_eos train_on_eot roles_to_train train_on_completions
    only responses are trained, always; {train_on} chooses which turns (assistant, last or flagged)
optim optimizer optimizer_type optimizers use_8bit_adam adamw_8bit optim_args
    the optimizer is always AdamW with fp32 moments; its settings are {lr}, {beta1}, {beta2}, {eps}, {weight_decay}
galore use_galore use_badam use_apollo loraplus_lr_ratio loraplus_lr_embedding use_muon use_adam_mini use_llama_pro
mixture_of_depths qat qat_scheme unfrozen_parameters freeze_trainable_layers
    that is not supported here; remove it
report_to wandb_project use_wandb wandb tensorboard use_tensorboard use_mlflow mlflow_experiment_name use_trackio
trackio_project_name -> tracker
    {track} sends the figures to tensorboard, wandb, trackio or mlflow, into the project graftune; without it they are
    in metrics.jsonl and loss.png in the run folder only
wandb_entity wandb_name wandb_mode wandb_run_id use_swanlab run_name comet_project_name logging_dir wandb_watch
wandb_log_model use_comet trackio_space_id trackio_run_name mlflow_tracking_uri mlflow_run_name project
    {track} sends the figures to tensorboard, wandb, trackio or mlflow, into the project graftune; without it they are
    in metrics.jsonl and loss.png in the run folder only
logging_steps steps_per_report log_every plot_loss logging_strategy logging_first_step verbosity
    every step is written to metrics.jsonl in the run folder; remove it
push_to_hub hub_model_id hub_token hub_strategy hub_private_repo use_auth_token hf_token token
    nothing is uploaded: export the run with graftune export RUN --to peft and upload the folder yourself
deepspeed fsdp fsdp_config ddp_backend local_rank num_gpus num_machines tensor_parallel_size ddp ddp_timeout
ddp_find_unused_parameters context_parallel_degree gpus nproc_per_node num_processes sequence_parallel_degree
fsdp_version fsdp_transformer_layer_cls_to_wrap dp_shard_size dp_replicate_size context_parallel_size ray_num_workers
    torchrun --nproc-per-node N -m graftune train trains on N GPUs; {shard_base} divides a base that does not fit on
    one of them, {deadline} limits the wait for a rank
device_map max_memory gpu_memory_limit low_cpu_mem_usage
    {device} chooses the device, and what fits there is planned before anything is loaded; a base that does not fit is
    held in host memory ({base_on}) or, under torchrun, divided among the GPUs ({shard_base})
finetuning_type fine_tune_type use_peft use_lora full_finetuning get_peft_model -> training_method
    {method} chooses what trains: lora (also over 4-bit weights, {base_dtype} nf4), full or scratch
training_type peft_type peft lora train_from_scratch
    {method} chooses what trains: lora (also over 4-bit weights, {base_dtype} nf4), full or scratch
stage rl rlhf trainer -> stage
    train does supervised fine-tuning, and preferences with {loss} dpo, kto and others; graftune rl trains on rewards
do_train do_eval do_predict task_type predict_with_generate
    supervised fine-tuning is what train does; remove it
pref_loss loss_type rl_loss -> loss
    {loss} chooses what is minimised: cross_entropy, or for preferences dpo, ipo, simpo, orpo, kto and others
dpo_beta pref_beta simpo_gamma kto_desirable_weight kto_undesirable_weight rpo_alpha pref_ftx
    {loss} chooses the preference loss; {beta}, {gamma}, {sft_share}, {desirable_weight} and {undesirable_weight} are
    its settings
precompute_ref_log_probs ref_model
    {reference} chooses the model that preferences are compared with, {reference_pass} whether its log-probabilities are
    computed once
reward_funcs reward_model
    graftune rl trains on rewards (GRPO, PPO and others): give the file of the function with {reward} (docs/rl.md)
dataset datasets dataset_name dataset_dir hf_dataset pretraining_dataset data_files media_dir
    {data} takes a file, a folder, a glob or a Hub data set (owner/name); for several, write
    data: [{path: owner/name, split: train, weight: 2}] in a YAML file
type format data_format dataset_format formatting formatting_func field_messages message_property_mappings
prompt_feature completion_feature text_feature chat_feature columns input_column output_column dataset_text_field
prompt_column response_column text_column field_instruction field_output
    the format of the rows is recognised automatically; where columns have other names, use {map}
dataset_config dataset_config_name dataset_train_split dataset_test_split dataset_split train_split split subset
dataset_streaming
    write the source in a file as data: [{path: owner/name, split: train, subset: main}]
chat_template chat_template_jinja chat_template_path prompt_template prompt_style conversation_template -> jinja_file
    the model's own chat template is used; {template} takes a Jinja file instead
default_system default_system_message
    put a system turn into the rows of {data}
enable_thinking thinking reasoning_effort -> template_variable
    give it to the template with {template_vars}, as enable_thinking=false
val_set_size val_size test_size test_split_size validation_split eval_split validation_ratio -> val_split
    {val_split} is the share of the data held out for validation (0.1: a tenth), not a number of rows
max_samples max_train_samples val_batches num_samples interleave_probs mix_strategy
    there is no limit on rows: {max_steps} ends the run early, {eval_examples} limits validation
adapter_path
    {out} is the folder that a run is written to, {adapter} an adapter to continue from
resume_from_checkpoint resume_checkpoint auto_resume_from_checkpoints overwrite_output_dir
    continue a run with graftune train --resume RUN
lora_target_linear -> targets=all_linear
    adapters are on all layers; {targets} chooses the projections
num_layers lora_layers layers_to_transform layers_pattern layers finetune_last_n_layers lora_layers_to_transform
peft_layers_to_transform peft_layers_pattern
finetune_language_layers finetune_attention_modules finetune_mlp_modules finetune_vision_layers
    adapters are on all layers; {targets} chooses the projections
target_parameters lora_target_parameters -> parameters
    name them in {targets}, as experts.gate_up_proj
save_strategy eval_strategy evaluation_strategy evals_per_epoch saves_per_epoch save_on_each_node
    {save_every}, {save_minutes} and {eval_every} say how often; each epoch is saved and evaluated anyway
load_best_model_at_end metric_for_best_model greater_is_better save_best_model
    the best adapter by validation loss is what a run keeps; {patience} stops early
iters num_iters max_iters total_steps num_steps steps num_training_steps train_steps
    {max_steps} limits the number of optimizer steps (each of {tokens_per_step} tokens), {epochs} the passes over the
    data
save_safetensors save_only_model merge_lora save_method save_pretrained fuse export_dir export_size
    the run folder always holds the adapter in PEFT's layout; graftune export RUN --to merged, gguf or gguf-lora makes
    others
modules_to_save lora_modules_to_save additional_target train_embeddings
    {train_norms} trains the norms and {new_tokens} the rows of added tokens; other whole modules train only with
    {method} full
bias lora_bias
    projections of adapters have no bias here (PEFT's bias: none); remove it
tokens additional_special_tokens add_tokens -> new_tokens
    {new_tokens} adds tokens and trains their rows; the tokenizer's own special tokens are used as they are
special_tokens add_special_tokens resize_vocab eos_token pad_token eot_tokens resize_token_embeddings_to_32x
    {new_tokens} adds tokens and trains their rows; the tokenizer's own special tokens are used as they are
init_lora_weights lora_init peft_init_lora_weights -> init
    {init} is kaiming (PEFT's default) or gaussian; PiSSA and LoftQ are not supported
pissa_init loftq_config loftq
    {init} is kaiming (PEFT's default) or gaussian; PiSSA and LoftQ are not supported
use_dora dora peft_use_dora lora_dora use_vera
    DoRA is not supported here: use {rank} and {targets} to give plain LoRA more capacity
neftune_noise_alpha noisy_embedding_alpha
    NEFTune's noise is not supported here; {dropout} is there against overfitting
scale lora_scale lora_scaling lora_parameters
    the product is scaled by alpha/rank: set {alpha} to the scale times {rank}
lr_scheduler_kwargs cosine_min_lr_ratio -> least_lr
    {schedule} is cosine, linear or constant, going down to {min_lr}
cosine_constant_lr_ratio
    {schedule} is cosine, linear or constant, going down to {min_lr}
data_seed
    {seed} covers the split, the shuffle, the adapters and dropout
sequence_length context_length max_context num_ctx n_ctx max_prompt_length max_completion_length
    {max_seq_len} is the longest example in tokens, prompt and response together
liger_kernel use_liger_kernel liger enable_liger_kernel cut_cross_entropy unsloth use_unsloth unsloth_lora_mlp
lora_mlp_kernel lora_qkv_kernel lora_o_kernel torch_compile label_smoothing_factor liger_rope liger_rms_norm
liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy use_kernels unsloth_force_compile
    the loss is cross-entropy over response tokens, in fused kernels that are chosen automatically; remove it
dataloader_num_workers preprocessing_num_workers dataset_processes num_workers num_proc
dataset_num_proc
    data is read and encoded on all cores automatically; {threads} limits the CPU threads
dataloader_pin_memory dataset_prepared_path overwrite_cache dataloader_prefetch_factor streaming
dataloader_drop_last shuffle_merged_datasets remove_unused_columns preprocessing_batch_size dataset_kwargs
skip_prepare_dataset tokenized_path
    encoded data is cached automatically; GRAFTUNE_CACHE says where
loss_watchdog_threshold loss_watchdog_patience
    {stop_on_warning} stops a run whose loss jumps, with a checkpoint
processor_type image_max_pixels video_max_pixels freeze_vision_tower freeze_multi_modal_projector image_size
finetune_audio_layers
    images, audio and video are not trained here, only text
trust_remote_code
    no code from a model's repository is ever run; remove it
no_cuda use_cpu -> device=cpu
    {device} chooses it: auto, cpu, cuda, cuda:N, xpu or mps
use_mps_device use_ipex cpu cuda gpu
    {device} chooses it: auto, cpu, cuda, cuda:N, xpu or mps
model_type tokenizer_type tokenizer_name tokenizer config_name model_max_position is_llama_derived_model
tokenizer_use_fast is_mistral_derived_model is_falcon_derived_model use_fast_tokenizer processing_class
    family and tokenizer are read from the base; remove it
rope_scaling rope_theta sliding_window
    positions are as in the base's own configuration; remove it
formatting_func compute_metrics data_collator callbacks preprocess_logits_for_metrics plugins
    code of your own is not called here; {map} names columns, and the rows go through the model's chat template
fast_inference gpu_memory_utilization max_lora_rank float8_kv_cache
    answers are computed here, not by vLLM; remove it
train test
    graftune train trains and graftune eval RUN DATA evaluates; remove it
rate lr_rate
    the learning rate is {lr}
"""

# Names that are ours too and mean something else there: used when a file of that tool is imported.
_CLASHES = """
adapter -> training_method
    {method} chooses what trains
template -> jinja_file
    the model's own chat template is used; {template} takes a Jinja file instead
strict
    weights that do not fit the base are always refused; {strict} is about rows of the data
"""


def _read(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Parse lines of names, each followed by indented lines with their answer. Returns the answers and the converting
    functions, both by name."""
    found: dict[str, str] = {}
    functions: dict[str, str] = {}
    for head, answer in re.findall(r"((?:^[^ \n].*\n)+)((?:^ .*\n)+)", text, re.M):
        names, _, function = head.partition("->")
        found |= dict.fromkeys(names.split(), " ".join(answer.split()))
        functions |= dict.fromkeys(names.split() if function else [], function.strip())
    return found, functions


def _named(text: str) -> list[tuple[str, list[str]]]:
    """Lines of a name, a colon and names; an indented line continues the one before it."""
    lines = text.replace("\n    ", " ").strip().split("\n")
    return [(name, names.split()) for line in lines for name, _, names in [line.partition(":")]]


ANSWERS, CONVERTED_BY = _read(_ANSWERS)
CLASHES, CLASHES_CONVERTED_BY = _read(_CLASHES)
SAME = {name: ours for ours, names in _named(_SAME) for name in names}
_SIGNS = """
axolotl: base_model datasets sequence_len micro_batch_size num_epochs sample_packing lora_target_linear lr_scheduler
    val_set_size dataset_prepared_path evals_per_epoch saves_per_epoch pad_to_sequence_len train_on_inputs
llama-factory: stage finetuning_type cutoff_len lora_target lora_rank dataset dataset_dir do_train quantization_bit
    val_size plot_loss overwrite_cache preprocessing_num_workers neat_packing mask_history train_on_prompt
    infer_backend export_dir
trl: dataset_name dataset_config dataset_text_field use_peft lora_r lora_target_modules max_length dataset_train_split
    assistant_only_loss completion_only_loss
"""
SIGNS = {tool: set(names) for tool, names in _named(_SIGNS)}  # the names by which a tool's file is recognised
_TRANSFORMERS = {"model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "output_dir"}
SIMILAR = 0.75  # of 1: two letters exchanged in a word of four
OTHERS_SIMILAR = 0.85  # for other tools' names, of which there are hundreds
_CHAT = ("max_new_tokens", "temperature", "system")


def same(name: str) -> str | None:
    """Our setting that another tool's name means, where meaning and unit are the same."""
    return SAME.get(plain(name))


def answer(name: str, flags: bool) -> str | None:
    """What to use instead of a name of another tool; None if the name is not known. `flags`: show our settings as
    flags."""
    found = plain(name)
    if found in SAME:
        return f"here it is {_shown(SAME[found], flags)}"
    text = ANSWERS.get(found)
    return re.sub(r"\{(\w+)\}", lambda match: _shown(match[1], flags), text) if text else None


def plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def near(typed: str, known: list[str], similar: float = SIMILAR) -> str | None:
    """The one of these names that was probably meant. What is less similar is not guessed: a wrong guess costs more
    than none."""
    by_name = {plain(name): name for name in known}
    found = difflib.get_close_matches(plain(typed), by_name, 1, similar)
    return by_name[found[0]] if found else None


def advice(typed: str, known: list[str], flags: bool) -> str:
    """What to do about a name that is not a setting: the answer if another tool has it, else a guess at the setting or
    the other tool's name that was meant; empty if there is none. `known`: our names, as the user writes them."""
    if reply := answer(typed, flags):
        return reply
    ours, theirs = near(typed, known), near(typed, [*SAME, *ANSWERS], OTHERS_SIMILAR)
    if theirs and not (ours and _similarity(typed, ours) >= _similarity(typed, theirs)):
        return f"did you mean {_shown(theirs, flags)}? {answer(theirs, flags)}"
    return f"did you mean {ours}?" if ours else ""


def _similarity(typed: str, name: str) -> float:
    return difflib.SequenceMatcher(None, plain(typed), plain(name)).ratio()


def tool_of(keys: Iterable[str]) -> str | None:
    """The tool that a file of settings is for, by its own names; with names of transformers alone it is TRL's."""
    names = {plain(key) for key in keys}
    found = max(SIGNS, key=lambda tool: len(SIGNS[tool] & names))
    return found if SIGNS[found] & names else "trl" if _TRANSFORMERS & names else None


def _shown(name: str, flags: bool) -> str:
    return "--" + name.replace("_", "-") if flags or name in _CHAT else name
