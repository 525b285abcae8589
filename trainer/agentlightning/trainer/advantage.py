"""Advantages: how much better a rollout did than the others of its group.

Estimators work on the values of one group, one per rollout, so neither the number of a rollout's samples nor their
lengths weigh. `score` joins credit and estimator and spreads the result over the sampled tokens.

| estimator | formula | source |
|---|---|---|
| `dr_grpo` (default) | r_i − mean | Liu et al. 2025, arXiv 2503.20783 |
| `grpo` | (r_i − mean)/(std + 1e-6), std with n − 1 | Shao et al. 2024, arXiv 2402.03300 |
| `rloo` | n/(n−1)·(r_i − mean) = r_i − mean of the others | Ahmadian et al. 2024, arXiv 2402.14740 |
| `reinforce` | r_i | Williams 1992 |
| `reinforce++` | r_i; the learner adds −β·k1 per token and whitens over all sampled tokens | Hu 2025, arXiv 2501.03262 |
| `reinforce++-baseline` | r_i − mean, divided by the deviation over the batch | the same |

A group of one, or one whose rewards are all equal, says nothing: every estimator with a baseline gives exactly 0.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from agentlightning.proto.errors import ConfigError, nearest
from agentlightning.trainer.credit import Credit, CreditSettings, Outcome, Step, assign
from agentlightning.trainer.samples import Sample, SampleSet

__all__ = [
    "AdvantageSettings",
    "CreditSettings",
    "Estimator",
    "GroupStats",
    "Outcome",
    "Scored",
    "carry_back",
    "estimate",
    "score",
    "whiten",
]

Estimator = Literal["dr_grpo", "grpo", "rloo", "reinforce", "reinforce++", "reinforce++-baseline"]
Floats = npt.NDArray[np.float64]
TokenFloats = npt.NDArray[np.float32]

POLICY_CAUSES = frozenset({"agent_error", "timeout", "context_overflow"})
"""Causes of failure that a policy can be blamed for. The others never enter a group's statistics."""


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    estimator: Estimator = "dr_grpo"
    scored_causes: tuple[str, ...] = ()
    """Failed rollouts that are scored all the same, by cause: agent_error, timeout, context_overflow."""

    def __post_init__(self) -> None:
        if self.estimator not in get_args(Estimator):
            names = get_args(Estimator)
            raise ConfigError(
                f"There is no advantage estimator {self.estimator!r}.{nearest(self.estimator, names)}"
            )
        for cause in self.scored_causes:
            if cause not in POLICY_CAUSES:
                raise ConfigError(
                    f"Rollouts that failed with cause {cause!r} cannot be scored.{nearest(cause, POLICY_CAUSES)}"
                )


@dataclass(frozen=True, slots=True)
class GroupStats:
    """The rewards of a group's scored rollouts."""

    group_id: str
    rollouts: int
    mean: float
    std: float
    zero_variance: bool
    """All advantages are 0: the group teaches nothing and is worth a refill."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Samples ready to be trained, with an advantage per token."""

    samples: tuple[Sample, ...]
    advantages: tuple[TokenFloats, ...]
    """Parallel to `samples`; each parallel to the sample's tokens, 0 where the mask is false."""
    groups: tuple[GroupStats, ...]
    refused_rollouts: Counter[str] = field(default_factory=Counter)
    tokens_left_out: Counter[str] = field(default_factory=Counter)
    """By reason; those that merging had left out included."""


def score(
    sample_set: SampleSet,
    outcomes: Iterable[Outcome],
    *,
    credit: CreditSettings | None = None,
    advantage: AdvantageSettings | None = None,
) -> Scored:
    """Credit, then advantage over groups, then one number per sampled token.

    A rollout that failed for a cause that is not scored, or whose reward is missing or not finite, is refused: it
    changes no statistics and its tokens are left out, counted.
    """
    credit, advantage = credit or CreditSettings(), advantage or AdvantageSettings()
    steps = _steps(sample_set)
    credits: dict[str, list[Credit]] = {}
    groups: dict[str, str] = {}
    rewards: dict[str, float] = {}
    refused: dict[str, str] = {}
    for outcome in sorted(outcomes, key=lambda o: o.rollout_id):
        assigned = _refusal(outcome, advantage) or assign(credit, outcome, steps.get(outcome.rollout_id, ()))
        if isinstance(assigned, str):
            refused[outcome.rollout_id] = assigned
            continue
        credits[outcome.rollout_id] = assigned
        # A rollout that nobody grouped is a group of its own.
        groups[outcome.rollout_id] = outcome.rollout_id if outcome.group_id is None else outcome.group_id
        if outcome.reward is not None:
            rewards[outcome.rollout_id] = outcome.reward
    per_call, with_signal = _per_call(credits, groups, advantage.estimator)
    samples, advantages, left_out = [], [], Counter(sample_set.tokens_left_out)
    for sample in sample_set.samples:
        if sample.rollout_id not in credits:
            left_out[refused.get(sample.rollout_id, "no_outcome")] += sample.trained
            continue
        samples.append(sample)
        advantages.append(_spread(sample, per_call))
    refusals = Counter(refused.values())
    refusals["no_outcome"] += len(
        {s.rollout_id for s in sample_set.samples} - credits.keys() - refused.keys()
    )
    return Scored(
        samples=tuple(samples),
        advantages=tuple(advantages),
        groups=tuple(_statistics(groups, rewards, with_signal)),
        refused_rollouts=+refusals,
        tokens_left_out=+left_out,
    )


