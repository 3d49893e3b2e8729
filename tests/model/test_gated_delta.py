"""Gated delta nets over packed documents: nothing passes from one document to another, in whatever order they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graftune.batch import Example
from graftune.model.frozen.interface import TensorRows
from graftune.model.mixers.gated_delta import DeltaHeads, GatedDeltaSpec
from graftune.settings.sections import LoraConfig
from graftune.weights import rows
from graftune.weights.base import open_base
from tests.support import oracle, specs, tiny

LENGTHS = (70, 1, 33, 130, 5)  # chunks of 64 tokens: some documents end inside one, one spans three


@pytest.fixture
def slow(tiny_folder: Callable[[str], Path]) -> oracle.Ours:
    """A model whose states hardly decay: what a document leaves behind would last."""
    base = open_base(str(tiny_folder("qwen3_5")))
    slowed = {name: TensorRows(torch.full(t.shape, -3.0)) for name, t in base.tensors.items() if name.endswith("A_log")}
    assert len(slowed) == 3
    torch.manual_seed(1)
    found = oracle.place(replace(base, tensors=dict(base.tensors) | slowed), LoraConfig(rank=4, alpha=10.0))
    found.arena.weights.normal_(0, 0.1)
    found.arena.publish()
    return found


def documents() -> list[list[int]]:
    drawn = torch.Generator().manual_seed(5)
    return [torch.randint(3, tiny.VOCAB, (length,), generator=drawn).tolist() for length in LENGTHS]


@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_other_documents_do_not_notice(changed: int, slow: oracle.Ours) -> None:
    """Every token of one document is another: the logits of the others are the same bits."""
    before, given = documents(), documents()
    given[changed] = [3 + (token + 60) % (tiny.VOCAB - 3) for token in given[changed]]
    want, got = (slow.logits(texts).split(LENGTHS) for texts in (before, given))
    for index, (a, b) in enumerate(zip(want, got, strict=True)):
        assert torch.equal(a, b) == (index != changed), index


def test_states_last_in_this_model(slow: oracle.Ours) -> None:
    """Or the test above would prove little: the first token still matters 129 tokens later."""
    text = documents()[3]
    want, got = slow.logits([text])[-1], slow.logits([[3 + (text[0] + 60) % 250, *text[1:]]])[-1]
    assert (want - got).abs().max() > 1e-4


def test_documents_in_another_order_have_the_same_gradients(slow: oracle.Ours) -> None:
    """Of each document by itself: only its tokens count."""
    for counted in (0, 2, 3):
        found = []
        for order in ((0, 1, 2, 3, 4), (3, 4, 2, 0, 1)):
            given = documents()
            batch = [Example(given[i], [i == counted] * LENGTHS[i]) for i in order]
            found.append(slow.gradients(batch))
        (loss, grads), (other_loss, other) = found
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            assert (grad - other[name]).norm() < 1e-5 * grad.norm(), name


HEADS = DeltaHeads(key_heads=2, value_heads=6, key_width=4, value_width=3)


def test_the_order_of_value_heads_in_files() -> None:
    grouped = GatedDeltaSpec(8, HEADS, 4, 1e-6)
    tiled = replace(grouped, tiled=True)
    # Key head 0 has the value heads 0, 1 and 2, key head 1 has 3, 4 and 5; a GGUF has one of each in turn.
    order = grouped.order_in("gguf", "A_log")
    assert order is not None and order.indices.tolist() == [0, 3, 1, 4, 2, 5]
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "conv1d", "A_log", "dt_bias"):
        there, back = grouped.order_in("gguf", name), tiled.order_in("folder", name)
        assert there is not None and back is not None and there.dim == back.dim == (name == "out_proj")
        assert torch.equal(there.indices[back.indices], torch.arange(len(there.indices))), name
        assert grouped.order_in("folder", name) is tiled.order_in("gguf", name) is None
    qkv, z = grouped.order_in("gguf", "in_proj_qkv"), grouped.order_in("gguf", "in_proj_z")
    assert qkv is not None and z is not None
    assert qkv.indices[:16].tolist() == list(range(16)), "q and k stay"
    assert torch.equal(qkv.indices[16:] - 16, z.indices) and z.indices[:6].tolist() == [0, 1, 2, 9, 10, 11]
    assert replace(grouped, heads=HEADS._replace(key_heads=6)).order_in("gguf", "A_log") is None
    assert grouped.order_in("gguf", "norm") is None


def test_decay_rates_of_a_gguf_come_back_to_the_bit(tiny_folder: Callable[[str], Path]) -> None:
    spec = specs.edited(open_base(str(tiny_folder("qwen3_5"))).spec, tiled=True)
    name, stored = "layers.0.linear_attn.A_log", TensorRows(-torch.rand(4))
    used = rows.from_file(stored, "gguf", spec, name)
    assert torch.allclose(used.values(), (-stored.values()).log())
    assert rows.to_file(used, "gguf", spec, name) is stored


@pytest.mark.parametrize(
    ("values", "what"),
    [({"heads": HEADS._replace(value_heads=5)}, "value heads"), ({"taps": 0}, "taps of the convolution")],
)
def test_sizes_that_no_model_has_are_refused(values: dict[str, object], what: str, tiny_folder: Callable[[str], Path]):
    base = open_base(str(tiny_folder("qwen3_5")))
    assert specs.edited(base.spec, (0,), **values).wrong() == what
