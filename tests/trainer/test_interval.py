import math
import random

import pytest

from agentlightning.trainer.interval import mean_interval


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = random.Random(0)
    for truth in (0.1, 0.5, 0.9):
        covered = 0
        for _ in range(2000):
            interval = mean_interval([float(rng.random() < truth) for _ in range(64)])
            covered += interval.low <= truth <= interval.high
        assert covered / 2000 > 0.93


def test_equal_rewards_still_leave_doubt() -> None:
    interval = mean_interval([1.0] * 50)
    assert interval.mean == interval.high == 1.0
    assert 0.9 < interval.low < 0.95


def test_rewards_outside_the_unit_interval_get_the_normal_interval() -> None:
    interval = mean_interval([-1.0, 0.0, 1.0, 2.0])
    assert interval.mean == 0.5
    assert interval.high - interval.mean == pytest.approx(1.96 * math.sqrt(5 / 3 / 4), rel=1e-3)


def test_no_rewards_give_no_number() -> None:
    assert math.isnan(mean_interval([]).mean)
