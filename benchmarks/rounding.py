"""Does PEFT's loss in fp32 fall as its own in bf16, or faster? The same weights, adapters and tokens both times.

python benchmarks/rounding.py CASE        on a GPU; docs/numerics.md has what came of 8b-1x512
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cases, peers

STEPS = 10


def losses(case: cases.Case, device: torch.device, dtype: torch.dtype) -> list[float]:
    """Of PEFT's first steps. The weights are bf16's values either way."""
    import peft

    model = peers.random_llama(case.shape, device, torch.bfloat16).to(dtype)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=case.rank, lora_alpha=int(case.alpha), target_modules=list(case.targets), bias="none", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, config).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = peers.adamw(trained)
    ids = cases.tokens(case)
    targets, ids = cases.labels(ids, case).to(device), ids.to(device)
    found = []
    for step in range(STEPS):
        total = 0.0
        batch = step % cases.BATCHES
        for rows, wanted in zip(ids[batch], targets[batch], strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(input_ids=rows, labels=wanted, use_cache=False).loss / case.micro
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, cases.HYPER["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(round(total, 4))
    return found


def main() -> None:
    case, device = cases.parse(sys.argv[1]), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for dtype in (torch.bfloat16, torch.float32):
        print(case.name, dtype, losses(case, device, dtype), flush=True)


if __name__ == "__main__":
    main()
