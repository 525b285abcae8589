"""What a reward judges: a call, an agent's part of the work, or the rollout."""

import math
from collections import Counter

from agentlightning.collector.calls import Agent, Call, Evaluation, Tool
from agentlightning.collector.forest import Forest, Joined, SpanKey, key_of
from agentlightning.proto import attributes as names

__all__ = ["judge"]


def judge(forest: Forest, joined: list[Joined], counters: Counter[str]) -> dict[str, float]:
    """Attach every evaluation to its call, or return it as the rollout's.

    The reward of an agent that did only a part of the work is the rollout's under the agent's name.
    """
    by_member: dict[SpanKey, Joined] = {}
    by_call_id: dict[str, Joined] = {}
    by_response_id: dict[str, Joined] = {}
    for call in joined:  # in order: a span that tells of several calls judges the last of them
        by_call_id[call.call_id] = call
        for member in call.members:
            by_member[key_of(member)] = call
            role = forest.roles.get(key_of(member))
            if isinstance(role, Call) and role.response_id:
                by_response_id[role.response_id] = call
    rollout: dict[str, float] = {}
    given: set[tuple[int, str]] = set()
    for evaluation in sorted(forest.evaluations, key=lambda e: (e.time_ns, e.origin)):
        if evaluation.value is None:
            counters["reward_without_value"] += 1
            continue
        if not math.isfinite(evaluation.value):
            counters["reward_not_finite"] += 1
            continue
        judged, known = _judged_call(evaluation, forest, by_member, by_call_id, by_response_id)
        name = evaluation.name
        if judged is not None:
            target = judged.rewards
        elif known:
            target = rollout
            agent = _judged_part(evaluation, forest, joined)
            if agent is not None:
                name = agent if name == names.DEFAULT_REWARD else f"{agent}/{name}"
        else:  # it names a call that is not here
            counters["orphan"] += 1
            continue
        if (id(target), name) in given:
            counters["reward_replaced"] += 1  # the latest judgement counts
        given.add((id(target), name))
        target[name] = evaluation.value
    return rollout


def _judged_call(
    evaluation: Evaluation,
    forest: Forest,
    by_member: dict[SpanKey, Joined],
    by_call_id: dict[str, Joined],
    by_response_id: dict[str, Joined],
) -> tuple[Joined | None, bool]:
    """The call that is judged, if it is one; and whether what is judged is known at all."""
    if evaluation.call_id is not None:
        call = by_call_id.get(evaluation.call_id)
        return call, call is not None
    start = (evaluation.trace_id, evaluation.span_id or "")
    direct = by_member.get(start)
    if direct is not None and key_of(direct.truth.span) == start:
        return direct, True  # of several choices with one response id, this one
    if evaluation.response_id is not None and evaluation.response_id in by_response_id:
        return by_response_id[evaluation.response_id], True
    if evaluation.span_id is not None:
        for key in (start, *forest.ancestors(start)):
            if key in by_member:
                return by_member[key], True
            if isinstance(forest.roles.get(key), Agent | Tool):
                break
    return None, evaluation.response_id is None


def _judged_part(evaluation: Evaluation, forest: Forest, joined: list[Joined]) -> str | None:
    """Name of the agent whose work is judged; None if that is the whole attempt."""
    if evaluation.span_id is None:
        return None
    start = (evaluation.trace_id, evaluation.span_id)
    role = forest.roles.get(start)
    around = [*forest.agents(start), *([(start, role.name)] if isinstance(role, Agent) else [])]
    if not around:
        return None
    agent, name = around[-1]
    for call in joined:
        agents = {key for member in call.members for key, _ in forest.agents(key_of(member))}
        if agents and agent not in agents:
            return name  # another agent has called too
    return None
