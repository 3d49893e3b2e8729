"""Creates the parts of a session: base, adapters, decoder, step, graphs and loader.

The step and its pipeline are created on first use, because evaluating and sampling need neither.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from graftune.batch import BatchLayout, Example
from graftune.data.loader import Loader
from graftune.data.pack import Capacities
from graftune.dist.world import World
from graftune.errors import GraftuneError
from graftune.infer.cache import CacheShape, CacheSize, cache_capacity
from graftune.infer.generate import Sampler, requests_of, sampler_for
from graftune.kernels import attention, launch, rehearsal
from graftune.kernels.attention import Choice
from graftune.losses import Loss, choose
from graftune.model.arena import Arena, Start
from graftune.model.bundles import BundleStorage
from graftune.model.decoder import Decoder
from graftune.model.lora import build_arena
from graftune.model.mixers.attention import Attention, OwnBackend
from graftune.ranks import WHOLE, Share
from graftune.runtime import DTYPES, Runtime
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.step.evaluate import EvalResult, evaluate
from graftune.step.pipeline import Pipeline, pipeline_for
from graftune.step.step import Step
from graftune.tokenizer import Tokenizer
from graftune.weights import checkpoint
from graftune.weights.adapter import adapter_tensors, write_adapter
from graftune.weights.base import Base
from graftune.weights.checkpoint import Progress
from graftune.weights.load import build_decoder
from graftune.weights.model import save_model
from graftune.weights.placement import Placement

UNPLANNED = 1024  # tokens of a micro-batch if memory is not planned
CACHED = 8192  # without a planned step, the cache may take as much memory as a step of this many tokens
CACHE_SHARE = 0.4  # or this share of the free memory of a GPU


OWN = "own examples"  # key of the shape for examples that come without a data set
# Settings that decide the batches of a session; its saved state has them.
RESOLVED = ("recompute", "tokens_per_micro_batch", "tokens_per_step", "seed")


@dataclass(frozen=True)
class DataPosition:
    """The position of a session in its data: so many steps of `epoch` are done."""

    epoch: int = 0
    step: int = 0
    data: str = ""  # digest


def loader_of(
    config: Config,
    examples: Sequence[Example],
    capacity: int,
    *,
    layout: BatchLayout | None = None,
    share: Share = WHOLE,
) -> Loader:
    """Create the loader that divides the data into steps and micro-batches of `capacity` tokens."""
    settings = config.train
    return Loader(
        examples,
        tokens_per_step=settings.step_tokens,
        micro_capacity=capacity,
        seed=settings.seed,
        layout=layout or choose(settings).layout(examples),
        share=share,
    )


def attention_layers(decoder: Decoder) -> list[Attention]:
    return [part for block in decoder.blocks for part in block.parts if isinstance(part, Attention)]


def most_common_heads(decoder: Decoder) -> attention.HeadKind | None:
    """The kind of heads that most attention layers have; None: no layer has attention."""
    counts = Counter(layer.head_kind for layer in attention_layers(decoder))
    return counts.most_common(1)[0][0] if counts else None


def choose_for_other_heads(decoder: Decoder, runtime: Runtime) -> None:
    """Choose a backend for each attention layer whose heads differ from the most common kind."""
    device, dtype, main = runtime.device, runtime.compute, most_common_heads(decoder)
    for layer in attention_layers(decoder):
        heads = layer.head_kind
        if heads != main:
            more = {"capped": heads.capped, "sinks": heads.sinks}
            best = attention.choose(device, dtype, heads.width, runtime.deterministic, False, **more)
            any_shape = attention.for_any_shape(best.backend, device, dtype, heads.width)
            layer.own = OwnBackend(best.backend, any_shape)


@dataclass(eq=False, repr=False)
class SessionParts:
    """A base with adapters, and the parts built on it. The plan rehearses it, the trainer runs it, a Session wraps
    it."""

    config: Config  # as requested, with `auto` resolved
    base: Base  # the model as it was opened: `name`, `path`, `spec`, `tokenizer`
    runtime: Runtime  # device and dtype
    placement: Placement
    lora: LoraConfig  # from the adapter, if one was loaded
    attention: Choice
    loss: Loss  # the training loss
    world: World | None = None  # the ranks of the run, where there are several
    whole: dict[str, Any] | None = None  # the configuration to save the model with, if all of it is trained
    storage: InitVar[BundleStorage | None] = None  # of fetched frozen weights (model/bundles.py)
    arena: Arena = field(init=False)
    decoder: Decoder = field(init=False)
    start: Start | None = field(init=False)  # snapshot of the weights at the start, where the loss compares with it
    read_start: Callable[[], torch.Tensor] | None = None  # reads that snapshot of a finished run, when it is needed
    say: Callable[[str], None] = lambda note: None  # reports a note to the user
    closed: bool = field(default=False, init=False)
    _reported: set[str] = field(default_factory=set, init=False)  # notes that were reported already
    shapes: dict[str, Capacities] = field(default_factory=dict, init=False)  # fixed shapes, by kind of data
    planned_cache: CacheShape | None = field(default=None, init=False)  # which sampling keeps beside training
    keeps_to_plan: bool = field(default=False, init=False)  # in a run: take no more memory than its plan has counted
    _sampler: Sampler | None = field(default=None, init=False)

    def __post_init__(self, storage: BundleStorage | None) -> None:
        """Lay out the trainable weights and load the base around them. Adapters have no values yet; trained weights
        of the base and rows of added tokens have theirs, unless training starts from scratch. The plan rehearses this
        very function and records the owner of all memory."""
        spec, runtime, full = self.base.spec, self.runtime, self.config.train.method != "lora"
        with rehearsal.owned("adapters"):
            self.arena = build_arena(spec, self.lora, runtime.device, runtime.compute, full=full)
            self.start = Start(self.arena) if self.loss.reference == "start" else None
        rehearsal.assign("gradients", self.arena.grads)
        rehearsal.assign("moments", self.arena.m, self.arena.v)
        with rehearsal.owned("base"):
            self.decoder = build_decoder(self.base, self.arena, self.lora, runtime, self.placement, storage)
        choose_for_other_heads(self.decoder, runtime)

    @property
    def tokenizer(self) -> Tokenizer:
        """The base's, with the chat template."""
        return self.base.tokenizer

    @property
    def fixed_shapes(self) -> bool:
        """Whether micro-batches have a fixed shape, so that their steps can be replayed from graphs."""
        return launch.on_gpu(self.runtime.device)

    @property
    def share(self) -> Share:
        return WHOLE if self.world is None else self.world.share

    @property
    def eager_attention(self) -> str:
        """The backend for shapes that change from batch to batch."""
        heads = most_common_heads(self.decoder)
        if heads is None:
            return self.attention.backend
        return attention.for_any_shape(self.attention.backend, self.runtime.device, self.runtime.compute, heads.width)

    def say_once(self, note: str) -> None:
        if note not in self._reported:
            self._reported.add(note)
            self.say(note)

    def check_open(self) -> None:
        if self.closed:
            raise GraftuneError("this session is closed", fix="open another one")

    @cached_property
    def step(self) -> Step:
        config = self.config
        assert config.train.recompute != "auto", "the plan resolves recompute before there is a step"
        return Step(
            self.decoder,
            self.arena,
            clip_mode=config.optim.clip_mode,
            dropout=self.lora.dropout,
            seed=config.train.seed,
            recompute=config.train.recompute,
            attention_backend=self.attention.backend,
            other_backends=self.attention.others,
            eager_backend=self.eager_attention,
            loss=self.loss,
            tuned=self.fixed_shapes and not config.train.deterministic,  # nothing may depend on timing then
            reduce=self.world,
            start=self.start_of(self.loss),
        )

    def start_of(self, loss: Loss) -> Start | None:
        """The snapshot that a loss compares with. A loss that needs one is refused if it was not taken at the start."""
        if loss.reference == "start" and self.start is None and self.read_start is not None:
            values = self.read_start()
            self.start = Start(self.arena)
            self.start.values.copy_(values)
        if loss.reference == "start" and self.start is None:
            raise GraftuneError(
                f"the loss {type(loss).__name__} compares with the adapter as it was at the start, which was not kept",
                fix="open the session with this loss",
            )
        return self.start

    @cached_property
    def pipeline(self) -> Pipeline:
        return pipeline_for(self.step, graph=self.config.train.graph)

    def renew_step(self) -> None:
        """Recreate the step and its pipeline for another loss, and keep the counts."""
        old = vars(self).pop("step")
        self.step.count.copy_(old.count)
        self.step.longest, self.step.longest_ahead = old.longest, old.longest_ahead
        if self.step.scaler is not None:
            self.step.scaler.state.copy_(old.scaler.state)
        if "pipeline" in vars(self):  # replaced at once: the loader's thread may be using it
            vars(self)["pipeline"] = pipeline_for(self.step, graph=self.config.train.graph)

    def loader(self, examples: Sequence[Example]) -> Loader:
        capacity, layout = self.config.train.tokens_per_micro_batch, self.loss.layout(examples)
        return loader_of(self.config, examples, capacity, layout=layout, share=self.share)

    def fix_shape(self, loader: Loader, epochs: float) -> Capacities | None:
        """Fix the shape of every micro-batch of this many epochs; None where batches keep their exact shapes."""
        if not self.fixed_shapes:
            return None
        shape = self.shape_for("data sets", loader.capacities(math.ceil(epochs)), loader.micro_capacity)
        loader.fix(shape)
        self.pipeline.bound_documents(shape.longest, loader.ahead_shape.longest if loader.ahead_shape else 0)
        return shape

    def shape_for(self, data: str, need: Capacities, most: int) -> Capacities:
        """The fixed shape of all micro-batches of a kind of data: the first one needed, until a batch exceeds it. A
        larger shape replaces it and frees its graphs, so that captures do not pile up. `most`: the most tokens that
        rounding up may reach."""
        had = self.shapes.setdefault(data, need)
        if had != need and not had.holds(need):
            self.shapes[data] = had.grown(need, most, self.config.data.max_seq_len)
            self.pipeline.free_graphs()
        return self.shapes[data]

    @property
    def own_shape(self) -> list[int]:
        """The fixed shape of micro-batches of examples that came without a data set; empty if there is none. It depends
        on the batches so far, and in another shape sums may be rounded differently, so saved states hold it."""
        return list(self.shapes.get(OWN, ()))

    @own_shape.setter
    def own_shape(self, stored: Sequence[int]) -> None:
        if stored and self.fixed_shapes and self.own_shape != list(stored):
            self.shapes[OWN] = Capacities(*stored)
            self.pipeline.free_graphs()

    def evaluated(
        self,
        examples: Sequence[Example],
        *,
        adapted: bool = True,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> EvalResult:
        return evaluate(
            self.decoder,
            examples,
            capacity=self.config.train.tokens_per_micro_batch or UNPLANNED,
            loss=self.loss,
            adapted=adapted,
            backend=self.attention.backend,
            between=on_progress,
            start=self.start_of(self.loss),
            share=self.share,
            **({} if self.world is None else {"gather": self.world.gather}),
        )

    def sampler(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sampler:
        """The sampler for a call. It is kept for later calls, with its cache and its graphs."""
        requests = requests_of(self.decoder, prompts, new_tokens)
        backend = self.eager_attention
        found = sampler_for(self.decoder, requests, self.cache_budget, backend, self._sampler, self.planned_cache)
        if self._sampler is None or not self._sampler.busy:
            self._sampler = found
        return found

    def free_cache(self) -> None:
        self._sampler = None

    @property
    def cache_held(self) -> int:
        """Bytes of the cache that is kept."""
        return 0 if self._sampler is None else self._sampler.shape.bytes(self._cache_size)

    @property
    def _cache_size(self) -> CacheSize:
        return CacheSize.of(self.base.spec, self.decoder.compute)

    @property
    def cache_budget(self) -> int:
        """Bytes that the cache of generation may take: the planned ones, if there is a plan; otherwise as much as a
        step takes. On a GPU it is a share of the free memory, if that is more, in two cases: before `auto` is resolved,
        since the plan then counts the cache, and once the step is captured and has its memory."""
        settings, size = self.config.train, self._cache_size
        if self.planned_cache is not None:
            return self.planned_cache.bytes(size)
        tokens = settings.tokens_per_micro_batch
        budget = cache_capacity(tokens or CACHED, settings.recompute) * size.most_per_token
        waits = tokens and not ("pipeline" in vars(self) and self.pipeline.captures)
        if waits or self.keeps_to_plan or self.runtime.device.type != "cuda":
            return budget
        return max(budget, int(CACHE_SHARE * torch.cuda.mem_get_info(self.runtime.device)[0]))

    def close(self) -> None:
        self.closed = True
        self.free_cache()
        for name in ("pipeline", "step", "decoder", "arena"):
            vars(self).pop(name, None)
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize(self.runtime.device)
            torch.cuda.empty_cache()

    # Saving

    @property
    def product(self) -> str:
        """The kind of result that a run writes, which is also the name of its folder."""
        return "adapter" if self.whole is None else "model"

    def write(self, folder: Path) -> None:
        """Write the adapter, or the whole model if all of it was trained."""
        if self.whole is None:
            self._write_adapter(folder)
        else:
            save_model(folder, self.arena, self.base, self.whole, self.runtime.compute)

    def write_state(self, folder: Path, steps: int, position: DataPosition) -> Path:
        """Write what a session needs to go on: weights, moments, the update count, the loss scale, the position in the
        data, and the settings that `auto` resolved to. The layout is that of a run's checkpoint."""
        settings = {name: getattr(self.config.train, name) for name in RESOLVED}
        step = vars(self).get("step")
        updates = 0 if step is None else int(step.count)
        progress = Progress(step=steps, epoch=position.epoch, epoch_step=position.step, updates=updates)
        progress.own_shape = self.own_shape
        identity: dict[str, Any] = {"base": self.base.sha256, "examples": position.data, "resolved": settings}
        return checkpoint.write(folder, self.arena, progress, identity, None if step is None else step.scaler)

    def resolved_in(self, folder: Path) -> dict[str, Any]:
        """The settings that `auto` had resolved to in a saved state."""
        if not (folder / checkpoint.STATE).is_file():
            raise GraftuneError("is not a saved state", where=str(folder), fix="give a folder that save_state wrote")
        _, identity = checkpoint.read_state(folder)
        checkpoint.check_identity({"base": self.base.sha256}, identity, folder)
        stored = identity.get("resolved")
        return {name: stored[name] for name in RESOLVED if name in stored} if isinstance(stored, dict) else {}

    def read_state(self, folder: Path) -> tuple[int, DataPosition]:
        """Fill the arena and the step from what `write_state` wrote. Returns the steps taken and the position in the
        data."""
        checkpoint.check_whole(folder)
        _, identity = checkpoint.read_state(folder)
        progress = checkpoint.load(folder, self.arena, self.step.scaler)
        self.step.count.fill_(progress.updates)
        self.own_shape = progress.own_shape
        return progress.step, DataPosition(progress.epoch, progress.epoch_step, str(identity.get("examples", "")))

    def _write_adapter(self, folder: Path) -> None:
        names = [name for name in ("embed_tokens", "lm_head") if f"{name}.rows" in self.arena.slots]
        tables = {name: self._table(name) for name in names}
        data = self.config.data
        facts = {
            "template": "none" if data.template == "none" else "auto",
            "append_eos": data.append_eos,
            "revision": self.config.base.revision,
        }
        write_adapter(folder, adapter_tensors(self.arena, self.base, tables), self.lora, self.base, facts)

    def _table(self, name: str) -> torch.Tensor:
        """Read the embedding or head from the file, rounded as products see it. The device may hold none of it or only
        a shard, and only one rank writes."""
        source, compute = self.base.tensors[f"{name}.weight"], self.runtime.compute
        rows = source.read(0, source.shape[0])
        return rows.to(DTYPES.get(self.placement.base_dtype, compute)).to(compute)
