"""What the launcher's environment says of this process."""

from __future__ import annotations

import pytest

from graftune.errors import GraftuneError
from graftune.ranks import from_environment

TORCHRUN = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"},
    **{"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"},
    "TORCHELASTIC_MAX_RESTARTS": "3",
}


def test_torchrun_is_understood():
    found = from_environment(TORCHRUN)
    assert found is not None and (found.rank, found.size, found.local_rank, found.local_size) == (3, 4, 1, 2)
    assert (found.host, found.port, found.agent_store) == ("node0", 29500, True)
    assert (found.restarts, found.max_restarts) == (2, 3)
    assert not found.leads


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}])
def test_a_process_that_nobody_launched_is_alone(environment):
    assert from_environment(environment) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"LOCAL_RANK": "2"}, "on this machine 2 of 2"),
    ],
)
def test_half_an_environment_is_refused(change, said):
    with pytest.raises(GraftuneError, match=said):
        from_environment({**TORCHRUN, **change})
