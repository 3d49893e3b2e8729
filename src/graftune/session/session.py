"""The Session: the verbs of the Python API, over the parts of a model.

    session.forward_backward(batch)     as often as there are batches to accumulate
    stats = session.optim_step(lr=...)

Batches of `batches()` have one fixed shape on CUDA and replay from graphs, exactly as `graftune train` does, and so do
examples that are given step by step. Only reading a step's figures waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from graftune.batch import Example, PackedBatch
from graftune.data.dataset import Dataset, prepare
from graftune.data.memory import Data, as_given
from graftune.errors import GraftuneError
from graftune.infer.sample import Sampling
from graftune.losses import Loss, choose
from graftune.model.arena import Start
from graftune.model.context import micro_batch_id
from graftune.observe.console import Console
from graftune.observe.speed import Meter
from graftune.runtime import Runtime
from graftune.session import arguments, text
from graftune.session.arguments import Message
from graftune.session.batches import Batch, BatchFeed, StepStats
from graftune.session.parts import UNPLANNED, DataPosition, SessionParts
from graftune.session.text import Sample
from graftune.settings.config import Config
from graftune.step.evaluate import EvalResult
from graftune.step.schedule import hyperparameters, learning_rate
from graftune.tokenizer import Tokenizer
from graftune.weights.base import Base

VERBS = (  # in the order in which a reader wants them
    *("prepare", "batches", "steps_per_epoch", "schedule", "forward_backward", "optim_step", "evaluate", "logprobs"),
    *("sample", "stream", "generate", "chat", "encode", "prompt_tokens", "describe"),
    *("save_adapter", "save", "save_state", "load_state", "close"),
)
ATTRIBUTES = ("config", "loss", "steps", "context", "tokenizer", "base", "runtime")


class Session:
    """A base with adapters, ready to train, evaluate and sample. `graftune.open` makes one.

    Example:
        with graftune.open("model.gguf", rank=8) as session:
            data = session.prepare("data.jsonl")
            for batch in session.batches(data):
                session.forward_backward(batch)
                stats = session.optim_step()
            session.save_adapter("my-adapter")
    """

    steps: int  # optimizer steps taken

    def __init__(self, parts: SessionParts):
        self.parts, self.feed = parts, BatchFeed(parts)  # for the rest of the package
        self.steps = 0
        self._own_loss = False  # whether the loss is an object of the user's, not the one that the settings name
        self._micro = 0  # micro-batches that have added up since the last update
        self._tokens = self._responses = 0  # of these micro-batches
        self._divisor = 0.0
        self._meter = Meter(0, 0)
        self._position = self._reached = DataPosition()  # after the last batch applied, and the last one accumulated

    @property
    def config(self) -> Config:
        """The settings, with `auto` resolved."""
        return self.parts.config

    @property
    def loss(self) -> Loss:
        """The training loss."""
        return self.parts.loss

    @property
    def base(self) -> Base:
        """The model as it was opened: `name`, `path`, `spec`, `tokenizer`."""
        return self.parts.base

    @property
    def tokenizer(self) -> Tokenizer:
        """The base's, with the chat template."""
        return self.parts.tokenizer

    @property
    def runtime(self) -> Runtime:
        """Device and dtype."""
        return self.parts.runtime

    def __dir__(self) -> list[str]:
        """For completion: the verbs and attributes that are meant for users."""
        return [*VERBS, *ATTRIBUTES, *(name for name in super().__dir__() if name.startswith("_"))]

    def __repr__(self) -> str:
        base, runtime = self.base.name or str(self.base.path), self.runtime
        what = f"rank {self.parts.lora.rank}" if self.parts.whole is None else f"method {self.config.train.method}"
        return f"Session({base}, {what}, {self.parts.placement.base_dtype} on {runtime.device}, {self.steps} steps)"

    def describe(self) -> dict[str, Any]:
        """The base, the device and what was chosen, by name."""
        self.parts.check_open()
        return self.base.describe() | {
            "device": self.runtime.describe(),
            "attention": self.parts.attention.backend,
            "base_dtype": self.parts.placement.base_dtype,
            "trainable": len(self.parts.arena.weights),
            "adapter": self.config.lora.adapter,
        }

    # Data

    def prepare(self, data: Data, console: Console | None = None) -> Dataset:
        """Read and tokenise data by the session's data settings, as its loss takes it. `data` is a path, a Hub data
        set's name, a list of records, a Hugging Face Dataset or an iterator of records; what was encoded before is
        found again.

        Example:
            data = session.prepare([{"prompt": "Say 1", "response": "one"}])
        """
        self.parts.check_open()
        return prepare(as_given(data), self.tokenizer, self.config.data, console, self.loss.data)

    def batches(self, data: Dataset, epoch: int = 0, *, loss: str | Loss | None = None) -> Iterator[Batch]:
        """The batches of one epoch, one per optimizer step: `tokens_per_step` tokens in micro-batches of
        `tokens_per_micro_batch`, shuffled by the seed, packed one step ahead by a thread. `loss`, a name or an object,
        replaces the session's from here on.

        After `load_state` the first pass over an epoch leaves out what the saved session had trained on; later ones
        are whole.

        Example:
            for epoch in range(3):
                for batch in session.batches(data, epoch):
                    session.forward_backward(batch)
                    session.optim_step()
        """
        self.parts.check_open()
        data, epoch = arguments.data_set(data, "batches"), arguments.whole_number(epoch, "epoch")
        self._use_loss(loss)
        return self.feed.batches(data, epoch)

    def steps_per_epoch(self, data: Dataset, epoch: int = 0) -> int:
        """Optimizer steps of one whole pass over the data. Epochs may differ by a step, since each is shuffled and
        packed anew."""
        self.parts.check_open()
        data = arguments.data_set(data, "steps_per_epoch")
        return self.feed.loader_for(data).steps_per_epoch(arguments.whole_number(epoch, "epoch"))

    def schedule(self, steps: int) -> list[float]:
        """The learning rate of each of so many steps, by the settings: warm-up, then cosine, linear or constant.
        `session.steps` counts those that were taken, also before a state was saved.

        Example:
            rates = session.schedule(session.steps_per_epoch(data))
            for batch in session.batches(data):
                session.forward_backward(batch)
                session.optim_step(lr=rates[session.steps])
        """
        steps = arguments.whole_number(steps, "steps")
        return [learning_rate(step, steps, self.config.optim) for step in range(steps)]

    # Training

    def forward_backward(
        self, batch: Batch | PackedBatch | Dataset | Data | Sequence[Example], loss: str | Loss | None = None
    ) -> None:
        """Forward, loss, backward. Gradients add up until `optim_step`. `batch` comes from `batches()`; or it is the
        examples of one step: records (as `prepare` takes them), a data set, or tokenised examples, each a dict with
        `tokens` and, one number per token, `mask` (which are trained) or `weights`, and what the loss reads, as
        `advantages` and `logprobs`. They are divided into micro-batches of the session's size. On CUDA their
        micro-batches replay from one graph, in the shape that the first ones needed, rounded up. Packed batches of your
        own are taken too and run eagerly.

        `loss`, a name or an object, replaces the session's from here on. One that reads other fields than the loss a
        batch was packed for is given to `batches()` or to `graftune.open`.

        Example:
            session.forward_backward([{"prompt": "Say 1", "response": "one"}])
            print(session.optim_step(lr=1e-4).loss)
        """
        self.parts.check_open()
        self._use_loss(loss, batch if isinstance(batch, Batch) else None)
        if not isinstance(batch, Batch):
            batch = self.feed.own_batch(batch)
        if self.loss.ahead and (self._micro or batch.packed[0].ahead is None):
            raise GraftuneError(
                f"{type(self.loss).__name__} needs sums over all examples of a step before its micro-batches",
                fix="give all of them to one call of forward_backward, and not as packed batches",
            )
        pipeline = self._ready()
        if batch._fixed or not self.parts.fixed_shapes:
            for staged in batch._take(pipeline.stage):
                pipeline.micro(staged, self._next_micro_batch_id())
        else:
            self.parts.say_once("packed batches of your own run eagerly, not from CUDA graphs: give examples instead")
            for packed in batch.packed:
                pipeline.eager(packed, self._next_micro_batch_id())
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
        """Clip and apply what has added up. What is given overrides the settings, for this step. The figures that
        come back are fetched when they are read.

        Example:
            stats = session.optim_step(lr=2e-4)
            print(stats.loss, stats.grad_norm)
        """
        self.parts.check_open()
        if not self._micro:
            raise GraftuneError("optim_step was called with no gradients", fix="call forward_backward first")
        given = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "clip": clip}
        values = hyperparameters(self.config.optim, **arguments.hyperparameters(given))
        step = self.steps + 1
        speed = self._meter.update(step, self._tokens)
        stats = StepStats(step, values["lr"], self._tokens, self._responses, speed, self._fetch)
        self.parts.pipeline.update(values | {"divisor": self._divisor or 1.0}, stats)
        self.steps, self._position = step, self._reached
        self._forget_sums()
        self._collect()
        return stats

    def _ready(self) -> Any:
        """The pipeline, with `auto` resolved."""
        if "step" not in vars(self.parts):
            self.feed.resolve_auto(None, self.loss.layout(()))
        return self.parts.pipeline

    def _use_loss(self, loss: str | Loss | None, batch: Batch | None = None) -> None:
        """Replace the session's loss, by a name of the settings or an object; None leaves it. `batch`: the next batch,
        which must have the fields that the loss reads."""
        named = isinstance(loss, str)
        if loss is None or (named and not self._own_loss and loss == self.config.train.loss):
            found = self.loss
        else:
            config = self.config.replace(loss=loss) if named else self.config
            found = choose(config.train) if named else arguments.a_loss(loss)
        if batch is not None and not batch._suits(found):
            raise GraftuneError(
                f"the batch was packed for another loss than {type(found).__name__}, which reads other fields",
                fix="give the loss to batches(data, loss=...), or to graftune.open",
            )
        if found is self.loss:
            return
        if found.reference == "base" and self.parts.whole is not None:
            raise GraftuneError(
                f"{type(found).__name__} compares with the base and method is {self.config.train.method}, which leaves "
                "none",
                fix="set method to lora, or give another loss",
            )
        if self._micro:
            raise GraftuneError(
                "the loss was changed while gradients of another one had added up", fix="call optim_step first"
            )
        if found.reference == "start" and self.parts.start is None and not self.steps:
            self.parts.start = Start(self.parts.arena)
            self.parts.start.take()
        self.parts.start_of(found)  # raises an error if the loss needs a snapshot of the start that was not taken
        self.parts.loss, self._own_loss = found, not named
        if named:
            self.parts.config = config
        if "step" in vars(self.parts):
            self._collect(wait=True)
            self.parts.renew_step()
            if self.parts.fixed_shapes:
                self.parts.say_once("the loss was changed: steps are captured again each time it is")

    def _collect(self, wait: bool = False) -> None:
        """Put the figures of finished steps into their StepStats; `wait`: of all steps."""
        if "pipeline" in vars(self.parts):
            for done in self.parts.pipeline.finished(wait):
                done.tag._figures = done

    def _forget_sums(self) -> None:
        self._tokens = self._responses = self._micro = 0
        self._divisor, self._reached = 0.0, self._position

    def _fetch(self, stats: StepStats) -> None:
        while not stats.ready:
            done = self.parts.pipeline.next()
            done.tag._figures = done

    def _next_micro_batch_id(self) -> int:
        self._micro += 1
        return micro_batch_id(self.steps, self._micro - 1)

    # Evaluation and text

    def evaluate(
        self,
        data: Data | Dataset | Sequence[Example],
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
        examples = self.feed.examples(data, "evaluate")
        return self.parts.evaluated(examples, adapted=adapted, on_progress=on_progress)

    def logprobs(
        self, data: Data | Dataset | Sequence[Example], *, adapted: bool = True, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """The log-probability of every response token, one tensor per example (fp32, on the CPU). `temperature` divides
        the logits. `data` may be tokenised, as for `forward_backward`.

        Example:
            (one,) = session.logprobs([{"prompt": "Say 1", "response": "one"}])
        """
        self._check_usable(adapted)
        examples = self.feed.examples(data, "logprobs")
        temperature = arguments.above_zero(temperature, "temperature")
        capacity = self.config.train.tokens_per_micro_batch or UNPLANNED
        return text.logprobs_of(self.parts, examples, capacity, adapted, temperature)

    def sample(
        self,
        prompts: str | Sequence[Message] | Sequence[str | Sequence[Message]],
        *,
        n: int = 1,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        logprobs: bool = True,
        adapted: bool = True,
        on_text: Callable[[int, str], None] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[Sample]]:
        """`n` samples of every prompt, drawn together: a list for each prompt. A prompt is raw text or a conversation
        (a list of messages); one prompt may stand by itself. `stop` are texts that end a sample. `on_text` is called
        with (sample, new text) while samples are drawn; samples are numbered prompt by prompt. `on_progress` is called
        with the number of samples that are complete.

        Example:
            (answers,) = session.sample("Once upon a time", n=4, max_new_tokens=20)
            print(answers[0].text, sum(answers[0].logprobs))
        """
        self._check_usable(adapted)
        n, each = arguments.whole_number(n, "n", 1), arguments.prompts(prompts)
        encoded, ends = zip(*(text.encoded(self.parts, prompt) for prompt in each), strict=True) if each else ((), ())
        repeated = [prompt for prompt in encoded for _ in range(n)]
        endings = tuple(sorted({end for some in ends for end in some}))
        how = Sampling(max_new_tokens, temperature, top_k, top_p, seed, endings)
        found = text.sampled(
            self.parts,
            repeated,
            how,
            stop=arguments.stop_strings(stop),
            adapted=adapted,
            logprobs=logprobs,
            on_text=on_text,
            on_progress=on_progress or (lambda done: None),
        )
        return [found[start : start + n] for start in range(0, len(found), n)]

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        adapted: bool = True,
    ) -> Iterator[str]:
        """One answer, piece by piece as it is drawn.

        Example:
            for piece in session.stream("Once upon a time", max_new_tokens=20):
                print(piece, end="")
        """
        self._check_usable(adapted)
        encoded, ends = text.encoded(self.parts, arguments.prompt(prompt))
        how = Sampling(max_new_tokens, temperature, top_k, top_p, seed, ends)
        drawn = text.stream(self.parts, [encoded], how, stop=arguments.stop_strings(stop), adapted=adapted, reads=True)
        return (piece for _, piece, _ in drawn if piece)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        adapted: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> list[str]:
        """Continue raw text, greedily unless a temperature is given. `on_text` gets the first one's text as it comes.

        Example:
            print(session.generate("Once upon a time", max_new_tokens=20)[0])
        """
        self._check_usable(adapted)
        encoded = [text.encoded(self.parts, prompt)[0] for prompt in arguments.texts(prompts)]
        how = Sampling(max_new_tokens, temperature, top_k, top_p, seed, tuple(stop_ids))
        return self._texts(encoded, how, arguments.stop_strings(stop), adapted, on_text)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        adapted: bool = True,
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """Answer a conversation through the model's chat template. A text is a conversation of one user turn.

        Example:
            print(session.chat([{"role": "user", "content": "Hi"}], max_new_tokens=20))
        """
        self._check_usable(adapted)
        prompt, ends = text.encoded(self.parts, arguments.turns(messages))
        how = Sampling(max_new_tokens, temperature, top_k, top_p, seed, ends)
        return self._texts([prompt], how, arguments.stop_strings(stop), adapted, on_text)[0]

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """The tokens of a prompt, raw text or a conversation, that `sample` continues.

        Example:
            tokens = session.encode([{"role": "user", "content": "Hi"}])
        """
        return text.encoded(self.parts, arguments.prompt(prompt))[0]

    def prompt_tokens(self, messages: str | Sequence[Message]) -> int:
        """How many tokens `chat` would read of a conversation. They and the answer share the model's `context`."""
        return len(text.encoded(self.parts, arguments.turns(messages))[0])

    @property
    def context(self) -> int:
        """The longest sequence that the model takes, in tokens."""
        return self.base.spec.max_positions

    def _texts(
        self,
        prompts: Sequence[Sequence[int]],
        how: Sampling,
        stop: Sequence[str],
        adapted: bool,
        on_text: Callable[[str], None] | None,
    ) -> list[str]:
        def first(index: int, piece: str) -> None:
            if index == 0 and on_text is not None:
                on_text(piece)

        found = text.sampled(self.parts, prompts, how, stop=stop, adapted=adapted, on_text=first if on_text else None)
        return [sample.text for sample in found]

    # Saving

    def save(self, path: str | Path) -> Path:
        """Write what was trained: the adapter in PEFT's layout, or (method full or scratch) the model as a Hugging Face
        folder."""
        self.parts.check_open()
        folder = arguments.path(path)
        self.parts.write(folder)
        return folder

    def save_adapter(self, path: str | Path) -> Path:
        """Write the adapter in PEFT's layout, with tokenizer and chat template.

        Example:
            session.save_adapter("my-adapter")
        """
        if self.parts.whole is not None:
            raise GraftuneError("this session trains the whole model, not an adapter", fix="write it with save()")
        return self.save(path)

    def save_state(self, path: str | Path) -> Path:
        """Write what is needed to go on exactly from here: weights, moments, counts and the position in the data.
        Gradients that have not been applied yet are not part of it.

        Example:
            session.save_state("state")
        """
        self.parts.check_open()
        return self.parts.write_state(arguments.path(path), self.steps, self._position)

    def load_state(self, path: str | Path, *, position: bool = True) -> None:
        """Go on from what `save_state` wrote. The first pass of `batches()` then starts behind the batches that were
        used; with `position=False` it starts at the beginning, and may be over other data.

        Example:
            session = graftune.open("model.gguf", rank=8)
            session.load_state("state")
        """
        self.parts.check_open()
        folder = arguments.path(path)
        resolved = self.parts.resolved_in(folder)
        if "step" not in vars(self.parts):
            self.parts.config = self.config.replace(**resolved)
            self.feed.resolve_auto(None, self.loss.layout(()))
        self.parts.step.discard()
        self.steps, found = self.parts.read_state(folder)
        self._position = found if position else DataPosition()
        self.feed.start_at(found if position and found.data else None)
        self._forget_sums()

    def close(self) -> None:
        """Let go of the model and of the device's memory. A closed session cannot be used again; the figures of its
        steps can still be read."""
        if not self.parts.closed:
            self._collect(wait=True)
            self.feed.start_at(None)
            self.parts.close()

    def _check_usable(self, adapted: bool) -> None:
        self.parts.check_open()
        if not adapted and self.parts.whole is not None:
            raise GraftuneError(
                f"adapted is False and method is {self.config.train.method}, which leaves no base without adapters",
                fix="open the base in a session of its own",
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
