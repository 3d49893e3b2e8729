"""SmolLM2, or its first layers in a quick run, tuned for a few steps, then asked four ways: our own engine, PEFT over
the dequantised base, llama.cpp with our adapter on the ORIGINAL Q4_1 file, and llama.cpp with our merged GGUF.

The texts are our own greedy answers; every way gives the log-probability of each of their tokens. We and PEFT compute
in fp32 over the same values. llama.cpp rounds activations to 8 bits over Q4_1 and to fp16 over F16, so it stands apart
by that noise: over Q4_1 more than over F16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.api import Session, export, train
from graftune.data import sample
from graftune.infer.sample import Sampling
from graftune.model.decoder import PackedDocuments
from graftune.observe.console import Console
from graftune.settings.config import Config
from tests.exporting.judges import LlamaCpp, opened
from tests.support import oracle
from tests.support.generate import generate
from tests.support.thorough import THOROUGH

QUESTIONS = ("My parcel has not arrived.", "I was charged twice this month.")[: 2 if THOROUGH else 1]
STEPS, ANSWER = 2, 16 if THOROUGH else 8
# Of log-probabilities; measured: 2e-5, 0.2 and 5e-3 at most.
LIMITS = {"PEFT": 1e-4, "llama.cpp, adapter on Q4_1": 0.4, "llama.cpp, merged F16": 0.015}

Texts = list[tuple[list[int], list[int]]]  # (prompt, answer) in tokens


@pytest.fixture(scope="module")
def run(shallow_smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make train`'s settings, stopped early, with a learning rate that shows within these steps."""
    out = tmp_path_factory.mktemp("smollm2") / "run"
    settings: dict[str, Any] = {"base": str(shallow_smollm2), "out": str(out)}
    settings |= {"max_steps": STEPS, "samples": 0, "score": False, "device": "cpu", "compute_dtype": "fp32"}
    settings |= {"lr": 4e-3, "warmup": 0.0, "val_split": 0.0, "tokens_per_step": 64}
    config = Config.load(Path(sample.__file__).with_name("support.yaml"), settings)
    return train(config, console=Console(quiet=True)).folder


@pytest.fixture(scope="module")
def tuned(run: Path) -> Session:
    return opened(run)


@pytest.fixture(scope="module")
def texts(tuned: Session) -> Texts:
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    template = tuned.tokenizer.template
    prompts = [tuned.tokenizer.encode(template.render(turn, add_generation_prompt=True)) for turn in asked]
    answers = generate(tuned.parts.decoder, prompts, Sampling(max_new_tokens=ANSWER), ())
    return list(zip(prompts, answers, strict=True))


def chosen(table: torch.Tensor, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Of log-probabilities [T, V] over a text, those of its answer's tokens."""
    return table[len(prompt) - 1 : len(prompt) + len(answer) - 1].gather(1, torch.tensor(answer)[:, None])[:, 0]


def by_us(run: Session, texts: Texts, adapted: bool) -> torch.Tensor:
    """All texts as one pack."""
    lengths = tuple(len(prompt) + len(answer) for prompt, answer in texts)
    decoder = run.parts.decoder
    positions = torch.cat([torch.arange(length) for length in lengths])
    state = decoder.begin(positions, PackedDocuments.of(lengths), adapted=adapted)
    with torch.no_grad():
        tokens = torch.tensor([token for prompt, answer in texts for token in (*prompt, *answer)])
        logits = decoder.logits(decoder.hidden(tokens, state), adapted=adapted)
    tables = torch.log_softmax(logits.float(), -1).split(lengths)
    return torch.cat([chosen(table, *text) for table, text in zip(tables, texts, strict=True)])


def by_peft(model: Any, texts: Texts) -> torch.Tensor:
    """One batch; what pads a text at its end is seen by nothing before it."""
    wholes = [torch.tensor([*prompt, *answer]) for prompt, answer in texts]
    with torch.no_grad():
        logits = model(torch.nn.utils.rnn.pad_sequence(wholes, batch_first=True)).logits
    tables = torch.log_softmax(logits.float(), -1)
    return torch.cat([chosen(table, *text) for table, text in zip(tables, texts, strict=True)])


def by_llama_cpp(server: LlamaCpp, texts: Texts) -> torch.Tensor:
    """It says its own greedy text; where that leaves ours, it is asked again behind our token."""
    found: list[float] = []
    for prompt, answer in texts:
        done = 0
        while done < len(answer):
            asked = {"n_predict": len(answer) - done, "n_probs": 50}
            for step in server.ask([*prompt, *answer[:done]], **asked)["completion_probabilities"]:
                shown = {one["id"]: one["logprob"] for one in step["top_logprobs"]}
                found.append(shown[answer[done]])
                done += 1
                if step["id"] != answer[done - 1]:
                    break
    return torch.tensor(found)


def test_four_ways(run: Path, tuned: Session, texts: Texts, shallow_smollm2: Path, tmp_path: Path) -> None:
    import peft

    own = by_us(tuned, texts, adapted=True)
    plain = by_us(tuned, texts[:1], adapted=False)
    moved = (own[: len(plain)] - plain).abs()
    model = peft.PeftModel.from_pretrained(
        oracle.smollm2_in_transformers(tuned.base), str(export(str(run), "peft", out=str(tmp_path / "p")).path)
    ).eval()

    lora = export(str(run), "gguf-lora", out=str(tmp_path / "l.gguf")).path
    merged = export(str(run), "gguf", kind="F16", out=str(tmp_path / "m.gguf"))
    assert merged.facts["survives"] > 0.99
    ways = {
        "PEFT": by_peft(model, texts),
        "llama.cpp, adapter on Q4_1": by_llama_cpp(LlamaCpp(shallow_smollm2, [lora]), texts),
        "llama.cpp, merged F16": by_llama_cpp(LlamaCpp(merged.path), texts),
    }
    print(f"{len(own)} tokens, moved by the adapter by {moved.mean():.2f} in the mean and {moved.max():.2f} at most")
    for name, found in ways.items():
        difference = (found - own).abs()
        print(f"{name}: differs from our own by {difference.max():.1e} at most, {difference.mean():.1e} in the mean")
    assert len(own) == len(texts) * ANSWER and moved.max() > 1, "an adapter that changes nothing proves nothing"
    for name, found in ways.items():
        assert (found - own).abs().max() < LIMITS[name], name
