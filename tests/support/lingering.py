"""The letters agent with a long tail: it waits before each call, for as long as a seeded log-normal law says.

A wait depends on the task and the call, not on when or where they run: two loops get the same durations.
"""

import os
import random
import time

from letters import evaluate, open_client, say, tasks

__all__ = ["evaluate", "solve", "tasks"]

MEDIAN = float(os.environ.get("LINGER_MEDIAN", "0.4"))
"""Seconds."""
SIGMA = float(os.environ.get("LINGER_SIGMA", "1.0"))
LONGEST = 30.0


def pause(key: str) -> float:
    return min(LONGEST, random.Random(key).lognormvariate(0.0, SIGMA) * MEDIAN)


def solve(word: str) -> str:
    client, messages, said = open_client(), [], []
    for call in range(2):
        time.sleep(pause(f"{os.environ['AGENTLIGHTNING_ROLLOUT_ID']}/{call}"))
        said.append(say(client, messages, f"Say {word}." if call == 0 else "Again."))
    return "".join(said)
