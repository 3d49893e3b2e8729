"""Rounds of reinforcement learning: sample answers, reward them, train on all of them.

    python benchmarks/rounds.py [8b 8b-nf4 1b ...] [--who ours,trl] [--prompts 8] [--group 8] [--json FILE]
    python benchmarks/rounds.py 8b-nf4 --who ours --prompts 1 --prompt 256 --new 1024 --micro 2048 --recompute selective

Prompts and answers have 512 tokens, weights are random, and no token ends an answer. The reward is the share of even
tokens, so that answers of a group differ. `trl` is TRL's GRPOTrainer with PEFT and transformers' `generate`, with its
defaults (blocks recomputed) and micro-batches of one group. Ours runs through the verbs of a session. Reported are the
median round after the first two, its phases, the captures of all rounds and the peak of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import goal, said
from benchmarks.random_bases import base_of
from benchmarks.step import opened

from benchmarks import cases
from benchmarks import measure as record
from graftune.rl.rewards import advantages_of
from graftune.rl.rounds import example_of
from graftune.tokenizer import Tokenizer

WORDS = 256  # of the prompts' language; drawn tokens beyond them have no text
FASTER = 3.0  # than trl, at least


def texts(prompts: int, tokens: int, number: int) -> list[str]:
    drawn = torch.randint(3, WORDS, (prompts, tokens), generator=torch.Generator().manual_seed(number))
    return [" ".join(f"w{word}" for word in row) for row in drawn.tolist()]


def words() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


def reward(tokens: list[int]) -> float:
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


def ours(case: cases.Case, device: torch.device, options: Any) -> dict[str, Any]:
    base = dataclasses.replace(base_of(case, device), tokenizer=Tokenizer(words()))
    how = {"recompute": options.recompute} if options.recompute else {}
    how |= {"tokens_per_micro_batch": options.micro} if options.micro else {}
    session = opened(case, device, base=base, loss="ppo", lr=1e-5, **how)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # a random base is made in bf16
    phases: list[tuple[float, float]] = []
    for number in range(options.rounds):
        prompts, began = texts(options.prompts, options.prompt, number), time.perf_counter()
        groups = session.sample(prompts, n=options.group, max_new_tokens=options.new, seed=number)
        sampled, batch = time.perf_counter(), []
        for prompt, group in zip(prompts, groups, strict=True):
            tokens = session.encode(prompt)
            advantages = advantages_of([reward(list(answer.tokens)) for answer in group], "group")
            batch += [
                example_of(tokens, answer, advantage)
                for answer, advantage in zip(group, advantages, strict=True)
                if advantage is not None
            ]
        session.forward_backward(batch)
        figures = session.optim_step().fetched()
        phases.append((sampled - began, time.perf_counter() - sampled))
    sampling, training = (statistics.median(one[i] for one in phases[2:]) for i in (0, 1))
    found = {"round_s": round(sampling + training, 3), "sample_s": round(sampling, 3), "train_s": round(training, 3)}
    found |= {"first_round_s": round(sum(phases[0]), 3), "ratio": round(figures.more.get("ratio", 0.0), 4)}
    if device.type == "cuda":
        found |= {"captures": session.parts.pipeline.captures, "sampling_graphs": len(session.parts._sampler.graphs)}
        found["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    session.close()
    return found


def trl(case: cases.Case, device: torch.device, options: Any) -> dict[str, Any]:
    import transformers
    from benchmarks.peers import lora_config, nf4_llama, random_llama
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = nf4_llama(case, device) if case.base == "nf4" else random_llama(case.shape, device, torch.bfloat16)
    steps, times = 2, [0.0]  # the first of them warms up
    args = GRPOConfig(
        output_dir="trainer",
        per_device_train_batch_size=options.group,
        gradient_accumulation_steps=options.prompts,
        num_generations=options.group,
        max_completion_length=options.new,
        max_steps=steps,
        learning_rate=1e-5,
        bf16=device.type == "cuda",
        use_cpu=device.type == "cpu",
        report_to="none",
        save_strategy="no",
    )
    rows = [{"prompt": text} for text in texts(options.prompts * steps, options.prompt, 0)]
    special = {"eos_token": "w1", "pad_token": "w2", "unk_token": "w0"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words(), **special)

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - times[0])

    def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward(tokens) for tokens in completion_ids]

    trainer = GRPOTrainer(
        model, rewards, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        peft_config=lora_config(case), callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    found: dict[str, Any] = {"round_s": round(min(times[2:]), 3), "first_round_s": round(times[1], 3)}
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["8b"])
    parser.add_argument("--who", default="ours,trl")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--micro", type=int, default=0, help="tokens of our micro-batches; default: one group")
    parser.add_argument("--recompute", default="", help="our policy; default: none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", default="", help="a GPU's record, or - to print")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    options = parser.parse_args(given)
    device, results, goals = torch.device(options.device), dict[str, Any](), []
    for name in options.cases:
        case = cases.parse(f"{name}-{options.group}x{options.prompt + options.new}")
        found = results[name] = dict[str, Any]()
        for who in options.who.split(","):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            found[who] = {"ours": ours, "trl": trl}[who](case, device, options)
            record.keep(options.json, "rounds", record.facts(options.commit) | {"cases": results, "goals": goals})
            print(f"{name} {who}", *(f"{key} {value}" for key, value in found[who].items()), sep="  ", flush=True)
            gc.collect()
        if len(found) == 2:
            times = found["trl"]["round_s"] / found["ours"]["round_s"]
            goals.append(goal(f"rounds {name}: trl / ours", "at least", FASTER, times))
    print("\n".join(map(said, goals)))
    record.keep(options.json, "rounds", record.facts(options.commit) | {"cases": results, "goals": goals})
    return 0


if __name__ == "__main__":
    sys.exit(main())
