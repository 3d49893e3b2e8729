"""The Session: the verbs of a training loop over the parts, from Python.

    session.forward_backward(batch)     as often as there are batches to accumulate
    stats = session.optim_step(lr=...)

Batches of `batches()` have one fixed shape on CUDA and replay from graphs, exactly as `graftune train` does; others run
eagerly, and that is said once. Nothing here waits for the device but reading a step's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from graftune.batch import PackedBatch
from graftune.data.dataset import Dataset, prepare
from graftune.data.loader import Loader
from graftune.data.memory import Data, as_value
from graftune.data.pack import largest, pack
from graftune.errors import GraftuneError
from graftune.kernels.adamw import Hyper
from graftune.losses import Loss
from graftune.observe.console import Console
from graftune.observe.speed import Meter
from graftune.session import state, text
from graftune.session.parts import UNPLANNED
from graftune.session.state import DataPosition
from graftune.session.stepping import Batch, StepStats
from graftune.session.text_verbs import TextVerbs
from graftune.step.evaluate import EvalResult
from graftune.step.schedule import learning_rate

MICRO_BATCHES = 4096  # of a step at most, as far as dropout's seeds go

Planner = Callable[["Session", Dataset | None], None]


def _silent(note: str) -> None:
    """Nobody reads notes."""


@dataclass(eq=False, repr=False)
class Session(TextVerbs):
    """A base with adapters, ready to train, evaluate and sample. `graftune.open` makes one.

    Example:
        with graftune.open("model.gguf", rank=8) as session:
            data = session.prepare("data.jsonl")
            for batch in session.batches(data):
                session.forward_backward(batch)
                stats = session.optim_step()
            session.save_adapter("my-adapter")
    """

    planner: Planner | None = None  # resolves `auto` when training begins
    say: Callable[[str], None] = _silent  # takes a note for the user
    steps: int = 0  # optimizer steps taken
    _loaded: tuple[Dataset, Loader] | None = field(default=None, init=False)
    _tokens: int = field(default=0, init=False)  # of what has added up since the last update
    _responses: int = field(default=0, init=False)
    _divisor: float = field(default=0.0, init=False)
    _micro: int = field(default=0, init=False)
    _meter: Meter = field(default_factory=lambda: Meter(0, 0), init=False)
    _warned_eager: bool = field(default=False, init=False)
    _position: DataPosition = field(default_factory=DataPosition, init=False)  # behind the last batch that was used
    _resume_at: DataPosition | None = field(
        default=None, init=False
    )  # where a loaded state stands: what is before it is done
    _restored: tuple[int, dict[str, torch.Tensor]] | None = field(default=None, init=False)  # for the step to come

    def __repr__(self) -> str:
        base, runtime = self.base.name or str(self.base.path), self.runtime
        what = f"rank {self.lora.rank}" if self.whole is None else f"method {self.config.train.method}"
        return f"Session({base}, {what}, {self.placement.base_dtype} on {runtime.device}, {self.steps} steps)"

    def describe(self) -> dict[str, Any]:
        """The base, the device and what was chosen, by name."""
        return self.base.describe() | {
            "device": self.runtime.describe(),
            "attention": self.attention.backend,
            "base_dtype": self.placement.base_dtype,
            "trainable": len(self.arena.weights),
            "adapter": self.config.lora.adapter,
        }

    # Data

    def prepare(self, data: Data, console: Console | None = None) -> Dataset:
        """Read and tokenise data by the session's data settings. `data` is a path, a Hub data set's name, a list of
        records, a Hugging Face Dataset or an iterator of records; what was encoded before is found again.

        Example:
            data = session.prepare([{"prompt": "Say 1", "response": "one"}])
        """
        return prepare(as_value(data), self.tokenizer, self.config.data, console, self.loss.data)

    def batches(self, data: Dataset, epoch: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, one per optimizer step: `tokens_per_step` tokens in micro-batches of
        `tokens_per_micro_batch`, shuffled by the seed, packed one step ahead by a thread. After `load_state` what the
        saved session had trained on is left out.

        Example:
            for epoch in range(3):
                for batch in session.batches(data, epoch):
                    session.forward_backward(batch)
                    session.optim_step()
        """
        loader, start = self._loader_for(data), self._start(data, epoch)
        if start == loader.steps_per_epoch(epoch):
            return
        self.fix_shape(loader, max(self.config.train.epochs, epoch + 1))
        stage = self.pipeline.stage
        for index, held in enumerate(loader.epoch(epoch, start, lambda batch: (batch, stage(batch))), start):
            tokens, responses = loader.counts(epoch, index)
            packed, staged = zip(*held, strict=True)
            position = DataPosition(epoch, index + 1, data.digest)
            yield Batch(packed, tokens, responses, position, staged, loader.fixed)

    def steps_per_epoch(self, data: Dataset, epoch: int = 0) -> int:
        """Optimizer steps of one pass over the data."""
        return self._loader_for(data).steps_per_epoch(epoch)

    def schedule(self, steps: int) -> list[float]:
        """The learning rate of each of so many steps, by the settings: warm-up, then cosine, linear or constant.

        Example:
            rates = session.schedule(session.steps_per_epoch(data))
            for batch, lr in zip(session.batches(data), rates, strict=True):
                session.forward_backward(batch)
                session.optim_step(lr=lr)
        """
        return [learning_rate(step, steps, self.config.optim) for step in range(steps)]

    def _start(self, data: Dataset, epoch: int) -> int:
        """The first step of an epoch that a loaded state has not done."""
        if self._resume_at is None or epoch > self._resume_at.epoch:
            return 0
        if data.digest != self._resume_at.data:
            raise GraftuneError(
                "the loaded state was saved on other data",
                where=data.path,
                mend="go on with the same data and settings",
            )
        return self._resume_at.step if epoch == self._resume_at.epoch else self._loader_for(data).steps_per_epoch(epoch)

    def _loader_for(self, data: Dataset) -> Loader:
        self._check_open()
        if self._loaded is None or self._loaded[0] is not data:
            self._resolve_auto(data)
            least = largest(data.examples, self.loss.layout(data.examples))
            size = max(self.config.train.tokens_per_micro_batch, least)
            self.config = self.config.replace(tokens_per_micro_batch=size)
            self._loaded = data, self.loader(data.examples)
        return self._loaded[1]

    def _resolve_auto(self, data: Dataset | None = None) -> None:
        """Resolve what of the settings depends on memory: by the plan, or where nobody plans to what always works."""
        settings = self.config.train
        if settings.recompute != "auto" and settings.tokens_per_micro_batch:
            return
        if self.planner is not None:
            self.planner(self, data)
        settings = self.config.train
        self.config = self.config.replace(
            recompute="none" if settings.recompute == "auto" else settings.recompute,
            tokens_per_micro_batch=settings.tokens_per_micro_batch or min(settings.tokens_per_step, UNPLANNED),
        )

    # Training

    def forward_backward(self, batch: Batch | PackedBatch | Data, loss: Loss | None = None) -> None:
        """Forward, loss, backward. Gradients add up until `optim_step`. `batch` comes from `batches()`; records (as
        `prepare` takes them) and packed batches of your own are taken too, and on CUDA they run eagerly, not from the
        graphs. `loss` replaces the session's loss, before the first batch.

        Example:
            session.forward_backward([{"prompt": "Say 1", "response": "one"}])
            print(session.optim_step(lr=1e-4).loss)
        """
        self._check_open()
        self._set_loss(loss)
        if not isinstance(batch, Batch):
            batch = self._packed(batch)
        pipeline = self._ready()
        if batch.fixed or not self.captured:
            for staged in batch.take(pipeline.stage):
                pipeline.micro(staged, self._next_dropout_seed())
        else:
            self._warn_eager()
            for packed in batch.packed:
                pipeline.eager(packed, self._next_dropout_seed())
        self._tokens += batch.tokens
        self._responses += batch.response_tokens
        self._divisor += batch.divisor
        self._position = batch.position or self._position

    def optim_step(
        self,
        *,
        lr: float | None = None,
        beta1: float | None = None,
        beta2: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        clip: float | None = None,
    ) -> StepStats:
        """Clip and apply what has added up. What is given goes before the settings, for this step. The figures that
        come back are fetched when they are read.

        Example:
            stats = session.optim_step(lr=2e-4)
            print(stats.loss, stats.grad_norm)
        """
        if not self._micro:
            raise GraftuneError("optim_step was called with no gradients", mend="call forward_backward first")
        given = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "clip": clip}
        values = {name: getattr(self.config.optim, name) for name in Hyper._fields if name != "divisor"}
        values |= {name: value for name, value in given.items() if value is not None}
        self.steps += 1
        speed = self._meter.update(self.steps, self._tokens)
        stats = StepStats(self._fetch, self.steps, values["lr"], self._tokens, self._responses, speed)
        self.pipeline.update(values | {"divisor": self._divisor or 1.0}, stats)
        for done in self.pipeline.finished():
            done.tag.fill(done)
        self._tokens = self._responses = self._micro = 0
        self._divisor = 0.0
        return stats

    def _ready(self) -> Any:
        """The pipeline, with what a loaded state knows of the step in its place."""
        self._resolve_auto()
        if self._restored is not None:
            updates, scale = self._restored
            self.step.count.fill_(updates)
            if self.step.scaler is not None and scale:
                self.step.scaler.load_state_dict(scale)
            self._restored = None
        return self.pipeline

    def _packed(self, batch: PackedBatch | Data) -> Batch:
        if isinstance(batch, PackedBatch):
            return Batch([batch], len(batch.tokens), batch.response_tokens)
        data = self.prepare(batch)
        packed = pack(data.examples, layout=self.loss.layout(data.examples))
        return Batch([packed], data.summary.tokens, packed.response_tokens)

    def _set_loss(self, loss: Loss | None) -> None:
        if loss is None or loss is self.loss:
            return
        if "step" in vars(self) or self._loaded is not None:
            raise GraftuneError(
                "the loss was given after training began", mend="give it with the first batch, before batches()"
            )
        self.loss = loss

    def _fetch(self, stats: StepStats) -> None:
        while not stats.ready:
            done = self.pipeline.next()
            done.tag.fill(done)

    def _next_dropout_seed(self) -> int:
        self._micro += 1
        return self.steps * MICRO_BATCHES + self._micro - 1

    def _warn_eager(self) -> None:
        if not self._warned_eager:
            self.say("batches of other shapes than those of batches() run eagerly, not from CUDA graphs")
            self._warned_eager = True

    # Evaluation and text

    def evaluate(
        self,
        data: Data | Dataset,
        *,
        adapted: bool = True,
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> EvalResult:
        """Loss and perplexity on response tokens, with the adapter or (adapted=False) without it. `on_progress` is
        called with the number of examples done.

        Example:
            print(session.evaluate("held-out.jsonl").perplexity)
        """
        self._check_open()
        data = data if isinstance(data, Dataset) else self.prepare(data)
        return self.evaluated(data.examples, adapted=adapted, on_progress=on_progress)

    def logprobs(self, data: Data | Dataset, *, adapted: bool = True) -> list[torch.Tensor]:
        """The log-probability of every response token, one tensor per example (fp32, on the CPU).

        Example:
            (one,) = session.logprobs([{"prompt": "Say 1", "response": "one"}])
        """
        self._check_open()
        data = data if isinstance(data, Dataset) else self.prepare(data)
        capacity = self.config.train.tokens_per_micro_batch or UNPLANNED
        return text.logprobs_of(self, data.examples, capacity, adapted)

    # Saving

    def save(self, path: str | Path) -> Path:
        """Write what was trained: the adapter in PEFT's layout, or (method full or scratch) the model as a Hugging Face
        folder."""
        self._check_open()
        folder = Path(path)
        self.write(folder)
        return folder

    def save_adapter(self, path: str | Path) -> Path:
        """Write the adapter in PEFT's layout, with tokenizer and chat template.

        Example:
            session.save_adapter("my-adapter")
        """
        if self.whole is not None:
            raise GraftuneError("this session trains the whole model, not an adapter", mend="write it with save()")
        return self.save(path)

    def save_state(self, path: str | Path) -> Path:
        """Write what is needed to go on exactly from here: weights, moments, counts and the position in the data.
        Gradients that have not been applied yet are not part of it.

        Example:
            session.save_state("state")
        """
        self._check_open()
        updates = self._restored[0] if self._restored else int(self.step.count) if "step" in vars(self) else 0
        return state.save(self, Path(path), self.steps, updates, self._position)

    def load_state(self, path: str | Path) -> None:
        """Go on from what `save_state` wrote; a loop over `batches()` then starts behind the batches that were used.

        Example:
            session = graftune.open("model.gguf", rank=8)
            session.load_state("state")
        """
        self._check_open()
        if "step" in vars(self):
            self.step.discard()
        progress, self._position, resolved, scale = state.load(self, Path(path))
        self._resume_at = self._position
        self.steps, self._restored = progress.step, (progress.updates, scale)
        if "step" not in vars(self):
            self.config = self.config.replace(**resolved)
        self._tokens = self._responses = self._micro = 0
        self._divisor, self._loaded = 0.0, None

    def close(self) -> None:
        """Let go of the model and of the device's memory. A closed session cannot be used again."""
        if not self._closed:
            self._closed = True
            for name in ("pipeline", "step", "decoder", "arena", "_loaded"):
                self.__dict__.pop(name, None)
            if self.runtime.device.type == "cuda":
                torch.cuda.synchronize(self.runtime.device)
                torch.cuda.empty_cache()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
