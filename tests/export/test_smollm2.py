"""SmolLM2 tuned for a few steps, then asked four ways: our own engine, PEFT over the dequantised base, llama.cpp with
our adapter on the ORIGINAL Q4_1 file, and llama.cpp with our merged GGUF.

The texts are our own greedy answers; every way gives the log-probability of each of their tokens. We and PEFT compute
in fp32 over the same values. llama.cpp rounds activations to 8 bits over Q4_1 and to fp16 over F16, so it stands apart
by that noise: over Q4_1 more than over F16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.api import Run, export, train
from graftune.config import Config
from graftune.data import sample
from graftune.observe.console import Console
from tests import oracle
from tests.export.judges import LlamaCpp, opened, ours

QUESTIONS = (
    "My parcel has not arrived.",
    "How do I change my password?",
    "What is the capital of France?",
    "I was charged twice this month.",
)
STEPS, ANSWER = 4, 10
LIMITS = {"PEFT": 2e-3, "llama.cpp, adapter on Q4_1": 0.6, "llama.cpp, merged F16": 0.15}


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make train`'s settings, stopped early, with a learning rate that shows within these steps."""
    out = tmp_path_factory.mktemp("smollm2") / "run"
    settings: dict[str, Any] = {"base": str(smollm2), "out": str(out)}
    settings |= {"max_steps": STEPS, "samples": 0, "score": False, "device": "cpu", "compute_dtype": "fp32"}
    settings |= {"lr": 2e-3, "warmup": 0.0, "val_split": 0.0, "tokens_per_step": 256}
    config = Config.load(Path(sample.__file__).with_name("support.yaml"), settings)
    return train(config, console=Console(quiet=True)).folder


@pytest.fixture(scope="module")
def tuned(run: Path) -> Run:
    return opened(run)


@pytest.fixture(scope="module")
def texts(tuned: Run) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) in tokens."""
    found = []
    for question in QUESTIONS:
        shown = tuned.tokenizer.template.render([{"role": "user", "content": question}], add_generation_prompt=True)
        prompt = tuned.tokenizer.encode(shown)
        answer = tuned.generate(shown, max_new_tokens=ANSWER)[0]
        found.append((prompt, tuned.tokenizer.encode(answer)[:ANSWER]))
    return found


def along(of: Any, texts: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Log-probability of every answer's tokens, by whoever gives [T, V] over a text."""
    parts = []
    for prompt, answer in texts:
        table = of([*prompt, *answer])[len(prompt) - 1 : -1]
        parts.append(table.gather(1, torch.tensor(answer)[:, None])[:, 0])
    return torch.cat(parts)


def by_llama_cpp(server: LlamaCpp, texts: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    found = []
    for prompt, answer in texts:
        for place, token in enumerate(answer):
            found.append(float(server.after([*prompt, *answer[:place]], 49152, shown=2000)[token]))
    return torch.tensor(found)


def test_four_ways(run: Path, tuned: Run, texts: Any, smollm2: Path, tmp_path: Path) -> None:
    import peft

    own = along(lambda tokens: ours(tuned, tokens), texts)
    base = along(lambda tokens: ours(tuned, tokens, adapted=False), texts)
    moved = (own - base).abs()
    model = peft.PeftModel.from_pretrained(
        oracle.smollm2_in_transformers(tuned.engine.base), str(export(str(run), "peft", out=str(tmp_path / "p")).path)
    ).eval()

    def theirs(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)

    lora = export(str(run), "gguf-lora", out=str(tmp_path / "l.gguf")).path
    merged = export(str(run), "gguf", kind="F16", out=str(tmp_path / "m.gguf"))
    assert merged.facts["survives"] > 0.99
    ways = {
        "PEFT": along(theirs, texts),
        "llama.cpp, adapter on Q4_1": by_llama_cpp(LlamaCpp(smollm2, [lora]), texts),
        "llama.cpp, merged F16": by_llama_cpp(LlamaCpp(merged.path), texts),
    }
    print(f"{len(own)} tokens, moved by the adapter by {moved.mean():.2f} in the mean and {moved.max():.2f} at most")
    for name, found in ways.items():
        difference = (found - own).abs()
        print(f"{name}: differs from our own by {difference.max():.1e} at most, {difference.mean():.1e} in the mean")
    assert len(own) > 30 and moved.max() > 1, "an adapter that changes nothing proves nothing"
    for name, found in ways.items():
        assert (found - own).abs().max() < LIMITS[name], name
