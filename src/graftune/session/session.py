"""The Session: the verbs of a training loop over the parts, from Python.

    session.forward_backward(batch)     as often as there are batches to accumulate
    stats = session.optim_step(lr=...)

Batches of `batches()` have one fixed shape on CUDA and replay from graphs, exactly as `graftune train` does; others run
eagerly, and that is said once. Nothing here waits for the device but reading a step's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftune.batch import PackedBatch
from graftune.data.dataset import Dataset, prepare
from graftune.data.loader import Loader
from graftune.data.source import Refusal
from graftune.data.template import stop_ids, usable_format
from graftune.errors import GraftuneError
from graftune.infer.generate import TextStream
from graftune.infer.sample import Sampling
from graftune.kernels.adamw import Hyper
from graftune.observe.console import Console
from graftune.observe.speed import Meter
from graftune.session.parts import UNPLANNED, Parts
from graftune.session.stepping import Batch, StepStats
from graftune.step.evaluate import EvalResult
from graftune.step.schedule import learning_rate

DRAWS = 4096  # dropout masks that a step may number

Planner = Callable[["Session", Dataset | None], None]


@dataclass(eq=False, repr=False)
class Session(Parts):
    """A base with adapters, ready to train, evaluate and sample."""

    planner: Planner | None = None  # resolves `auto` when training begins
    say: Callable[[str], None] = lambda text: None  # takes a note for the user
    steps: int = 0  # optimizer steps taken
    _loaded: tuple[Dataset, Loader] | None = field(default=None, init=False)
    _tokens: int = field(default=0, init=False)  # of what has added up since the last update
    _responses: int = field(default=0, init=False)
    _divisor: float = field(default=0.0, init=False)
    _micro: int = field(default=0, init=False)
    _meter: Meter = field(default_factory=lambda: Meter(0, 0), init=False)
    _told_eager: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        base, runtime = self.base.name or str(self.base.path), self.runtime
        what = f"rank {self.lora.rank}" if self.whole is None else f"method {self.config.train.method}"
        return f"Session({base}, {what}, {self.placement.base_dtype} on {runtime.device}, {self.steps} steps)"

    def describe(self) -> dict[str, Any]:
        return self.base.describe() | {
            "device": self.runtime.describe(),
            "attention": self.attention.backend,
            "base_dtype": self.placement.base_dtype,
            "trainable": len(self.arena.weights),
            "adapter": self.config.lora.adapter,
        }

    # Data

    def prepare(self, data: str, console: Console | None = None) -> Dataset:
        """Read and tokenise data by the session's data settings; what was encoded before is found again. `console`
        shows progress."""
        return prepare(data, self.tokenizer, self.config.data, console)

    def batches(self, data: Dataset, epoch: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, each of `tokens_per_step` tokens, shuffled by the seed."""
        loader = self._loader_for(data)
        self.fix_shape(loader, max(self.config.train.epochs, epoch + 1))
        stage = self.pipeline.stage
        for index, held in enumerate(loader.epoch(epoch, 0, lambda batch: (batch, stage(batch)))):
            tokens, responses = loader.counts(epoch, index)
            packed, staged = zip(*held, strict=True)
            yield Batch(packed, tokens, responses, epoch, index, data.sha256, staged, loader.fixed)

    def steps_per_epoch(self, data: Dataset, epoch: int = 0) -> int:
        """Optimizer steps of one pass over the data."""
        return self._loader_for(data).steps_per_epoch(epoch)

    def schedule(self, steps: int) -> list[float]:
        """The learning rate of each of so many steps, by the settings: warm-up, then cosine, linear or constant."""
        return [learning_rate(step, steps, self.config.optim) for step in range(steps)]

    def _loader_for(self, data: Dataset) -> Loader:
        if self._loaded is None or self._loaded[0] is not data:
            self._settle(data)
            size = max(self.config.train.tokens_per_micro_batch, data.longest)
            self.config = self.config.replace(tokens_per_micro_batch=size)
            self._loaded = data, self.loader(data.examples)
        return self._loaded[1]

    def _settle(self, data: Dataset | None = None) -> None:
        """Resolve what of the settings hangs on memory: by a plan, or where nobody plans to what is always right."""
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

    def forward_backward(self, batch: Batch | PackedBatch) -> None:
        """Forward, loss on response tokens, backward. Gradients add up until `optim_step`."""
        if isinstance(batch, PackedBatch):
            batch = Batch([batch], len(batch.tokens), batch.response_tokens)
            self._settle()
        pipeline = self.pipeline
        if batch.fixed or not self.captured:
            for staged in batch.take(pipeline.stage):
                pipeline.micro(staged, self._draw())
        else:
            self._tell_eager()
            for packed in batch.packed:
                pipeline.eager(packed, self._draw())
        self._tokens += batch.tokens
        self._responses += batch.response_tokens
        self._divisor += batch.divisor

    def optim_step(self, *, lr: float | None = None, **hyper: float) -> StepStats:
        """Clip and apply what has added up. `lr`, `beta1`, `clip`, ... override the session's for this step."""
        if not self._micro:
            raise GraftuneError("optim_step was called with no gradients", mend="call forward_backward first")
        optim = self.config.optim
        values = {name: getattr(optim, name) for name in Hyper._fields if name != "divisor"}
        unknown = set(hyper) - set(values)
        if unknown:
            raise GraftuneError(f"unknown hyperparameter {unknown.pop()!r}", mend=f"use {', '.join(values)}")
        values |= hyper | {"divisor": self._divisor or 1.0}
        values["lr"] = optim.lr if lr is None else lr
        self.steps += 1
        speed = self._meter.update(self.steps, self._tokens)
        stats = StepStats(self._fetch, self.steps, values["lr"], self._tokens, self._responses, speed)
        self.pipeline.update(values, stats)
        for done in self.pipeline.finished():
            done.tag.fill(done)
        self._tokens = self._responses = self._micro = 0
        self._divisor = 0.0
        return stats

    def _fetch(self, stats: StepStats) -> None:
        while not stats.ready:
            done = self.pipeline.next()
            done.tag.fill(done)

    def _draw(self) -> int:
        self._micro += 1
        return self.steps * DRAWS + self._micro - 1

    def _tell_eager(self) -> None:
        if not self._told_eager:
            self.say(
                "these batches have shapes of their own and run eagerly; those of batches() replay from CUDA graphs"
            )
            self._told_eager = True

    # Evaluation and text

    def evaluate(
        self, data: str | Dataset, *, adapted: bool = True, on_progress: Callable[[int], None] = lambda done: None
    ) -> EvalResult:
        """Loss and perplexity on response tokens, with the adapter or (adapted=False) without it.

        `on_progress` is called with the number of examples done."""
        data = self.prepare(data) if isinstance(data, str) else data
        return self.evaluated(data.examples, adapted=adapted, on_progress=on_progress)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        adapted: bool = True,
        on_text: Callable[[str], None] | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Continue raw text. `sampling`: max_new_tokens, temperature, top_k, top_p, seed, stop_ids."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._continue([self.tokenizer.encode(t, add_special=True) for t in texts], adapted, on_text, sampling)

    def chat(
        self,
        messages: list[dict[str, str]],
        *,
        adapted: bool = True,
        on_text: Callable[[str], None] | None = None,
        **sampling: Any,
    ) -> str:
        """Answer a conversation through the model's chat template."""
        prompt, stops = self._rendered(messages)
        return self._continue([prompt], adapted, on_text, {"stop_ids": stops} | sampling)[0]

    def prompt_tokens(self, messages: list[dict[str, str]]) -> int:
        """How many tokens `chat` would read of a conversation. They and the answer share the model's `context`."""
        return len(self._rendered(messages)[0])

    @property
    def context(self) -> int:
        """The longest sequence that the model takes, in tokens."""
        return self.base.spec.max_positions

    def _rendered(self, messages: list[dict[str, str]]) -> tuple[list[int], tuple[int, ...]]:
        """A conversation as the tokens to continue, and those that end an answer."""
        form = usable_format(self.tokenizer, self.config.data)
        try:
            prompt = form.render([dict(m) for m in messages], None, generate=True)
        except Refusal as refusal:
            raise GraftuneError(str(refusal), where="the conversation", mend="change its turns") from None
        return self.tokenizer.encode(prompt), tuple(stop_ids(self.tokenizer, form))

    def _continue(
        self, prompts: list[list[int]], adapted: bool, on_text: Callable[[str], None] | None, sampling: dict[str, Any]
    ) -> list[str]:
        stops = self.tokenizer.stop_ids
        stream = TextStream(self.tokenizer, on_text, (*stops, *sampling.get("stop_ids", ()))) if on_text else None

        def push(new: dict[int, int]) -> None:
            if stream is not None and 0 in new:
                stream.push(new[0])

        found = self.continued(prompts, Sampling(**sampling), stops, adapted=adapted, on_tokens=push)
        if stream is not None:
            stream.finish()
        return [self.tokenizer.decode(tokens, skip_special=True) for tokens in found]

    def save(self, path: str | Path) -> Path:
        """Write the adapter in PEFT's layout, or (method full or scratch) the model as a Hugging Face folder."""
        folder = Path(path)
        self.write(folder)
        return folder
