from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.advantage import (
    AdvantageSettings,
    Estimator,
    Scored,
    score,
)
from agentlightning.trainer.aggregate import sample_weights
from agentlightning.trainer.credit import CreditSettings, Outcome, Step, assign
from agentlightning.trainer.estimators import estimate
from agentlightning.trainer.returns import carry_back, whiten
from agentlightning.trainer.samples import Call, Sample, SampleSet, build_samples

BASELINED: list[Estimator] = ["grpo", "dr_grpo", "rloo"]
rewards = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=1, max_size=12)


def one_group(estimator: Estimator, values: Sequence[float]) -> np.ndarray:
    return estimate(estimator, np.array(values, np.float64), np.zeros(len(values), np.int64))


def rollouts(one_call: Callable[..., Call], values: dict[str, float | None], group: str = "g") -> SampleSet:
    return build_samples([one_call([1], [2, 3], rollout=r, group_id=group) for r in values])


def outcomes(values: dict[str, float | None], group: str = "g") -> list[Outcome]:
    return [Outcome(rollout, group, value) for rollout, value in values.items()]


def per_rollout(scored: Scored) -> dict[str, float]:
    pairs = zip(scored.samples, scored.advantages, strict=True)
    return {s.rollout_id: float(a[s.mask][0]) for s, a in pairs}


@pytest.mark.parametrize("estimator", BASELINED)
@given(values=rewards)
def test_advantages_of_a_group_add_up_to_zero(estimator: Estimator, values: list[float]) -> None:
    result = one_group(estimator, values)
    assert abs(result.sum()) < 1e-6 * max(1.0, np.abs(result).sum())


@given(values=rewards)
def test_the_formulas_are_those_of_the_papers(values: list[float]) -> None:
    r = np.array(values)
    if len(values) < 2 or np.ptp(r) == 0:
        return
    np.testing.assert_allclose(one_group("dr_grpo", values), r - r.mean(), atol=1e-9)
    np.testing.assert_allclose(one_group("grpo", values), (r - r.mean()) / (r.std(ddof=1) + 1e-6), atol=1e-9)
    others = (r.sum() - r) / (len(r) - 1)
    np.testing.assert_allclose(one_group("rloo", values), r - others, atol=1e-9)
    np.testing.assert_allclose(one_group("reinforce", values), r)
    whitened = one_group("reinforce++-baseline", values)
    assert np.sqrt((whitened**2).mean()) == pytest.approx(1, rel=1e-3)


