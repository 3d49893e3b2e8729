"""Families with mixtures of experts: which layers have one, the router, and a shared expert beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.families.common import Family
from graftune.model.families.reading import FileConfig, Getter
from graftune.model.feed_forward.experts import ExpertsSpec
from graftune.model.feed_forward.gated import GatedSpec
from graftune.model.feed_forward.router import RouterSpec
from graftune.model.part import FeedForwardSpec
from graftune.model.spec import ModelSpec

SIGMOID = 2  # llama.cpp's number
# Family.folder_names, where folders number the projections of an expert.
NUMBERED = {
    ".experts.N.gate_proj.": ".experts.N.w1.",
    ".experts.N.up_proj.": ".experts.N.w3.",
    ".experts.N.down_proj.": ".experts.N.w2.",
}


@dataclass(frozen=True)
class Mixture(Family):
    expert_ffn_key: str = "intermediate_size"
    dense_key: str = ""  # how many of the first layers have no experts; "": all layers have them
    shared: str = ""  # the module of the shared expert; "": there is none
    shared_ffn_key: str = ""  # the key of its width; "": the width is an expert's times the value of `shared_count_key`
    shared_count_key: str = ""
    shared_gate: bool = False  # whether its output has a gate, whose name in folders is in `folder_names`
    score: str = "softmax"
    selection_bias: str = ""
    sum_eps: float = 0.0  # RouterSpec.eps
    scale_key: str = ""  # RouterSpec.scale
    llama_cpp_normalises: bool | None = True  # whether llama.cpp makes the weights sum to one; None: as the file says

    # Reading a configuration

    def feed_forwards(self, get: Getter) -> list[tuple[FeedForwardSpec, ...]]:
        layers = get.layers()
        dense = int(get.number(self.dense_key, 0)) if self.dense_key else 0
        if not 0 <= dense <= layers:
            raise get.refused("dense layers")
        mixture = (self.experts(get), *((self.shared_expert(get),) if self.shared else ()))
        return [*([(self.dense(get),)] * dense if dense else ()), *([mixture] * (layers - dense))]

    def experts(self, get: Getter) -> ExpertsSpec:
        config = get.config
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise GraftuneError("has experts in some layers only", where=get.where, fix="this variant is not supported")
        if int(config.get("n_group") or 1) != 1:
            raise GraftuneError("chooses experts by groups", where=get.where, fix="this variant is not supported")
        key = next((key for key in ("num_experts", "num_local_experts") if key in config), self.experts_key)
        count, chosen = get.experts(key, "num_experts_per_tok")
        width, ffn = get.whole("hidden_size"), get.whole(self.expert_ffn_key)
        return ExpertsSpec(width, ffn, count, chosen, self.router(get), self.mlp, get.activation())

    def router(self, get: Getter) -> RouterSpec:
        return RouterSpec(
            bool(get.config.get("norm_topk_prob")),
            self.score,
            selection_bias=self.selection_bias,
            scale=get.number(self.scale_key, 1.0) if self.scale_key else 1.0,
            eps=self.sum_eps,
        )

    def shared_expert(self, get: Getter) -> GatedSpec:
        if self.shared_ffn_key:
            ffn = get.whole(self.shared_ffn_key)
        else:
            ffn = get.whole(self.shared_count_key) * get.whole(self.expert_ffn_key)
        return GatedSpec(get.whole("hidden_size"), ffn, get.activation(), self.shared, out_gate=self.shared_gate)

    # Other files

    def gguf_config(self, metadata: FileConfig, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
        config = super().gguf_config(metadata, tensors, where)
        if self.llama_cpp_normalises is not None:
            return config | {"norm_topk_prob": self.llama_cpp_normalises}
        return config | {"norm_topk_prob": bool(metadata.get(f"{self.arch}.expert_weights_norm"))}

    def config(self, spec: ModelSpec, where: str = "") -> dict[str, Any]:
        found, experts = super().config(spec, where), experts_of(spec)
        parts = [part for kind in spec.kinds for part in kind.parts if isinstance(part, GatedSpec)]
        shared = next((part for part in parts if part.module == self.shared), None)
        found |= {
            self.experts_key: experts.experts,
            "num_experts_per_tok": experts.chosen,
            self.expert_ffn_key: experts.ffn,
            "norm_topk_prob": experts.router.normalised,
        }
        if self.dense_key:
            found[self.dense_key] = sum(isinstance(layer.feed_forward, GatedSpec) for layer in spec.layers)
        if self.scale_key:
            found[self.scale_key] = experts.router.scale
        if shared is not None:
            key = self.shared_ffn_key or self.shared_count_key
            found[key] = shared.ffn if self.shared_ffn_key else shared.ffn // experts.ffn
        return found

    def gguf_keys(self, spec: ModelSpec, where: str) -> dict[str, Any]:
        router = experts_of(spec).router
        if self.llama_cpp_normalises is not None and router.normalised != self.llama_cpp_normalises:
            does = "sum to one" if self.llama_cpp_normalises else "are the probabilities themselves"
            raise GraftuneError(
                f"llama.cpp weighs the experts of this family so that they {does}, which this model does not",
                fix="export to merged or peft",
            )
        found = super().gguf_keys(spec, where)
        if router.score == "sigmoid":
            found["expert_gating_func"] = SIGMOID
        return found | ({} if self.llama_cpp_normalises is not None else {"expert_weights_norm": router.normalised})


def experts_of(spec: ModelSpec) -> ExpertsSpec:
    return next(part for kind in spec.kinds for part in kind.parts if isinstance(part, ExpertsSpec))
