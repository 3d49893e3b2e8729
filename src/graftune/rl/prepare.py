"""Prepares a run of reinforcement learning: the reward functions, the prompts, the folder and the session, each mistake
found as early as it can be. Memory is planned for the longest answers, and for the cache of the samples of a round,
which stays while the run trains."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graftune.data.prompts import PromptData, PromptRow, read_prompts
from graftune.data.row import Refusal
from graftune.data.summary import counted
from graftune.data.template import usable_format
from graftune.errors import GraftuneError
from graftune.infer.cache import Request
from graftune.losses import LOSSES, choose
from graftune.losses.policy import PolicyLoss
from graftune.observe.console import Console
from graftune.observe.memory import forget_earlier_runs, free_bytes, resident_bytes
from graftune.plan import Card, Job, card_here
from graftune.rl.rewards import GIVEN, Rewards
from graftune.runtime import set_up
from graftune.session import Session, open_session, reader_of, text
from graftune.settings import auto
from graftune.settings.config import Config
from graftune.settings.sections import NOT_FOR_REWARDS
from graftune.settings.sources import DataValue, label
from graftune.tokenizer import Tokenizer
from graftune.tokenizer.template import today
from graftune.training.prepare import opened, opened_to_plan, plan_session, training_job, with_auto
from graftune.training.ranks import SingleProcess
from graftune.training.run import PreparedRun
from graftune.weights.base import Base

USUAL_HELD_OUT = 64  # prompts of an evaluation, unless eval_examples says otherwise

EncodedPrompt = tuple[PromptRow, list[int]]


@dataclass(frozen=True)
class PromptSplit:
    training: list[PromptRow]
    held_out: list[PromptRow]
    data_sha256: str  # of the files
    prompts_sha256: str  # of the prompts as tokens
    lengths: list[int]  # tokens of each prompt that is trained or evaluated
    longest: int  # tokens of the longest prompt, evaluated or not: a resume reads them all
    columns: list[str]  # that the reward functions are given beside prompts and completions


@dataclass(frozen=True)
class PreparedRl(PreparedRun):
    session: Session
    data: PromptSplit
    rewards: Rewards


def with_policy_loss(config: Config) -> Config:
    """The settings with a policy loss: ppo unless one is named."""
    config = config.replace(loss="ppo") if config.train.loss == "cross_entropy" else config
    policies = [name for name, row in LOSSES.items() if isinstance(row.make, type) and issubclass(row.make, PolicyLoss)]
    if config.train.loss not in policies:
        what = f"loss is {config.train.loss}, which does not train on rewards"
        raise GraftuneError(what, fix=f"set it to one of: {', '.join(policies)}")
    choose(config.train)  # refuses settings that do not fit
    return config


def prepare_rl(
    config: Config,
    console: Console,
    held: ExitStack,
    folder_for: Callable[[Config, DataValue], Path],
    ranks: SingleProcess,
    before: Config | None = None,
) -> PreparedRl:
    """Prepare a run. `folder_for` makes or finds its folder, once its data was read; what it opens is closed with
    `held`. `before`: the settings so far of a run that is resumed."""
    if ranks.size > 1:
        what = f"a run with rewards is one process, and a launcher has started {ranks.size}"
        raise GraftuneError(what, fix="start it without torchrun")
    if before is None and not config.data.date:
        config = config.replace(date=today().isoformat())
    config, chosen_length = with_policy_loss(config), config.data.max_seq_len
    if before is None and (unused := config.not_default(NOT_FOR_REWARDS)):
        console.warn(f"settings that a run with rewards does not use: {', '.join(unused)}")
    if not config.data.data:
        raise GraftuneError("there is no data", fix="name a file of prompts behind the base")
    rewards = Rewards(config.rl)
    held.callback(rewards.close)
    with console.working("importing the reward functions"):
        rewards.check()
    device = ranks.device(config.base.device)
    for note in set_up(device):
        console.note(note)
    forget_earlier_runs()
    card = card_here(device) if device.type == "cuda" else None  # before anything is loaded: a plan counts the base too
    free = free_bytes(device) if device.type == "cpu" else 0
    with console.working("opening the base"):
        config, base, adapter = opened(config)
    with console.working("reading the data"):
        data = _read(config, reader_of(config, base, adapter), config.data.data, console)
    rewards.check_columns(data.columns)
    if not chosen_length:  # no longer than needed: memory is planned for it
        config = config.replace(max_seq_len=_needed(config, data))
    config = _with_auto(config, base, console)
    folder = folder_for(config, config.data.data)
    process = resident_bytes()
    with console.working("loading the base"):
        session = open_session(config, base=base)
    held.callback(session.close)
    parts = session.parts
    parts.say, parts.config = console.note, parts.config.replace(out=str(folder))
    sampled = round_of(config, data.lengths, base.spec.max_positions)
    with console.working("planning memory"):
        layout = session.loss.layout(())
        plan = plan_session(parts, None, layout, card=card, free=free, process=process, sampled=sampled)
    session.feed.resolve_auto(None, session.loss.layout(()))  # where memory is not planned
    session.feed.asked_tokens = 0  # the answers decide the shape of a micro-batch, as the plan has it
    return PreparedRl(folder, parts, plan, before, ranks, session, data, rewards)


def round_of(config: Config, prompts: Sequence[int], positions: int) -> tuple[Request, ...]:
    """The samples of the round that needs the most memory. `prompts`: tokens of each prompt."""
    longest, settings = sorted(prompts, reverse=True)[: config.rl.prompts_per_round], config.rl
    return tuple(Request(n, min(n + settings.answer_tokens, positions), settings.group) for n in longest)


def job_of(config: Config, console: Console, memory: int = 0, named: Card | None = None) -> Job:
    """A run that is only planned: with the prompts of its data, or without data with the longest that settings allow.
    The reward functions are not called."""
    chosen = config.data.max_seq_len
    config, base, adapter, runtime, card, memory = opened_to_plan(with_policy_loss(config), console, memory, named)
    if config.data.data:
        data = _read(config, reader_of(config, base, adapter), config.data.data, console)
        prompts, config = data.lengths, config.replace(max_seq_len=chosen or _needed(config, data))
    else:
        config = config.replace(max_seq_len=min(config.data.longest(), base.spec.max_positions))
        prompts = [max(1, config.data.max_seq_len - config.rl.answer_tokens)] * config.rl.prompts_per_round
    config = _with_auto(config, base, console)
    sampled = round_of(config, prompts, base.spec.max_positions)
    longest = config.data.max_seq_len
    return training_job(config, base, runtime, card, memory, longest, None, evaluates=False, sampled=sampled)


def _needed(config: Config, data: PromptSplit) -> int:
    """Tokens of the longest prompt with its answer: memory is planned for no longer ones."""
    return max(data.longest + config.rl.answer_tokens, 8)


def _read(config: Config, tokenizer: Tokenizer, value: DataValue, console: Console) -> PromptSplit:
    console.note(f"reading {label(value)}")
    found = read_prompts(value, config.data)
    training, data = _fitting(found, config, tokenizer, console, value), found.sha256
    if config.data.eval_data:
        other = read_prompts(config.data.eval_data, config.data)
        held = _fitting(other, config, tokenizer, console, config.data.eval_data)
        data += other.sha256
    else:
        training, held = _split(training, config.data.val_split, config.train.seed)
    digest = hashlib.sha256(repr([[tokens for _, tokens in part] for part in (training, held)]).encode()).hexdigest()
    most = config.data.eval_examples or USUAL_HELD_OUT
    order = np.sort(np.random.default_rng([config.train.seed, 0xE7A1]).permutation(len(held))[:most]).tolist()
    chosen = [held[place] for place in order]
    console.note(
        f"prompts: {len(training)} to train on, {len(held)} held out"
        + (f", {len(order)} of them evaluated" if len(order) < len(held) else "")
    )
    both = (*training, *chosen)
    columns = dict.fromkeys(name for row, _ in both for name in row.columns)  # a row that lacks one gets None
    for name in (one for one in GIVEN if one in columns):
        console.warn(f"reward functions do not get the data's column {name}: the {name} of a round have this name")
    whole = [replace(row, columns={**columns, **row.columns}) for row, _ in both]
    lengths = [len(tokens) for _, tokens in both]
    longest = max(len(tokens) for _, tokens in (*training, *held))
    return PromptSplit(whole[: len(training)], whole[len(training) :], data, digest, lengths, longest, list(columns))


def _fitting(
    found: PromptData, config: Config, tokenizer: Tokenizer, console: Console, value: DataValue
) -> list[EncodedPrompt]:
    """The prompts that leave space for an answer. Others are counted and reported."""
    form, most = usable_format(tokenizer, config.data), config.data.max_seq_len - config.rl.answer_tokens
    if most < 1:
        sizes = f"answer_tokens is {config.rl.answer_tokens} and max_seq_len is {config.data.max_seq_len}"
        what = f"{sizes}, which leaves no token for a prompt"
        raise GraftuneError(what, fix="set max_seq_len, or lower answer_tokens")
    kept: list[EncodedPrompt] = []
    for prompt in found.prompts:
        try:
            tokens = text.conversation(tokenizer, form, prompt.messages)
            if len(tokens) > most:
                raise Refusal(f"a prompt longer than the {most} tokens that max_seq_len leaves beside answer_tokens")
            kept.append((prompt, tokens))
        except Refusal as refusal:
            found.refused.setdefault(refusal.reason, []).append(prompt.place)
    for reason, places in found.refused.items():
        which = ", ".join(places[:3]) + (" and others" if len(places) > 3 else "")
        console.warn(f"{label(value)}: {counted(len(places), 'row')} left out: {reason} ({which})")
    if not kept:
        raise GraftuneError("no prompt can be used", where=label(value), fix="set max_seq_len, or lower answer_tokens")
    return kept


def _split(data: list[EncodedPrompt], share: float, seed: int) -> tuple[list[EncodedPrompt], list[EncodedPrompt]]:
    """Training and held-out prompts; equal ones are on the same side."""
    texts: dict[tuple[int, ...], list[int]] = {}
    for place, (_, tokens) in enumerate(data):
        texts.setdefault(tuple(tokens), []).append(place)
    groups = list(texts.values())
    count = min(len(groups) - 1, max(1, round(share * len(groups)))) if share else 0
    order = np.random.default_rng([seed, 0x51D3]).permutation(len(groups)).tolist()
    held = sorted(place for group in order[:count] for place in groups[group])
    rest = sorted(place for group in order[count:] for place in groups[group])
    return [data[place] for place in rest], [data[place] for place in held]


def _with_auto(config: Config, base: Base, console: Console) -> Config:
    """The settings with an `auto` learning rate chosen. Steps have no number of tokens of their own."""
    return with_auto(auto.with_step_tokens(config, base.spec.parameters), base, None, console)
