"""The verbs of a session that give text: sample, stream, generate, chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from graftune.data.row import Refusal
from graftune.data.template import stop_ids, usable_format
from graftune.errors import GraftuneError
from graftune.infer.sample import Sampling
from graftune.session import arguments, text
from graftune.session.arguments import Conversation, Message
from graftune.session.parts import Parts
from graftune.session.text import Sample


@dataclass(eq=False, repr=False)
class TextVerbs(Parts):
    _closed: bool = field(default=False, init=False)

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
    ) -> list[list[Sample]]:
        """`n` samples of every prompt, drawn together: a list for each prompt. A prompt is raw text or a conversation
        (a list of messages); one prompt may stand by itself. `stop` are texts that end a sample. `on_text` is called
        with (sample, new text) while samples are drawn; samples are numbered prompt by prompt.

        Example:
            (answers,) = session.sample("Once upon a time", n=4, max_new_tokens=20)
            print(answers[0].text, sum(answers[0].logprobs))
        """
        self._check_usable(adapted)
        n, each = arguments.whole_number(n, "n", 1), arguments.prompts(prompts)
        encoded, ends = zip(*(self._encoded(prompt) for prompt in each), strict=True) if each else ((), ())
        repeated = [prompt for prompt in encoded for _ in range(n)]
        endings = tuple(sorted({end for some in ends for end in some}))
        how = Sampling(max_new_tokens, temperature, top_k, top_p, seed, endings)
        found = text.sampled(
            self, repeated, how, stop=arguments.stop_strings(stop), adapted=adapted, logprobs=logprobs, on_text=on_text
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
        encoded, ends = self._encoded(arguments.prompt(prompt))
        how = Sampling(max_new_tokens, temperature, top_k, top_p, seed, ends)
        drawn = text.stream(self, [encoded], how, stop=arguments.stop_strings(stop), adapted=adapted, reads=True)
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
        encoded = [self._encoded(prompt)[0] for prompt in arguments.texts(prompts)]
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
        prompt, ends = self._encoded(arguments.turns(messages))
        how = Sampling(max_new_tokens, temperature, top_k, top_p, seed, ends)
        return self._texts([prompt], how, arguments.stop_strings(stop), adapted, on_text)[0]

    def prompt_tokens(self, messages: str | Sequence[Message]) -> int:
        """How many tokens `chat` would read of a conversation. They and the answer share the model's `context`."""
        return len(self._encoded(arguments.turns(messages))[0])

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

        found = text.sampled(self, prompts, how, stop=stop, adapted=adapted, on_text=first if on_text else None)
        return [sample.text for sample in found]

    def _encoded(self, prompt: str | Conversation) -> tuple[list[int], tuple[int, ...]]:
        """A prompt or conversation as the tokens to continue, and those that end an answer."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special=True), ()
        form = usable_format(self.tokenizer, self.config.data)
        try:
            rendered = form.render(prompt, None, generate=True)
        except Refusal as refusal:
            raise GraftuneError(str(refusal), where="the conversation", fix="change its turns") from None
        return self.tokenizer.encode(rendered), tuple(stop_ids(self.tokenizer, form))

    def _check_open(self) -> None:
        if self._closed:
            raise GraftuneError("this session is closed", fix="open another one")

    def _check_usable(self, adapted: bool) -> None:
        self._check_open()
        if not adapted and self.whole is not None:
            raise GraftuneError(
                f"adapted is False and method is {self.config.train.method}, which leaves no base without adapters",
                fix="open the base in a session of its own",
            )
