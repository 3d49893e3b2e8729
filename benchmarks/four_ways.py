"""A tuned SmolLM2 asked four ways: our own chat, PEFT over the dequantised base, llama.cpp with our adapter on the
ORIGINAL file, and llama.cpp with our merged GGUF.

    python benchmarks/four_ways.py RUN [--prompts 20] [--json benchmarks/results/four-ways.json]

RUN is what `make train` leaves. The prompts are the first of its validation set, which it has not seen. Each way gives
its greedy answers, scored as `graftune train` scores them, and the log-probability of every token of our own answers;
the largest difference from ours is reported. Needs the test dependencies (transformers, peft, xllamacpp).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import oracle
from tests.exporting.judges import LlamaCpp, opened, ours

from benchmarks import report
from graftune.api import export
from graftune.data.sample import score_all
from graftune.observe.console import Console
from graftune.training.prepare import prepare_run, stored_config

LONGEST = 96  # tokens of an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--merged", default="F16", help="type of the merged GGUF")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(args.run), args.prompts, args.merged, Path(folder))
    for name, figures in found["ways"].items():
        apart = "" if "most" not in figures else f"log-probabilities apart by at most {figures['most']:.2e}"
        print(f"{name:32} {figures['right']:2d} of {args.prompts} right  {apart}")
    if args.json:
        Path(args.json).write_text(json.dumps(found | {"commit": report.commit()}, indent=1) + "\n")


def compare(run: Path, count: int, merged: str, folder: Path) -> dict[str, Any]:
    import peft

    tuned = opened(run)
    tokenizer, (questions, references) = tuned.tokenizer, unseen(run, count, folder)
    prompts = [tokenizer.encode(question) for question in questions]
    stops = set(tokenizer.stop_ids)
    model = peft.PeftModel.from_pretrained(
        oracle.smollm2_in_transformers(tuned.engine.base), str(export(str(run), "peft", out=str(folder / "peft")).path)
    ).eval()
    lora = export(str(run), "gguf-lora", out=str(folder / "lora.gguf")).path
    whole = export(str(run), "gguf", kind=merged, out=str(folder / "merged.gguf")).path

    def in_peft(prompt: list[int]) -> str:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=LONGEST,
                do_sample=False,
                eos_token_id=list(stops),
                pad_token_id=0,
            )
        return text([int(t) for t in out[0][len(prompt) :]])

    def text(tokens: list[int]) -> str:
        end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
        return tokenizer.decode(tokens[:end], skip_special=True)

    def along(of: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
        table = of([*prompt, *answer])[len(prompt) - 1 : -1]
        return table.gather(1, torch.tensor(answer)[:, None])[:, 0]

    def theirs(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)

    own_text = [tuned.generate(question, max_new_tokens=LONGEST)[0] for question in questions]
    own_tokens = [tokenizer.encode(answer)[:LONGEST] for answer in own_text]
    pairs = list(zip(prompts, own_tokens, strict=True))
    own = torch.cat([along(lambda tokens: ours(tuned, tokens), *pair) for pair in pairs])
    ways: dict[str, dict[str, Any]] = {"graftune": figures(references, own_text)}
    found = torch.cat([along(theirs, *pair) for pair in pairs])
    ways["PEFT, dequantised base"] = figures(references, [in_peft(p) for p in prompts], found, own)
    original = Path(tuned.engine.base.path)
    for name, server in (
        (f"llama.cpp, adapter on {original.suffixes[0][1:]}", LlamaCpp(original, [lora], context=512)),
        (f"llama.cpp, merged {merged}", LlamaCpp(whole, context=512)),
    ):
        answers = [server.ask(prompt, n_predict=LONGEST)["content"] for prompt in prompts]
        asked = [
            float(server.after([*prompt, *answer[:place]], 49152, shown=500)[token])
            for prompt, answer in pairs
            for place, token in enumerate(answer)
        ]
        ways[name] = figures(references, answers, torch.tensor(asked), own)
    return {"prompts": count, "tokens": len(own), "ways": ways}


def figures(
    references: list[str], answers: list[str], found: torch.Tensor | None = None, own: torch.Tensor | None = None
) -> dict[str, Any]:
    report = score_all(zip(references, answers, strict=True))
    right = {"right": round(report.share * report.total), "share": report.share}
    if found is None or own is None:
        return right
    apart = (found - own).abs()
    return right | {"most": float(apart.max()), "mean": float(apart.mean())}


def unseen(run: Path, count: int, folder: Path) -> tuple[list[str], list[str]]:
    """Rendered prompts of the run's validation set, and what should be answered."""
    config = stored_config(run, {}).replace(out=str(folder / "again"))
    validation = prepare_run(config, Console(quiet=True)).validation
    chosen = [pair for pair in zip(validation.prompts, validation.references, strict=True) if pair[0]][:count]
    assert len(chosen) == count, f"the validation set has {len(chosen)} prompts"
    return [prompt for prompt, _ in chosen], [reference for _, reference in chosen]


if __name__ == "__main__":
    main()
