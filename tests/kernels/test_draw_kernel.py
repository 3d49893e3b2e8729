"""Drawing a token: the kernel draws what the reference draws, and both draw from the distribution that they claim."""

from __future__ import annotations

import pytest
import torch

from graftune.kernels import draw as drawing
from graftune.kernels.draw import Drawn, DrawSettings, draw, kernel, reference

# mode, temperature, top-k, top-p
CASES = [
    ("greedy", 1.0, 0, 1.0),
    ("whole", 1.0, 0, 1.0),
    ("whole", 0.6, 0, 1.0),
    ("limited", 1.0, 5, 1.0),
    ("limited", 1.7, 0, 0.8),
    ("limited", 1.0, 40, 0.5),
    ("limited", 1.0, 0, 1e-6),
    ("limited", 1.0, 10_000, 1.0),
]


def drawn(
    logits: torch.Tensor, mode: str, temperature: float, top_k: int, top_p: float, seed: int = 7, first: int = 0
) -> Drawn:
    samples = torch.arange(first, first + len(logits), device=logits.device)
    settings = DrawSettings.of(temperature, top_k, top_p, seed, logits.device)
    return draw(logits, mode, settings, samples, samples % 3)


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("vocabulary", "dtype"), [(1, torch.float32), (300, torch.float32), (300, torch.bfloat16)])
def test_the_kernel_draws_what_the_reference_draws(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    case: tuple[str, float, int, float],
    vocabulary: int,
    dtype: torch.dtype,
) -> None:
    """Several blocks of the vocabulary, rows with a stride, equal logits, NaN beside the rows."""
    monkeypatch.setattr(kernel, "BLOCK", 64)
    monkeypatch.setattr(kernel, "SEARCH_BLOCK", 128)
    wide = torch.full((7, vocabulary + 5), float("nan"))
    wide[:, :vocabulary] = (torch.randn(7, vocabulary) * 3).round(decimals=1)
    wide[1, : vocabulary // 2] = float("-inf")
    logits = wide.to(device, dtype)[:, :vocabulary]
    want = reference.draw(
        logits.cpu(), case[0], DrawSettings.of(*case[1:], 7, "cpu"), torch.arange(7), torch.arange(7) % 3
    )
    monkeypatch.setattr(drawing.launch, "fused", lambda x: True)
    got = drawn(logits, *case)
    assert got.tokens.cpu().tolist() == want[0].tolist()
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert torch.allclose(ours.cpu(), theirs, atol=1e-5)


def kept_of(logits: torch.Tensor, top_k: int, top_p: float, temperature: float) -> torch.Tensor:
    """The distribution that a draw should have, from the definition, token by token."""
    shares = torch.softmax(logits.double() / temperature, -1)
    order = shares.argsort(descending=True)[: top_k or None]
    allowed, before = torch.zeros_like(shares), 0.0
    for token in order:
        if before < top_p * shares[order].sum():
            allowed[token] = shares[token]
        before += float(shares[token])
    return allowed / allowed.sum()


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "greedy"], ids=str)
def test_frequencies_are_those_of_the_distribution(device: str, case: tuple[str, float, int, float]) -> None:
    """Chi-square over 20,000 draws; its 0.9999 quantile bounds what chance makes of it."""
    temperature, top_k, top_p = case[1:]
    logits = torch.randn(50, generator=torch.Generator().manual_seed(5)) * 2
    want = kept_of(logits, top_k, top_p, temperature)
    counts = torch.bincount(drawn(logits.to(device).expand(20_000, -1), *case).tokens.cpu(), minlength=50).double()
    assert not counts[want == 0].any()
    expected = 20_000 * want[want > 0]
    rare = expected < 5  # pooled, as the test requires
    observed = counts[want > 0]
    if rare.any():
        expected, observed = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (expected, observed))
    freedom = len(expected) - 1
    statistic = float(((observed - expected).square() / expected).sum())
    assert statistic <= freedom + 3.7 * (2 * freedom) ** 0.5 + 10


def test_log_probabilities_are_the_models_and_the_samplers() -> None:
    logits = torch.randn(9, 70) * 2
    for case in CASES:
        found = drawn(logits, *case)
        row = torch.arange(9)
        assert torch.allclose(found.logprobs, torch.log_softmax(logits, -1)[row, found.tokens], atol=1e-6)
        want = torch.log_softmax(logits / case[1], -1)[row, found.tokens] * (case[0] != "greedy")
        assert torch.allclose(found.sampling_logprobs, want, atol=1e-6)


def test_a_draw_depends_on_its_own_seed_sample_and_position_only() -> None:
    logits = torch.randn(6, 500)
    together = drawn(logits, *CASES[1]).tokens
    for row in range(6):
        alone = draw(
            logits[row : row + 1], "whole", DrawSettings.of(1.0, 0, 1.0, 7, "cpu"), torch.tensor([row]),
            torch.tensor([row % 3]),
        )  # fmt: skip
        assert int(alone.tokens) == int(together[row])
    for other in ({"seed": 8}, {"seed": 7 + 2**32}, {"first": 6}, {"first": 2**32}):
        assert drawn(logits, *CASES[1], **other).tokens.tolist() != together.tolist()


def test_neighbouring_seeds_samples_and_positions_are_independent() -> None:
    def noise(seed: int, samples: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return reference.uniform(torch.tensor(seed), samples, positions).double() - 0.5

    count = torch.arange(20_000)
    lines = [noise(0, count, count * 0), noise(1, count, count * 0), noise(0, count, count * 0 + 1)]
    lines += [noise(0, count * 0, count), noise(0, count * 0 + 1, count), noise(2**32, count, count * 0)]
    found = torch.stack(lines) * 12**0.5
    correlations = (found @ found.t()) / len(count)
    assert (correlations - torch.eye(len(lines))).abs().max() < 5 / len(count) ** 0.5
    assert found.abs().max() < 3**0.5
