"""Judging an agent's output where the agent cannot reach: a forked process of a launcher of its own."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from agentlightning.controller.processes import Processes
from agentlightning.controller.rollout import Rollout
from agentlightning.proto.errors import LightningError

__all__ = ["EVALUATION_TIME", "EvaluatorFailed", "evaluate"]

EVALUATION_TIME = 60.0
"""Seconds one evaluation may take."""


class EvaluatorFailed(LightningError):
    """The evaluator raised, hung, or returned no number; never the agent's fault."""


async def evaluate(
    processes: Processes, target: str, rollout: Rollout, output: Any, directory: Path, counters: Counter[str]
) -> dict[str, float]:
    """The rewards of an attempt that succeeded, by name. Raises EvaluatorFailed."""
    log = str(directory / "evaluator.log")
    ended = await processes.run(
        {
            "id": rollout.key,
            "kind": "evaluation",
            "task": rollout.task,
            "output": output,
            "environ": None,
            "seed": rollout.seed,
            "stdout": log,
            "stderr": log,
            "timeout": EVALUATION_TIME,
            "grace": 1.0,
        }
    )
    if ended.ending == "exited" and ended.code == 0 and ended.result is not None:
        return {str(name): float(value) for name, value in json.loads(ended.result).items()}
    counters["evaluator_error"] += 1
    if ended.ending == "timeout":
        problem = f"ran longer than {EVALUATION_TIME:g} s"
    elif ended.ending in ("lost", "not_started"):
        problem = f"could not run: {ended.error}"
    else:
        how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
        problem = f"failed ({how}): {ended.last_line()}"
    raise EvaluatorFailed(f"The evaluator {target} {problem} (see {log}).")
