"""What an exported GGUF says of its vocabulary and of the file it came from, in llama.cpp's reading of it."""

from __future__ import annotations

import dataclasses
import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from graftune.api import export
from graftune.errors import GraftuneError
from graftune.exporting import gguf_vocab
from graftune.tokenizer import Tokenizer, from_folder, from_gguf
from graftune.weights.gguf_io import read_gguf
from tests.exporting.judges import DOCUMENT, gap, opened, ours
from tests.exporting.judges import LlamaCpp as Runner
from tests.tokenizer import llama_cpp, real
from tests.weights import tiny_gguf

MARK = "\u2581"


def gemma_like() -> Tokenizer:
    """SentencePiece-style BPE without a blank in front, whose runs of blanks are added tokens, always kept whole."""
    runs = [MARK * n for n in range(2, 32)]
    letters = [*"abcdefghijklmnopqrstuvwxyz():<>/", "\n", MARK]
    pieces = ["th", "the", f"{MARK}the", "re", "ret", *runs]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *pieces, "<td>"]
    merges = [(MARK * a, MARK * (n - a)) for n in range(2, 32) for a in range(1, n)]
    merges += [("t", "h"), ("th", "e"), (MARK, "the"), ("r", "e"), ("re", "t")]
    vocabulary = {text: id for id, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", MARK)
    backend.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken(text, normalized=False) for text in (*runs, "<td>")])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(
        backend=backend, bos_id=1, eos_id=2, pad_id=None, add_bos=True, add_eos=False, template=None, stop_ids=(2,)
    )


def texts() -> list[str]:
    rng = random.Random(3)
    words = ("  ", " ", "\n", "the", "   ", " <td>", "ret", "a", "é")
    made = ["".join(rng.choice(words) for _ in range(10)) for _ in range(200)]
    return [*("a" + " " * n + "b" for n in range(1, 20)), *(" " * n for n in range(1, 20)), *made]


def said(server: llama_cpp.LlamaCpp, ids: list[int]) -> str:
    request = urllib.request.Request(
        server.server.listening_address + "/detokenize",
        json.dumps({"tokens": ids}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["content"])


def keys_of(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As `vocabulary` checks them, before they are bytes."""
    found: dict[str, Any] = {}
    check = gguf_vocab._check
    monkeypatch.setattr(gguf_vocab, "_check", lambda t, metadata: (found.update(metadata), check(t, metadata)))
    gguf_vocab.vocabulary(tokenizer, tokenizer.vocab_size, None)
    return found


@pytest.mark.parametrize("which", ["made up", pytest.param("gemma3", marks=real.needed)])
def test_runs_of_blanks_there_and_back(which: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Text to tokens is tokenizer.json's, and tokens to text is the text: no visible blank is ever said."""
    tokenizer = gemma_like() if which == "made up" else from_folder(real.FOLDER / which)
    keys = keys_of(tokenizer, monkeypatch)
    server = llama_cpp.LlamaCpp(llama_cpp.write_model(tmp_path / "v.gguf", keys))
    back = from_gguf(keys)
    for text in texts():
        ids = tokenizer.encode(text)
        assert server.encode(text) == ids and back.encode(text) == ids, text
        assert said(server, ids) == text and back.decode(ids) == text
    assert tokenizer.token(tokenizer.encode("a  b")[1]) == MARK * 2, "a run is one token"


@pytest.mark.parametrize("more", [1, 2, 3])
def test_ends_of_an_answer_that_have_no_usual_name(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 ends its answers with <|assistant|> too. GGUF has two names for such tokens."""
    tokenizer = gemma_like().with_tokens([f"<|speaker {i}|>" for i in range(more)])
    ends = tuple(range(tokenizer.vocab_size - more, tokenizer.vocab_size))
    tokenizer = dataclasses.replace(tokenizer, stop_ids=(2, *ends))
    if more > 2:
        with pytest.raises(GraftuneError, match=r"cannot name '<\|speaker 2\|>' as one more"):
            gguf_vocab.vocabulary(tokenizer, tokenizer.vocab_size, None)
        return
    keys = keys_of(tokenizer, monkeypatch)
    assert from_gguf(keys).stop_ids == (2, *ends) and keys["tokenizer.ggml.eos_token_id"] == 2


def test_a_split_base_goes_out_as_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_writer = gguf.GGUFWriter
    with monkeypatch.context() as patch:
        patch.setattr(tiny_gguf.gguf, "GGUFWriter", lambda path, arch: real_writer(path, arch, split_max_tensors=9))
        tiny_gguf.write(tmp_path / "tiny.gguf")
    first = tmp_path / "tiny-00001-of-00004.gguf"
    assert {"split.no", "split.count", "split.tensors.count"} <= read_gguf(first).metadata.keys()
    whole = export(str(first), "gguf", kind="F32", out=str(tmp_path / "whole.gguf")).path
    assert not [key for key in read_gguf(whole).metadata if key.startswith("split.")]
    want = ours(opened(first))
    assert gap(ours(opened(whole)), want) < 1e-4 and gap(Runner(whole).along(DOCUMENT), want) < 1e-4
