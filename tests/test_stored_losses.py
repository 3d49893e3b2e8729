"""The first hundred losses of five small runs equal the stored ones (support/stored.py): within 1e-5 everywhere, and
to the bit on the kind of machine that stored them. What was checked is said at the end of the tests.

After a change that is meant to move them: OMP_NUM_THREADS=1 python tools/store_losses.py "why"
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tools import store_losses

from tests.support import stored


@pytest.mark.parametrize("name", stored.CASES)
def test_losses_are_those_that_are_stored(name: str, record_property: Callable[[str, object], None]) -> None:
    kept, here = stored.record(name), stored.machine()
    got = stored.CASES[name]()
    other = [f"{key} {value} instead of {kept[key]}" for key, value in here.items() if kept[key] != value]
    off, step = stored.worst(got, kept["losses"])
    how = f"within {stored.NEAR:g} (off by {off:.1e} at most; {', '.join(other)})" if other else "to the bit"
    record_property("said", f"stored losses, {name}: compared {how}")
    assert off <= stored.NEAR, f"step {step} is off by {off:.1e}; if it is meant to be: tools/store_losses.py"
    assert other or got == kept["losses"], (
        f"step {step} is off by {off:.1e}; if it is meant to be: tools/store_losses.py"
    )
    assert len(got) == 100 and got[-1] < got[0] and len(kept["why"]) >= store_losses.SHORTEST


def test_a_reason_is_demanded(capsys: pytest.CaptureFixture[str]) -> None:
    assert [store_losses.main(words) for words in ([], [" "], ["dense"], ["a reason of some length", "sparse"])] == [
        2
    ] * 4
    assert capsys.readouterr().out.count("say why") == 4
