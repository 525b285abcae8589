"""What a step's rollouts were like, and the alarms that are raised from it."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import Spoken, Told, assistant, user, write_recording

from agentlightning.proto.dataset import open_dataset
from agentlightning.trainer.alarms import (
    answers_repeat,
    entropy_collapses,
    new_alarms,
    reward_follows_length,
    reward_follows_tools,
)
from agentlightning.trainer.comparison import compare_evaluations, paired_difference, task_rewards
from agentlightning.trainer.credit import Outcome
from agentlightning.trainer.figures import Observation, observe, step_figures, within_groups
from agentlightning.trainer.metrics import Metrics
from agentlightning.trainer.recorded import read_index


def seen(
    reward: float, group: str = "g", *, tokens: int = 1, tools: int = 0, answer: str = ""
) -> Observation:
    return Observation("r", group, group, reward, tokens, 1, tools, 0, answer)


# --- figures ----------------------------------------------------------------------------------------------


def test_rollouts_are_observed_from_their_calls(tmp_path: Path) -> None:
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f"}}] * 2,
    }
    calls = [
        Spoken(messages=[user("q")], answer=called, prompt=[1], response=[2, 3], agent="planner"),
        Spoken(
            messages=[user("q")], answer=assistant(" The  END "), prompt=[1], response=[4], agent="writer"
        ),
    ]
    told = [Told("a", calls, reward=0.5), Told("b", calls, reward=None), Told("c", [], reward=1.0)]
    dataset = open_dataset(write_recording(tmp_path, told))
    outcomes = [entry.outcome for entry in read_index(dataset).entries]
    observed = observe(dataset.table("transitions"), outcomes)
    assert [o.rollout_id for o in observed] == ["a", "c"]  # b was not judged
    assert observed[0].tokens == 3
    assert (observed[0].calls, observed[0].tool_calls, observed[0].answer) == (2, 2, "the end")
    assert observed[0].agents == ("planner", "writer")
    assert (observed[1].calls, observed[1].answer) == (0, "")


def test_each_agent_has_its_own_named_reward_or_the_rollouts() -> None:
    first = Observation("a", "g", "t", 1.0, 1, 1, 0, 0, "", ("planner", "writer"), (("planner", 0.2),))
    second = Observation("b", "g", "t", 0.0, 1, 1, 0, 0, "", ("writer",))
    agents = step_figures([first, second])["agents"]
    assert agents["planner"] == {"reward": 0.2, "rollouts": 1}
    assert agents["writer"] == {"reward": 0.5, "rollouts": 2}


def test_the_interval_is_over_rollouts() -> None:
    figures = step_figures([seen(float(n % 2)) for n in range(16)])
    low, high = figures["reward_interval"]
    assert (low, high) == (pytest.approx(0.28, abs=0.01), pytest.approx(0.72, abs=0.01))  # Wilson, 8 of 16
    assert step_figures([]) == {}


def test_the_correlation_is_within_groups_alone() -> None:
    """Between groups, hard tasks have long answers and low rewards; within them length earns reward."""
    observations = [
        seen(1.0 - g + 0.1 * k, f"g{g}", tokens=100 * g + 10 * k) for g in range(3) for k in range(3)
    ]
    assert within_groups(observations, [float(o.tokens) for o in observations]) == pytest.approx(1.0)
    overall = np.corrcoef([o.tokens for o in observations], [o.reward for o in observations])[0, 1]
    assert overall < 0
    assert within_groups(observations, [1.0] * 9) is None


def test_repeated_answers_count_across_tasks_only() -> None:
    same = [seen(0.0, f"g{n // 2}", answer="42") for n in range(4)]
    assert step_figures(same)["behaviour"]["same_answer"] == 1.0
    own = [seen(0.0, f"g{n // 2}", answer=f"{n // 2}") for n in range(4)]
    assert step_figures(own)["behaviour"]["same_answer"] == 0.0
    assert step_figures(own[:2])["behaviour"]["same_answer"] is None


# --- alarms -----------------------------------------------------------------------------------------------


def steps(
    count: int = 8, *, rollouts: int = 32, groups: int = 4, **ramps: tuple[float, float]
) -> list[dict[str, Any]]:
    """Steps whose figures go from one value to another."""
    made = []
    for n in range(count):
        at = {name: low + (high - low) * n / (count - 1) for name, (low, high) in ramps.items()}
        reward, entropy = at.pop("reward", 0.5), at.pop("entropy", 2.0)
        made.append(
            {
                "event": "step",
                "step": n + 1,
                "reward": reward,
                "rollouts": rollouts,
                "groups": {"sampled": groups, "informative": groups},
                "update": {"entropy": entropy, "tokens_trained": 100.0},
                "behaviour": at,
            }
        )
    return made


def test_length_that_earns_reward_and_grows_is_named() -> None:
    text = reward_follows_length(steps(length=(50, 100), reward_by_length=(0.2, 0.9)))
    assert text is not None
    assert "from 57 to 93 tokens" in text


@pytest.mark.parametrize(
    "quiet",
    [
        {"length": (50.0, 50.0), "reward_by_length": (0.9, 0.9)},  # so are the tasks: nothing has grown
        {"length": (50.0, 100.0), "reward_by_length": (0.1, 0.3)},  # answers grow, but are not paid for it
        {"length": (100.0, 50.0), "reward_by_length": (0.9, 0.9)},
    ],
)
def test_length_alone_and_reward_alone_are_quiet(quiet: dict[str, tuple[float, float]]) -> None:
    assert reward_follows_length(steps(**quiet)) is None
    assert (
        reward_follows_length(steps(count=4, length=(50, 100), reward_by_length=(0.9, 0.9))) is None
    )  # too early
    assert (
        reward_follows_length(steps(rollouts=4, groups=2, length=(50, 100), reward_by_length=(0.6, 0.6)))
        is None
    )
    assert reward_follows_length(steps()) is None  # nothing was observed


def test_chance_raises_no_alarm() -> None:
    """200 runs of 20 steps of 4 groups of 4 whose rewards have nothing to do with their ever longer answers."""
    generator = random.Random(0)
    alarms = 0
    for _ in range(200):
        run = []
        for n in range(20):
            observations = [
                seen(generator.random(), f"g{g}", tokens=generator.randint(20 + 4 * n, 60 + 4 * n))
                for g in range(4)
                for _ in range(4)
            ]
            run.append(
                {
                    "event": "step",
                    "reward": 0.5,
                    "rollouts": 16,
                    "groups": {"sampled": 4},
                    **step_figures(observations),
                }
            )
            alarms += reward_follows_length(run) is not None
    assert alarms == 0


def test_tools_that_earn_reward_are_named() -> None:
    assert "More tool calls earn more" in str(
        reward_follows_tools(steps(tool_calls=(1, 5), reward_by_tool_calls=(0.6, 0.9)))
    )
    assert reward_follows_tools(steps(tool_calls=(0, 0), reward_by_tool_calls=(0.6, 0.9))) is None


def test_one_answer_for_every_task_is_named_while_it_pays() -> None:
    assert "77%" in str(answers_repeat(steps(count=6, same_answer=(0.1, 0.94), reward=(0.3, 0.9))))
    assert answers_repeat(steps(same_answer=(0.9, 0.9))) is None  # yes and no are all that can be answered
    assert (
        answers_repeat(steps(same_answer=(0.1, 0.9), reward=(0.9, 0.1))) is None
    )  # it is paid for: no hacking
    assert answers_repeat(steps()) is None


def test_a_collapse_of_entropy_is_named_and_a_fall_is_not() -> None:
    assert "Entropy has collapsed" in str(entropy_collapses(steps(entropy=(2.0, 0.05))))
    assert entropy_collapses(steps(entropy=(2.0, 1.0))) is None


def test_an_alarm_is_raised_once_in_a_run_and_heard(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.listen(heard.append)
    for record in steps(count=12, entropy=(2.0, 0.01)):
        metrics.add(**record)
    (alarm,) = metrics.of("alarm")
    assert alarm["alarm"] == "entropy_collapses"
    assert [event for event in heard if event["event"] == "alarm"] == [alarm]
    again = Metrics(metrics.path)  # a resumed run has raised it already
    assert new_alarms(again.events) == {}
    again.rewind(alarm["step"] - 1)  # it was raised by a step that is done again
    assert again.of("alarm") == []


# --- comparison -------------------------------------------------------------------------------------------


def test_tasks_are_compared_each_with_itself() -> None:
    """Rewards differ widely between tasks, and each has risen by 0.1: overlapping intervals would hide it."""
    before = [n / 20 for n in range(18)]
    gain = paired_difference([(reward, reward + 0.1) for reward in before])
    assert gain.mean == pytest.approx(0.1)
    assert gain.n == 18
    assert paired_difference([(0.0, 2.0), (1.0, 3.5), (5.0, 6.0)]).low > 0


def test_the_interval_covers_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        before = (generator.random(40) < 0.3).astype(float)
        after = np.where(generator.random(40) < 0.5, before, (generator.random(40) < 0.6).astype(float))
        interval = paired_difference(list(zip(before.tolist(), after.tolist(), strict=True)))
        covered += interval.low <= 0.5 * (0.6 - 0.3) <= interval.high
    assert 0.94 <= covered / 2000 <= 0.98


def test_equal_differences_keep_a_width() -> None:
    gain = paired_difference([(0.0, 1.0)] * 3)
    assert gain.mean == 1.0
    assert gain.low < 0.9
    lonely = paired_difference([(0.0, 7.0)])
    assert math.isinf(lonely.low)


def test_evaluations_are_paired_by_task_and_infrastructure_is_left_out() -> None:
    outcomes = [
        Outcome("a", "g0", 1.0),
        Outcome("b", "g1", None, state="failed", cause="timeout"),
        Outcome("c", "g2", None, state="failed", cause="infra_error"),
    ]
    rewards = task_rewards(outcomes, ["g0", "g1", "g2", "g3"])
    assert rewards == [1.0, 0.0, None, None]
    gain = compare_evaluations({"rewards": [0.0, 0.0, 1.0, 1.0]}, {"rewards": rewards})
    assert gain is not None
    assert (gain.n, gain.mean) == (2, 0.5)
    assert compare_evaluations({}, {"rewards": rewards}) is None
    assert json.dumps(rewards)
