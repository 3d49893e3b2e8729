"""Generated text three ways: over the key cache, by the plain forward over the whole text, and by transformers.

The models are tiny and random: their texts mean nothing, but are sure enough to be equal to the token.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import graftune
from graftune.errors import GraftuneError
from graftune.infer import cache as caches
from graftune.infer import generate as generate_module
from graftune.infer.cache import Cache, CacheShape, CacheSize, Decode, Request
from graftune.infer.decode_batch import DecodeBatch, Piece, passes
from graftune.infer.generate import Token, requests_of, sampler_for
from graftune.infer.sample import Sampling
from graftune.kernels import draw
from graftune.kernels.paged_attention import PAGE
from graftune.model.families import from_config
from tests.support import oracle, quantised, tiny
from tests.support.generate import generate

PROMPTS = [[40, 7, 99], [3], [200, 5, 5, 18, 77, 150, 31, 8, 8, 64, 12, 90], [11, 250, 6, 4, 30, 21]]
FAMILIES = (
    *tiny.FAMILIES,
    "llama-yarn",
    "llama-untied",
    "mistral-window",
    "gemma3-linear",
    "gemma2-odd",
    "phi3-long",
    "smollm3-window",
    "olmo3-yarn",
)
# A family's arithmetic shows in its cached logits, and in transformers' text. What generate itself does with prompts
# meets each kind of cache and position once: plain, windows, odd heads with caps, positions by length, layers without
# rotation, convolutions, delta nets.
KINDS = pytest.mark.parametrize(
    "ours", ["llama", "mistral-window", "gemma2-odd", "phi3-long", "smollm3-window", "lfm2", "qwen3_5"], indirect=True
)


@pytest.fixture(scope="module", params=FAMILIES)
def ours(request: pytest.FixtureRequest, tiny_folder: Any) -> oracle.Ours:
    torch.manual_seed(1)
    return oracle.ours(tiny_folder(request.param))


@pytest.fixture(scope="module")
def llama(tiny_folder: Any) -> oracle.Ours:
    torch.manual_seed(1)
    return oracle.ours(tiny_folder("llama"))


def greedy(
    found: oracle.Ours, prompts: list[list[int]], count: int, stops: tuple[int, ...] = (), **options: Any
) -> Any:
    return generate(found.decoder, prompts, Sampling(max_new_tokens=count), stops, **options)


@pytest.mark.parametrize(
    ("requests", "tokens", "places", "pages"),
    [
        ([Request(20, 64)] * 3, 192, 3, 12),
        ([Request(20, 64)] * 3, 191, 2, 8),
        ([Request(3, 16), Request(20, 160)], 32, 1, 10),  # one has to fit
        ([Request(33, 64, samples=4)], 999, 4, 2 + 4 * 2),  # two pages of the prompt are shared
        ([Request(1, 16, samples=1000)], 1 << 20, 256, 256),
    ],
)
def test_as_many_samples_together_as_fit_the_cache(
    requests: list[Request], tokens: int, places: int, pages: int
) -> None:
    size = CacheSize.of(quantised.spec(), torch.float32)
    assert size == (0, {0: size.most_per_token}, size.most_per_token), "attention keeps something per token alone"
    found = CacheShape.of(size, requests, tokens * size.most_per_token)
    assert found == (places, {0: pages}, max(-(-one.final // PAGE) for one in requests))


def test_states_and_windows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "CHUNK", 32)
    size = CacheSize(per_sequence=80, per_token={0: 5, 40: 5}, most_per_token=20)
    found = CacheShape.of(size, [Request(100, 1600)] * 9, 20_000)
    assert found == (2, {0: 200, 40: 12}, 100), "100 pages each, and 6 for a window of 40 and a pass of 32"
    larger = found._replace(places=4)
    assert larger.covers(found) and not found.covers(larger) and found.joined(larger) == larger


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixers_say_what_their_cache_takes(family: str, dtype: torch.dtype) -> None:
    spec = from_config(tiny.hf_config(family).to_dict(), "x")
    size = CacheSize.of(spec, dtype)
    shape = CacheShape.of(size, [Request(3, 20), Request(5, 40)], 1 << 40)
    cache = Cache(spec, shape, torch.device("cpu"), dtype)
    held = stored_by(cache)
    assert sum(x.nbytes for x in held) == shape.bytes(size)
    assert (size.per_sequence > 0) == (family in ("lfm2", "lfm3", "qwen3_5"))


def stored_by(cache: Cache) -> list[torch.Tensor]:
    """Layers that read another layer's keys store nothing."""
    layers = [layer for layer in cache.layers if layer is not None]
    return [x for layer in layers for x in (*layer.states, *vars(layer).values()) if isinstance(x, torch.Tensor)]


