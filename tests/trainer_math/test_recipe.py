"""From a configuration and transitions to an update, for every algorithm that can be named."""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest

from agentlightning.proto.schemas import TRANSITIONS
from agentlightning.trainer.advantage import Estimator, Outcome
from agentlightning.trainer.config import config_from
from agentlightning.trainer.learner import Learner
from agentlightning.trainer.recipe import learner_settings, score_transitions
from agentlightning.trainer.rollouts import Collected


def collected(groups: int = 2, size: int = 3) -> Collected:
    """Rollouts of two calls by a planner and a worker, whose rewards differ."""
    generator = np.random.default_rng(0)
    rows, outcomes = [], []
    for g in range(groups):
        prompt = generator.integers(0, 31, 6).tolist()
        for i in range(size):
            rollout, context = f"g{g}r{i}", list(prompt)
            for seq, agent in enumerate(("planner", "worker")):
                said = generator.integers(0, 31, 4).tolist()
                rows.append(
                    dict.fromkeys(TRANSITIONS.names)
                    | {
                        "group_id": f"g{g}",
                        "rollout_id": rollout,
                        "attempt": 0,
                        "seq": seq,
                        "call_id": f"{rollout}c{seq}",
                        "span_id": "s",
                        "trace_id": "t",
                        "agent": agent,
                        "policy": "policy",
                        "model_version": 0,
                        "prompt_token_ids": context,
                        "response_token_ids": said,
                        "response_logprobs": [-3.0] * 4,
                        "token_source": "engine",
                        "reward": float(generator.random()),
                        "done": seq == 1,
                        "start_time": seq,
                        "duration_ms": 1.0,
                        "source": "gateway",
                    }
                )
                context = context + said + [9]
            outcomes.append(Outcome(rollout, f"g{g}", float(generator.random())))
    return Collected(rows={}, outcomes=outcomes, transitions=pa.Table.from_pylist(rows, schema=TRANSITIONS))


@pytest.mark.parametrize("advantage", get_args(Estimator))
def test_every_algorithm_that_can_be_named_trains(tiny_llama: Callable[..., Any], advantage: str) -> None:
    config = config_from({"algorithm": {"advantage": advantage}, "policy": {"dtype": "float32"}})
    _, scored = score_transitions(config, collected())
    result = Learner(tiny_llama(), learner_settings(config)).update(scored.samples, scored.advantages)
    assert result.stepped
    assert ("value_loss" in result.metrics) == (advantage == "gae")
    assert len(result.advantages) == len(scored.samples)
    tokens = np.concatenate([a[s.mask] for s, a in zip(scored.samples, result.advantages, strict=True)])
    assert tokens.any()
    if advantage in ("gae", "reinforce++"):
        assert tokens.mean() == pytest.approx(0, abs=1e-5)


def test_selection_and_the_price_of_length_are_those_of_the_configuration() -> None:
    data = collected()
    algorithm = {"agents": ["plan*"], "overlong": {"max_tokens": 8, "buffer": 8, "penalty": 0.5}}
    _, plain = score_transitions(config_from({}), data)
    samples, priced = score_transitions(config_from({"algorithm": algorithm}), data)
    assert samples.tokens_left_out == {"not_selected": 6 * 4}
    assert {segment.agent for s in priced.samples for segment in s.segments} == {"planner"}
    # 4 of 8 tokens: a quarter of a point from everyone, so only the mean of each group has moved.
    for before, after in zip(plain.groups, priced.groups, strict=True):
        assert after.mean == pytest.approx(before.mean - 0.25)
        assert after.std == pytest.approx(before.std)