def estimate(estimator: Estimator, values: Floats, groups: npt.NDArray[np.int64]) -> Floats:
    """Advantages of a batch: one value per rollout, and the number of its group."""
    result = np.zeros(len(values))
    # Sorted within the group, so that the order of rows cannot change a rounding.
    for group in np.unique(groups):
        rows = np.nonzero(groups == group)[0]
        rows = rows[np.argsort(values[rows], kind="stable")]
        result[rows] = _ESTIMATORS[estimator](values[rows])
    if estimator == "reinforce++-baseline":
        # Each group's mean is 0 already: only the scale is left to whiten, and 0 stays exactly 0.
        return result / (np.sqrt(np.mean(np.sort(result**2))) + 1e-8) if len(result) else result
    return result


def carry_back(
    samples: Sequence[Sample], token_rewards: Sequence[TokenFloats], *, gamma: float = 1.0
) -> list[TokenFloats]:
    """Returns of token rewards: what each sampled token and those sampled after it in its rollout earned.

    Carried from call to call through the observations in between, across a rollout's samples.
    """
    returns = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
    rollouts: dict[str, list[tuple[int, str, int, int, int]]] = {}
    for i, sample in enumerate(samples):
        for segment in sample.segments:
            place = (segment.seq, segment.call_id, i, segment.start, segment.end)
            rollouts.setdefault(sample.rollout_id, []).append(place)
    for places in rollouts.values():
        carried = 0.0
        for _, _, i, start, end in sorted(places, reverse=True):
            for t in range(end - 1, start - 1, -1):
                carried = float(token_rewards[i][t]) + gamma * carried
                returns[i][t] = carried
    return returns


def whiten(samples: Sequence[Sample], advantages: Sequence[TokenFloats]) -> list[TokenFloats]:
    """Mean 0 and deviation 1 over all sampled tokens of the batch; all 0 if they are all the same."""
    if not samples:
        return []
    values = np.sort(
        np.concatenate([a[s.mask] for s, a in zip(samples, advantages, strict=True)]).astype(np.float64)
    )
    if not values.size or values[0] == values[-1]:
        return [np.zeros_like(a) for a in advantages]
    mean, deviation = values.mean(), values.std() + 1e-8
    whitened = [((a - mean) / deviation).astype(np.float32) for a in advantages]
    return [np.where(s.mask, a, np.float32(0)) for s, a in zip(samples, whitened, strict=True)]


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


def _refusal(outcome: Outcome, settings: AdvantageSettings) -> str | None:
    if outcome.state == "succeeded":
        return None
    if outcome.cause in settings.scored_causes:
        return None
    return outcome.cause or outcome.state


def _steps(sample_set: SampleSet) -> dict[str, list[Step]]:
    """The calls of each rollout that are trained or judged, in order."""
    calls: dict[str, dict[tuple[int, str], Step]] = {}
    for sample in sample_set.samples:
        for segment in sample.segments:
            of = calls.setdefault(sample.rollout_id, {})
            of[segment.seq, segment.call_id] = Step(segment.call_id, segment.agent)
    for rollout_id, judged in sample_set.call_rewards.items():
        of = calls.setdefault(rollout_id, {})
        for call in judged:
            step = of.get((call.seq, call.call_id), Step(call.call_id, trained=False))
            of[call.seq, call.call_id] = Step(step.call_id, step.agent, call.reward, step.trained)
    return {rollout_id: [of[key] for key in sorted(of)] for rollout_id, of in calls.items()}


def _per_call(
    credits: Mapping[str, Sequence[Credit]], groups: Mapping[str, str], estimator: Estimator
) -> tuple[dict[tuple[str, str], float], set[str]]:
    """The advantage of each call, and the groups that have one other than 0."""
    entries = [(rollout_id, credit) for rollout_id, of in credits.items() for credit in of]
    numbers: dict[tuple[str, str], int] = {}
    slots = [numbers.setdefault((groups[r], credit.slot), len(numbers)) for r, credit in entries]
    values = np.array([credit.value for _, credit in entries], np.float64)
    advantages = estimate(estimator, values, np.array(slots, np.int64))
    per_call: dict[tuple[str, str], float] = {}
    with_signal = set()
    for (rollout_id, credit), value in zip(entries, advantages.tolist(), strict=True):
        if value:
            with_signal.add(groups[rollout_id])
        for call_id in credit.call_ids:
            per_call[rollout_id, call_id] = value
    return per_call, with_signal


def _spread(sample: Sample, per_call: Mapping[tuple[str, str], float]) -> TokenFloats:
    advantages = np.zeros(len(sample.token_ids), np.float32)
    for segment in sample.segments:
        advantages[segment.start : segment.end] = per_call.get((sample.rollout_id, segment.call_id), 0.0)
    return advantages


def _statistics(
    groups: Mapping[str, str], rewards: Mapping[str, float], with_signal: set[str]
) -> list[GroupStats]:
    members: dict[str, list[str]] = {}
    for rollout_id, group_id in groups.items():
        members.setdefault(group_id, []).append(rollout_id)
    statistics = []
    for group_id in sorted(members):
        values = np.sort([rewards[r] for r in members[group_id] if r in rewards])
        mean, std = (float(values.mean()), float(values.std())) if values.size else (0.0, 0.0)
        statistics.append(
            GroupStats(group_id, len(members[group_id]), mean, std, group_id not in with_signal)
        )
    return statistics
