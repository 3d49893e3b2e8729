"""How adapters start: A as PEFT draws it, B zero, the same bytes for the same seed; and the scale follows the rank.
And how a model starts that is trained from nothing."""

from __future__ import annotations

import math

import pytest
import torch

from graftune.model.lora import build_arena, initialise, scaling, start_from_scratch
from graftune.settings.sections import LoraConfig
from graftune.settings.targets import PROJECTIONS
from tests.support import oracle, quantised

RANK = 8


def started(folder, seed: int = 3, **settings) -> dict[str, torch.Tensor]:
    made = oracle.ours(folder, LoraConfig(rank=RANK, **settings), random_b=False)
    initialise(made.arena, made.lora, seed=seed)
    return {name: made.arena.view(name, made.arena.weights).clone() for name in made.arena.slots}


def test_a_starts_as_pefts(tiny_folder):
    """Bounds and spread of every A by PEFT's own layers, from the default settings of both."""
    import peft
    import transformers

    judge = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=RANK, target_modules=list(PROJECTIONS))
    judge = peft.get_peft_model(judge, settings)
    theirs = {name: value.detach() for name, value in judge.named_parameters() if "lora_A" in name}
    ours = {name: value for name, value in started(tiny_folder("llama")).items() if "lora_A" in name}
    assert len(ours) == len(theirs) > 0
    for name, value in ours.items():
        (want,) = (other for other_name, other in theirs.items() if name.split(".lora_A")[0] in other_name)
        assert value.shape == want.shape
        bound = 1 / math.sqrt(value.shape[1])
        for drawn in (value, want):
            assert 0.95 * bound < drawn.abs().max() <= bound and abs(float(drawn.mean())) < 0.1 * bound
            assert float(drawn.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1), name


def test_the_first_a_is_torchs_kaiming_to_the_last_bit_but_one(tiny_folder):
    """What PEFT calls, from the same seed: the same numbers, not only the same spread."""
    first = next(value for name, value in started(tiny_folder("llama"), seed=11).items() if "lora_A" in name)
    want = torch.empty(first.shape)
    torch.nn.init.kaiming_uniform_(want, a=math.sqrt(5), generator=torch.Generator().manual_seed(11))
    torch.testing.assert_close(first, want, rtol=1e-6, atol=1e-9)


def test_the_seed_decides_every_byte(tiny_folder):
    one, same, other = (started(tiny_folder("llama"), seed) for seed in (3, 3, 4))
    for name in one:
        assert torch.equal(one[name], same[name])
        assert torch.equal(one[name], other[name]) == ("lora_B" in name), name
        assert "lora_A" in name or not one[name].any()


def test_gaussian_is_a_choice(tiny_folder):
    wide = started(tiny_folder("llama"), init="gaussian", init_scale=2.0)
    values = torch.cat([value.flatten() for name, value in wide.items() if "lora_A" in name])
    assert float(values.std()) == pytest.approx(2.0 / RANK, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "alpha", "scale"),
    [
        ({}, 32, 2), ({"rank": 8}, 16, 2), ({"rank": 8, "rslora": True}, 16, 16 / math.sqrt(8)),
        ({"rank": 8, "alpha": 32}, 32, 4), ({"rank": 8, "alpha": 16}, 16, 2),
    ],
)  # fmt: skip
def test_alpha_is_twice_the_rank_unless_it_is_set(settings, alpha, scale):
    lora = LoraConfig(**settings)
    assert lora.resolved().alpha == alpha and lora.resolved().resolved() == lora.resolved()
    assert scaling(lora) == scaling(lora.resolved()) == pytest.approx(scale)


def test_a_model_from_nothing_starts_each_part_as_it_says():
    spec = quantised.delta_spec()
    arena = build_arena(spec, LoraConfig(), torch.device("cpu"), torch.float32, full=True)
    start_from_scratch(arena, spec, seed=3)
    of = {name.removeprefix("layers.0."): arena.view(name, arena.weights) for name in arena.slots}
    decay = of["linear_attn.A_log"].exp()
    assert len(decay.unique()) == 16 and decay.min() >= 0.01 and decay.max() <= 16
    assert (of["linear_attn.dt_bias"] == 1).all() and (of["linear_attn.norm.weight"] == 1).all()
    spread = {name: float(of[f"{name}.weight"].std()) for name in ("mlp.up_proj", "mlp.down_proj")}
    assert spread["mlp.up_proj"] == pytest.approx(0.02, rel=0.1)
    assert spread["mlp.down_proj"] == pytest.approx(0.01, rel=0.1), "it writes to the stream"
