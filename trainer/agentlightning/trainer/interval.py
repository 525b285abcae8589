"""Confidence intervals of mean rewards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Interval", "mean_interval"]

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % confidence interval over `n` independent rollouts."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(rewards: Sequence[float]) -> Interval:
    """95 % interval of the mean.

    For rewards within [0, 1] the Wilson score interval (Wilson 1927): exact in spirit for successes,
    conservative for partial credit, because no variable on [0, 1] with that mean varies more than a coin;
    it stays sensible where all rewards are equal. For other ranges the normal interval.
    """
    n = len(rewards)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(rewards) / n
    if min(rewards) >= 0.0 and max(rewards) <= 1.0:
        centre = (mean + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
        half = Z95 * math.sqrt(mean * (1 - mean) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
        return Interval(mean, min(centre - half, mean), max(centre + half, mean), n)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / max(n - 1, 1)
    half = Z95 * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n)
