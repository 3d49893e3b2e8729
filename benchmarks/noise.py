"""What bf16 alone does to a first gradient, by somebody else's code: the yardstick of curves.py.

    python benchmarks/noise.py DATA [--base BASE] [--json FILE]

The first batch of curves.py's run goes through transformers and PEFT on the CPU, with our adapters' values: in fp32,
then over the base rounded to bf16, then in bf16 throughout, with products and attention as a GPU makes them (operands
and results in bf16, sums in fp32). Reported is how far each tensor's gradient of the latter two is from the first, and
how far ours in fp32 is. Needs the test dependencies.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import oracle

from benchmarks import apart as apart_
from benchmarks import curves, report

Gradients = dict[str, torch.Tensor]


class Product(torch.autograd.Function):
    """x w' as a GPU makes it in bf16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        return _short(_short(x) @ _short(w).t()).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        grad = _short(grad)
        of_w = _short(grad.flatten(0, -2).t() @ _short(x).flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return _short(grad @ _short(w)).to(x.dtype), None if of_w is None else of_w.to(w.dtype)


def _short(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


@contextmanager
def as_a_gpu() -> Iterator[None]:
    """Products and attention of whatever runs inside."""
    linear, attend = F.linear, F.scaled_dot_product_attention

    def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = Product.apply(x, w)
        return y if bias is None else y + bias

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        return attend(q.float(), k.float(), v.float(), **more).bfloat16()

    F.linear, F.scaled_dot_product_attention = product, attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear, F.scaled_dot_product_attention = linear, attend


def documents(batches: list[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens, the label that each predicts or -100) of all packed documents that have any."""
    for batch in batches:
        labels = torch.full((len(batch.tokens),), -100)
        counted = batch.labels >= 0
        labels[batch.rows[counted]] = batch.labels[counted]
        for tokens, wanted in zip(batch.tokens.split(batch.lengths), labels.split(batch.lengths), strict=True):
            if (wanted >= 0).any():
                yield tokens.tolist(), wanted.tolist()


def gradients(model: Any, batches: list[Any]) -> Gradients:
    """Of the mean loss, in fp32 whatever the model is; those of A are zero at the start and left out."""
    total = sum(batch.response_tokens for batch in batches)
    for tokens, wanted in documents(batches):
        logits = model(torch.tensor([tokens])).logits[0].float()
        (F.cross_entropy(logits, torch.tensor(wanted), reduction="sum", ignore_index=-100) / total).backward()
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None and "lora_B" in n}


def apart(here: Gradients, there: Gradients) -> dict[str, Any]:
    norms = [{name: float(grad.norm()) for name, grad in side.items()} for side in (here, there)]
    named = [{name.replace(".default", ""): norm for name, norm in side.items()} for side in norms]
    cosines = [float(F.cosine_similarity(here[n].flatten(), g.flatten(), 0)) for n, g in there.items()]
    whole = [sum(norm**2 for norm in side.values()) ** 0.5 for side in norms]
    return apart_.norms_off(*named, apart_.NOISE["norm"]) | {"cosine": round(min(cosines), 5), "first_norm": whole}


def measured(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = curves.opened(args, f"{folder}/run")
        batches = next(iter(run.loader.epoch(0)))
        engine = run.engine
        for batch in batches:
            run.step.micro_step(batch)
        total, arena = sum(batch.response_tokens for batch in batches), engine.arena
        own = {oracle.peft_name(n): arena.view(n, arena.grads) / total for n in arena.slots if "lora_B" in n}
    ours = oracle.Ours(engine.base, engine.decoder, engine.arena, engine.lora)

    def peft(dtype: torch.dtype) -> Any:
        return oracle.peft_model(oracle.smollm2_in_transformers(engine.base).to(dtype), ours)

    exact = gradients(peft(torch.float32), batches)
    rounded = oracle.smollm2_in_transformers(engine.base).bfloat16().float()
    found = {
        "ours, fp32": apart(own, exact),
        "fp32, base rounded to bf16": apart(gradients(oracle.peft_model(rounded, ours), batches), exact),
    }
    with as_a_gpu():
        found["bf16"] = apart(gradients(peft(torch.bfloat16), batches), exact)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--base", default="")
    parser.add_argument("--limit", type=int, default=curves.LIMIT, help="records of DATA that are taken; 0: all")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    parser.add_argument("--json", default="")
    args = parser.parse_args(namespace=argparse.Namespace(device="cpu", compute="fp32", steps=200))
    with curves.limited(args):
        facts, found = curves.provenance(args), measured(args)
    for name, figures in found.items():
        print(
            f"{name:28}{figures['tensors_beyond']:4} of {figures['tensors']} beyond {figures['bound']:.0%}; {figures}"
        )
    if args.json:
        report.write(Path(args.json), facts | found)


if __name__ == "__main__":
    main()
