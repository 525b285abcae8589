from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.advantage import AdvantageSettings, CreditSettings, Outcome, Scored, score
from agentlightning.trainer.samples import Call, SampleSet, build_samples

OneCall = Callable[..., Call]
GIGPO = AdvantageSettings("gigpo")
TREE = AdvantageSettings("tree")


def per_call(scored: Scored) -> dict[str, float]:
    return {
        segment.call_id: float(advantages[segment.start])
        for sample, advantages in zip(scored.samples, scored.advantages, strict=True)
        for segment in sample.segments
    }


def three_rollouts(one_call: OneCall) -> SampleSet:
    """All begin alike; a and b come to the same state, c to another."""
    calls = []
    for rollout, first, second in (("a", 5, 7), ("b", 5, 8), ("c", 6, 7)):
        calls.append(one_call([1], [first], seq=0, rollout=rollout))
        calls.append(one_call([1, first, 2], [second], seq=1, rollout=rollout))
    return build_samples(calls)


OUTCOMES = [Outcome("a", "g", 1.0), Outcome("b", "g", 0.0), Outcome("c", "g", 0.5)]


def test_gigpo_adds_what_calls_from_the_same_state_earned(one_call: OneCall) -> None:
    settings = replace(GIGPO, omega=0.5, gamma=0.5)
    result = per_call(score(three_rollouts(one_call), OUTCOMES, advantage=settings))
    # Rollouts: ±0.5, 0. First calls share the empty state: returns 0.5, 0, 0.25. Second: a and b share one, c is alone.
    assert result == pytest.approx(
        {
            "a-c0": 0.5 + 0.5 * 0.25,
            "b-c0": -0.5 - 0.5 * 0.25,
            "c-c0": 0.0,
            "a-c1": 0.5 + 0.5 * 0.5,
            "b-c1": -0.5 - 0.5 * 0.5,
            "c-c1": 0.0,
        }
    )


def test_states_of_other_groups_are_other_states(one_call: OneCall) -> None:
    calls = [one_call([1], [2], rollout=r, group_id=g) for r, g in (("a", "g"), ("b", "h"))]
    outcomes = [Outcome("a", "g", 1.0), Outcome("b", "h", 0.0)]
    scored = score(build_samples(calls), outcomes, advantage=GIGPO)
    assert set(per_call(scored).values()) == {0.0}
    assert all(group.zero_variance for group in scored.groups)


def test_an_observation_can_be_the_state_where_histories_differ(one_call: OneCall) -> None:
    calls = []
    for rollout, first in (("a", 5), ("b", 6)):
        calls.append(one_call([1], [first], seq=0, rollout=rollout))
        calls.append(one_call([1, first, 9, 9], [7], seq=1, rollout=rollout))
    samples, outcomes = build_samples(calls), OUTCOMES[:2]
    by_prompt = per_call(score(samples, outcomes, advantage=GIGPO))
    by_observation = per_call(score(samples, outcomes, advantage=replace(GIGPO, anchor="observation")))
    assert by_prompt["a-c1"] == pytest.approx(0.5)  # alone in its state
    assert by_observation["a-c1"] == pytest.approx(1.0)


def test_a_nodes_advantage_is_its_value_over_its_parents(one_call: OneCall) -> None:
    result = per_call(score(three_rollouts(one_call), OUTCOMES, advantage=TREE))
    # V(group) = 0.5; V(first 5) = 0.5 of a and b; V(first 6) = 0.5 of c alone.
    assert result == {"a-c0": 0.0, "b-c0": 0.0, "c-c0": 0.0, "a-c1": 0.5, "b-c1": -0.5, "c-c1": 0.0}


def test_a_rollout_that_forks_from_another_counts_below_the_fork(one_call: OneCall) -> None:
    calls = [
        one_call([1], [5], seq=0, rollout="a"),
        one_call([1, 5, 2], [7], seq=1, rollout="a"),
        one_call([1, 5, 2], [8], seq=0, rollout="b"),  # began where a's first call ended
        one_call([1], [6], seq=0, rollout="c"),
    ]
    result = per_call(score(build_samples(calls), OUTCOMES, advantage=TREE))
    assert result == pytest.approx({"a-c0": 0.5 - 0.5, "a-c1": 0.5, "b-c0": -0.5, "c-c0": 0.0})
    outcomes = [Outcome("a", "g", 1.0), Outcome("b", "g", 0.5), Outcome("c", "g", 0.0)]
    result = per_call(score(build_samples(calls), outcomes, advantage=TREE))
    assert result == pytest.approx({"a-c0": 0.25, "a-c1": 0.25, "b-c0": -0.25, "c-c0": -0.5})


def test_an_answer_that_begins_another_is_not_its_parent(one_call: OneCall) -> None:
    calls = [one_call([1], [5], rollout="a"), one_call([1], [5, 6], rollout="b")]
    assert per_call(score(build_samples(calls), OUTCOMES[:2], advantage=TREE)) == {"a-c0": 0.5, "b-c0": -0.5}


@pytest.mark.parametrize("settings", [GIGPO, TREE])
def test_equal_rewards_give_exactly_zero_and_order_changes_no_bit(
    one_call: OneCall, random_batch: Callable[..., SampleSet], settings: AdvantageSettings
) -> None:
    samples = random_batch(3)
    rollouts = sorted({(s.rollout_id, s.group_id) for s in samples.samples})
    flat = score(samples, [Outcome(r, g, 0.1) for r, g in rollouts], advantage=settings)
    assert not any(a.any() for a in flat.advantages)
    assert all(group.zero_variance for group in flat.groups)
    generator = np.random.default_rng(0)
    outcomes = [Outcome(r, g, float(generator.random())) for r, g in rollouts]
    plain = score(samples, outcomes, advantage=settings)
    assert any(a.any() for a in plain.advantages)
    turned = replace(samples, samples=samples.samples[::-1])
    twice = replace(samples, samples=samples.samples + samples.samples[:3])
    for other in (turned, twice):
        assert per_call(score(other, outcomes[::-1], advantage=settings)) == per_call(plain)


def test_a_call_reward_that_is_not_finite_refuses_its_rollout(one_call: OneCall) -> None:
    calls = [
        one_call([1], [2], rollout="a", reward=float("inf")),
        one_call([1], [3], rollout="b"),
        one_call([1], [4], rollout="c"),
    ]
    scored = score(build_samples(calls), OUTCOMES, advantage=GIGPO)
    assert scored.refused_rollouts == {"reward_not_finite": 1}
    assert per_call(scored) == {"b-c0": -0.5, "c-c0": 0.5}


def test_estimators_that_make_their_own_credit_refuse_another() -> None:
    empty = SampleSet()
    for settings in (GIGPO, TREE):
        with pytest.raises(ConfigError, match="needs credit 'final'"):
            score(empty, [], credit=CreditSettings("last"), advantage=settings)
    with pytest.raises(ConfigError, match="carries rewards back"):
        score(empty, [], credit=CreditSettings("per_agent"), advantage=AdvantageSettings("gae"))
    with pytest.raises(ConfigError, match="belong to the estimator 'gigpo'"):
        AdvantageSettings("rloo", omega=2.0)
    with pytest.raises(ConfigError, match="Did you mean 'prompt'"):
        AdvantageSettings("gigpo", anchor="promt")  # type: ignore[arg-type]
