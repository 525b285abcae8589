"""The agent of `loops.py`: two model calls, and before each a wait that its task gives.

Waits stand for tools, compilers and web pages: they cost no processor, and a few take very long. They are drawn once,
by task and place in the group, so every loop meets the same ones.
"""

import os
import random
import time
from typing import Any

from openai import OpenAI

SIGMA = 1.0
"""Of the logarithm of a rollout's waits: one in forty takes seven times the median."""
GROUP = 4


def tasks(seed: int, count: int) -> list[dict[str, Any]]:
    """Every rollout of a group has its own waits, `MEAN_WAIT` seconds on average."""
    mean = float(os.environ["MEAN_WAIT"])
    rng = random.Random(seed)
    # The mean of a log-normal law is exp(mu + sigma²/2).
    draws = [[rng.lognormvariate(-(SIGMA**2) / 2, SIGMA) * mean for _ in range(GROUP)] for _ in range(count)]
    return [
        {"task_id": f"t{n}", "input": {"word": f"word{n % 16}", "waits": waits}, "reference": None}
        for n, waits in enumerate(draws)
    ]


def held_out(seed: int, count: int) -> list[dict[str, Any]]:
    return [
        {"task_id": f"v{n}", "input": {"word": f"word{n % 16}", "waits": [0.0]}, "reference": None}
        for n in range(count)
    ]


def solve(word: str, waits: list[float]) -> str:
    client = OpenAI(max_retries=8)
    wait = waits[int(os.environ["AGENTLIGHTNING_ROLLOUT_ID"].rsplit(".", 1)[1]) % len(waits)]
    messages: list[Any] = []
    said = ""
    for text in (f"Say {word}.", "Again."):
        time.sleep(wait / 2)
        messages.append({"role": "user", "content": text})
        answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        said += answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    return said


def evaluate(task: dict[str, Any], output: Any) -> float:
    """How much of the answer is ASCII letters."""
    text = str(output)
    return sum(character.isascii() and character.isalpha() for character in text) / max(len(text), 1)
