from collections.abc import Callable

import pytest

from agentlightning.proto.errors import ConfigError
from agentlightning.trainer.advantage import AdvantageSettings, Outcome, score
from agentlightning.trainer.config import config_from
from agentlightning.trainer.samples import Call, build_samples
from agentlightning.trainer.shaping import OverlongSettings, overlong, shape

OneCall = Callable[..., Call]


def test_the_price_of_length_rises_in_a_line_and_stays() -> None:
    settings = OverlongSettings(max_tokens=100, buffer=20, penalty=0.5)
    prices = {tokens: overlong(settings, tokens) for tokens in (0, 80, 85, 90, 100, 101, 500)}
    assert prices == {0: 0, 80: 0, 85: -0.125, 90: -0.25, 100: -0.5, 101: -0.5, 500: -0.5}
    with pytest.raises(ConfigError, match="buffer"):
        OverlongSettings(max_tokens=10, buffer=11)


def test_a_rollout_pays_for_all_its_calls_however_they_merged(one_call: OneCall) -> None:
    settings = OverlongSettings(max_tokens=4, buffer=4)
    merged = build_samples([one_call([1], [2, 3], seq=0), one_call([1, 2, 3], [4], seq=1)])
    apart = build_samples([one_call([1], [2, 3], seq=0), one_call([7], [4], seq=1)])
    outcomes = [Outcome("r", "g", 1.0), Outcome("silent", "g", 1.0), Outcome("lost", "g", None)]
    for sample_set in (merged, apart):
        shaped = [outcome.reward for outcome in shape(settings, sample_set, outcomes)]
        assert shaped == [0.25, 1.0, None]
    assert outcomes[0].reward == 1.0


def test_a_failure_that_is_scored_counts_as_zero(one_call: OneCall) -> None:
    calls = [one_call([1], [2], rollout=r) for r in ("a", "b")]
    outcomes = [Outcome("a", "g", 1.0), Outcome("b", "g", None, state="failed", cause="timeout")]
    scored = score(build_samples(calls), outcomes, advantage=AdvantageSettings(scored_causes=("timeout",)))
    assert scored.groups[0].mean == 0.5
    assert [float(a[1]) for a in scored.advantages] == [0.5, -0.5]


def test_agents_are_selected_by_name_or_pattern(one_call: OneCall) -> None:
    calls = [
        one_call([k], [9], seq=k, agent=agent) for k, agent in enumerate(["plan_a", "plan_b", "Plan", None])
    ]
    for agents, chosen in (
        (["plan*"], {0, 1}),
        (["plan_[b]", "Plan"], {1, 2}),
        ([""], {3}),
        (["*"], {0, 1, 2, 3}),
        (None, {0, 1, 2, 3}),
        ([], set()),
    ):
        result = build_samples(calls, agents=agents)
        assert {segment.seq for s in result.samples for segment in s.segments} == chosen
        assert result.tokens_left_out["not_selected"] == 4 - len(chosen)


@pytest.mark.parametrize(
    ("algorithm", "train", "words"),
    [
        ({"advantage": "gigpo", "credit": "last"}, {}, "needs credit 'final'"),
        ({"advantage": "tree", "credit": "per_call"}, {}, "needs credit 'final'"),
        ({"advantage": "gae", "credit": "per_agent"}, {}, "carries rewards back"),
        ({"advantage": "gae", "credit": "per_call", "gamma": 0.9}, {}, "discounts per token"),
        ({"advantage": "rloo", "value": {"lam": 0.9}}, {}, "belongs to advantage=gae"),
        ({"omega": 0.5}, {}, "belong to the estimator 'gigpo'"),
        ({"anchor": "observation"}, {}, "belong to the estimator 'gigpo'"),
        ({"gamma": 0.5}, {}, "advantage=gigpo"),
        ({"advantage": "reinforce++", "loss": {"kl_beta": 0.1}}, {}, "kl_kind=k1"),
        ({"loss": {"kl_beta": 0.1, "kl_kind": "k1"}}, {}, "Use k2 or k3"),
        ({"loss": {"kind": "reinforce", "clip_high": 0.2}}, {}, "no ratio to clip"),
        ({"loss": {"kind": "reinforce"}}, {"epochs": 2}, "use ppo, gspo or cispo"),
        ({"loss": {"sequence_mask": [2, 3]}}, {}, "two bounds around 1"),
        ({"overlong": {"max_tokens": 10, "buffer": 20}}, {}, "buffer"),
        ({"aggregation": "constant"}, {}, "needs constant_length"),
        ({}, {"group_size": 1}, "at least 2"),
    ],
)
def test_combinations_that_make_no_sense_are_refused_before_anything_starts(
    algorithm: dict[str, object], train: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from({"algorithm": algorithm, "train": train})


@pytest.mark.parametrize(
    ("algorithm", "train"),
    [
        (
            {"advantage": "gae", "credit": "per_call", "value": {"gamma": 0.99, "lam": 0.95}},
            {"group_size": 1},
        ),
        ({"advantage": "gigpo", "gamma": 0.95, "omega": 0.5, "anchor": "observation"}, {}),
        ({"advantage": "reinforce++", "loss": {"kl_beta": 0.1, "kl_kind": "k1", "kl_in": "reward"}}, {}),
        ({"loss": {"kind": "gspo"}}, {"minibatches": 4}),
        ({"agents": ["plan*"], "overlong": {"max_tokens": 100, "buffer": 20}}, {}),
    ],
)
def test_combinations_that_make_sense_survive_being_written_out(
    algorithm: dict[str, object], train: dict[str, object]
) -> None:
    config = config_from({"algorithm": algorithm, "train": train})
    assert config_from(config.model_dump(mode="json")) == config
