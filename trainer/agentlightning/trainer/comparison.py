"""Two evaluations of the same held-out tasks, compared task by task.

A task that is hard is hard in both: what counts is each task's difference, which varies less than the tasks do. The interval
is over tasks, one rollout each.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentlightning.trainer.credit import Outcome
from agentlightning.trainer.interval import Z95, Interval

__all__ = ["compare_evaluations", "paired_difference", "task_rewards"]

POLICY_CAUSES = frozenset({"agent_error", "timeout", "context_overflow"})


def task_rewards(outcomes: Iterable[Outcome], groups: Sequence[str]) -> list[float | None]:
    """The reward of each group's one rollout; 0 where the policy made it fail, None where the infrastructure did."""
    rewards: dict[str | None, float] = {}
    for outcome in outcomes:
        if outcome.state == "succeeded" and outcome.reward is not None:
            rewards[outcome.group_id] = outcome.reward
        elif outcome.state == "failed" and outcome.cause in POLICY_CAUSES:
            rewards[outcome.group_id] = 0.0
    return [rewards.get(group) for group in groups]


def compare_evaluations(first: Mapping[str, Any], last: Mapping[str, Any]) -> Interval | None:
    """How much the reward of the same tasks has risen between two `evaluate` events; None if no task is in both."""
    pairs = zip(first.get("rewards") or (), last.get("rewards") or (), strict=False)
    both = [(before, after) for before, after in pairs if before is not None and after is not None]
    return paired_difference(both) if both else None


def paired_difference(pairs: Sequence[tuple[float, float]]) -> Interval:
    """95 % interval of the mean of after − before.

    For rewards within [0, 1] the adjusted Wald interval of Agresti and Min (2005): half a pair of each sort is added, so it
    keeps its width where all differences are equal. For other ranges the normal interval.
    """
    n = len(pairs)
    differences = [after - before for before, after in pairs]
    mean = math.fsum(differences) / n
    if all(0.0 <= value <= 1.0 for pair in pairs for value in pair):
        centre = math.fsum(differences) / (n + 2)
        variance = (math.fsum(d * d for d in differences) + 1) / (n + 2) - centre**2
        half = Z95 * math.sqrt(variance / (n + 2))
        return Interval(mean, min(mean, max(-1.0, centre - half)), max(mean, min(1.0, centre + half)), n)
    if n < 2:
        return Interval(mean, -math.inf, math.inf, n)
    half = Z95 * math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1) / n)
    return Interval(mean, mean - half, mean + half, n)