@given(values=rewards, scale=st.floats(0.5, 20), shift=st.floats(-50, 50))
def test_grpo_does_not_see_affine_changes_of_the_reward(
    values: list[float], scale: float, shift: float
) -> None:
    if np.std(values) < 0.1:
        return
    changed = one_group("grpo", [scale * value + shift for value in values])
    np.testing.assert_allclose(changed, one_group("grpo", values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", [*BASELINED, "reinforce++-baseline"])
def test_a_group_of_one_or_without_variance_gives_exactly_zero(estimator: Estimator) -> None:
    values = np.array([0.1, 0.1, 0.1, 7.0, 1.0, 0.0])
    result = estimate(estimator, values, np.array([0, 0, 0, 1, 2, 2]))
    assert (result[:4] == 0).all()
    assert (result[4:] != 0).all()


@settings(deadline=None)
@given(values=rewards, rng=st.randoms(use_true_random=False))
def test_the_order_of_rows_and_groups_changes_no_bit(values: list[float], rng: "np.random.Generator") -> None:
    groups = np.arange(len(values)) % 3
    order = list(range(len(values)))
    rng.shuffle(order)
    for estimator in (*BASELINED, "reinforce++-baseline"):
        plain = estimate(estimator, np.array(values), groups)
        permuted = estimate(estimator, np.array(values)[order], (2 - groups)[order])
        assert (permuted == plain[order]).all()


def test_rewards_that_are_not_finite_are_refused_and_counted(one_call: Callable[..., Call]) -> None:
    values: dict[str, float | None] = {"a": 1.0, "b": 0.0, "nan": np.nan, "inf": np.inf, "none": None}
    scored = score(rollouts(one_call, values), outcomes(values))
    assert scored.refused_rollouts == {"reward_not_finite": 2, "no_reward": 1}
    assert scored.tokens_left_out == {"reward_not_finite": 4, "no_reward": 2}
    assert per_rollout(scored) == {"a": 0.5, "b": -0.5}


def test_infrastructure_failures_change_no_statistics(one_call: Callable[..., Call]) -> None:
    values: dict[str, float | None] = {"a": 1.0, "b": 0.0, "c": 0.5}
    plain = score(rollouts(one_call, values), outcomes(values))
    failed = [
        Outcome("d", "g", 0.0, state="failed", cause="infra_error"),
        Outcome("e", "g", 0.0, state="failed", cause="lost"),
        Outcome("f", "g", 0.0, state="cancelled"),
        Outcome("h", "g", 0.0, state="failed", cause="timeout"),
    ]
    more = rollouts(one_call, {**values, "d": 0.0, "e": 0.0, "f": 0.0, "h": 0.0, "stray": 0.0})
    scored = score(more, outcomes(values) + failed)
    assert per_rollout(scored) == per_rollout(plain)
    assert scored.groups == plain.groups
    assert scored.refused_rollouts == {
        "infra_error": 1,
        "lost": 1,
        "cancelled": 1,
        "timeout": 1,
        "no_outcome": 1,
    }
    counted = score(more, outcomes(values) + failed, advantage=AdvantageSettings(scored_causes=("timeout",)))
    assert counted.groups[0].rollouts == 4
    with pytest.raises(ConfigError, match="infra_error"):
        AdvantageSettings(scored_causes=("infra_error",))


def test_a_rollout_without_samples_still_counts_in_its_group(one_call: Callable[..., Call]) -> None:
    values: dict[str, float | None] = {"a": 1.0, "silent": 0.0}
    scored = score(rollouts(one_call, {"a": 1.0}), outcomes(values))
    assert per_rollout(scored) == {"a": 0.5}


def test_groups_tell_which_are_worth_a_refill(one_call: Callable[..., Call]) -> None:
    calls = [one_call([1], [2], rollout=r, group_id=r[0]) for r in ("a1", "a2", "b1", "b2", "c1")]
    results = [
        Outcome(r, r[0], v) for r, v in [("a1", 1.0), ("a2", 1.0), ("b1", 1.0), ("b2", 0.0), ("c1", 1.0)]
    ]
    statistics = score(build_samples(calls), results).groups
    assert [(g.group_id, g.rollouts, g.mean, g.zero_variance) for g in statistics] == [
        ("a", 2, 1.0, True),
        ("b", 2, 0.5, False),
        ("c", 1, 1.0, True),
    ]


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_splitting_samples_or_permuting_them_changes_no_advantage(
    random_batch: Callable[..., SampleSet],
    one_per_call: Callable[[Sample], list[Sample]],
    estimator: Estimator,
) -> None:
    def by_token(sample_set: SampleSet, results: list[Outcome]) -> dict[tuple[str, int], float]:
        scored = score(sample_set, results, advantage=AdvantageSettings(estimator))
        return {
            (segment.call_id, t - segment.start): float(advantages[t])
            for sample, advantages in zip(scored.samples, scored.advantages, strict=True)
            for segment in sample.segments
            for t in range(segment.start, segment.end)
        }

    merged = random_batch(5)
    generator = np.random.default_rng(0)
    ids = sorted({(s.rollout_id, s.group_id) for s in merged.samples})
    results = [Outcome(rollout, group, float(generator.random())) for rollout, group in ids]
    apart = [part for sample in merged.samples for part in one_per_call(sample)]
    assert len(apart) > len(merged.samples)
    order = generator.permutation(len(apart))
    other = SampleSet(tuple(apart[i] for i in order))
    assert by_token(other, results[::-1]) == by_token(merged, results)


STEPS = [
    Step("c0", "a", 1.0),
    Step("c1", "b", None),
    Step("x", "z", 8.0, trained=False),
    Step("c2", "a", 2.0),
]


def values_of(credit: CreditSettings, outcome: Outcome) -> dict[str, float]:
    assigned = assign(credit, outcome, STEPS)
    assert not isinstance(assigned, str)
    return {call_id: c.value for c in assigned for call_id in c.call_ids}


def test_credit_modes() -> None:
    outcome = Outcome("r", "g", 4.0, rewards={"b": -1.0})
    assert values_of(CreditSettings("final"), outcome) == {"c0": 4.0, "c1": 4.0, "c2": 4.0}
    assert values_of(CreditSettings("last"), outcome) == {"c2": 4.0}
    assert values_of(CreditSettings("per_agent"), outcome) == {"c0": 4.0, "c1": -1.0, "c2": 4.0}
    # c2: 2 + 4; x: 8 + 3; c1: 5.5; c0: 1 + 2.75
    assert values_of(CreditSettings("per_call", gamma=0.5), outcome) == {"c0": 3.75, "c1": 5.5, "c2": 6.0}
    assert assign(CreditSettings("per_agent"), Outcome("r", "g", None, {"a": 1.0}), STEPS) == "no_reward"
    assert assign(CreditSettings("per_call"), Outcome("r", "g", float("nan")), STEPS) == "reward_not_finite"
    with pytest.raises(ConfigError, match="Did you mean 'per_call'"):
        CreditSettings("per_cal")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gamma"):
        CreditSettings("final", gamma=0.5)


def test_the_return_of_a_terminal_reward_is_that_reward_everywhere(one_sample: Callable[..., Sample]) -> None:
    samples = [
        one_sample([1, 2, 3, 4, 5, 6], (1, 3), (4, 6), rollout="r", index=0, first_seq=0),
        one_sample([9, 8, 7], (1, 3), rollout="r", index=1, first_seq=5),
        one_sample([9, 8, 7], (1, 3), rollout="other"),
    ]
    token_rewards = [np.zeros(6, np.float32), np.array([0, 0, 0.75], np.float32), np.zeros(3, np.float32)]
    first, second, other = carry_back(samples, token_rewards)
    assert first.tolist() == [0, 0.75, 0.75, 0, 0.75, 0.75]
    assert second.tolist() == [0, 0.75, 0.75]
    assert not other.any()
    discounted = carry_back(samples, token_rewards, gamma=0.5)[0]
    assert discounted[5] == 0.75 * 0.25  # the two tokens of the later call lie in between


def test_whitening_is_over_sampled_tokens_alone(one_sample: Callable[..., Sample]) -> None:
    samples = [one_sample([1, 2, 3, 4], (2, 4)), one_sample([1, 2], (1, 2), rollout="s")]
    a, b = whiten(samples, [np.array([0, 0, 1, 2], np.float32), np.array([0, 6], np.float32)])
    values = np.concatenate([a[2:], b[1:]])
    assert values.mean() == pytest.approx(0, abs=1e-6)
    assert values.std() == pytest.approx(1, rel=1e-5)
    assert (a[:2] == 0).all()
    same = whiten(samples, [np.array([0, 0, 3, 3], np.float32), np.array([0, 3], np.float32)])
    assert not np.concatenate(same).any()


def test_weights_of_the_aggregation_modes(one_sample: Callable[..., Sample]) -> None:
    samples = [
        one_sample([0] * 4, (1, 4), rollout="a"),
        one_sample([0] * 2, (1, 2), rollout="a", index=1),
        one_sample([0] * 3, (1, 3), rollout="b"),
        one_sample([0] * 3, rollout="c"),  # nothing sampled
    ]
    assert sample_weights("rollout-mean", samples).tolist() == [1 / 8, 1 / 8, 1 / 4, 0]
    assert sample_weights("token-mean", samples).tolist() == [1 / 6, 1 / 6, 1 / 6, 0]
    assert sample_weights("sample-mean", samples).tolist() == [1 / 9, 1 / 3, 1 / 6, 0]
    assert sample_weights("constant", samples, constant_length=10).tolist() == [1 / 30, 1 / 30, 1 / 30, 0]
    assert sample_weights("rollout-mean", []).tolist() == []
