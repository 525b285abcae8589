"""Trace an agent for training: `import agentlightning.sdk as agl`.

    agl.instrument()                        # once, at start

    with agl.rollout(task={"question": q}): # where no controller does it
        with agl.agent("solver"):
            answer = solve(q)               # model calls through httpx or httpx2 record themselves
        agl.reward(score(answer))

The names below are the whole interface; the modules beneath are private.
"""

from agentlightning.sdk._instrument import flush, instrument, uninstrument
from agentlightning.sdk._losses import counters
from agentlightning.sdk._rewards import Judgement, reward
from agentlightning.sdk._spans import Rollout, agent, rollout

__all__ = [
    "Judgement",
    "Rollout",
    "agent",
    "counters",
    "flush",
    "instrument",
    "reward",
    "rollout",
    "uninstrument",
]
