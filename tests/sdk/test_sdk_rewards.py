"""Rewards as a value, as several, as a decorator and as a block: each of what was current, none that is no number."""

import asyncio
from typing import Any

import pytest

import agentlightning.sdk as agl


def verdicts(traced: Any) -> dict[str, tuple[float, str]]:
    """By name: score, and the span that it judges."""
    assert agl.flush()
    return {
        span.attributes["gen_ai.evaluation.name"]: (
            span.attributes["gen_ai.evaluation.score.value"],
            span.parent,
        )
        for span in traced.named("gen_ai.evaluation.result")
    }


def test_every_form_judges_what_was_current(traced):
    @agl.reward
    def score(answer: str) -> float:
        """How right it is."""
        return float(answer == "42")

    @agl.reward(name="speed")
    async def speed() -> float:
        return 0.25

    with agl.rollout(rollout_id="ro-1") as rollout:
        with agl.agent("solver") as solver:
            assert score("42") == 1.0
            assert asyncio.run(speed()) == 0.25
            with agl.reward(name="tidy") as judged, agl.agent("inner"):
                judged.value = 0.75
        agl.reward({"right": 1, "style": 0.5}, of=rollout)
    assert score.__doc__ == "How right it is."
    solver_id, rollout_id = (f"{scope.span.get_span_context().span_id:016x}" for scope in (solver, rollout))
    assert verdicts(traced) == {
        "reward": (1.0, solver_id),
        "speed": (0.25, solver_id),
        "tidy": (0.75, solver_id),
        "right": (1.0, rollout_id),
        "style": (0.5, rollout_id),
    }
    spans = traced.named("gen_ai.evaluation.result")
    assert {span.attributes["agentlightning.rollout.id"] for span in spans} == {"ro-1"}


def test_a_block_that_fails_is_not_judged_and_one_without_a_value_is_a_mistake(traced):
    async def fails() -> None:
        async with agl.reward(name="a") as judged:
            judged.value = 1.0
            raise KeyError("no")

    with pytest.raises(KeyError):
        asyncio.run(fails())
    with pytest.raises(ValueError, match="without a value"), agl.reward(name="b"):
        pass
    assert verdicts(traced) == {}


@pytest.mark.parametrize("value", [None, "0.5", float("nan"), float("inf"), {"a": 1.0, "b": None}, {"": 1.0}])
def test_what_is_no_finite_number_is_refused_and_nothing_is_sent(traced, value):
    with pytest.raises(ValueError, match="reward"):
        agl.reward(value)
    assert verdicts(traced) == {}


def test_scores_by_name_have_no_other_name(traced):
    with pytest.raises(ValueError, match="name themselves"):
        agl.reward({"a": 1.0}, name="b")
    assert verdicts(traced) == {}