def without_cache(
    found: oracle.Ours, text: list[int], start: int, sampling: Sampling, adapted: bool = True
) -> list[int]:
    """What generate should say after each of the text's tokens from `start` on, by one forward over the whole text."""
    logits, at = found.logits([text[:-1]], adapted=adapted)[start - 1 :], torch.arange(start, len(text))
    chosen = sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed
    settings = draw.DrawSettings.of(*chosen, logits.device)
    return draw.draw(logits, sampling.mode, settings, at * 0, at).tokens.tolist()


def test_cached_logits_equal_the_whole_texts(ours: oracle.Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random texts: prompts in pieces of 16 tokens, then token by token; pages in any order; one ends on the way."""
    monkeypatch.setattr(caches, "CHUNK", 16)
    lengths, starts = (14, 70, 22, 40), (3, 37, 1, 17)
    texts = [torch.randint(3, tiny.VOCAB, (n,)).tolist() for n in lengths]
    decoder = ours.decoder
    want = [ours.logits([text]) for text in texts]
    requests = [Request(n + 1, len(text)) for n, text in zip(starts, texts, strict=True)]
    shape = CacheShape.of(CacheSize.of(decoder.spec, decoder.compute), requests, 1 << 40)
    cache = Cache(decoder.spec, shape, decoder.device, decoder.compute)
    for stored in stored_by(cache):
        stored.fill_(1e4)  # what was never written must not be seen
    for pages in cache.free.values():
        random.Random(0).shuffle(pages)
    lines = []
    for one in requests:
        own = cache.take({window: caches.own_pages(one, window) for window in cache.free})
        assert own is not None
        lines.append({window: caches.line_of(one, window, (), pages) for window, pages in own.items()})
    cache.write_tables(range(4), lines)
    places = DecodeBatch(decoder, cache, "cpu")
    for some in passes(
        [Piece(i, 0, text[:n], len(text)) for i, (text, n) in enumerate(zip(texts, starts, strict=True))]
    ):
        places.read(some)
    for step in range(33):
        at = torch.tensor(starts) + step
        live = at < torch.tensor(lengths)
        at = at * live
        tokens = torch.tensor([text[int(i)] for text, i in zip(texts, at, strict=True)])
        with torch.no_grad():
            decoding = Decode(cache, at, live, torch.tensor(lengths), int(at.max()) + 1)
            rows = decoder.logits(decoder.hidden(tokens, decoder.begin(at, decoding)))
        for row, one, i, going in zip(rows, want, at, live, strict=True):
            assert not going or (row - one[int(i)]).abs().max() < 1e-4
    assert not (torch.tensor(starts) + 33 < torch.tensor(lengths)).any()


def drawn(
    found: oracle.Ours, prompts: list[list[int]], numbers: list[int], budget: int = 1 << 40, ahead: bool = False
) -> list[list[Token]]:
    """Hot samples that end at one of many stop tokens, or after 20. `ahead`: as on CUDA, where rounds are queued before
    the host has seen the last ones, over a few fixed numbers of places."""
    decoder, sampling = found.decoder, Sampling(20, temperature=1.5, top_p=0.98, seed=9)
    sampler = sampler_for(decoder, requests_of(decoder, prompts, 20), budget, "cpu")
    sampler.batch.ahead = ahead
    answers: list[list[Token]] = [[] for _ in prompts]
    held = stored_by(sampler.cache)
    kept = [(x.data_ptr(), x.shape) for x in held]
    for fresh in sampler.rounds(prompts, sampling, range(0, tiny.VOCAB, 9)[:60], numbers=numbers):
        for index, tokens in fresh.items():
            answers[index] += tokens
    assert kept == [(x.data_ptr(), x.shape) for x in held], "the memory is the same from beginning to end"
    assert {w: sorted(pages) for w, pages in sampler.cache.free.items()} == {
        w: list(range(1, count + 1)) for w, count in sampler.shape.pages.items()
    }, "every page was given back"
    return answers


@pytest.mark.few(2)
@KINDS
def test_a_sample_is_the_same_alone_and_in_any_batch(ours: oracle.Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group whose prompt is read once, in a place that others had before, after others ended, and as on CUDA."""
    monkeypatch.setattr(caches, "CHUNK", 16)
    monkeypatch.setattr(generate_module, "SHORT", 1)  # so that rounds shrink, and sequences move
    long = [3 + i * i % 200 for i in range(45)]
    prompts = [PROMPTS[1], *[long] * 3, PROMPTS[0], *[PROMPTS[2]] * 4, *[long[:33]] * 2, PROMPTS[3]]
    numbers = list(range(len(prompts)))
    alone = [drawn(ours, [prompt], [number])[0] for prompt, number in zip(prompts, numbers, strict=True)]
    assert len({len(answer) for answer in alone}) > 3, "some end early"
    assert len({tuple(token.id for token in answer) for answer in alone[1:4]}) > 1
    size = CacheSize.of(ours.decoder.spec, ours.decoder.compute)
    most = CacheShape.of(size, requests_of(ours.decoder, prompts, 20), 1 << 40).bytes(size)
    for budget, ahead in ((1 << 40, False), (most // 3, False), (most // 3, True)):
        together = drawn(ours, prompts, numbers, budget, ahead)
        for got, want in zip(together, alone, strict=True):
            assert [token.id for token in got] == [token.id for token in want]
            for token, other in zip(got, want, strict=True):
                assert token[1:] == pytest.approx(other[1:], rel=1e-5, abs=1e-5)


def test_sampled_log_probabilities_are_those_of_a_forward_pass(ours: oracle.Ours) -> None:
    (answer,) = drawn(ours, [PROMPTS[2]], [4])
    text = PROMPTS[2] + [token.id for token in answer]
    logits = ours.logits([text[:-1]])[len(PROMPTS[2]) - 1 :]
    for scale, kind in ((1.0, 1), (1.5, 2)):
        want = torch.log_softmax(logits / scale, -1).gather(1, torch.tensor(text[len(PROMPTS[2]) :])[:, None])
        assert torch.allclose(torch.tensor([token[kind] for token in answer]), want.squeeze(1), atol=1e-5)


def test_a_prompt_of_a_group_is_read_once(llama: oracle.Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "CHUNK", 16)
    monkeypatch.setattr(caches, "PASS_TOKENS", 40)
    passes_read: list[list[tuple[int, int]]] = []
    usual = DecodeBatch.read

    def read(self: DecodeBatch, some: list[Piece]) -> None:
        passes_read.append([(piece.start, len(piece.tokens)) for piece in some])
        usual(self, some)

    monkeypatch.setattr(DecodeBatch, "read", read)
    drawn(llama, [*[[5] * 38] * 6, *[[6] * 20] * 2, [7]], list(range(9)))
    assert passes_read == [[(0, 16), (0, 16)], [(16, 16)], [(32, 5), (16, 3)]]


def test_a_growing_chat_rarely_needs_a_new_cache(tiny_folder: Any) -> None:
    with graftune.open(tiny_folder("llama"), quiet=True, device="cpu") as session:
        found = [session.parts.sampler([[1] * length], 4) for length in range(20, 240, 20)]
    assert len(set(found)) <= 4


def test_calls_keep_the_sampler_and_two_at_a_time_do_not_mix(tiny_folder: Any) -> None:
    run = graftune.open(str(tiny_folder("llama")), compute_dtype="fp32", device="cpu", quiet=True)
    want = run.generate(["hello", "you"], max_new_tokens=12)
    kept = run.parts.sampler([[1, 2]], 4)
    assert run.parts.sampler([[1] * 5], 9) is kept and not kept.busy
    both = [run.stream(text, max_new_tokens=12) for text in ("hello", "you")]
    pieces = [[next(one)] for one in both]
    for got, one in zip(pieces, both, strict=True):
        got += one
    assert ["".join(got) for got in pieces] == want
    begun = run.stream("hello", max_new_tokens=12)
    next(begun)
    del begun
    assert run.generate(["hello", "you"], max_new_tokens=12) == want, "one that is left early frees its places"
    assert run.parts.sampler([[1] * 200] * 8, 9) is not kept, "a larger one takes its place"


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_text_equals_transformers(variant: str, tiny_folder: Any) -> None:
    model = tiny.hf_model(variant)
    got = greedy(oracle.ours(tiny_folder(variant), random_b=False), PROMPTS[1:3], 12)
    for prompt, answer in zip(PROMPTS[1:3], got, strict=True):
        want = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
        )
        assert answer == want[0, len(prompt) :].tolist()


def test_a_stop_token_ends_an_answer_and_is_not_in_it(llama: oracle.Ours) -> None:
    prompt = PROMPTS[0]
    whole = greedy(llama, [prompt], 20)[0]
    last = whole[8]
    first = whole.index(last)
    assert greedy(llama, [prompt], 20, (last,)) == [whole[:first]]
    besides = Sampling(max_new_tokens=20, stop_ids=(last,))
    assert generate(llama.decoder, [prompt], besides, ()) == [whole[:first]]
    seen: list[int] = []
    greedy(llama, [prompt], 20, (last,), on_tokens=lambda new: seen.append(new[0]))
    assert seen == whole[: first + 1], "who streams learns of the stop token"
    assert greedy(llama, [prompt], 20, (whole[0],)) == [[]]


def test_nothing_is_written_past_the_context(llama: oracle.Ours) -> None:
    """256 positions: each answer fills its own, whatever the length of the prompt beside it."""
    long = [3 + i % 200 for i in range(250)]
    assert [len(a) for a in greedy(llama, [long], 40)] == [6]
    together = greedy(llama, [long, PROMPTS[0]], 40)
    assert [len(a) for a in together] == [6, 40]
    assert together[1] == greedy(llama, [PROMPTS[0]], 40)[0]
    full = long[:1] * 255
    (last,) = greedy(llama, [full], 40)
    assert len(last) == 1 and last == without_cache(llama, full + last, 255, Sampling())


@pytest.mark.parametrize("length", [0, 256, 300])
def test_a_prompt_that_does_not_fit_is_refused(llama: oracle.Ours, length: int) -> None:
    with pytest.raises(GraftuneError, match=rf"a prompt has {length} tokens.*1 to 255"):
        greedy(llama, [[3], [5] * length], 4)


def test_no_prompts_no_answers(llama: oracle.Ours) -> None:
    assert greedy(llama, [], 4) == []


def test_the_api_with_and_without_the_adapter(tiny_folder: Any, tmp_path: Path) -> None:
    base = str(tiny_folder("llama"))
    run = graftune.open(base, compute_dtype="fp32", device="cpu")
    plain = run.generate("hello", max_new_tokens=20)
    run.parts.arena.weights.add_(torch.randn(len(run.parts.arena.weights)), alpha=0.1)
    run.parts.arena.publish()
    assert run.generate("hello", max_new_tokens=20) != plain
    assert run.generate("hello", max_new_tokens=20, adapted=False) == plain
    answer = run.chat([{"role": "user", "content": "hello"}], max_new_tokens=20)
    pieces: list[str] = []
    turn = [{"role": "user", "content": "hello"}]
    assert run.chat(turn, max_new_tokens=20, on_text=pieces.append) == answer
    assert answer.startswith("".join(pieces)) and answer.removeprefix("".join(pieces)).strip("\ufffd") == ""
    assert run.prompt_tokens([*turn, {"role": "assistant", "content": answer}, *turn]) > run.prompt_tokens(turn) > 5
    assert run.context == run.base.spec.max_positions
    with pytest.raises(GraftuneError, match="a prompt has 300 tokens"):
        run.generate("x" * 300)
