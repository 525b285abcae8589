"""The reward of one attempt, from the agent's answer alone."""

import re
from typing import Any

__all__ = ["evaluate"]

NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,15})?", re.ASCII)


def evaluate(task: dict[str, Any], output: Any) -> float:
    """1 if the agent answered the right number and nothing else, else 0."""
    answer = output.strip() if isinstance(output, str) else ""
    return float(bool(NUMBER.fullmatch(answer)) and float(answer) == task["reference"]["answer"])
