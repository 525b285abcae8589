"""The synchronous and the asynchronous loop on agents with long-tailed durations: rollouts per hour, and the reward.

    python benchmarks/loops.py [--steps 14] [--mean-wait 8]

Both loops train the same tiny random model on the same tasks with every component real, one run after the other. Agents
wait before each call (a log-normal law, see `longtail.py`); all waits are drawn beforehand, so the ideal is known: so
many agents that wait one rollout after the other without a break, and a model that takes no time. Rates are of trained
rollouts, from the end of the second step to the end of the fourth last: neither the start nor the end,
where nothing new is started, says anything about a long run. The final reward is that of 64 held-out tasks.
Nine minutes, most of which is waiting.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import longtail
import yaml

from agentlightning.trainer.tasks import load_tasks, task_order

HERE = Path(__file__).parent
SLOTS = 16
GROUPS = 4
SKIPPED_FIRST, SKIPPED_LAST = 2, 3


@dataclass(frozen=True)
class Result:
    per_hour: float
    before: dict[str, Any]
    after: dict[str, Any]
    staleness: float
    held: float
    """Seconds of a step in which calls waited."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument(
        "--mean-wait", type=float, default=8.0, help="seconds that a rollout waits on average"
    )
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    options = parser.parse_args()
    if options.steps < SKIPPED_FIRST + SKIPPED_LAST + 2:
        parser.error(f"--steps must be at least {SKIPPED_FIRST + SKIPPED_LAST + 2}")
    os.environ["MEAN_WAIT"] = str(options.mean_wait)
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        model = root / "model"
        build_model(model)
        results = {kind: measure(kind, root, model, options.steps) for kind in ("sync", "async")}
    show(results, ideal(options.steps))
    return 0


def measure(kind: str, root: Path, model: Path, steps: int) -> Result:
    config = {
        "run": {"name": kind, "root": str(root)},
        "agent": {
            "target": "longtail:solve",
            "evaluator": "longtail:evaluate",
            "concurrency": SLOTS,
            "timeout_s": 600,
        },
        "tasks": {"train": "longtail:tasks", "val": "longtail:held_out"},
        "policy": {"name": "tiny", "model": str(model), "dtype": "float32", "sampling": {"max_tokens": 12}},
        "engine": {"dtype": "float32", "max_model_len": 512},
        "train": {
            "steps": steps,
            "groups_per_step": GROUPS,
            "group_size": longtail.GROUP,
            "learning_rate": 1e-3,
            "refill_rounds": 0,
        },
        "loop": {"kind": kind, "drain_s": 0.0},
        "evaluate": {"tasks": 64},
    }
    file = root / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(config))
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "agentlightning.cli", "train", str(file)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"The {kind} run failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    events = [json.loads(line) for line in (root / kind / "metrics.jsonl").read_text().splitlines()]
    made = [event for event in events if event["event"] == "step"]
    window = made[SKIPPED_FIRST : steps - SKIPPED_LAST]
    seconds = sum(event["seconds"]["total"] for event in window)
    evaluations = [event for event in events if event["event"] == "evaluate"]
    return Result(
        per_hour=3600 * sum(event["rollouts"] for event in window) / seconds,
        before=evaluations[0],
        after=evaluations[-1],
        staleness=max(event["staleness"].get("max", 0) for event in made),
        held=sum(event["held_seconds"] for event in window) / len(window),
    )


def ideal(steps: int) -> float:
    """Rollouts per hour of agents that do nothing but wait, one rollout after the other."""
    order = task_order(load_tasks("longtail:tasks", seed=0), seed=0)
    waits = [wait for _ in range(steps * GROUPS) for wait in next(order).input["waits"]]
    return 3600 * SLOTS * len(waits) / sum(waits)


def show(results: dict[str, Result], ideal_per_hour: float) -> None:
    sync, other = results["sync"], results["async"]
    print(
        f"{SLOTS} agents at once, {GROUPS} groups of {longtail.GROUP} a step; ideal {ideal_per_hour:,.0f} rollouts/h"
    )
    print(
        f"{'loop':<8}{'rollouts/h':>12}{'of ideal':>10}{'oldest token':>14}{'calls held':>12}  held-out reward"
    )
    for name, result in results.items():
        after = result.after
        print(
            f"{name:<8}{result.per_hour:>12,.0f}{result.per_hour / ideal_per_hour:>10.0%}"
            f"{result.staleness:>12.0f} v{result.held:>10.2f} s  {result.before['mean']:.3f} → {after['mean']:.3f} "
            f"[{after['low']:.3f}, {after['high']:.3f}]"
        )
    overlap = sync.after["low"] <= other.after["high"] and other.after["low"] <= sync.after["high"]
    lines = [
        ("async / sync", f"{other.per_hour / sync.per_hour:.2f}×", "≥ 2×"),
        ("async / ideal", f"{other.per_hour / ideal_per_hour:.0%}", "≥ 90 %"),
        ("final rewards within each other's interval", "yes" if overlap else "no", "yes"),
    ]
    print(f"{'':<44}{'measured':>10}  target")
    for name, value, target in lines:
        print(f"{name:<44}{value:>10}  {target}")


def build_model(folder: Path) -> None:
    sys.path.insert(0, str(HERE.parent / "tests" / "support"))
    from tinymodel import build_tiny_model

    build_tiny_model(folder)


if __name__ == "__main__":
    sys.exit(main())
