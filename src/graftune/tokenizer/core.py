"""The one tokenizer object the rest of graftune sees.

Purpose: text to ids and back, with character offsets, for every vocabulary format. Method: a thin wrapper over one
`tokenizers.Tokenizer` (compiled, and the same library that transformers uses), plus the facts such an object does not
hold: which ids are BOS, EOS and padding, what the model expects around plain text, where generation stops, and the
chat template. Rejected: a class per format; the formats differ only in how the backend is built (gguf_vocab, folder).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from graftune.errors import GraftuneError
from graftune.io.files import write_file
from graftune.tokenizer.offsets import ByteOffsets, Offsets
from graftune.tokenizer.template import ChatTemplate

# Control tokens by which the known families end a turn. Files often name only one of them as EOS (Llama 3 has three),
# so they are found by text as llama.cpp does.
TURN_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<turn|>",
        "<|tool_response>",
        "<|ifm|im_end|>",
        "[e~[",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<|END_OF_TURN_TOKEN|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)


@contextmanager
def guarded(doing: str, where: str = "", fix: str = "") -> Iterator[None]:
    """Turn errors of the tokenizers library into a GraftuneError; `doing` completes "the tokenizer cannot ...".

    The library raises plain Exception for faults of a vocabulary or a text, and a panic of its Rust code is an
    exception outside Exception."""
    try:
        yield
    except (GraftuneError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise GraftuneError(
            f"the tokenizer cannot {doing} ({str(error) or type(error).__name__})",
            where=where or None,
            fix=fix or "use the tokenizer of another version of the model, or other text",
        ) from None


def _copy(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    with guarded("be copied"):
        return tokenizers.Tokenizer.from_str(backend.to_str())


def check_text(text: object, what: str) -> None:
    """Refuse text that is not valid Unicode: the backend takes UTF-8 only."""
    if not isinstance(text, str):
        raise GraftuneError(f"{what} must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GraftuneError(
            f"{what} holds half a surrogate pair, which is not a character",
            where=f"character {error.start + 1}",
            fix="write the text as valid UTF-8",
        ) from error


def not_an_end(ends: Collection[str]) -> frozenset[str]:
    """The turn ends of a vocabulary that do not end an answer in it.

    Harmony-style vocabularies close one channel of an answer with <|end|>, not the answer. Gemma 4's </s> is text.
    """
    texts = set()
    if "<|end|>" in ends and {"<|call|>", "<|calls|>"} & set(ends) and {"<|return|>", "<|flush|>"} & set(ends):
        texts.add("<|end|>")
    if "<|tool_response>" in ends and "</s>" in ends:
        texts.add("</s>")
    return frozenset(texts)


def find_stop_ids(backend: tokenizers.Tokenizer, known: Iterable[int | None]) -> tuple[int, ...]:
    """The end ids that a file names and those of control tokens whose text ends a turn (TURN_ENDS), sorted."""
    named = {id for id in known if id is not None}
    special = {token.content: id for id, token in backend.get_added_tokens_decoder().items() if token.special}
    ends = TURN_ENDS & special.keys()
    return tuple(sorted(named | {special[text] for text in ends - not_an_end(ends)}))


@dataclasses.dataclass(frozen=True, eq=False)  # eq: the backend has no equality of its own
class Tokenizer:
    """A vocabulary with its special tokens and its chat template. Immutable; `with_tokens` returns another one."""

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    template: ChatTemplate | None = None
    template_fault: GraftuneError | None = None  # why the template in the base's files cannot be used
    stop_ids: tuple[int, ...] = ()
    rows: int = 0  # rows of the embedding, if the vocabulary has more tokens: those beyond cannot be used. 0: no limit

    @property
    def refused_template(self) -> str:
        """A note where the base's own chat template cannot be used; empty otherwise."""
        if self.template_fault is None:
            return ""
        return f"{self.template_fault.what}; the base's own chat template is not saved with adapters and exports"

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_id is None else self.token(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_id is None else self.token(self.eos_id)

    @property
    def pad_token(self) -> str | None:
        return None if self.pad_id is None else self.token(self.pad_id)

    @functools.cached_property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def highest_id(self) -> int:
        """The highest token id; more than `vocab_size` - 1 if ids have gaps."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides the tokens of a text or a conversation; a date only if the template prints
        it."""
        template = self.template
        facts: list[object] = [
            self.bos_id,
            self.eos_id,
            self.pad_id,
            self.add_bos,
            self.add_eos,
            self.stop_ids,
            self.rows,
        ]
        if template is not None:
            facts += [template.source, template.bos_token, template.eos_token, template.name]
            facts += [str(template.now)] if "strftime_now" in template.source else []
        return hashlib.sha256((self.backend.to_str() + json.dumps(facts)).encode()).hexdigest()

    def encode(self, text: str, *, special: bool = True, add_special: bool = False) -> list[int]:
        """Ids of `text`. `special`: control tokens written in it become their ids; otherwise they are plain text.
        `add_special`: BOS and EOS around it, as the model expects them."""
        backend = self.backend if special else self._plain
        ids = self._run(backend, text).ids
        if add_special and self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and, for each, its characters [start, end) in `text`; special tokens are parsed, no BOS is added.

        In order and without gaps: a character that the vocabulary's normaliser drops goes to the token after it
        (the last one takes what is left), and the pieces of one split character all get that character.
        """
        encoding = self._run(self._untrimmed, text)
        return encoding.ids, Offsets(encoding, len(text), plain=False).whole()

    def encode_batch(self, texts: list[str]) -> list[tuple[list[int], Offsets]]:
        """`encode_with_offsets` of many texts at once, on all cores (the library's own threads: after a fork, and with
        TOKENIZERS_PARALLELISM=false, it keeps to one)."""
        for text in texts:
            if not text.isascii():
                check_text(text, "what is tokenised")
        backend, sizes, made = self._untrimmed, self._byte_sizes, list[tuple[list[int], Offsets]]()
        exact = backend.normalizer is None
        if sizes is not None and (exact or all(map(str.isascii, texts))):  # NFC changes no ASCII text
            with guarded("encode the texts"):
                found = backend.encode_batch_fast(texts, add_special_tokens=False)
            for text, ids in zip(texts, [encoding.ids for encoding in found], strict=True):
                made.append((ids, ByteOffsets(ids, text, sizes, self.encode_with_offsets)))
        else:
            with guarded("encode the texts"):
                found = backend.encode_batch(texts, add_special_tokens=False)
            for text, encoding in zip(texts, found, strict=True):
                made.append((encoding.ids, Offsets(encoding, len(text), exact or text.isascii())))
        if self.rows:
            for ids, _ in made:
                self._check_rows(ids)
        return made

    @functools.cached_property
    def _byte_sizes(self) -> list[int] | None:
        """The bytes of a text that each token stands for, by id; None if that does not follow from the token: the
        vocabulary is not byte-level, changes the text, or has added tokens that take blanks from beside them."""
        backend, added = self._untrimmed, self._untrimmed.get_added_tokens_decoder()
        if (
            not isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
            or not isinstance(backend.normalizer, tokenizers.normalizers.NFC | None)
            or backend.pre_tokenizer is None
            or backend.pre_tokenizer.pre_tokenize_str("a") != [("a", (0, 1))]  # it puts a blank before a text
            or any(token.lstrip or token.rstrip for token in added.values())
        ):
            return None
        letters, vocabulary = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()), backend.get_vocab()
        sizes = [0] * (max(vocabulary.values()) + 1)
        for token, id in vocabulary.items():
            if id not in added and not letters.issuperset(token):
                return None
            sizes[id] = len(added[id].content.encode()) if id in added else len(token)
        return sizes

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`. An id past the vocabulary (a padded embedding row) has no text and prints nothing."""
        with guarded("decode tokens"):
            return self.backend.decode([int(id) for id in ids], skip_special_tokens=skip_special)

    def token(self, id: int) -> str:
        """The vocabulary's own spelling of one id (byte-level and ▁ marks included)."""
        text = self.backend.id_to_token(id) if 0 <= id < 2**32 else None
        if text is None:
            raise GraftuneError(f"there is no token with id {id}", fix=f"ids run from 0 to {self.vocab_size - 1}")
        return text

    def with_tokens(self, new: Sequence[str]) -> Tokenizer:
        """This tokenizer with special tokens added at the end of the vocabulary, in the order given."""
        if new and self.rows:
            raise GraftuneError(
                f"the tokenizer has tokens already that the model has no row for, such as {self.token(self.rows)}",
                fix="leave new_tokens out",
            )
        backend = _copy(self.backend)
        for position, text in enumerate(new):
            check_text(text, "a new token")
            if not text.strip():
                raise GraftuneError("a new token must not be blank", where=f"new token {position + 1}")
            known = backend.token_to_id(text)
            if known is not None:
                raise GraftuneError(
                    f"the token '{text}' is in the vocabulary already (id {known})",
                    where=f"new token {position + 1}",
                    fix="leave it out: it can be used as it is",
                )
            expected = self.vocab_size + position
            if backend.id_to_token(expected) is not None:
                raise GraftuneError(
                    f"the vocabulary has gaps: id {expected}, the next free one by count, is taken",
                    where=f"new token {position + 1}",
                    fix="use a base whose token ids are contiguous",
                )
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
        return dataclasses.replace(self, backend=backend, stop_ids=find_stop_ids(backend, self.stop_ids))

    def save(self, folder: Path) -> list[Path]:
        """Write the Hugging Face files of this tokenizer into `folder`; returns their paths."""
        folder = Path(folder)
        # Explicit values for everything transformers would otherwise guess or change on loading.
        settings: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "clean_up_tokenization_spaces": False,
            "stop_token_ids": list(self.stop_ids),
        }
        settings = {key: value for key, value in settings.items() if value is not None}
        if self.template is not None:
            settings["chat_template"] = self.template.checked_source()
        files = {
            "tokenizer.json": self.backend.to_str(),
            "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2) + "\n",
        }
        if self.template is not None:
            files["chat_template.jinja"] = self.template.checked_source()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                write_file(folder / name, text)
        except OSError as error:
            raise GraftuneError(f"the tokenizer cannot be saved: {error.strerror}", where=str(folder)) from error
        return [folder / name for name in files]

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        # A copy, not a flag flipped around each call: another thread may be encoding with the backend.
        plain = _copy(self.backend)
        plain.encode_special_tokens = True
        return plain

    @functools.cached_property
    def _untrimmed(self) -> tokenizers.Tokenizer:
        # Some post-processors trim the blank off a token's offsets; BOS and EOS are added by `encode` in any case.
        if self.backend.post_processor is None:
            return self.backend
        untrimmed = _copy(self.backend)
        untrimmed.post_processor = None
        return untrimmed

    def special_beyond(self, rows: int) -> bool:
        """Whether all ids from `rows` on are those of special tokens that were added to the vocabulary."""
        added = self.backend.get_added_tokens_decoder()
        beyond = [id for id in self.backend.get_vocab(with_added_tokens=True).values() if id >= rows]
        return all(id in added and added[id].special for id in beyond)

    def _run(self, backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        check_text(text, "what is tokenised")
        with guarded("encode this text"):
            encoding = backend.encode(text, add_special_tokens=False)
        if self.rows:
            self._check_rows(encoding.ids)
        return encoding

    def _check_rows(self, ids: list[int]) -> None:
        if max(ids, default=0) >= self.rows:
            token = self.token(next(id for id in ids if id >= self.rows))
            raise GraftuneError(
                f"the text holds {token}, a special token that the model has no row for",
                fix="take it out: this model was not made to read it",
            )
