"""The short form of `make torture`."""

from pathlib import Path

import pytest
from torture import torture


@pytest.mark.slow
def test_twenty_kills_lose_no_acknowledged_span_and_double_none(tmp_path: Path) -> None:
    outcome = torture(tmp_path, kills=20, seed=7)
    assert sum(outcome.kills.values()) == 20
    assert min(outcome.kills["receiver"], outcome.kills["converter"]) > 0
    assert outcome.acknowledged == 480
    assert (outcome.lost, outcome.doubled) == ([], [])
