"""graftune from Python: open a model, take steps, save, generate.

    import graftune

    run = graftune.open("model.gguf", rank=8)
    data = run.prepare("data.jsonl")
    for batch in run.batches(data):
        run.micro_step(batch)
        print(run.update_step().loss)
    run.save("my-adapter")
    print(run.generate("Once upon a time", max_new_tokens=20)[0])

`train` is what the command line calls: a whole run with its folder, checkpoints and evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from graftune.batch import PackedBatch, StepStats
from graftune.config import Config
from graftune.data.dataset import Dataset, prepare
from graftune.data.loader import Loader
from graftune.data.source import Refusal
from graftune.data.template import stop_ids, usable_format
from graftune.errors import GraftuneError
from graftune.exporting import export
from graftune.infer.generate import TextStream, generate
from graftune.infer.sample import Sampling
from graftune.kernels.adamw import Hyper
from graftune.observe.console import Console
from graftune.observe.speed import Meter
from graftune.run_folder import find_state, open_state
from graftune.session import Engine, adapter_folder, is_run, open_engine, trains_all, whole_run, with_adapter
from graftune.step.accumulator import Accumulator
from graftune.step.evaluate import EvalResult, evaluate
from graftune.step.scaler import LossScaler
from graftune.step.step import Step
from graftune.tokenizer import Tokenizer
from graftune.training.launch import train
from graftune.training.loop import TrainResult
from graftune.weights.adapter import is_adapter, load_adapter

__all__ = ["Accumulator", "LossScaler", "Run", "TrainResult", "export", "open", "train"]


def open(base: str = "", *, adapter: str = "", **settings: Any) -> Run:
    """Open a base, or a run or adapter folder together with the base it belongs to. Of a run also a checkpoint, as in
    `open("runs/mine@step-200")`, `@best` or `@last`, while it trains too.

    `settings` are those of the configuration: rank, alpha, lr, device, ... An empty base is the bundled SmolLM2.
    """
    state = find_state(adapter or base) if adapter or base else None
    if state is not None:
        return Run(open_state(state, {**settings, "base": base} if adapter and base else settings))
    folder = Path(adapter or base or ".")
    if base and not adapter and is_run(folder) and trains_all(folder):
        settings = whole_run(folder) | settings
        base, folder = settings["base"], Path(settings["base"])
    tuned = bool(adapter or base) and (is_run(folder) or is_adapter(folder))
    if adapter and not tuned:
        raise GraftuneError("is not an adapter or run folder", where=adapter, mend="give one made by train or PEFT")
    if tuned and is_run(folder):
        # What the run took for data is what its evaluation means too; its template travels with the adapter.
        data = Config.of_run(folder).nested()["data"]
        settings = {k: v for k, v in data.items() if k not in ("template", "append_eos")} | settings
    settings["base"] = base if adapter or not tuned else ""
    config = Config.of(settings, where="settings")
    if tuned:
        config = with_adapter(config, load_adapter(adapter_folder(folder)))
    return Run(open_engine(config))


class Run:
    """A model with its adapters, ready to train, evaluate and generate."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.config: Config = engine.config
        self._step = Step(
            engine.decoder,
            engine.arena,
            clip_mode=self.config.optim.clip_mode,
            dropout=engine.lora.dropout,
            seed=self.config.train.seed,
            recompute=self.config.train.recompute,
            # Whoever calls micro_step chooses the shapes, one after another: no backend that wants a plan for each.
            attention_backend=engine.eager_attention,
        )
        self._meter = Meter(0, 0)
        self._done = self._tokens = self._responses = self._micro = 0
        self._divisor = 0.0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def describe(self) -> dict[str, Any]:
        engine = self.engine
        return engine.base.describe() | {
            "device": engine.runtime.describe(),
            "attention": engine.attention.backend,
            "base_dtype": engine.placement.base_dtype,
            "trainable": len(engine.arena.weights),
            "adapter": self.config.lora.adapter,
        }

    def prepare(self, data: str, console: Console | None = None) -> Dataset:
        """Read and tokenise data by the run's data settings; what was encoded before is found again. `console` shows
        progress."""
        return prepare(data, self.tokenizer, self.config.data, console)

    def batches(self, data: Dataset, epoch: int = 0) -> Iterator[PackedBatch]:
        """One packed micro-batch after another, shuffled by the run's seed."""
        size = max(self.config.train.tokens_per_step, data.longest)
        loader = Loader(
            data.examples, tokens_per_step=size, micro_capacity=size, seed=self.config.train.seed, fixed=False
        )
        for micro_batches in loader.epoch(epoch):
            yield from micro_batches

    def micro_step(self, batch: PackedBatch) -> None:
        """Forward, loss on response tokens, backward; gradients add up until update_step."""
        self._step.set_draw(self._done * 4096 + self._micro)
        self._step.micro_step(batch.to(self.engine.runtime.device))
        self._tokens += len(batch.tokens)
        self._responses += batch.response_tokens
        self._divisor += batch.divisor
        self._micro += 1

    def update_step(self, *, lr: float | None = None, **hyper: float) -> StepStats:
        """Clip and apply what has added up. `lr`, `beta1`, `clip`, ... override the run's for this step."""
        if not self._micro:
            raise GraftuneError("update_step was called with no gradients", mend="call micro_step first")
        optim = self.config.optim
        values = {name: getattr(optim, name) for name in Hyper._fields if name != "divisor"}
        unknown = set(hyper) - set(values)
        if unknown:
            raise GraftuneError(f"unknown hyperparameter {unknown.pop()!r}", mend=f"use {', '.join(values)}")
        values |= hyper | {"divisor": self._divisor or 1.0}
        values["lr"] = optim.lr if lr is None else lr
        self._step.set_hyper(values)
        loss, norm, skipped, *_ = self._step.update_step().tolist()
        self._done += 1
        speed = self._meter.update(self._done, self._tokens)
        stats = StepStats(self._done, loss, norm, values["lr"], self._tokens, self._responses, bool(skipped), speed)
        self._tokens = self._responses = self._micro = 0
        self._divisor = 0.0
        return stats

    def evaluate(
        self, data: str | Dataset, *, adapted: bool = True, on_progress: Callable[[int], None] = lambda done: None
    ) -> EvalResult:
        """Loss and perplexity on response tokens, with the adapter or (adapted=False) without it.

        `on_progress` is called with the number of examples done."""
        data = self.prepare(data) if isinstance(data, str) else data
        return evaluate(
            self.engine.decoder,
            data.examples,
            capacity=1024,
            adapted=adapted,
            backend=self.engine.attention.backend,
            between=on_progress,
        )

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
        return self.engine.base.spec.max_positions

    def _rendered(self, messages: list[dict[str, str]]) -> tuple[list[int], tuple[int, ...]]:
        """A conversation as the tokens to continue, and those that end an answer."""
        form = usable_format(self.tokenizer, self.config.data)
        try:
            prompt = form.render([dict(m) for m in messages], None, generate=True)
        except Refusal as refusal:
            raise GraftuneError(str(refusal), where="the conversation", mend="change its turns") from None
        return self.tokenizer.encode(prompt), tuple(stop_ids(self.tokenizer, form))

    def save(self, path: str | Path) -> Path:
        """Write the adapter in PEFT's layout, or (method full or scratch) the model as a Hugging Face folder."""
        folder = Path(path)
        self.engine.save(folder)
        return folder

    def _continue(
        self, prompts: list[list[int]], adapted: bool, on_text: Callable[[str], None] | None, sampling: dict[str, Any]
    ) -> list[str]:
        stops = self.tokenizer.stop_ids
        ending = (*stops, *sampling.get("stop_ids", ()))
        stream = TextStream(self.tokenizer, on_text, ending) if on_text else None

        def push(new: dict[int, int]) -> None:
            if stream is not None and 0 in new:
                stream.push(new[0])

        found = generate(
            self.engine.decoder,
            prompts,
            Sampling(**sampling),
            stops,
            adapted=adapted,
            backend=self.engine.eager_attention,
            on_tokens=push,
        )
        if stream is not None:
            stream.finish()
        return [self.tokenizer.decode(tokens, skip_special=True) for tokens in found]
