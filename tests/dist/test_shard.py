"""A frozen base that lies elsewhere than on the device: in parts on two ranks, or in host memory. What is computed is
what a resident base computes, to the bit; a rank keeps about its share."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from graftune.session import open_session
from tests.dist import sharded
from tests.support import quantised


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    sharded.write_models(path)
    return path


@pytest.fixture(scope="module")
def ranks(folder, launcher):
    """What two ranks found, in one pair of processes for all cases."""
    ended = launcher.run(2, folder, module="tests.dist.sharded")
    assert ended.codes == [0, 0], ended.said
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def resident(folder):
    """case -> what a resident base gives, and the bytes of its frozen weights."""
    known = {}

    def find(case):
        if case not in known:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            ours = sharded.made(folder, case, None)
            known[case] = sharded.results(ours, case), quantised.frozen_bytes(ours.decoder)
            torch.set_num_threads(threads)
        return known[case]

    return find


def same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
    assert want["gradients full"].abs().amax() > 0


@pytest.mark.parametrize("case", sharded.CASES)
def test_two_ranks_compute_what_one_does(case, folder, ranks, resident):
    for rank in range(2):
        same(load_file(folder / f"{case}-{rank}.safetensors"), resident(case)[0])


@pytest.mark.parametrize("case", sharded.CASES)
def test_a_rank_holds_its_share(case, ranks, resident):
    whole = resident(case)[1]
    for facts in ranks:
        assert 0.5 * whole <= facts[case]["kept"] + facts[case]["buffers"] <= 0.6 * whole


def test_a_session_of_two_ranks_divides_its_base(ranks, folder):
    """Opened from settings: loss and text are what a session with a resident base gives, on both ranks."""
    with open_session(sharded.settings(folder)) as session:
        want = sharded.said(session)
    for rank in range(2):
        found = json.loads((folder / f"session-{rank}.json").read_text())
        assert found.pop("held") == "fp32, in equal parts on 2 ranks (as set)"
        assert found == want
