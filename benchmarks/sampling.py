"""How many tokens are sampled in a second, at temperature 1, with 512 tokens in every prompt and 512 new ones.

    python benchmarks/sampling.py [8b:64 8b:256 1b:64 8b-nf4:8 ...] [--transformers] [--json FILE]

A case is a base (benchmarks/cases.py) and a number of sequences. Prompts differ, weights are random, and no token ends
a sequence. `tok_s` is of the rounds alone: from the first block of rounds that the host has seen to the last one;
`whole_tok_s` includes the prompts, in a second call, when everything is captured. The log-probabilities of the first
sequences are computed again by a forward pass over the whole text: their mean difference goes with every time. With
--transformers, `generate` of the same shape runs in the same process, over fewer tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import goal, said
from benchmarks.step import opened

import graftune
from benchmarks import cases
from benchmarks import measure as record
from graftune.batch import Example
from graftune.data.sample import sample_for
from graftune.infer.generate import Token, requests_of, sampler_for
from graftune.infer.sample import Sampling
from graftune.model.decoder import PackedDocuments

DEFAULT = ("8b:64", "8b:256", "1b:64")
GOALS = {"8b:64": 8500.0, "8b:256": 16000.0, "1b:64": 35000.0}
MOST_OFF = 0.005
CHECKED = 2  # sequences


def sampled(session: Any, prompts: list[list[int]], new: int, profile: bool) -> dict[str, Any]:
    parts = session.parts
    decoder, device = parts.decoder, parts.runtime.device
    sampler = sampler_for(decoder, requests_of(decoder, prompts, new), 1 << 45, parts.eager_attention)
    found: dict[str, Any] = {"places": sampler.shape.places}
    for call in ("first", "second"):
        answers: list[list[Token]] = [[] for _ in prompts]
        _wait(device)
        began, seen, blocks = time.perf_counter(), 0, list[tuple[float, int]]()
        for fresh in sampler.rounds(prompts, Sampling(new, temperature=1.0, seed=3), ()):
            for index, tokens in fresh.items():
                answers[index] += tokens
                seen += len(tokens)
            blocks.append((time.perf_counter(), seen))
        whole = time.perf_counter() - began
        (first, some), (last, every) = blocks[0], blocks[-1]
        found |= {f"{call}_call_s": round(whole, 3), "tok_s": round((every - some) / max(last - first, 1e-9))}
        found["whole_tok_s"] = round(every / whole)
    found["round_ms"] = round(1e3 * len(prompts) / found["tok_s"], 3)
    found["graphs"] = len(sampler.graphs)
    found["off"] = round(_difference(parts, prompts, answers), 5)
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    if profile:
        found["kernels"] = _by_kernel(sampler, prompts)
    return found


@torch.no_grad()
def _difference(parts: Any, prompts: list[list[int]], answers: list[list[Token]]) -> float:
    """The mean difference between sampled and recomputed log-probabilities."""
    decoder, device, off = parts.decoder, parts.runtime.device, []
    for prompt, answer in list(zip(prompts, answers, strict=True))[:CHECKED]:
        text = torch.tensor(prompt + [token.id for token in answer], device=device)
        documents = PackedDocuments.of([len(text)], device, parts.eager_attention)
        x = decoder.hidden(text, decoder.begin(torch.arange(len(text), device=device), documents))
        want = torch.log_softmax(decoder.logits(x[len(prompt) - 1 : -1]).float(), -1)
        want = want.gather(1, text[len(prompt) :, None]).squeeze(1).cpu()
        off.append((torch.tensor([token.logprob for token in answer]) - want).abs())
    return float(torch.cat(off).mean())


def real(base: str, dtype: str, device: torch.device, count: int = 64, new: int = 128) -> dict[str, Any]:
    """A trained model's answers at temperature 1: how far their log-probabilities are from those of a forward pass."""
    rows = [json.loads(line)["messages"] for line in sample_for("answers").read_text().splitlines()[:count]]
    questions = [[turn for turn in row if turn["role"] == "user"] for row in rows]
    compute = "bf16" if device.type == "cuda" else "fp32"
    with graftune.open(base, base_dtype=dtype, compute_dtype=compute, device=str(device)) as session:
        answers = [one for (one,) in session.sample(questions, max_new_tokens=new, temperature=1.0, seed=3)]
        prompts = [session.encode(question) for question in questions]
        texts = [
            Example(prompt + answer.tokens, [False] * len(prompt) + [True] * len(answer.tokens))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        want = session.logprobs(texts)
    off = [torch.tensor(answer.logprobs) - found for answer, found in zip(answers, want, strict=True)]
    return {"off": round(float(torch.cat(off).abs().mean()), 5), "tokens": sum(map(len, off))}


def _by_kernel(sampler: Any, prompts: list[list[int]], rounds: int = 32) -> dict[str, float]:
    """Microseconds a round of the kernels that take the most, over a short call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in sampler.rounds(prompts, Sampling(rounds, temperature=1.0), ()):
            pass
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)[:20]
    return {event.key[:60]: round(event.device_time_total / rounds, 1) for event in events}


def transformers_tok_s(case: cases.Case, prompts: list[list[int]], new: int) -> float:
    """Tokens per second of `generate` with its cache, prompts included."""
    import transformers

    config = transformers.AutoConfig.for_model(**case.shape.settings)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    tokens = torch.tensor(prompts, device="cuda")
    options = {"do_sample": True, "eos_token_id": None, "pad_token_id": 0}
    for count in (4, new):
        _wait(tokens.device)
        began = time.perf_counter()
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, **options)
        _wait(tokens.device)
    return len(prompts) * new / (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a round")
    parser.add_argument("--transformers", action="store_true", help="also run transformers' generate, for 64 tokens")
    parser.add_argument("--real", default="", metavar="FILE", help="compare the answers of this model")
    parser.add_argument("--json", default="", help="a GPU's record, or - to print")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    options = parser.parse_args(words)
    device, results, goals = torch.device(options.device), dict[str, Any](), []
    for name in options.cases or (() if options.real else DEFAULT):
        size, _, count = name.partition(":")
        case = cases.parse(f"{size}-1x{options.prompt}")
        session = opened(case, device)
        drawn = torch.Generator().manual_seed(1)
        shape = (int(count or 64), options.prompt)
        prompts = torch.randint(3, session.base.spec.vocab, shape, generator=drawn).tolist()
        found = results[name] = sampled(session, prompts, options.new, options.profile)
        session.close()
        del session
        gc.collect()
        if options.transformers:
            found["transformers_tok_s"] = round(transformers_tok_s(case, prompts, 64))
            gc.collect()
        print(name, *(f"{key}: {value}" for key, value in found.items()), sep="\n  ", flush=True)
        goals.append(goal(f"sampling {name}: off by, a token", "at most", MOST_OFF, found["off"]))
        if name in GOALS and (options.prompt, options.new) == (512, 512):
            goals.append(goal(f"sampling {name}, tokens/s", "at least", GOALS[name], found["tok_s"]))
    for dtype in ("bf16", "nf4") if options.real else ():
        name = f"{Path(options.real).stem} {dtype}"
        results[name] = real(options.real, dtype if device.type == "cuda" else "auto", device)
        print(name, results[name], flush=True)
        goals.append(goal(f"sampling {name}: off by, a token", "at most", MOST_OFF, results[name]["off"]))
    print("\n".join(map(said, goals)))
    record.keep(options.json, "sampling", record.facts(options.commit) | {"cases": results, "goals": goals})
    return int(any(found["off"] > MOST_OFF for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
