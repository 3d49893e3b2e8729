"""One optimizer step, two ways: accumulated = one batch, packed = unpacked, and clip = torch's own.

The judge of the gradients' values is PEFT, in tests/parity; here the same gradients are brought about in another way
and must come out alike, and what is done with them must be what torch.nn.utils and torch.optim do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graftune.batch import Example
from graftune.data.pack import pack
from graftune.model.context import Dropout
from graftune.model.decoder import PackedDocuments
from graftune.settings.sections import LoraConfig, OptimConfig
from graftune.step.schedule import learning_rate
from graftune.step.step import Step
from tests.support import oracle, tiny

HYPER = {
    "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "divisor": 1.0, "clip": 0.0,
}  # fmt: skip
Folder = Callable[[str], Path]


def examples(*lengths: int) -> list[Example]:
    """Random tokens; shares of trained ones that differ, so that a mean of means would differ from the mean."""
    made = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(3, tiny.VOCAB, (length,)).tolist()
        made.append(Example(tokens, [i > 0 and i % (index % 4 + 1) == 0 for i in range(length)]))
    return made


def ready(
    folder: Path, *, clip_mode: str = "global", dropout: float = 0.0, full: bool = False, **lora: object
) -> tuple[oracle.Ours, Step]:
    config = LoraConfig(rank=4, alpha=10.0, dropout=dropout, **lora)  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(5)  # the oracle's random B: the same for each that is made
        ours = oracle.whole(folder) if full else oracle.ours(folder, config)
    return ours, Step(ours.decoder, ours.arena, clip_mode=clip_mode, dropout=dropout, seed=3)


def take(step: Step, micro_batches: list[list[Example]], **hyper: float) -> list[float]:
    """One optimizer step; its loss, norm and whether it was skipped."""
    batches = [pack(held) for held in micro_batches]
    step.set_hyper({**HYPER, "divisor": float(sum(b.response_tokens for b in batches)), **hyper})
    for index, batch in enumerate(batches):
        step.set_dropout_seed(index)
        step.micro_step(batch)
    return step.update_step()[:3].tolist()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


DIVISIONS = {
    "one each": [[0], [1], [2], [3], [4]],
    "unequal": [[3], [0, 1, 2, 4]],
    "other order": [[4, 2], [1, 0], [3]],
}


@pytest.mark.parametrize(("division", "full"), [*((name, False) for name in DIVISIONS), ("unequal", True)])
def test_micro_batches_equal_one_batch(division: str, full: bool, tiny_folder: Folder) -> None:
    """Gradients and the weights after the update. Also packed = unpacked: `one each` packs nothing at all."""
    data = examples(40, 3, 17, 29, 8)
    ours, step = ready(tiny_folder("llama"), train_norms=True, full=full)
    start = ours.arena.weights.clone()
    want_loss, want_grads = ours.gradients(data)
    ours.arena.grads.zero_()
    want = take(step, [data], clip=0.5)
    weights = ours.arena.weights.clone()

    ours, step = ready(tiny_folder("llama"), train_norms=True, full=full)
    assert torch.equal(ours.arena.weights, start)
    for held in DIVISIONS[division]:
        step.micro_step(pack([data[i] for i in held]))
    for name, grad in want_grads.items():
        assert grad.norm() > 0 and relative(ours.arena.view(name, ours.arena.grads), grad) < 4e-6, name
    assert float(step.loss_sum) == pytest.approx(want_loss, rel=1e-6)
    step.discard()
    got = take(step, [[data[i] for i in held] for held in DIVISIONS[division]], clip=0.5)
    assert got[:2] == pytest.approx(want[:2], rel=1e-6) and got[2] == want[2] == 0
    # AdamW's first update is lr * sign(g): compare where rounding does not decide the sign.
    flat = torch.cat([g.flatten() for g in want_grads.values()])
    sure = flat.abs() > 1e-4 * flat.abs().max()
    assert sure.sum() > 0.5 * len(sure) and (ours.arena.weights - weights)[sure].abs().max() < 2e-6
    mean_of_means = sum(ours.gradients([data[i] for i in h])[0] / pack([data[i] for i in h]).response_tokens
                        for h in DIVISIONS[division]) / len(DIVISIONS[division])  # fmt: skip
    assert abs(mean_of_means - want[0]) > 1e-3, "the data would not show a mean of means"


def test_loss_is_the_mean_over_response_tokens(tiny_folder: Folder) -> None:
    data = examples(21, 5, 13)
    ours, step = ready(tiny_folder("qwen3"))
    total = sum(
        float(torch.nn.functional.cross_entropy(ours.logits([e.tokens])[i - 1], torch.tensor(e.tokens[i])))
        for e in data
        for i in range(1, len(e.tokens))
        if e.supervised[i]
    )
    loss, norm, _ = take(step, [data[:1], data[1:]])
    assert loss == pytest.approx(total / sum(e.response_tokens for e in data), rel=1e-5)
    _, grads = ours.gradients(data)
    assert norm > 0 and all(torch.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("clip", [0.05, 1e6, 0.0])
@pytest.mark.parametrize("mode", ["global", "layer"])
def test_clip_is_torchs(mode: str, clip: float, tiny_folder: Folder) -> None:
    data = examples(30, 12)
    ours, step = ready(tiny_folder("llama"), clip_mode=mode, train_norms=True)
    tokens = sum(e.response_tokens for e in data)
    _, grads = ours.gradients(data)
    ours.arena.grads.zero_()
    mean = {name: torch.nn.Parameter(torch.zeros_like(g)) for name, g in grads.items()}
    for name, parameter in mean.items():
        parameter.grad = grads[name] / tokens
    groups: dict[int, list[torch.nn.Parameter]] = {}
    for name, parameter in mean.items():
        groups.setdefault(ours.arena.slots[name].layer if mode == "layer" else 0, []).append(parameter)
    norms = [torch.nn.utils.clip_grad_norm_(held, clip or math.inf) for held in groups.values()]
    assert len(norms) == (4 if mode == "layer" else 1)  # three layers, and the final norm that has none
    _, norm, _ = take(step, [data], clip=clip, lr=0.0, beta1=0.0)
    assert norm == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)
    for name, parameter in mean.items():  # with beta1 = 0 the first moment is the clipped gradient itself
        assert relative(ours.arena.view(name, ours.arena.m), parameter.grad) < 1e-5, name


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_costs_one_step_and_no_state(value: float, tiny_folder: Folder) -> None:
    first, second = examples(20, 8), examples(15)
    ours, step = ready(tiny_folder("llama"))
    take(step, [first])
    kept = [b.clone() for b in (ours.arena.weights, ours.arena.m, ours.arena.v, step.count)]
    step.micro_step(pack(first))
    ours.arena.grads[5] = value
    _, norm, skipped = step.update_step()[:3].tolist()
    assert skipped == 1 and not math.isfinite(norm)
    for before, now in zip(kept, (ours.arena.weights, ours.arena.m, ours.arena.v, step.count), strict=True):
        assert torch.equal(before, now)
    assert not ours.arena.grads.any() and float(step.loss_sum) == 0
    loss, _, skipped = take(step, [second])
    assert skipped == 0 and math.isfinite(loss)
    after = ours.arena.weights.clone()

    straight, other = ready(tiny_folder("llama"))
    take(other, [first])
    take(other, [second])
    assert torch.equal(straight.arena.weights, after), "a skipped step leaves no trace"


def test_a_loss_that_is_not_finite_is_skipped_too(tiny_folder: Folder) -> None:
    ours, step = ready(tiny_folder("llama"))
    step.set_hyper(HYPER)
    step.micro_step(pack(examples(9)))
    step.loss_sum.fill_(math.nan)
    before = ours.arena.weights.clone()
    assert step.update_step().tolist()[2] == 1 and torch.equal(before, ours.arena.weights)


def test_dropout_against_autograd(tiny_folder: Folder) -> None:
    """PEFT's modules around transformers' model, with our masks put in place of their dropout: same gradients."""
    data = examples(19, 26)
    ours, step = ready(tiny_folder("llama"), dropout=0.3)
    batch = pack(data)
    step.set_dropout_seed(5)
    step.micro_step(batch)
    grads = {n: ours.arena.view(n, ours.arena.grads).clone() for n in ours.arena.slots}
    dropout = Dropout(0.3, step.dropout_seed)
    model = oracle.peft_model(tiny.hf_model("llama"), ours).train()
    groups = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}
    for name, module in model.named_modules():
        if name.endswith("lora_dropout.default"):
            layer, projection = int(name.split(".layers.")[1].split(".")[0]), name.split("_proj")[0].split(".")[-1]
            block, group = ours.decoder.blocks[layer], groups[projection]
            mask_id = getattr(block.mixer if group in ("qkv", "o") else block.feed_forward, group).mask_id
            only = batch.rows if layer == 2 and projection in ("gate", "up", "down") else None
            module.forward = _masked(dropout, mask_id, only)
    # One sequence with a block-diagonal mask on their side: positions start anew in each document.
    lengths, total = batch.lengths, len(batch.tokens)
    allowed = torch.zeros(total, total, dtype=torch.bool)
    at = 0
    for length in lengths:
        allowed[at : at + length, at : at + length] = torch.ones(length, length).tril().bool()
        at += length
    bias = torch.zeros(1, 1, total, total).masked_fill(~allowed, torch.finfo(torch.float32).min)
    logits = model(input_ids=batch.tokens[None], position_ids=batch.positions[None], attention_mask=bias).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[batch.rows], batch.labels, reduction="sum")
    loss.backward()
    assert float(step.loss_sum) == pytest.approx(float(loss.detach()), rel=1e-5)
    theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, grad in grads.items():
        assert relative(grad, theirs[oracle.peft_name(name)]) < 1e-4, name


def _masked(dropout, mask_id, only):
    """Our mask as a torch module's forward; the last MLP sees the trained rows only, so its mask has their shape."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        flat = x[0]
        if only is None:
            mask = dropout.apply(torch.ones_like(flat), mask_id)
        else:
            mask = torch.ones_like(flat)
            mask[only] = dropout.apply(torch.ones(len(only), flat.shape[1]), mask_id)
        return (flat * mask)[None]

    return forward


