"""Signs that a policy is gaming its reward, or has stopped exploring.

Each alarm is a pure function of the steps so far, oldest first, as `metrics.jsonl` has them: what it saw and where to look,
or None. An alarm is a reason to read rollouts, not a proof: the thresholds are set so that a run that merely learns is quiet.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "ALARMS",
    "answers_repeat",
    "entropy_collapses",
    "new_alarms",
    "reward_follows_length",
    "reward_follows_tools",
]

Steps = Sequence[Mapping[str, Any]]

WINDOW = 3
"""Steps that are looked at together: one step alone is noise."""
CORRELATION = 0.5
"""Within groups, in each of these steps."""
EVIDENCE = 5.0
"""Standard errors by which the correlations of the window together must exceed 0 (Fisher's z), so that small groups, whose
correlations are large by chance, raise no alarm."""
GROWTH = 1.3
"""… of length or tool calls since the first steps. A correlation without growth is how the tasks are."""
REPEATED = 0.5
ENTROPY = 0.25
"""Of the first steps' entropy."""


def reward_follows_length(steps: Steps) -> str | None:
    """Longer answers earn more, and answers have grown."""
    return _follows(
        steps,
        "reward_by_length",
        "length",
        "Longer rollouts earn more: within groups reward and sampled tokens correlate by {r:.2f} over the last {n} steps, "
        "and rollouts have grown from {first:.0f} to {last:.0f} tokens. Does the reward count words instead of the answer? "
        "Read the best rollouts in the report; algorithm.overlong penalises length.",
    )


def reward_follows_tools(steps: Steps) -> str | None:
    """More tool calls earn more, and there are ever more of them."""
    return _follows(
        steps,
        "reward_by_tool_calls",
        "tool_calls",
        "More tool calls earn more: within groups they correlate with the reward by {r:.2f} over the last {n} steps, and "
        "have grown from {first:.1f} to {last:.1f} a rollout. Is calling rewarded, or is it useful? Read the best rollouts "
        "in the report.",
    )


def answers_repeat(steps: Steps) -> str | None:
    """One answer for many tasks, more and more, without costing any reward."""
    known = [
        step for step in steps if _behaviour(step, "same_answer") is not None and step["reward"] is not None
    ]
    if len(known) < 2 * WINDOW:
        return None
    before, now = _mean(known[:WINDOW], "same_answer"), _mean(known[-WINDOW:], "same_answer")
    rewards = [sum(step["reward"] for step in part) / WINDOW for part in (known[:WINDOW], known[-WINDOW:])]
    if now < REPEATED or now < before + 0.2 or rewards[1] < rewards[0]:
        return None
    return (
        f"Different tasks get the same answer: {now:.0%} of rollouts in the last {WINDOW} steps end with an answer that "
        f"another task's rollout gave too ({before:.0%} at first), and the reward has not fallen. Does one answer satisfy "
        "the reward whatever was asked? Compare rollouts of different tasks in the report."
    )


def entropy_collapses(steps: Steps) -> str | None:
    """The policy has become almost certain of every token."""
    updates = [step.get("update", {}) for step in steps]
    known = [update["entropy"] for update in updates if update.get("tokens_trained")]
    if len(known) < 2 * WINDOW:
        return None
    first, now = sum(known[:WINDOW]) / WINDOW, sum(known[-WINDOW:]) / WINDOW
    if first <= 0 or now >= ENTROPY * first:
        return None
    return (
        f"Entropy has collapsed: {now:.3f} nats a token, {first:.3f} at first. Groups will soon be all alike and teach "
        "nothing. Look at the groups with signal; lower the learning rate, or set algorithm.loss.entropy_bonus or "
        "algorithm.loss.kl_beta."
    )


ALARMS: dict[str, Callable[[Steps], str | None]] = {
    "reward_follows_length": reward_follows_length,
    "reward_follows_tools": reward_follows_tools,
    "answers_repeat": answers_repeat,
    "entropy_collapses": entropy_collapses,
}


def new_alarms(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Alarms that the events of a run give reason for and that it has not raised yet, by name."""
    raised = {event["alarm"] for event in events if event["event"] == "alarm"}
    steps = [event for event in events if event["event"] == "step"]
    found = {name: alarm(steps) for name, alarm in ALARMS.items() if name not in raised}
    return {name: text for name, text in found.items() if text is not None}


def _follows(steps: Steps, correlation: str, amount: str, sentence: str) -> str | None:
    known = [step for step in steps if _behaviour(step, amount) is not None]
    if len(known) < 2 * WINDOW:
        return None
    recent = [(_behaviour(step, correlation), step) for step in known[-WINDOW:]]
    strong = [(r, step) for r, step in recent if r is not None and r >= CORRELATION]
    evidence = sum(_fisher(r, step) for r, step in strong) / math.sqrt(WINDOW)
    first, last = _mean(known[:WINDOW], amount), _mean(known[-WINDOW:], amount)
    if len(strong) < WINDOW or evidence < EVIDENCE or last < GROWTH * first or last == 0:
        return None
    return sentence.format(r=sum(r for r, _ in strong) / WINDOW, n=WINDOW, first=first, last=last)


def _fisher(r: float, step: Mapping[str, Any]) -> float:
    """The correlation in standard errors. Each group's mean costs a degree of freedom."""
    freedom = step["rollouts"] - step["groups"]["sampled"] - 2
    return math.atanh(min(r, 0.999)) * math.sqrt(max(0, freedom))


def _behaviour(step: Mapping[str, Any], name: str) -> float | None:
    value: float | None = step.get("behaviour", {}).get(name)
    return value


def _mean(steps: Steps, name: str) -> float:
    return sum(step["behaviour"][name] for step in steps) / len(steps)
