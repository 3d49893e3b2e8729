"""Real runs on one GPU: two share it within their plans, a third waits and then runs."""

from __future__ import annotations

import pytest
import torch

from graftune.runtime import device_uuid
from tests.training.test_reserve import check_sharing

pytestmark = pytest.mark.gpu


def test_two_runs_share_a_gpu_and_a_third_waits(tiny_folder, tmp_path) -> None:
    found = check_sharing("cuda", tiny_folder("llama"), tmp_path)
    uuid = device_uuid(torch.device("cuda", 0))
    assert uuid.startswith(("GPU-", "MIG-")) and {entry["device"] for entry in found["entries"]} == {uuid}
    for run in found["runs"].values():
        assert 0 < run["peak_device_memory"] <= run["needed"], "within its plan"
    first, second, _ = found["entries"]
    print(f"planned {first['planned']} and {second['planned']}, measured {first['measured']} and {second['measured']}")
