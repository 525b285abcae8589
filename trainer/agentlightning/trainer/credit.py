"""Credit: from the reward of a rollout to values of its calls.

| mode | value of a call |
|---|---|
| `final` | the rollout's reward, for every call (LightningRL; the default) |
| `last` | the rollout's reward for its last trained call, nothing for the others |
| `per_call` | R_k = r_k + γ·R_{k+1}: what the calls from this one on earned, the rollout's own reward at the end |
| `per_agent` | the reward named after the call's agent, else the rollout's |

Values are compared within a *slot*: the whole rollout, the k-th call, or the agent. Only trained calls get a value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from agentlightning.proto.errors import ConfigError, nearest

__all__ = ["Credit", "CreditMode", "CreditSettings", "Outcome", "Step", "assign"]

CreditMode = Literal["final", "last", "per_call", "per_agent"]


@dataclass(frozen=True, slots=True)
class CreditSettings:
    mode: CreditMode = "final"
    gamma: float = 1.0
    """Discount per call, of `per_call`."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(CreditMode):
            raise ConfigError(
                f"There is no credit mode {self.mode!r}.{nearest(self.mode, get_args(CreditMode))}"
            )
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"The credit discount gamma must lie between 0 and 1, not {self.gamma}.")
        if self.gamma != 1.0 and self.mode != "per_call":
            raise ConfigError(f"gamma discounts calls only in credit mode 'per_call', not in {self.mode!r}.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended, and what it was worth."""

    rollout_id: str
    group_id: str | None
    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named rewards; `per_agent` looks for the agent's name."""
    state: str = "succeeded"
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A call, as credit sees it."""

    call_id: str
    agent: str | None = None
    reward: float | None = None
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Credit:
    """A value that some calls of a rollout share."""

    slot: str
    value: float
    call_ids: tuple[str, ...]


def assign(settings: CreditSettings, outcome: Outcome, steps: Sequence[Step]) -> list[Credit] | str:
    """The values of a rollout's calls, in order of the calls; or why there are none."""
    trained = [step for step in steps if step.trained]
    match settings.mode:
        case "final":
            credits = [("", outcome.reward, trained)]
        case "last":
            credits = [("", outcome.reward, trained[-1:])]
        case "per_call":
            credits = _per_call(outcome, steps, settings.gamma)
        case "per_agent":
            agents = dict.fromkeys(step.agent or "" for step in trained)
            credits = [
                (
                    agent,
                    outcome.rewards.get(agent, outcome.reward),
                    [s for s in trained if (s.agent or "") == agent],
                )
                for agent in agents
            ]
    values = [value for _, value, _ in credits if value is not None]
    if len(values) < len(credits):
        return "no_reward"  # of one agent is enough: its calls could not be judged
    if not all(math.isfinite(value) for value in values):
        return "reward_not_finite"
    return [
        Credit(slot, value, tuple(step.call_id for step in of))
        for (slot, _, of), value in zip(credits, values, strict=True)
    ]


def _per_call(
    outcome: Outcome, steps: Sequence[Step], gamma: float
) -> list[tuple[str, float | None, list[Step]]]:
    judged = outcome.reward is not None or any(step.reward is not None for step in steps)
    if not judged:
        return [("", None, [])]
    value = outcome.reward or 0.0
    returns: list[float] = []
    for i, step in enumerate(reversed(steps)):
        # The rollout's reward comes with its last call, undiscounted.
        value = (step.reward or 0.0) + (value if i == 0 else gamma * value)
        returns.append(value)
    returns.reverse()
    trained = [(step, value) for step, value in zip(steps, returns, strict=True) if step.trained]
    return [(f"{k:06d}", value, [step]) for k, (step, value) in enumerate(trained)]
