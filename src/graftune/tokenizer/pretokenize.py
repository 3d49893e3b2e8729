r"""Pre-tokenizer rules of byte-level BPE vocabularies, by the name a GGUF file gives them.

Purpose: `tokenizer.ggml.pre` is only a name; the expressions behind it live in llama.cpp. Method: each name maps to a
chain of expressions, built here from a few named parts, and to the two flags the name implies. Every expression
splits the pieces the one before it left, keeping matches and gaps alike. Where llama.cpp departs from the model's
own tokenizer.json (its case classes know ASCII only), we follow llama.cpp: a GGUF base is served there, and
training must see the ids that serving will. Rejected: guessing a rule for an unknown name, which would train on
slightly wrong ids without anyone noticing.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from graftune.errors import GraftuneError

# Parts. \p{..} and \s are Unicode classes. Contractions are spelled out case by case because a case-insensitive
# group would also match the long s (U+017F), which llama.cpp does not.
_LOWER_CONTRACTION = r"'s|'t|'re|'ve|'m|'ll|'d"
_CONTRACTION = r"(?:'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_LINES = r"\s*[\r\n]+"
_SPACES = r"\s+(?!\S)|\s+"

_GPT2 = rf"{_LOWER_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+|{_SYMBOLS}|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_LINES}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_LINES}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES}|{_SPACES}"
)
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}"
_BAILING = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|\s*[\r\n]|{_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SYMBOLS}[\r\n/]?"
    rf"|\s*[\r\n]|{_SPACES}"
)
_JAIS2_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"
_JAIS2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_LINES}|{_JAIS2_SPACES}"


def _cased(marks: str, contraction: str, digits: str) -> str:
    """GPT-4o's rule: a word is capitals then small letters; a letter outside ASCII counts as both."""
    letters = rf"\p{{L}}{marks}"
    capital, small = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    head = r"[^\r\n\p{L}\p{N}]?"
    words = f"{head}{capital}*{small}+{contraction}|{head}{capital}+{small}*{contraction}"
    return rf"{words}|{digits}|{_SYMBOLS}[\r\n/]*|{_LINES}|{_SPACES}"


_GPT4O = _cased("", f"{_CONTRACTION}?", r"\p{N}{1,3}")
_GRANITE_MULTI = _cased(r"\p{M}", f"{_CONTRACTION}?", r"\p{N}{1,3}")
_TEKKEN = _cased("", "", r"\p{N}")

_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    rf"|{_LINES}|{_SPACES}"
)
_SPARK = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
    rf"|[\r\n]|{_SPACES}"
)
_HAN_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
# Blanks lie inside these wide ranges, but llama.cpp folds them into one ASCII blank before it matches.
_HAN_WIDE = r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}&&[^\s]]+"
# DeepSeek LLM lists its cased letters one by one: Unicode's, without the blocks below (added later, or left out).
_DEEPSEEK_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{0560}-\x{0588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}"
    r"\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16EFF}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DFFF}]]"
)
_DEEPSEEK_MARKS = r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}-\x{3002}]"
# Bloom's sentence marks: a word runs until a space or one of these (brackets and the bar included).
_BLOOM = r" ?[^\s(|.,!?)\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C}]+"


@dataclass(frozen=True)
class PreRule:
    """What one name implies: the expressions, whole-word lookup before merging, and BOS by default."""

    chain: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_RULES: tuple[tuple[str, PreRule], ...] = (
    ("default", PreRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4 mpt olmo jais"
        " trillion granite-docling",
        PreRule((_GPT2,)),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreRule((r"\p{N}", _GPT2))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreRule((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreRule((_LLAMA3,))),
    ("minicpm5", PreRule((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True)),
    ("jais-2", PreRule((_JAIS2,))),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreRule((_QWEN2,)),
    ),
    ("qwen35", PreRule((_QWEN35,))),
    ("tekken", PreRule((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreRule((_GPT4O,))),
    ("granite-embed-multi-97m", PreRule((_GRANITE_MULTI,), ignore_merges=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreRule((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3))),
    (
        "deepseek-llm",
        PreRule((r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}+", rf"\s?{_DEEPSEEK_MARKS}+", r"\s+\z", _HAN_WIDE, r"\p{N}+")),
    ),
    ("laguna", PreRule((r"[^\n]+|\n+", _QWEN2))),
    ("spark2_5", PreRule((r"\p{N}{1,3}", _HAN_KANA, _SPARK, r"\p{N}"))),
    ("deepseek-coder", PreRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_WIDE, r"\p{N}"))),
    ("falcon", PreRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", PreRule((_BLOOM,))),
    ("viking", PreRule((_BLOOM, r"\p{N}"))),
    ("bailingmoe bailingmoe2 llada-moe", PreRule((_BAILING,))),
    ("seed-coder", PreRule((_SEED_CODER,))),
    ("exaone-moe", PreRule((_EXAONE_MOE,))),
)
RULES: dict[str, PreRule] = {name: rule for names, rule in _RULES for name in names.split()}


def rule_for(name: str, where: str) -> PreRule:
    """The rule a GGUF file names, or a sentence that says which names are known."""
    rule = RULES.get(name)
    if rule is None:
        raise GraftuneError(
            f"the pre-tokenizer '{name}' is not supported",
            where=where,
            mend="use the model's Hugging Face folder as the base (its tokenizer.json states the rule), or a GGUF "
            f"with one of: {', '.join(sorted(RULES))}",
        )
    return rule


def build(rule: PreRule, vocabulary: Container[str]) -> pre_tokenizers.PreTokenizer:
    """The chain as one `tokenizers` object, ending in the byte alphabet of GPT-2."""
    splits = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in rule.chain]
    steps = [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    missing = sorted(byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte not in vocabulary)
    if missing:
        # A byte the vocabulary lacks (SmolLM2 lacks some control codes) is dropped. `tokenizers` would drop it before
        # merging and join its neighbours; llama.cpp drops it after. Standing alone, it keeps them apart.
        codes = "".join(rf"\x{{{ord(byte):04X}}}" for byte in missing)
        steps.append(pre_tokenizers.Split(Regex(f"[{codes}]"), behavior="isolated"))
    return pre_tokenizers.Sequence(steps)
