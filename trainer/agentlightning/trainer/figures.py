"""What a step's rollouts were like: rewards with their interval, by agent, lengths, tools, repeated answers.

Statistics are over rollouts, never over samples or tokens: a rollout that splits into many samples counts once.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from agentlightning.trainer.conversation import read_answer, text_of
from agentlightning.trainer.credit import Outcome
from agentlightning.trainer.interval import mean_interval

__all__ = ["Observation", "observe", "step_figures", "within_groups"]


@dataclass(frozen=True, slots=True)
class Observation:
    """One rollout, as somebody who watches for reward hacking sees it."""

    rollout_id: str
    group_id: str
    task_id: str | None
    reward: float
    tokens: int
    """Sampled, in all calls."""
    calls: int
    tool_calls: int
    truncated: int
    """Calls that ended because there was no room for more."""
    answer: str
    """The text of the last call's answer, spaces and case evened out."""
    agents: tuple[str, ...] = ()
    rewards: tuple[tuple[str, float], ...] = ()


def observe(transitions: pa.Table, outcomes: Iterable[Outcome]) -> list[Observation]:
    """The judged rollouts among the outcomes, with what their calls on record say."""
    judged = {o.rollout_id: o for o in outcomes if o.reward is not None and math.isfinite(o.reward)}
    names = ["rollout_id", "task_id", "seq", "agent", "response", "finish_reason"]
    lengths = pc.list_value_length(transitions.column("response_token_ids")).to_pylist()
    calls: dict[str, list[tuple[dict[str, Any], int]]] = defaultdict(list)
    for row, length in zip(transitions.select(names).to_pylist(), lengths, strict=True):
        if row["rollout_id"] in judged:
            calls[row["rollout_id"]].append((row, length or 0))
    observed = []
    for rollout_id in sorted(judged):
        outcome, rows = judged[rollout_id], sorted(calls[rollout_id], key=lambda call: call[0]["seq"])
        said = [read_answer(row["response"]) for row, _ in rows]
        answers = [answer for answer in said if not isinstance(answer, str)]
        assert outcome.reward is not None
        observed.append(
            Observation(
                rollout_id=rollout_id,
                group_id=outcome.group_id or rollout_id,
                task_id=rows[0][0]["task_id"] if rows else None,
                reward=outcome.reward,
                tokens=sum(length for _, length in rows),
                calls=len(rows),
                tool_calls=sum(len(answer.get("tool_calls") or ()) for answer in answers),
                truncated=sum(row["finish_reason"] == "length" for row, _ in rows),
                answer=" ".join(text_of(answers[-1]).lower().split()) if answers else "",
                agents=tuple(dict.fromkeys(row["agent"] for row, _ in rows if row["agent"])),
                rewards=tuple(sorted(outcome.rewards.items())),
            )
        )
    return observed


def step_figures(observations: Sequence[Observation]) -> dict[str, Any]:
    """The figures of one step, as JSON.

    `reward_interval` is the 95 % interval of the mean over rollouts. `behaviour` is what the alarms watch: means, the
    correlation of reward with length and with tool calls within groups, and the share of answers that another task's
    rollout gave too.
    """
    if not observations:
        return {}
    interval = mean_interval([o.reward for o in observations])
    lengths, tools = [float(o.tokens) for o in observations], [float(o.tool_calls) for o in observations]
    return {
        "reward_interval": [interval.low, interval.high],
        "rewards": _named(observations),
        "agents": _by_agent(observations),
        "behaviour": {
            "length": sum(lengths) / len(lengths),
            "length_max": max(lengths),
            "calls": sum(o.calls for o in observations) / len(observations),
            "tool_calls": sum(tools) / len(tools),
            "truncated": sum(o.truncated > 0 for o in observations) / len(observations),
            "reward_by_length": within_groups(observations, lengths),
            "reward_by_tool_calls": within_groups(observations, tools),
            "same_answer": _same_answer(observations),
        },
    }


def within_groups(observations: Sequence[Observation], values: Sequence[float]) -> float | None:
    """Correlation of reward and value over the rollouts, each less its group's mean; None if one of them never varies.

    Within groups, because harder tasks have both lower rewards and longer answers.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for number, observation in enumerate(observations):
        groups[observation.group_id].append(number)
    xx = yy = xy = 0.0
    for members in groups.values():
        x_mean = math.fsum(values[i] for i in members) / len(members)
        y_mean = math.fsum(observations[i].reward for i in members) / len(members)
        for i in members:
            x, y = values[i] - x_mean, observations[i].reward - y_mean
            xx, yy, xy = xx + x * x, yy + y * y, xy + x * y
    if xx < 1e-12 or yy < 1e-12:
        return None
    return xy / math.sqrt(xx * yy)


def _same_answer(observations: Sequence[Observation]) -> float | None:
    """Share of rollouts whose last answer a rollout of another task gave too; None with a single task."""
    tasks_of: dict[str, set[str]] = defaultdict(set)
    tasks = [o.task_id or o.group_id for o in observations]
    if len(set(tasks)) < 2:
        return None
    for observation, task in zip(observations, tasks, strict=True):
        tasks_of[observation.answer].add(task)
    return sum(len(tasks_of[o.answer]) > 1 for o in observations) / len(observations)


def _named(observations: Sequence[Observation]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for observation in observations:
        for name, value in observation.rewards:
            values[name].append(value)
    return {name: math.fsum(v) / len(v) for name, v in sorted(values.items()) if name != "reward"}


def _by_agent(observations: Sequence[Observation]) -> dict[str, dict[str, float]]:
    """Mean reward by agent: its own where it was given one under its name, else that of the rollouts it was in."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for observation in observations:
        own: Mapping[str, float] = dict(observation.rewards)
        for agent in observation.agents:
            rewards[agent].append(own.get(agent, observation.reward))
    return {
        agent: {"reward": math.fsum(values) / len(values), "rollouts": len(values)}
        for agent, values in sorted(rewards.items())
    }
