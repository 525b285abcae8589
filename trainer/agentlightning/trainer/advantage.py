"""Advantages: how much better a rollout did than the others of its group.

Estimators work on one value per rollout, so neither the number of a rollout's samples nor their lengths weigh. `score`
joins credit and estimator and spreads the result over the sampled tokens.

| estimator | formula | source |
|---|---|---|
| `dr_grpo` (default) | r_i − mean | Liu et al. 2025, arXiv 2503.20783 |
| `grpo` | (r_i − mean)/(std + 1e-6), std with n − 1 | Shao et al. 2024, arXiv 2402.03300 |
| `rloo` | n/(n−1)·(r_i − mean) = r_i − mean of the others | Ahmadian et al. 2024, arXiv 2402.14740 |
| `reinforce` | r_i | Williams 1992 |
| `reinforce++` | r_i; the learner adds −β·k1 per token and whitens over all sampled tokens | Hu 2025, arXiv 2501.03262 |
| `reinforce++-baseline` | r_i − mean, divided by the deviation over the batch | the same |
| `gae` | the learner's: δ_t = R_t + γV_{t'} − V_t, A_t = δ_t + γλA_{t'}, then whitened | PPO, arXiv 1707.06347; `value` |
| `gigpo` | r_i − mean, plus ω·(return − mean over the calls made in the same state) | arXiv 2505.10978; `states` |
| `tree` | V(node) − V(parent), V the mean reward of the rollouts below | `states` |

Every estimator with a baseline gives a group of one, or one whose rewards are all equal, exactly 0.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from agentlightning.proto.errors import ConfigError, nearest
from agentlightning.trainer.credit import Credit, CreditSettings, Outcome, Step, assign
from agentlightning.trainer.estimators import Floats, estimate
from agentlightning.trainer.returns import last_tokens
from agentlightning.trainer.samples import Sample, SampleSet
from agentlightning.trainer.states import Anchor, anchors, tree_advantages, visits

__all__ = [
    "BASELINED",
    "AdvantageSettings",
    "CreditSettings",
    "Estimator",
    "GroupStats",
    "Outcome",
    "Scored",
    "check_credit",
    "score",
]

Estimator = Literal[
    "dr_grpo", "grpo", "rloo", "reinforce", "reinforce++", "reinforce++-baseline", "gae", "gigpo", "tree"
]
TokenFloats = npt.NDArray[np.float32]

BASELINED = frozenset({"dr_grpo", "grpo", "rloo", "reinforce++-baseline", "gigpo", "tree"})
"""Estimators that compare the rollouts of a group with each other."""
POLICY_CAUSES = frozenset({"agent_error", "timeout", "context_overflow"})
"""Causes of failure that a policy can be blamed for. The others never enter a group's statistics."""


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    estimator: Estimator = "dr_grpo"
    scored_causes: tuple[str, ...] = ()
    """Failed rollouts that are scored all the same, by cause: agent_error, timeout, context_overflow."""
    omega: float = 1.0
    """Weight of the state's part of `gigpo`."""
    anchor: Anchor = "prompt"
    """What makes two states of `gigpo` the same."""
    gamma: float = 1.0
    """Discount per call of the returns that `gigpo` compares."""

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
        if self.anchor not in get_args(Anchor):
            raise ConfigError(f"There is no anchor {self.anchor!r}.{nearest(self.anchor, get_args(Anchor))}")
        if self.estimator != "gigpo" and (self.omega, self.anchor, self.gamma) != (1.0, "prompt", 1.0):
            raise ConfigError(
                f"omega, anchor and gamma belong to the estimator 'gigpo', not {self.estimator!r}."
            )
        if self.omega < 0 or not 0 <= self.gamma <= 1:
            raise ConfigError("omega must not be negative, and gamma must lie between 0 and 1.")


