r"""Pre-tokenizer rules of BPE vocabularies, by the name a GGUF file gives them.

Purpose: `tokenizer.ggml.pre` is only a name; the expressions behind it live in llama.cpp. Method: each name maps to a
chain of expressions, built here from a few named parts, and to the flags the name implies. Every expression
splits the pieces the one before it left, keeping matches and gaps alike. Names of encoders' vocabularies (jina-v2-de,
roberta-bpe, mmbert ...) are left out: an encoder cannot be a base. Where llama.cpp departs from the model's
own tokenizer.json (its case classes know ASCII only, it never normalises to NFC), we follow llama.cpp: a GGUF base is
served there, and training must see the ids that serving will. Rejected: guessing a rule for an unknown name, which
would silently train on slightly wrong ids.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

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
_UFAKZEKA = _QWEN2.removeprefix(f"{_CONTRACTION}|")
_K2_HORIZON = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}\x{{200C}}\x{{200D}}]+|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*"
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


def _marked(digits: str) -> str:
    """GPT-4o's rule where llama.cpp's own reading of the case classes makes every letter both capital and small."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_CONTRACTION}?"
    return rf"{word}|{digits}|{_SYMBOLS}[\r\n/]*|{_LINES}|{_SPACES}"


# Digits in threes from the right. AFMoE's and Tiny Aya's leave the text before a number with its first group, as
# llama.cpp does; possessive, and with the end of the text as a way out, so that no position is scanned twice.
_THREES_WITH_TEXT = r"\P{N}*+(?:\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}|\z)"
_THREES = r"(?=(?:[0-9]{3})+(?![0-9]))"
# AFMoE's third range begins at U+8C48: written for U+F900, whose sign looks the same.
_AFMOE_ASIAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}"
    r"\x{0E40}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{1100}-\x{11FF}]+"
)
_KIMI_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
_KIMI = (
    rf"[{_KIMI_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_KIMI_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*"
    rf"|{_LINES}|{_SPACES}"
)

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
_YOUTU_SCRIPTS = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
    rf"|[\x{{3105}}-\x{{312F}}]+|{_HAN_KANA}"
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    "[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
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
    """What one name implies.

    `ignore_merges`: a piece that is a token as it stands is not merged anew. `add_bos`: true unless the file says
    otherwise. `always_bos`: even if the file says otherwise.
    """

    chain: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    always_bos: bool = False


_RULES: tuple[tuple[str, PreRule], ...] = (
    ("default", PreRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
        PreRule((_GPT2,)),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreRule((r"\p{N}", _GPT2))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreRule((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreRule((_LLAMA3,))),
    ("glm4 glm5", PreRule((_LLAMA3,), ignore_merges=True)),
    ("k2-horizon", PreRule((_K2_HORIZON,))),
    ("minicpm5", PreRule((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True)),
    ("jais-2", PreRule((_JAIS2,))),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreRule((_QWEN2,)),
    ),
    ("qwen35", PreRule((_QWEN35,))),
    ("ufakzeka", PreRule((_UFAKZEKA,))),
    ("tekken", PreRule((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreRule((_GPT4O,))),
    ("granite-embed-multi-97m", PreRule((_GRANITE_MULTI,), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreRule((_THREES_WITH_TEXT, _marked(r"\p{N}{1,3}")))),
    ("youtu", PreRule((_YOUTU_SCRIPTS, _marked(r"\p{N}")), ignore_merges=True)),
    ("kimi-k2", PreRule((_KIMI,))),
    ("superbpe", PreRule((r"\p{N}+", _THREES))),
    ("afmoe", PreRule((_THREES_WITH_TEXT, _AFMOE_ASIAN, _DEEPSEEK3))),
    ("chameleon", PreRule(_CHAMELEON, add_bos=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreRule((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3))),
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

# Names of vocabularies whose pieces are text with visible blanks, as in SentencePiece, not GPT-2's byte alphabet.
RAW_RULES: dict[str, PreRule] = {
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), PreRule((r"\n+",), always_bos=True)),
    "sarvam-moe": PreRule((r"\n+",)),
}


def splits(rule: PreRule) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in rule.chain]


def build(rule: PreRule, vocabulary: Container[str]) -> pre_tokenizers.PreTokenizer:
    """The chain as one `tokenizers` object, ending in the byte alphabet of GPT-2."""
    steps = [*splits(rule), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    missing = sorted(byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte not in vocabulary)
    if missing:
        # A byte the vocabulary lacks (SmolLM2 lacks some control codes) is dropped. `tokenizers` would drop it before
        # merging and join its neighbours; llama.cpp drops it after. Standing alone, it keeps them apart.
        codes = "".join(rf"\x{{{ord(byte):04X}}}" for byte in missing)
        steps.append(pre_tokenizers.Split(Regex(f"[{codes}]"), behavior="isolated"))
    return pre_tokenizers.Sequence(steps)
