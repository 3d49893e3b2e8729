"""Generated text three ways: over the key cache, by the plain forward over the whole text, and by transformers.

The models are tiny and random: their texts mean nothing, but are sure enough to be equal to the token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graftune
from graftune.errors import GraftuneError
from graftune.infer import generate as generating
from graftune.infer.cache import Cache, CacheSize, Decode, Prefill
from graftune.infer.generate import TokenStep, in_groups
from graftune.infer.sample import Sampling
from graftune.kernels import draw
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
    ("final_lengths", "capacity", "groups"),
    [
        ([], 10, []),
        ([4, 4, 4], 12, [[0, 1, 2]]),
        ([4, 4, 4], 11, [[0, 1], [2]]),
        ([2, 2, 9, 2], 10, [[0, 1], [2], [3]]),  # a cache is as long as its longest
        ([30, 5], 10, [[0], [1]]),  # one has to go by itself
    ],
)
def test_as_many_prompts_together_as_fit_the_cache(
    final_lengths: list[int], capacity: int, groups: list[list[int]]
) -> None:
    plain = CacheSize.of(quantised.spec(), torch.float32)
    assert plain == (0, plain.per_token, plain.per_token), "attention everywhere keeps something per token alone"
    assert in_groups(final_lengths, capacity, plain) == groups


def test_a_state_per_sequence_counts() -> None:
    """Many short prompts over layers that keep a state of each, however short it is."""
    size = CacheSize(per_sequence=80, per_token=5, most_per_token=20)  # one layer of four keeps keys and values
    assert in_groups([2] * 9, 20, size) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert in_groups([2] * 9, 20, size._replace(per_sequence=0)) == [list(range(9))]
    assert in_groups([2, 24, 2], 20, size) == [[0, 1], [2]], "200 bytes each, of 400"


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixers_say_what_their_cache_takes(family: str, dtype: torch.dtype) -> None:
    spec = from_config(tiny.hf_config(family).to_dict(), "x")
    cache = Cache(spec, [3, 5], 11, torch.device("cpu"), dtype)
    taken = sum(held.nbytes for layer in cache.layers for held in vars(layer).values())
    size = CacheSize.of(spec, dtype)
    assert taken == size.bytes(2, 11) and (size.per_sequence > 0) == (family in ("lfm2", "lfm3", "qwen3_5"))


def without_cache(
    found: oracle.Ours, text: list[int], start: int, sampling: Sampling, adapted: bool = True
) -> list[int]:
    """What generate should say after each of the text's tokens from `start` on, by one forward over the whole text."""
    logits, at = found.logits([text[:-1]], adapted=adapted)[start - 1 :], torch.arange(start, len(text))
    return draw.draw(logits, sampling.mode, sampling.settings(logits.device), at * 0, at).tokens.tolist()


def test_cached_logits_equal_the_whole_texts(ours: oracle.Ours) -> None:
    """Random texts, token by token over the cache, some leaving it on the way."""
    texts = [torch.randint(3, tiny.VOCAB, (n,)).tolist() for n in (14, 9, 22, 11)]
    starts = [3, 1, 12, 2]
    decoder = ours.decoder
    want = [ours.logits([text]) for text in texts]
    cache = Cache(decoder.spec, starts, 22, decoder.device, decoder.compute)
    for layer in cache.layers:
        for stored in vars(layer).values():
            stored.fill_(1e4)  # what was never written must not be seen
    with torch.no_grad():
        packed = torch.tensor([t for text, n in zip(texts, starts, strict=True) for t in text[:n]])
        positions = torch.cat([torch.arange(n) for n in starts])
        x = decoder.hidden(packed, decoder.begin(positions, Prefill(cache, tuple(starts))))
        alive = list(range(4))
        last = torch.tensor(starts).cumsum(0) - 1
        rows = decoder.logits(x.index_select(0, last))
        for step in range(22):
            for row, index in zip(rows, alive, strict=True):
                assert (row - want[index][starts[index] + step - 1]).abs().max() < 1e-4
            going = [i for i, index in enumerate(alive) if starts[index] + step < len(texts[index])]
            if not going:
                break
            alive = [alive[i] for i in going]
            cache.keep(torch.tensor(going))
            tokens = torch.tensor([texts[index][starts[index] + step] for index in alive])
            rows = decoder.logits(decoder.hidden(tokens, decoder.begin(cache.lengths, Decode(cache))))
            cache.lengths += 1
    assert step == max(len(text) - n for text, n in zip(texts, starts, strict=True))


@KINDS
def test_prompts_together_equal_one_by_one(ours: oracle.Ours) -> None:
    """Some end early, at a stop token, and leave the batch."""
    alone = [greedy(ours, [p], 12)[0] for p in PROMPTS]
    assert greedy(ours, PROMPTS, 12) == alone
    stops = (alone[0][3], alone[2][7])
    together = greedy(ours, PROMPTS, 12, stops)
    assert together == [greedy(ours, [p], 12, stops)[0] for p in PROMPTS]
    cut = [next((i for i, t in enumerate(a) if t in stops), 12) for a in alone]
    assert together == [a[:n] for a, n in zip(alone, cut, strict=True)] and min(cut) < 12


class Fixed(TokenStep):
    """The step as it is captured on CUDA: ended sequences stay in the batch, and their results are not read."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options | {"fixed": True})


@KINDS
def test_a_step_of_fixed_shape_gives_the_same_text(ours: oracle.Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some end early, at a stop token or at their context's end, and the others do not notice."""
    long = [3 + i % 200 for i in range(250)]
    stops = tuple(answer[3] for answer in greedy(ours, PROMPTS[:2], 12))
    hot = Sampling(max_new_tokens=12, temperature=4.0, seed=3)

    def texts() -> list[Any]:
        drawn = generate(ours.decoder, PROMPTS, hot, stops)
        return [greedy(ours, PROMPTS, 12, stops), greedy(ours, [long, PROMPTS[0]], 20), drawn]

    want = texts()
    monkeypatch.setattr(generating, "TokenStep", Fixed)
    assert texts() == want
    assert len({len(answer) for answer in want[0]}) > 1, "some ended early"


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
