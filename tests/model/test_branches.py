"""Blocks that no family here has yet: parallel parts, a third branch with a per-layer input, a scaled stream.

The reference is plain torch with autograd in fp32, written from the formula in layer_spec.py: outputs and every
gradient are compared, with adapters and with every weight trained, for each recompute policy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks.synthetic import random_base
from torch.nn.functional import cross_entropy, silu

from graftune.batch import Example
from graftune.data.pack import pack
from graftune.infer.sample import Sampling
from graftune.model.context import PassContext
from graftune.model.feed_forward.gated import GatedSpec
from graftune.model.frozen.interface import TensorRows
from graftune.model.layer_spec import BranchPart, BranchSpec, LayerSpec, NormSpec
from graftune.model.lora import build_arena, initialise, norm_names, scaling
from graftune.model.mixers.attention import AttentionSpec
from graftune.model.part import FeedForward, FeedForwardSpec, PartInput, PartPlacer, SavedInput
from graftune.model.projection import Projection, ReadyGrad
from graftune.model.rotary import RopeSpec
from graftune.model.spec import EmbeddingSpec, HeadSpec, ModelSpec
from graftune.runtime import resolve
from graftune.settings.sections import LoraConfig
from graftune.step.step import Step
from graftune.weights.load import build_decoder
from graftune.weights.placement import Placement
from tests.support.generate import generate
from tests.support.oracle import Ours
from tests.support.pairwise import pairwise

CPU = torch.device("cpu")
VOCAB, WIDTH, HEADS, HEAD, FFN, INNER, EPS = 40, 24, 2, 8, 20, 6, 1e-5
DOCUMENTS = [[3, 7, 9, 4, 11, 30, 2], [5, 6, 8, 21, 13]]
EXAMPLES = [Example(tokens, [place >= 3 for place in range(len(tokens))]) for tokens in DOCUMENTS]


class GateSaved(NamedTuple):
    gate: torch.Tensor  # [T, P]
    h_gate: torch.Tensor | None
    h_out: torch.Tensor | None


@dataclass(frozen=True)
class GateSpec(FeedForwardSpec):
    """out(sigmoid(gate(x)) * e): e [T, P] is the layer's own input."""

    module: str = "per_layer"

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        return {"gate": (INNER, WIDTH), "out": (WIDTH, INNER)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {"gate": ("gate",), "out": ("out",)}

    def build(self, place: PartPlacer) -> Gate:
        return Gate(place.layer, place.projection("gate"), place.projection("out"))


@dataclass
class Gate(FeedForward[GateSaved]):
    layer: int
    gate: Projection
    out: Projection

    def forward(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, GateSaved]:
        gate, h_gate = entry.product(self.gate)
        out, h_out = self.out.forward(gate.sigmoid() * ctx.layer_input(self.layer), ctx)
        return out, GateSaved(gate, h_gate, h_out)

    def drop_recomputable(self, saved: GateSaved) -> GateSaved:
        return saved._replace(gate=saved.gate.new_empty(0))

    def recompute_dropped(self, saved: GateSaved, read: SavedInput, ctx: PassContext) -> GateSaved:
        return saved._replace(gate=read.part_input(ctx).product(self.gate, h=saved.h_gate)[0])

    def backward(
        self,
        grad: torch.Tensor,
        ready: ReadyGrad | None,
        read: SavedInput,
        saved: GateSaved,
        ctx: PassContext,
        need_input: bool,
    ) -> torch.Tensor | None:
        share, own = saved.gate.sigmoid(), ctx.layer_input(self.layer)
        grad_act, g = self.out.backward(grad, saved.h_out, ctx, ready=ready)
        assert grad_act is not None
        self.out.accumulate_grad(grad, g, share * own, ctx)
        ctx.add_layer_input_grad(self.layer, grad_act * share)
        grad_gate = grad_act * own * share * (1 - share)
        grad_read, g = self.gate.backward(grad_gate, saved.h_gate, ctx, need_input)
        self.gate.accumulate_grad(grad_gate, g, read.x, ctx, read.normed)
        return grad_read


class LayerTable:
    """A per-layer embedding [V, layers, P] over the tokens of a pass."""

    def __init__(self, table: torch.Tensor, tokens: torch.Tensor, grad: torch.Tensor):
        self.table, self.tokens, self.grad = table, tokens, grad

    def of(self, layer: int) -> torch.Tensor:
        return self.table[self.tokens, layer]

    def add_grad(self, layer: int, grad: torch.Tensor, rows: torch.Tensor | None) -> None:
        tokens = self.tokens if rows is None else self.tokens[rows]
        self.grad[:, layer].index_add_(0, tokens, grad)

    def backward(self) -> None:
        """The table does not read the embeddings."""


def norm(name: str) -> NormSpec:
    return NormSpec(name, WIDTH, EPS)


ATTENTION = AttentionSpec(
    width=WIDTH, heads=HEADS, kv_heads=1, head_width=HEAD, norm_eps=EPS, score_scale=HEAD**-0.5,
    rope=RopeSpec(HEAD, 1e4, enabled=False),
)  # fmt: skip
MLP, SECOND = GatedSpec(WIDTH, FFN), GatedSpec(WIDTH, FFN + 4, module="second_mlp")
MIXING = BranchSpec((BranchPart(ATTENTION, norm("input_norm")),))
FEEDING = BranchSpec((BranchPart(MLP, norm("mlp_norm")),))
PARALLEL = (
    BranchPart(MLP, norm("mlp_norm"), norm("mlp_out_norm")),
    BranchPart(SECOND, norm("second_norm"), norm("second_out_norm")),
)
GATED = BranchSpec((BranchPart(GateSpec(), None, norm("gate_out_norm")),))
LAYERS = {
    "two branches": LayerSpec((MIXING, FEEDING)),
    "parallel": LayerSpec((MIXING, BranchSpec(PARALLEL, norm("out_norm"), scale=0.7))),
    "parallel without norms": LayerSpec((MIXING, BranchSpec((BranchPart(MLP), BranchPart(SECOND))))),
    "three branches, scaled stream": LayerSpec((MIXING, FEEDING, GATED), stream_scale="layer_scalar"),
    "everything": LayerSpec((MIXING, BranchSpec(PARALLEL, norm("out_norm")), GATED), stream_scale="layer_scalar"),
    "mixer beside MLP": LayerSpec((BranchSpec((*MIXING.parts, BranchPart(MLP, norm("mlp_norm")))),)),
    "mixer last": LayerSpec((FEEDING, MIXING)),
    "one branch": LayerSpec((MIXING,)),
    "no mixer": LayerSpec((BranchSpec((BranchPart(MLP, norm("mlp_norm"), norm("mlp_out_norm")),), scale=0.5),)),
}


class Toy(NamedTuple):
    ours: Ours
    table: torch.Tensor
    table_grad: torch.Tensor


def toy(layers: tuple[LayerSpec, ...], lora: LoraConfig, full: bool) -> Toy:
    spec = ModelSpec("llama", EmbeddingSpec(VOCAB, WIDTH), layers, HeadSpec(norm("norm"), tied=False), 64)
    shapes = {"embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    for index, layer in enumerate(layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.weights.items()}
    torch.manual_seed(5)
    tensors = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    for index, layer in enumerate(layers):
        if layer.stream_scale is not None:
            tensors[f"layers.{index}.{layer.stream_scale}"] = torch.tensor([0.6 + index])
    tensors |= {name: 1 + 0.2 * torch.randn(width) for _, name, width in norm_names(spec)}
    held = {name: TensorRows(tensor) for name, tensor in tensors.items()}
    base = dataclasses.replace(random_base(spec, CPU), tensors=held)
    runtime = resolve("cpu", "fp32")
    arena = build_arena(spec, lora, CPU, torch.float32, full=full)
    decoder = build_decoder(base, arena, lora, runtime, Placement("fp32", "test"))
    if not full:
        initialise(arena, dataclasses.replace(lora, init="gaussian"), seed=7)
        for name in arena.slots:
            if name.endswith("lora_B.weight"):
                arena.view(name, arena.weights).normal_(0, 0.1)
    arena.publish()
    table = torch.randn(VOCAB, len(layers), INNER)
    table_grad = torch.zeros_like(table)
    decoder.layer_inputs = lambda tokens, x: LayerTable(table, tokens, table_grad)
    return Toy(Ours(base, decoder, arena, lora), table, table_grad)


class Reference:
    """The formula of layer_spec.py over weights that autograd follows."""

    def __init__(self, made: Toy):
        ours = made.ours
        self.spec, self.scale = ours.base.spec, scaling(ours.lora)
        self.frozen = {name: held.values() for name, held in ours.base.tensors.items()}
        self.trained = {
            name: ours.arena.view(name, ours.arena.weights).clone().requires_grad_() for name in ours.arena.slots
        }
        self.table = made.table.clone().requires_grad_()

    def tensor(self, name: str) -> torch.Tensor:
        return self.trained.get(name, self.frozen[name])

    def product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensor(f"{name}.weight").t()
        a, b = (self.trained.get(f"{name}.lora_{matrix}.weight") for matrix in "AB")
        return y if a is None or b is None else y + self.scale * (x @ a.t()) @ b.t()

    def norm(self, x: torch.Tensor, spec: NormSpec | None, prefix: str = "") -> torch.Tensor:
        if spec is None:
            return x
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.eps) * self.tensor(f"{prefix}{spec.name}.weight")
        )

    def part(self, spec: Any, x: torch.Tensor, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        stem = f"layers.{layer}.{spec.module}."
        if isinstance(spec, AttentionSpec):
            q, k, v = (self.product(x, f"{stem}{name}_proj").unflatten(1, (-1, HEAD)).transpose(0, 1) for name in "qkv")
            scores = q @ k.transpose(1, 2) * spec.score_scale
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
            return self.product(mixed.transpose(0, 1).flatten(1), f"{stem}o_proj")
        if isinstance(spec, GateSpec):
            return self.product(self.product(x, f"{stem}gate").sigmoid() * self.table[tokens, layer], f"{stem}out")
        act = silu(self.product(x, f"{stem}gate_proj")) * self.product(x, f"{stem}up_proj")
        return self.product(act, f"{stem}down_proj")

    def logits(self, document: list[int]) -> torch.Tensor:
        tokens = torch.tensor(document)
        x = self.tensor("embed_tokens.weight")[tokens]
        for index, layer in enumerate(self.spec.layers):
            stem = f"layers.{index}."
            for branch in layer.branches:
                outs = [
                    self.norm(self.part(p.part, self.norm(x, p.norm, stem), index, tokens), p.out_norm, stem)
                    for p in branch.parts
                ]
                x = x + branch.scale * self.norm(torch.stack(outs).sum(0), branch.out_norm, stem)
            if layer.stream_scale is not None:
                x = x * self.frozen[f"{stem}{layer.stream_scale}"]
        return self.norm(x, self.spec.head.norm) @ self.tensor("lm_head.weight").t()

    def loss(self) -> torch.Tensor:
        total = torch.zeros(())
        for example in EXAMPLES:
            logits, labels = self.logits(example.tokens)[:-1], torch.tensor(example.tokens)[1:]
            trained = torch.tensor(example.supervised)[1:]
            total = total + cross_entropy(logits[trained], labels[trained], reduction="sum")
        return total


def close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert float((found - wanted).norm()) <= 2e-5 * float(wanted.norm()) + 1e-6, what


def same_as_autograds(made: Toy, reference: Reference, recompute: str) -> None:
    """Logits, loss and every gradient."""
    ours = made.ours
    wanted = torch.cat([reference.logits(document) for document in DOCUMENTS]).detach()
    close(ours.logits(DOCUMENTS), wanted, "logits")
    step = Step(ours.decoder, ours.arena, recompute=recompute)
    step.micro_step(pack(EXAMPLES))
    total = reference.loss()
    total.backward()
    assert float(step.loss_sum) == pytest.approx(float(total.detach()), rel=1e-5)
    for name, leaf in reference.trained.items():
        grad = ours.arena.view(name, ours.arena.grads)
        if name.endswith("layer_scalar"):
            assert leaf.grad is None and not grad.any(), "a constant"
        elif not name.endswith("k_proj.bias"):  # close to zero: scores that all rise alike do not change the softmax
            assert leaf.grad is not None and leaf.grad.any(), name
            close(grad, leaf.grad, name)


def same_text(made: Toy, reference: Reference) -> None:
    """Greedy generation with a cache."""
    (answer,) = generate(made.ours.decoder, DOCUMENTS[:1], Sampling(max_new_tokens=5), ())
    for count in range(5):
        assert int(reference.logits(DOCUMENTS[0] + answer[:count])[-1].argmax()) == answer[count]


@pairwise(
    ("kind", LAYERS),
    ("trained", ["adapters", "adapters and norms", "all weights"]),
    ("recompute", ["none", "selective", "full"]),
)
def test_outputs_and_gradients_are_autograds(kind: str, trained: str, recompute: str) -> None:
    lora = LoraConfig(rank=3, alpha=6.0, targets=("all_linear",), train_norms=trained == "adapters and norms")
    made = toy((LAYERS[kind], LAYERS["two branches"], LAYERS[kind]), lora, full=trained == "all weights")
    reference = Reference(made)
    same_as_autograds(made, reference, recompute)
    if "GateSpec" in str(LAYERS[kind]):
        assert reference.table.grad is not None
        close(made.table_grad, reference.table.grad, "the per-layer input")


def test_generation_with_a_cache() -> None:
    made = toy((LAYERS["everything"],) * 2, LoraConfig(rank=3, alpha=6.0, targets=("all_linear",)), full=False)
    same_text(made, Reference(made))
