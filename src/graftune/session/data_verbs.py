"""The verbs of a session that give batches: prepare, batches, steps_per_epoch, schedule; and the loss that batches are
packed for.

What of the settings is `auto` and depends on memory is resolved here, when a session first trains: by the plan, or
where nobody plans to what always works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from graftune.batch import BatchLayout, PackedBatch
from graftune.data.dataset import Dataset, prepare
from graftune.data.loader import Loader
from graftune.data.memory import Data, as_given
from graftune.data.pack import largest
from graftune.errors import GraftuneError
from graftune.losses import Loss, choose
from graftune.model.start import Start
from graftune.observe.console import Console
from graftune.session import arguments
from graftune.session.parts import UNPLANNED, loader_of
from graftune.session.state import DataPosition
from graftune.session.stepping import Batch
from graftune.session.text_verbs import TextVerbs
from graftune.step.schedule import learning_rate

# Resolves `auto` when training begins: of a session, for a data set (None: for any) in batches of a layout.
Planner = Callable[[Any, Dataset | None, BatchLayout], None]


def _silent(note: str) -> None:
    """Nobody reads notes."""


@dataclass(eq=False, repr=False)
class DataVerbs(TextVerbs):
    planner: Planner | None = None
    say: Callable[[str], None] = _silent  # takes a note for the user
    steps: int = 0  # optimizer steps taken
    _said: set[str] = field(default_factory=set, init=False)  # notes that are said once
    _own_loss: bool = field(default=False, init=False)  # an object of the user's, not the one that the settings name
    _loaded: tuple[Dataset, Loss, Loader] | None = field(default=None, init=False)
    _micro: int = field(default=0, init=False)  # micro-batches that have added up since the last update
    _resume_at: DataPosition | None = field(default=None, init=False)  # of a loaded state, until a pass has begun there
    _passed: set[int] = field(default_factory=set, init=False)  # epochs before it that were passed over

    def prepare(self, data: Data, console: Console | None = None) -> Dataset:
        """Read and tokenise data by the session's data settings, as its loss takes it. `data` is a path, a Hub data
        set's name, a list of records, a Hugging Face Dataset or an iterator of records; what was encoded before is
        found again.

        Example:
            data = session.prepare([{"prompt": "Say 1", "response": "one"}])
        """
        self._check_open()
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
        self._check_open()
        data, epoch = arguments.data_set(data, "batches"), arguments.whole_number(epoch, "epoch")
        self._use_loss(loss)
        return self._batches(data, epoch)

    def steps_per_epoch(self, data: Dataset, epoch: int = 0) -> int:
        """Optimizer steps of one whole pass over the data. Epochs may differ by a step, since each is shuffled and
        packed anew."""
        self._check_open()
        data = arguments.data_set(data, "steps_per_epoch")
        return self._loader_for(data).steps_per_epoch(arguments.whole_number(epoch, "epoch"))

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

    def _batches(self, data: Dataset, epoch: int) -> Iterator[Batch]:
        loader, loss = self._loader_for(data), self.loss
        start = self._start(data, epoch, loader)
        if start == loader.steps_per_epoch(epoch):
            return
        digest = data.digest
        pipeline = self.pipeline  # made here, not by the thread that packs
        self.fix_shape(loader, max(self.config.train.epochs, epoch + 1))

        def stage(batch: PackedBatch) -> tuple[PackedBatch, Any]:
            return batch, (vars(self).get("pipeline") or pipeline).stage(batch)  # the present one, if there are others

        for index, held in enumerate(loader.epoch(epoch, start, stage), start):
            tokens, responses = loader.counts(epoch, index)
            packed, staged = zip(*held, strict=True)
            yield Batch(packed, tokens, responses, DataPosition(epoch, index + 1, digest), staged, loader, loss)
            self._check_open()

    def _start(self, data: Dataset, epoch: int, loader: Loader) -> int:
        """The first step of an epoch that a loaded state has not done. Each epoch is begun there once."""
        saved = self._resume_at
        if saved is None or epoch in self._passed:
            return 0
        if epoch > saved.epoch:
            self._resume_at = None
            return 0
        if data.digest != saved.data:
            raise GraftuneError(
                "the loaded state was saved on other data",
                where=data.path or None,
                fix="go on with the same data and settings, or load the state with position=False",
            )
        total = loader.steps_per_epoch(epoch)
        start = min(saved.step, total) if epoch == saved.epoch else total
        if epoch < saved.epoch:
            self._passed.add(epoch)
        else:
            self._resume_at = None
        self.say(f"epoch {epoch}: this pass leaves out {start} of {total} steps, which the saved session had taken")
        return start

    def _loader_for(self, data: Dataset) -> Loader:
        if self._loaded is None or self._loaded[0] is not data or self._loaded[1] is not self.loss:
            if not len(data):
                raise GraftuneError("the data set has no examples", where=data.path or None, fix="give another one")
            layout = self.loss.layout(data.examples)
            self._resolve_auto(data, layout)
            asked, least = self.config.train.tokens_per_micro_batch, largest(data.examples, layout)
            if least > asked:
                self.say(f"micro-batches have {least} tokens, as the longest example, where {asked} were asked for")
            size = max(asked, least)
            loader = loader_of(self.config, data.examples, size, fixed=self.captured, layout=layout, share=self.share)
            self._loaded = data, self.loss, loader
        return self._loaded[2]

    def _resolve_auto(self, data: Dataset | None = None, layout: BatchLayout | None = None) -> None:
        settings = self.config.train
        if settings.recompute != "auto" and settings.tokens_per_micro_batch:
            return
        if self.planner is not None:
            self.planner(self, data, layout or self.loss.layout(()))
        settings = self.config.train
        self.config = self.config.replace(
            recompute="none" if settings.recompute == "auto" else settings.recompute,
            tokens_per_micro_batch=settings.tokens_per_micro_batch or min(settings.tokens_per_step, UNPLANNED),
        )

    # The loss

    def _use_loss(self, loss: str | Loss | None, batch: Batch | None = None) -> None:
        """Replace the session's loss, by a name of the settings or an object; None leaves it. `batch` is what it is to
        be computed of."""
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
        if found.reference == "base" and self.whole is not None:
            raise GraftuneError(
                f"{type(found).__name__} compares with the base and method is {self.config.train.method}, which leaves "
                "none",
                fix="set method to lora, or give another loss",
            )
        if self._micro:
            raise GraftuneError(
                "the loss was changed while gradients of another one had added up", fix="call optim_step first"
            )
        if found.reference == "start" and self.start is None and not self.steps:
            self.start = Start(self.arena)
            self.start.take()
        self.start_of(found)  # refuses it where it is too late
        self.loss, self._own_loss = found, not named
        if named:
            self.config = config
        if "step" in vars(self):
            self._collect(wait=True)
            self._renew_step()
            if self.captured:
                self._say_once("the loss was changed: steps are captured again each time it is")

    def _collect(self, wait: bool = False) -> None:
        """Hand the figures of the steps that are done to those who asked for them; `wait`: of all steps."""
        if "pipeline" in vars(self):
            for done in self.pipeline.finished(wait):
                done.tag._fill(done)

    def _say_once(self, note: str) -> None:
        if note not in self._said:
            self._said.add(note)
            self.say(note)
