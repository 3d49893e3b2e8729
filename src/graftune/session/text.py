"""Draws samples with log-probabilities and stop strings, and computes the log-probabilities of given answers.

Prompts are continued together, as many at a time as fit the cache. With stop strings or streaming, text is decoded
token by token: an incomplete character, and the beginning of a possible stop string, are held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from graftune.batch import PLAIN, Example
from graftune.data.encoded import responses_of, take
from graftune.data.format import ChatFormat, stop_ids, with_known_roles
from graftune.data.pack import bins_in_order, pack
from graftune.data.row import Refusal
from graftune.data.template import usable_format
from graftune.errors import GraftuneError
from graftune.infer.generate import Token
from graftune.infer.sample import Sampling, sample_numbers
from graftune.session.arguments import Conversation
from graftune.session.parts import SessionParts
from graftune.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """One continuation of a prompt."""

    text: str  # without the stop string
    tokens: list[int]  # as they were drawn, without the stop token
    logprobs: list[float] | None  # of each token under the model; None if not requested
    stopped: str  # stop: a stop token or string; length: max_new_tokens or the model's context
    sampling_logprobs: list[float] | None = None  # at the sampling temperature over the whole vocabulary; greedy: 0
    end: Token | None = None  # the stop token that ended it: `id`, `logprob`, `sampling_logprob`


class Draft:
    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int], stop: Sequence[str], reads: bool):
        self.tokenizer, self.stop_ids, self.stop, self.reads = (
            tokenizer,
            set(stop_ids),
            tuple(stop),
            reads or bool(stop),
        )
        self.drawn, self.tokens = list[Token](), list[int]()
        self.end: Token | None = None
        self.text, self.shown, self.stopped = "", 0, ""

    def push(self, token: Token) -> str:
        """Take a token; returns the text that is certain now."""
        if token.id in self.stop_ids:
            self.stopped, self.end = "stop", token
            return self.finish()
        self.drawn.append(token)
        self.tokens.append(token.id)
        if not self.reads:
            return ""
        text = self.tokenizer.decode(self.tokens, skip_special=True)
        found = [text.index(stop) for stop in self.stop if stop in text]
        if found:
            self.text, self.stopped = text[: min(found)], "stop"
            return self._new(self.text)
        if text.endswith("\ufffd"):
            return ""
        return self._new(text[: len(text) - self._begun(text)])

    def finish(self) -> str:
        """End the draft and release the characters that were held back."""
        if self.stopped != "stop" or not self.text:
            self.text = self.tokenizer.decode(self.tokens, skip_special=True)
        self.stopped = self.stopped or "length"
        return self._new(self.text)

    def sample(self, logprobs: bool) -> Sample:
        if not logprobs:
            return Sample(self.text, self.tokens, None, self.stopped, end=self.end)
        model, sampler = [one.logprob for one in self.drawn], [one.sampling_logprob for one in self.drawn]
        return Sample(self.text, self.tokens, model, self.stopped, sampler, self.end)

    def _begun(self, text: str) -> int:
        """The number of characters at the end of the text that begin a stop string."""
        begun = (stop[:size] for stop in self.stop for size in range(1, len(stop)))
        return max((len(start) for start in begun if text.endswith(start)), default=0)

    def _new(self, text: str) -> str:
        fresh, self.shown = text[self.shown :], max(self.shown, len(text))
        return fresh


def stream(
    parts: SessionParts,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    adapted: bool = True,
    logprobs: bool = False,
    reads: bool = False,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Iterator[tuple[int, str, Sample | None]]:
    """Yields (prompt, new text, its Sample once it is complete); with `reads`, text comes piece by piece. `on_progress`
    is called after every token with the number of prompts that are done."""
    ending = (*parts.tokenizer.stop_ids, *sampling.stop_ids)
    answers = [Draft(parts.tokenizer, ending, stop, reads) for _ in prompts]
    most = [min(sampling.max_new_tokens, parts.base.spec.max_positions - len(prompt)) for prompt in prompts]
    ended: set[int] = set()
    if not prompts:
        return
    sampler = parts.sampler(prompts, sampling.max_new_tokens)
    numbers = sample_numbers(prompts)
    for fresh in sampler.rounds(prompts, sampling, ending, adapted=adapted, ended=ended, numbers=numbers):
        for index, tokens in fresh.items():
            answer, pieces = answers[index], list[str]()
            for token in tokens:
                if not answer.stopped:
                    pieces.append(answer.push(token))
            if not answer.stopped and len(answer.tokens) == most[index]:
                pieces.append(answer.finish())
            if answer.stopped:
                ended.add(index)
                yield index, "".join(pieces), answer.sample(logprobs)
            elif any(pieces):
                yield index, "".join(pieces), None
        on_progress(len(ended))


def sampled(
    parts: SessionParts,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    adapted: bool = True,
    logprobs: bool = False,
    on_text: Callable[[int, str], None] | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[Sample]:
    """A Sample for every prompt. `on_text` gets (prompt, new text) while they are drawn."""
    found: dict[int, Sample] = {}
    for index, text, sample in stream(
        parts,
        prompts,
        sampling,
        stop=stop,
        adapted=adapted,
        logprobs=logprobs,
        reads=on_text is not None,
        on_progress=on_progress,
    ):
        if on_text is not None and text:
            on_text(index, text)
        if sample is not None:
            found[index] = sample
    return [found[index] for index in range(len(prompts))]


def encoded(parts: SessionParts, prompt: str | Conversation) -> tuple[list[int], tuple[int, ...]]:
    """A prompt or conversation as the tokens to continue, and the tokens that end an answer."""
    if isinstance(prompt, str):
        return parts.tokenizer.encode(prompt, add_special=True), ()
    form = usable_format(parts.tokenizer, parts.config.data)
    try:
        return conversation(parts.tokenizer, form, prompt), tuple(stop_ids(parts.tokenizer, form))
    except Refusal as refusal:
        raise GraftuneError(str(refusal), where="the conversation", fix="change its turns") from None


def conversation(tokenizer: Tokenizer, form: ChatFormat, turns: Conversation) -> list[int]:
    """The tokens of a conversation up to where the answer begins; raises Refusal."""
    return tokenizer.encode(form.render(with_known_roles(form, turns), None, generate=True))


@torch.no_grad()
def logprobs_of(
    parts: SessionParts, examples: Sequence[Example], capacity: int, adapted: bool, temperature: float = 1.0
) -> list[torch.Tensor]:
    """The log-probability of every response token, per example: fp32 on the CPU."""
    decoder, found = parts.decoder, list[torch.Tensor]()
    for indices in bins_in_order(examples, capacity, PLAIN):
        held = take(examples, indices)
        batch = pack(held).to(decoder.device)
        run = decoder.begin_batch(batch, parts.eager_attention, adapted=adapted)
        stream = decoder.forward(batch.tokens, run, batch.rows)
        output = decoder.read_out(stream, adapted=adapted, temperature=temperature)
        found += output.log_probs(batch.labels).float().cpu().split(responses_of(held).tolist())
    return found
