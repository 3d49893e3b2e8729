"""Sums over a router's choices: the kernel against the reference, and the reference against a loop over the tokens."""

from __future__ import annotations

import math

import torch

from graftune.kernels import routing
from graftune.kernels.routing import PARTS, reference
from tests.support.pairwise import pairwise


@pairwise(("tokens", [1, 37, 130]), ("experts", [3, 8, 130]), ("chosen", [1, 3]), ("wider", [0, 5]))
def test_sums(tokens, experts, chosen, wider, device, kernels_on):
    scores = torch.rand(tokens, experts, device=device)
    scores[0, 0] = 0.0  # adds nothing to the entropy
    choice = torch.rand(tokens, experts, device=device).topk(chosen, 1).indices
    counted = torch.rand(tokens, device=device) < 0.7
    before = torch.randn(PARTS, experts + 2 + wider, device=device)
    sums, want = before.clone(), before.clone()
    routing.add_(sums, scores, choice, counted)
    reference.add_(want, scores, choice, counted)
    assert (sums.sum(0) - want.sum(0)).abs().max() < 1e-3
    gone = (want - before).sum(0)
    kept = [token for token in range(tokens) if counted[token]]
    counts = [sum(int(expert in choice[token]) for token in kept) for expert in range(experts)]
    entropy = 0.0
    for token in kept:
        p = (scores[token] / scores[token].sum()).tolist()
        entropy -= sum(each * math.log(each) for each in p if each)
    assert (gone - torch.tensor([*counts, *[0.0] * wider, entropy, len(kept)], device=device)).abs().max() < 1e-3
