"""How a product's algorithm is chosen, with a library that is not there: asked twice, timed, where long under load."""

from __future__ import annotations

import itertools

import pytest
import torch

from graftune.kernels.matmul import cublaslt

NONE = 15


class Library:
    """Algorithms by the workspace they need; None: the library says that it has none of that kind."""

    def __init__(self, with_space: list[int], without: list[int] | None, version: int = 130000):
        self.offers, self.most, self.version = {cublaslt.WORKSPACE: with_space, 0: without}, -1, version

    def cublasLtGetVersion(self):
        return self.version

    def cublasLtMatmulAlgoCheck(self, *words):
        *_, algo, found = words
        known = algo._obj[0] in [number for offer in self.offers.values() for number in offer or ()]
        found._obj.state, found._obj.workspace = 0, cublaslt.WORKSPACE
        return 0 if known else NONE

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        if attribute == cublaslt.PREF_WORKSPACE:
            self.most = value._obj.value
        if attribute == cublaslt.PREF_REDUCTION:
            self.reduction = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *words):
        *_, found, count = words
        assert self.reduction == 3, "parts of a sum are not to be added in 16 bits"
        offered = self.offers[self.most]
        if offered is None:
            return NONE
        for place, number in zip(found, offered, strict=False):
            place.algo[0], place.workspace, place.state = number, self.most, 0
        count._obj.value = len(offered)
        return 0

    def __getattr__(self, name):
        return lambda *words: 0


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """asked(library, alone, loaded) -> the number of the algorithm chosen; times in milliseconds, by number."""

    counter = itertools.count()
    # The same tensors every time: how they are aligned is a part of the product.
    a, b, out = torch.ones(4, 8).bfloat16(), torch.ones(8, 4).bfloat16(), torch.ones(4, 4).bfloat16()

    def ask(library: Library, alone: dict[int, float], loaded: dict[int, float] | None = None, cache: str = "") -> int:
        monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / (cache or str(next(counter)))))

        def under_load(plans, operands, about):
            assert loaded is not None, "timed under load, and should not be"
            return [loaded[plan.algorithm.algo[0]] for plan in plans]

        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
        monkeypatch.setattr(cublaslt, "_library", lambda: library)
        monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
        monkeypatch.setattr(cublaslt, "flush_bytes", lambda device: 1)
        monkeypatch.setattr(cublaslt, "_time", lambda plan, *rest: alone[plan.algorithm.algo[0]])
        monkeypatch.setattr(cublaslt, "_under_load", under_load)
        operands = cublaslt.Operands(a, b, out)
        plan = cublaslt._fastest(cublaslt._shape(operands), operands)
        return int(plan.algorithm.algo[0])

    return ask


def test_the_fastest_of_both_kinds(asked):
    assert asked(Library([1, 2], [3]), {1: 0.05, 2: 0.04, 3: 0.037}) == 3
    assert asked(Library([1, 2], [3]), {1: 0.05, 2: 0.03, 3: 0.047}) == 2
    assert asked(Library([1, 2], None), {1: 0.05, 2: 0.04}) == 2
    assert asked(Library([1, 2], [2]), {1: 0.05, 2: 0.04}) == 2


def test_those_that_refuse_are_left_out(asked):
    assert asked(Library([1, 2], []), {1: float("inf"), 2: 0.04}) == 2
    with pytest.raises(Exception, match="no algorithm"):
        asked(Library([1], None), {1: float("inf")})
    with pytest.raises(Exception, match="no algorithm"):
        asked(Library([], None), {})


def test_long_products_are_timed_under_load(asked):
    alone = {1: 2.80, 2: 2.70, 3: 2.75, 4: 9.0}
    assert asked(Library([1, 2, 3, 4], None), alone, {1: 2.9, 2: 3.1, 3: 2.8}) == 3
    assert asked(Library([1, 4], None), alone) == 1  # no other one is near


