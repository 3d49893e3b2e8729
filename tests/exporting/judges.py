"""The programs that have to take what we export: PEFT, transformers and llama.cpp, each asked for log-probabilities."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import graftune
from graftune.api import Session
from graftune.model.decoder import PackedDocuments
from tests.support import tiny

# Bytes of the tiny models' vocabulary, special tokens included.
DOCUMENT = [5, 90, 3, 200, 131, 7, 7, 64, 250, 17, 99, 2, 41, 1, 77]

LETTER = 70  # a token of one ASCII letter, in the tiny vocabulary and in SmolLM2's


def opened(base: Path | str = "", adapter: Path | str = "", **settings: Any) -> Session:
    return graftune.open(str(base), adapter=str(adapter), device="cpu", compute_dtype="fp32", **settings)


def shaken(run: Session, seed: int = 3, by: float = 0.1) -> Session:
    """Every trainable value moved off where it started, as training would."""
    arena = run.parts.arena
    arena.weights.add_(torch.randn(len(arena.weights), generator=torch.Generator().manual_seed(seed)), alpha=by)
    arena.publish()
    return run


def ours(run: Session, tokens: list[int] = DOCUMENT, adapted: bool = True) -> torch.Tensor:
    """Log-probabilities [T, V]."""
    decoder = run.parts.decoder
    state = decoder.begin(torch.arange(len(tokens)), PackedDocuments.of((len(tokens),)), adapted=adapted)
    with torch.no_grad():
        logits = decoder.logits(decoder.hidden(torch.tensor(tokens), state), adapted=adapted)
    return torch.log_softmax(logits.float(), -1)


def in_transformers(folder: Path, tokens: list[int] = DOCUMENT, adapter: Path | None = None) -> torch.Tensor:
    import peft

    model = tiny.load_hf(folder)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return torch.log_softmax(model.eval()(torch.tensor([tokens])).logits[0].float(), -1)


class LlamaCpp:
    """A server over a GGUF, with adapters; key cache in fp32 and plain attention, so that only blocks are coarse."""

    def __init__(self, path: Path, adapters: Sequence[Path] = (), context: int = 256):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = context, 1, False, 0
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(file), 1.0) for file in adapters]
        self.server = xllamacpp.Server(params)

    def ask(self, prompt: list[int] | str, **more: Any) -> dict[str, Any]:
        asked = {"prompt": prompt, "n_predict": 1, "temperature": 0.0, "cache_prompt": True} | more
        request = urllib.request.Request(
            self.server.listening_address + "/completion",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return dict(json.load(answer))

    def after(self, prompt: list[int], vocabulary: int = tiny.VOCAB, shown: int = 0) -> torch.Tensor:
        """Log-probabilities of every token (or of the `shown` likeliest) after a prompt.

        They are those before sampling. What is sampled is forced to be a letter: the server keeps silent about a token
        that is half a character, or the end."""
        asked = {"n_probs": shown or vocabulary, "logit_bias": [[LETTER, 1e4]]}
        (step,) = self.ask(prompt, **asked)["completion_probabilities"]
        found = torch.full((vocabulary,), float("nan"))
        for entry in step["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found

    def along(self, tokens: list[int], vocabulary: int = tiny.VOCAB) -> torch.Tensor:
        """[T, V] over a document, as `ours` gives them."""
        return torch.stack([self.after(tokens[: n + 1], vocabulary) for n in range(len(tokens))])


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference of log-probabilities; a NaN counts as one."""
    difference = (got - want).abs()
    return float("inf") if bool(difference.isnan().any()) else float(difference.max())