def test_dropout_keeps_the_mean() -> None:
    x, seven, eight = torch.ones(2000, 50), torch.tensor(7), torch.tensor(8)
    for p in (0.1, 0.5, 0.9):
        dropped = Dropout(p, seven).apply(x, 8)
        assert float(dropped.mean()) == pytest.approx(1.0, abs=0.05)
        assert float((dropped == 0).float().mean()) == pytest.approx(p, abs=0.01)
        assert torch.equal(dropped, Dropout(p, seven).apply(x, 8))
        assert not torch.equal(dropped, Dropout(p, eight).apply(x, 8))
        assert not torch.equal(dropped, Dropout(p, seven).apply(x, 11))


def test_evaluation_has_no_dropout(tiny_folder: Folder) -> None:
    ours, _ = ready(tiny_folder("llama"), dropout=0.5)
    plain, _ = ready(tiny_folder("llama"))
    batch = pack(examples(12))
    run = ours.decoder.begin(batch.positions, PackedDocuments.of(batch.lengths))
    assert run.dropout is None
    assert torch.equal(ours.decoder.hidden(batch.tokens, run), plain.decoder.hidden(batch.tokens, run))


def rates(total: int, **settings: object) -> list[float]:
    config = OptimConfig(lr=1.0, min_lr=0.1, **settings)  # type: ignore[arg-type]
    return [learning_rate(step, total, config) for step in range(total)]