def test_a_choice_is_remembered(asked, tmp_path):
    assert asked(Library([1, 2], [3]), {1: 0.05, 2: 0.03, 3: 0.06}, cache="same") == 2
    never: dict[int, float] = {}
    assert asked(Library([1, 2], [3]), never, cache="same") == 2
    # Not for another version of the library, nor where the library no longer takes it, nor from a damaged file.
    assert asked(Library([1, 2], [3], version=130100), {1: 0.01, 2: 0.03, 3: 0.06}, cache="same") == 1
    assert asked(Library([1], [3]), {1: 0.05, 3: 0.04}, cache="same") == 3
    (tmp_path / "same" / "products.json").write_text('{"5|a card|130000": "no"}')
    assert asked(Library([1, 2], [3]), {1: 0.05, 2: 0.03, 3: 0.06}, cache="same") == 2
    stored = (tmp_path / "same" / "products.json").read_text()
    (tmp_path / "same" / "products.json").write_text(stored.replace("0200", "zz00"))
    assert asked(Library([1, 2], [3]), {1: 0.01, 2: 0.03, 3: 0.06}, cache="same") == 1


@pytest.fixture
def tiled(monkeypatch, tmp_path):
    """tiled(times, writes, offers, scales) -> (number, tile, way) chosen, and how many variants were made. Tiles by
    their times; what those in `writes` do to the result, the others fill it with ones; the offers have tile 0."""

    def ask(times, writes, offers=(7,), scaled=True):
        made = []

        class Tiled(Library):
            def cublasLtMatmulAlgoConfigSetAttribute(self, algo, place, value, size):
                algo._obj[place] = value._obj.value
                made.append(value._obj.value)
                return 0

            def cublasLtMatmulAlgoCheck(self, *words):
                *_, algo, found = words
                found._obj.state, found._obj.workspace = 0, 0
                return 0 if algo._obj[cublaslt.CONFIG_TILE] in times else NONE

        def time(plan, operands, *rest):
            algo = plan.algorithm.algo
            tile = algo[cublaslt.CONFIG_TILE] or -algo[0]
            writes.get(tile, lambda out: out.fill_(1.0))(operands.out)
            return times[tile if tile in times else 0] + 0.001 * algo[cublaslt.CONFIG_CUSTOM]

        monkeypatch.setenv("GRAFTUNE_CACHE", str(tmp_path / str(len(list(tmp_path.iterdir())))))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
        library = Tiled(list(offers), None)
        monkeypatch.setattr(cublaslt, "_library", lambda: library)
        monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
        monkeypatch.setattr(cublaslt, "flush_bytes", lambda device: 1)
        monkeypatch.setattr(cublaslt, "_time", time)
        kind = torch.float8_e4m3fn if scaled else torch.bfloat16
        codes, scale = torch.ones(40, 40).to(kind), torch.ones(40)
        operands = cublaslt.Operands(
            codes, codes.t(), torch.empty(40, 40).bfloat16(), (scale, scale) if scaled else None
        )
        algo = cublaslt._fastest(cublaslt._shape(operands), operands).algorithm.algo
        return (algo[0], algo[cublaslt.CONFIG_TILE], algo[cublaslt.CONFIG_CUSTOM]), len(made)

    return ask


NEAR, WRONG = cublaslt.TILES[1:3]


def test_codes_have_variants(tiled):
    """The one algorithm that is offered for codes is tried with other tiles, those that the library takes."""
    chosen, made = tiled({0: 0.04, NEAR: 0.03}, {})
    assert chosen == (7, NEAR, 0) and made == 2 * len(cublaslt.TILES) * len(cublaslt.CUSTOM_OPTIONS)
    assert tiled({0: 0.04, NEAR: 0.09}, {})[0] == (7, 0, 0)
    assert tiled({0: 0.04, NEAR: 0.03}, {}, scaled=False) == ((7, 0, 0), 0), "other products have none"


@pytest.mark.parametrize(
    "writes",
    [
        lambda out: out.fill_(1.5),
        lambda out: None,  # and what was there before is right
        lambda out: out[:20].fill_(1.0),
        lambda out: out.fill_(float("nan")),
    ],
)
def test_a_variant_has_to_be_right(tiled, writes):
    assert tiled({0: 0.04, NEAR: 0.03, WRONG: 0.01}, {WRONG: writes})[0] == (7, NEAR, 0)


def test_where_nothing_tells_right_from_wrong_the_offer_stands(tiled):
    zeros = {tile: lambda out: out.zero_() for tile in (-7, NEAR)}
    assert tiled({0: 0.04, NEAR: 0.03}, zeros)[0] == (7, 0, 0)