def check_credit(credit: CreditSettings, advantage: AdvantageSettings) -> None:
    """Raise a ConfigError unless credit and estimator make sense together."""
    if advantage.estimator in ("gigpo", "tree") and credit.mode != "final":
        raise ConfigError(
            f"The estimator {advantage.estimator!r} gives every call its own credit from the rollout's reward: "
            "it needs credit 'final'."
        )
    if advantage.estimator == "gae" and credit.mode not in ("final", "per_call"):
        raise ConfigError(
            "The estimator 'gae' carries rewards back from where they fall: it needs credit 'final' (the rollout's "
            "reward, at its last token) or 'per_call' (those of the calls too)."
        )
    if advantage.estimator == "gae" and credit.gamma != 1.0:
        raise ConfigError("The estimator 'gae' discounts per token, not per call: set the value's gamma.")


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
    check_credit(credit, advantage)
    steps = _steps(sample_set)
    scored: dict[str, Outcome] = {}
    credits: dict[str, list[Credit]] = {}
    groups: dict[str, str] = {}
    refused: dict[str, str] = {}
    returns: dict[str, list[Credit]] = {}  # per call, of gigpo
    to_come = CreditSettings("per_call", advantage.gamma)
    for outcome in sorted(outcomes, key=lambda o: o.rollout_id):
        of = steps.get(outcome.rollout_id, ())
        if outcome.cause in advantage.scored_causes and outcome.reward is None:
            outcome = replace(outcome, reward=0.0)
        assigned = _refusal(outcome, advantage) or assign(credit, outcome, of)
        earned = assign(to_come, outcome, of) if advantage.estimator == "gigpo" else []
        if isinstance(assigned, str) or isinstance(earned, str):
            refused[outcome.rollout_id] = assigned if isinstance(assigned, str) else str(earned)
            continue
        scored[outcome.rollout_id] = outcome
        credits[outcome.rollout_id], returns[outcome.rollout_id] = assigned, earned
        # A rollout that nobody grouped is a group of its own.
        groups[outcome.rollout_id] = outcome.rollout_id if outcome.group_id is None else outcome.group_id
    samples = [sample for sample in sample_set.samples if sample.rollout_id in scored]
    match advantage.estimator:
        case "gae":
            advantages = _token_rewards(samples, scored, steps if credit.mode == "per_call" else {})
            with_signal = set(groups.values())  # the values are a baseline of their own
        case "gigpo":
            per_call = _gigpo(samples, credits, returns, groups, advantage)
            advantages, with_signal = _spread(samples, per_call, groups)
        case "tree":
            calls = list(visits(samples))
            rewards = {rollout_id: of[0].value for rollout_id, of in credits.items()}
            values = tree_advantages(calls, groups, rewards)
            keys = [(call.rollout_id, call.call_id) for call in calls]
            advantages, with_signal = _spread(samples, dict(zip(keys, values.tolist(), strict=True)), groups)
        case estimator:
            advantages, with_signal = _spread(samples, _by_slot(credits, groups, estimator), groups)
            if estimator == "reinforce++":
                with_signal = set(groups.values())  # its baseline is the mean of the batch
    left_out = Counter(sample_set.tokens_left_out)
    for sample in sample_set.samples:
        if sample.rollout_id not in scored:
            left_out[refused.get(sample.rollout_id, "no_outcome")] += sample.trained
    refusals = Counter(refused.values())
    refusals["no_outcome"] += len({s.rollout_id for s in sample_set.samples} - scored.keys() - refused.keys())
    rewards = {rollout_id: o.reward for rollout_id, o in scored.items() if o.reward is not None}
    return Scored(
        samples=tuple(samples),
        advantages=tuple(advantages),
        groups=tuple(_statistics(groups, rewards, with_signal)),
        refused_rollouts=+refusals,
        tokens_left_out=+left_out,
    )


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


PerCall = Mapping[tuple[str, str], float]


def _by_slot(
    credits: Mapping[str, Sequence[Credit]], groups: Mapping[str, str], estimator: Estimator
) -> PerCall:
    """The advantage of each call: its credit against those of the same slot in the other rollouts of the group."""
    entries = [(rollout_id, credit) for rollout_id, of in credits.items() for credit in of]
    numbers: dict[tuple[str, str], int] = {}
    slots = [numbers.setdefault((groups[r], credit.slot), len(numbers)) for r, credit in entries]
    values = np.array([credit.value for _, credit in entries], np.float64)
    advantages = estimate(estimator, values, np.array(slots, np.int64))
    return {
        (rollout_id, call_id): value
        for (rollout_id, credit), value in zip(entries, advantages.tolist(), strict=True)
        for call_id in credit.call_ids
    }


def _gigpo(
    samples: Sequence[Sample],
    credits: Mapping[str, Sequence[Credit]],
    returns: Mapping[str, Sequence[Credit]],
    groups: Mapping[str, str],
    settings: AdvantageSettings,
) -> PerCall:
    of_rollout = _by_slot(credits, groups, "dr_grpo")
    earned = {(r, call_id): c.value for r, of in returns.items() for c in of for call_id in c.call_ids}
    calls = list(visits(samples))
    keys = [(call.rollout_id, call.call_id) for call in calls]
    values: Floats = np.array([earned[key] for key in keys], np.float64)
    of_state = estimate("dr_grpo", values, anchors(calls, groups, settings.anchor)).tolist()
    return {key: of_rollout[key] + settings.omega * value for key, value in zip(keys, of_state, strict=True)}


def _token_rewards(
    samples: Sequence[Sample], scored: Mapping[str, Outcome], steps: Mapping[str, Sequence[Step]]
) -> list[TokenFloats]:
    """Rewards where they fall: a call's own at its last token, the rollout's at the last token of all.

    What a call that is not trained earned falls to the trained call before it, which led there.
    """
    of_call: dict[tuple[str, str], float] = {}
    for rollout_id, of in steps.items():
        latest = None
        for step in of:
            latest = step.call_id if step.trained else latest
            if latest is not None and step.reward is not None:
                of_call[rollout_id, latest] = of_call.get((rollout_id, latest), 0.0) + step.reward
    rewards = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
    for i, sample in enumerate(samples):
        for segment in sample.segments:
            rewards[i][segment.end - 1] += of_call.get((sample.rollout_id, segment.call_id), 0.0)
    for i, _, end in last_tokens(samples):
        rewards[i][end - 1] += scored[samples[i].rollout_id].reward or 0.0
    return rewards


def _spread(
    samples: Sequence[Sample], per_call: PerCall, groups: Mapping[str, str]
) -> tuple[list[TokenFloats], set[str]]:
    """One number per sampled token, and the groups that have one other than 0."""
    advantages = []
    for sample in samples:
        spread = np.zeros(len(sample.token_ids), np.float32)
        for segment in sample.segments:
            spread[segment.start : segment.end] = per_call.get((sample.rollout_id, segment.call_id), 0.0)
        advantages.append(spread)
    return advantages, {groups[rollout_id] for (rollout_id, _), value in per_call.items() if value}


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
