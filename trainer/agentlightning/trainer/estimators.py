"""Estimators: the values of a group against each other.

Pure functions of one value per rollout (or per call) and the number of its group. A group of one, or one whose values are
all equal, says nothing: every estimator with a baseline gives exactly 0.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["estimate"]

Floats = npt.NDArray[np.float64]


def estimate(estimator: str, values: Floats, groups: npt.NDArray[np.int64]) -> Floats:
    """Advantages of a batch; `estimator` is one of those in `advantage` that work on single values."""
    result = np.zeros(len(values))
    if not len(values):
        return result
    # Sorted within the group, so that the order of rows cannot change a rounding.
    order = np.lexsort((values, groups))
    starts = np.nonzero(np.diff(groups[order]))[0] + 1
    for rows in np.split(order, starts):
        result[rows] = _ESTIMATORS[estimator](values[rows])
    if estimator == "reinforce++-baseline":
        # Each group's mean is 0 already: only the scale is left to whiten, and 0 stays exactly 0.
        result = result / (np.sqrt(np.mean(np.sort(result**2))) + 1e-8)
    return result


def _no_signal(values: Floats) -> bool:
    return len(values) < 2 or values[0] == values[-1]  # sorted


def _dr_grpo(values: Floats) -> Floats:
    return np.zeros_like(values) if _no_signal(values) else values - values.mean()


def _grpo(values: Floats) -> Floats:
    return (
        np.zeros_like(values)
        if _no_signal(values)
        else (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    )


def _rloo(values: Floats) -> Floats:
    n = len(values)
    return np.zeros_like(values) if _no_signal(values) else (values - values.mean()) * n / (n - 1)


_ESTIMATORS: dict[str, Callable[[Floats], Floats]] = {
    "dr_grpo": _dr_grpo,
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce": np.copy,
    "reinforce++": np.copy,
    "reinforce++-baseline": _dr_grpo,
}