def test_schedules() -> None:
    warm = [0.2, 0.4, 0.6, 0.8, 1.0]
    constant = rates(50, schedule="constant", warmup=0.1)
    assert constant[:5] == pytest.approx(warm) and set(constant[5:]) == {1.0}
    linear = rates(50, schedule="linear", warmup=0.1)
    assert linear[:5] == pytest.approx(warm) and linear[5] == 1.0
    assert [a - b for a, b in itertools.pairwise(linear[5:])] == pytest.approx([0.9 / 45] * 44)
    assert linear[-1] == pytest.approx(0.1 + 0.9 / 45)
    cosine = rates(50, schedule="cosine", warmup=0.1)
    assert cosine[:5] == pytest.approx(warm) and cosine[5] == 1.0
    judge = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 45, eta_min=0.1)
    for rate in cosine[5:]:
        assert rate == pytest.approx(judge.get_last_lr()[0], abs=1e-9)
        judge.optimizer.step()
        judge.step()
    assert 0.1 < cosine[-1] < 0.102
    assert rates(3, schedule="cosine", warmup=0.0)[0] == 1.0
    assert rates(4, schedule="cosine", warmup=1.0) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates(1, schedule="linear", warmup=0.1) == [1.0]
    assert learning_rate(9, 10, OptimConfig(lr=1e-7, min_lr=1e-6)) <= 1e-7  # a floor above the peak raises nothing
