"""The Session: the verbs of a training loop over the parts, from Python.

    session.forward_backward(batch)     as often as there are batches to accumulate
    stats = session.optim_step(lr=...)

Batches of `batches()` have one fixed shape on CUDA and replay from graphs, exactly as `graftune train` does; others run
eagerly, and that is said once. Nothing here waits for the device but reading a step's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from graftune.batch import BatchLayout, Example, Field, PackedBatch
from graftune.data.dataset import Dataset, prepare
from graftune.data.encoded import lengths_of, take
from graftune.data.memory import Data, as_given
from graftune.data.pack import bins_in_order, pack
from graftune.data.summary import counted
from graftune.errors import GraftuneError
from graftune.kernels.adamw import Hyper
from graftune.losses import Loss
from graftune.model.context import dropout_seed
from graftune.observe.speed import Meter
from graftune.session import arguments, state, text
from graftune.session.data_verbs import DataVerbs
from graftune.session.parts import UNPLANNED
from graftune.session.state import DataPosition
from graftune.session.stepping import Batch, StepStats
from graftune.step.evaluate import EvalResult

VERBS = (  # in the order in which a reader wants them
    *("prepare", "batches", "steps_per_epoch", "schedule", "forward_backward", "optim_step", "evaluate", "logprobs"),
    *("sample", "stream", "generate", "chat", "prompt_tokens", "describe"),
    *("save_adapter", "save", "save_state", "load_state", "close"),
)
ATTRIBUTES = ("config", "loss", "steps", "context", "tokenizer", "base", "runtime")


@dataclass(eq=False, repr=False)
class Session(DataVerbs):
    """A base with adapters, ready to train, evaluate and sample. `graftune.open` makes one.

    Example:
        with graftune.open("model.gguf", rank=8) as session:
            data = session.prepare("data.jsonl")
            for batch in session.batches(data):
                session.forward_backward(batch)
                stats = session.optim_step()
            session.save_adapter("my-adapter")
    """

    _tokens: int = field(default=0, init=False)  # of what has added up since the last update
    _responses: int = field(default=0, init=False)
    _divisor: float = field(default=0.0, init=False)
    _meter: Meter = field(default_factory=lambda: Meter(0, 0), init=False)
    _position: DataPosition = field(default_factory=DataPosition, init=False)  # behind the last batch that was applied
    _reached: DataPosition = field(default_factory=DataPosition, init=False)  # behind the last batch that was added
    _restored: tuple[int, dict[str, torch.Tensor]] | None = field(default=None, init=False)  # for the step to come

    def __dir__(self) -> list[str]:
        """For completion: what is meant for users. The other parts are there for the rest of the package."""
        return [*VERBS, *ATTRIBUTES, *(name for name in super().__dir__() if name.startswith("_"))]

    def __repr__(self) -> str:
        base, runtime = self.base.name or str(self.base.path), self.runtime
        what = f"rank {self.lora.rank}" if self.whole is None else f"method {self.config.train.method}"
        return f"Session({base}, {what}, {self.placement.base_dtype} on {runtime.device}, {self.steps} steps)"

    def describe(self) -> dict[str, Any]:
        """The base, the device and what was chosen, by name."""
        self._check_open()
        return self.base.describe() | {
            "device": self.runtime.describe(),
            "attention": self.attention.backend,
            "base_dtype": self.placement.base_dtype,
            "trainable": len(self.arena.weights),
            "adapter": self.config.lora.adapter,
        }

    # Training

    def forward_backward(self, batch: Batch | PackedBatch | Dataset | Data, loss: str | Loss | None = None) -> None:
        """Forward, loss, backward. Gradients add up until `optim_step`. `batch` comes from `batches()`. Records (as
        `prepare` takes them), a data set and packed batches of your own are taken too; they are divided into
        micro-batches of the session's size, and on CUDA they run eagerly, not from the graphs.

        `loss`, a name or an object, replaces the session's from here on. One that reads other fields than the loss a
        batch was packed for is given to `batches()` or to `graftune.open`.

        Example:
            session.forward_backward([{"prompt": "Say 1", "response": "one"}])
            print(session.optim_step(lr=1e-4).loss)
        """
        self._check_open()
        self._use_loss(loss, batch if isinstance(batch, Batch) else None)
        if not isinstance(batch, Batch):
            batch = self._own_batch(batch)
        pipeline = self._ready()
        if batch._fixed or not self.captured:
            for staged in batch._take(pipeline.stage):
                pipeline.micro(staged, self._next_dropout_seed())
        else:
            self._say_once("batches of other shapes than those of batches() run eagerly, not from CUDA graphs")
            for packed in batch.packed:
                pipeline.eager(packed, self._next_dropout_seed())
        self._tokens += batch.tokens
        self._responses += batch.response_tokens
        self._divisor += batch.divisor
        self._reached = batch._position or self._reached

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
        self._check_open()
        if not self._micro:
            raise GraftuneError("optim_step was called with no gradients", fix="call forward_backward first")
        given = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "clip": clip}
        values = {name: getattr(self.config.optim, name) for name in Hyper._fields if name != "divisor"}
        values |= arguments.hyperparameters(given)
        step = self.steps + 1
        speed = self._meter.update(step, self._tokens)
        stats = StepStats(self._fetch, step, values["lr"], self._tokens, self._responses, speed)
        self.pipeline.update(values | {"divisor": self._divisor or 1.0}, stats)
        self.steps, self._position = step, self._reached
        self._forget_sums()
        self._collect()
        return stats

    def _ready(self) -> Any:
        """The pipeline, with what a loaded state knows of the step in its place."""
        if self._restored is not None:
            updates, scale = self._restored
            self.step.count.fill_(updates)
            if self.step.scaler is not None and scale:
                self.step.scaler.load_state_dict(scale)
            self._restored = None
        return self.pipeline

    def _own_batch(self, batch: PackedBatch | Dataset | Data) -> Batch:
        """A batch that did not come from `batches()`, in micro-batches of the session's size."""
        if isinstance(batch, PackedBatch):
            self._resolve_auto(None, _layout_of(batch))
            return Batch([batch], len(batch.tokens), batch.response_tokens)
        examples = self._examples(batch, "forward_backward").examples
        layout = self.loss.layout(examples)
        self._resolve_auto(None, layout)
        bins = bins_in_order(examples, self.config.train.tokens_per_micro_batch, layout)
        packed = [pack(take(examples, held), layout=layout) for held in bins]
        return Batch(packed, int(lengths_of(examples).sum()), sum(one.response_tokens for one in packed))

    def _examples(self, data: Data | Dataset, verb: str) -> Dataset:
        """A data set; records are encoded for this call, and what is left out of them is said."""
        if isinstance(data, Dataset):
            found = data
        else:
            found = prepare(as_given(data, verb), self.tokenizer, self.config.data, None, self.loss.data, keep=False)
            summary = found.summary
            for reason, count in (*summary.refused.items(), *summary.dropped.items()):
                self.say(f"{verb}: {counted(count, 'record')} left out: {reason}")
            for reason, count in summary.truncated.items():
                self.say(f"{verb}: {counted(count, 'record')} shortened: {reason}")
        if not len(found):
            raise GraftuneError(f"{verb} was given a data set without examples", fix="give another one")
        return found

    def _forget_sums(self) -> None:
        self._tokens = self._responses = self._micro = 0
        self._divisor, self._reached = 0.0, self._position

    def _fetch(self, stats: StepStats) -> None:
        while not stats.ready:
            done = self.pipeline.next()
            done.tag._fill(done)

    def _next_dropout_seed(self) -> int:
        self._micro += 1
        return dropout_seed(self.steps, self._micro - 1)

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
        self._check_usable(adapted)
        examples = self._examples(data, "evaluate").examples
        return self.evaluated(examples, adapted=adapted, on_progress=on_progress)

    def logprobs(self, data: Data | Dataset, *, adapted: bool = True) -> list[torch.Tensor]:
        """The log-probability of every response token, one tensor per example (fp32, on the CPU).

        Example:
            (one,) = session.logprobs([{"prompt": "Say 1", "response": "one"}])
        """
        self._check_usable(adapted)
        examples = self._examples(data, "logprobs").examples
        capacity = self.config.train.tokens_per_micro_batch or UNPLANNED
        return text.logprobs_of(self, examples, capacity, adapted)

    # Saving

    def save(self, path: str | Path) -> Path:
        """Write what was trained: the adapter in PEFT's layout, or (method full or scratch) the model as a Hugging Face
        folder."""
        self._check_open()
        folder = arguments.path(path)
        self.write(folder)
        return folder

    def save_adapter(self, path: str | Path) -> Path:
        """Write the adapter in PEFT's layout, with tokenizer and chat template.

        Example:
            session.save_adapter("my-adapter")
        """
        if self.whole is not None:
            raise GraftuneError("this session trains the whole model, not an adapter", fix="write it with save()")
        return self.save(path)

    def save_state(self, path: str | Path) -> Path:
        """Write what is needed to go on exactly from here: weights, moments, counts and the position in the data.
        Gradients that have not been applied yet are not part of it.

        Example:
            session.save_state("state")
        """
        self._check_open()
        updates = self._restored[0] if self._restored else int(self.step.count) if "step" in vars(self) else 0
        return state.save(self, arguments.path(path), self.steps, updates, self._position)

    def load_state(self, path: str | Path, *, position: bool = True) -> None:
        """Go on from what `save_state` wrote. The first pass of `batches()` then starts behind the batches that were
        used; with `position=False` it starts at the beginning, and may be over other data.

        Example:
            session = graftune.open("model.gguf", rank=8)
            session.load_state("state")
        """
        self._check_open()
        progress, found, resolved, scale = state.load(self, arguments.path(path))
        if "step" in vars(self):
            self.step.discard()
        self._position = found if position else DataPosition()
        self._resume_at, self._passed = (found if position and found.data else None), set()
        self.steps, self._restored = progress.step, (progress.updates, scale)
        if "step" not in vars(self):
            self.config = self.config.replace(**resolved)
        self._forget_sums()
        self._loaded = None

    def close(self) -> None:
        """Let go of the model and of the device's memory. A closed session cannot be used again; the figures of its
        steps can still be read."""
        if not self._closed:
            self._collect(wait=True)
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


def _layout_of(batch: PackedBatch) -> BatchLayout:
    """The layout of a batch that is packed already: its fields without the data they were read from."""

    def unread(examples: Sequence[Example]) -> np.ndarray:
        raise AssertionError("a packed batch is not packed again")

    per = {True: "label", False: "document"}
    fields = [
        Field(name, value.dtype, unread, per[len(value) == len(batch.rows)])  # type: ignore[arg-type]
        for name, value in batch.extra.items()
    ]
    return BatchLayout(fields=tuple(fields))
