"""`agl rescore`: judge recorded rollouts with another reward."""

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from agentlightning.proto.dataset import Dataset, open_dataset
from agentlightning.proto.errors import ConfigError, DataError
from agentlightning.proto.process import lock_directory, run_main
from agentlightning.trainer.interval import mean_interval
from agentlightning.trainer.recorded import Entry, Selection, read_index
from agentlightning.trainer.rescore import Change, Rescoring, rescore
from agentlightning.trainer.reward_workers import RewardWorkers
from agentlightning.trainer.tasks import load_tasks

__all__ = ["main"]

DESCRIPTION = """\
Judge recorded rollouts with another reward, and write the new rewards as a new generation of the data set.

The function is called as module:function(rollout) with rollout.task (task_id, input, reference),
rollout.messages (the last conversation), rollout.transitions (every call), rollout.reward and .rewards
(as recorded), .state and .cause. It returns a number, or a dict of named numbers of which `reward` is
the rollout's; names that it does not return stay. A rollout on which it fails keeps its rewards and is
counted; then the exit code is 1. What has not changed is not written, so running it again does nothing."""

EPILOG = """\
examples:
  agl rescore runs/first/data --reward my_rewards:shorter --dry-run     show what would change
  agl rescore runs/first/data --reward my_rewards:exact --tasks tasks.jsonl --workers 4
  agl train --offline runs/first/data config.yaml run.name=again       learn from the new rewards"""

SHOWN = 10


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    return run_main(lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="agl rescore",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "data", metavar="DATA", help="a data set (a folder, or s3://…), or the directory of a run"
    )
    parser.add_argument("--reward", required=True, metavar="MODULE:FUNCTION", help="what judges a rollout")
    parser.add_argument(
        "--tasks",
        action="append",
        metavar="TASKS",
        help="a tasks file (or module:function) that gives rollout.task['reference']; may be repeated",
    )
    parser.add_argument(
        "--run", action="append", metavar="ID", help="only rollouts of this run; may be repeated"
    )
    parser.add_argument("--split", choices=["train", "val", "all"], default="all", help="default: all")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for one rollout (default: 60)"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that judge (default: 1)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the difference, write nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    if options.workers < 1 or options.timeout <= 0:
        raise ConfigError("--workers must be at least 1 and --timeout above 0.")
    dataset = open_dataset(options.data)
    split = None if options.split == "all" else (options.split,)
    index = read_index(dataset, Selection(runs=tuple(options.run) if options.run else None, splits=split))
    if not index.groups:
        raise DataError(f"{dataset.root} holds no complete rollouts that these options mean.")
    references = {
        task.task_id: task.reference for source in options.tasks or () for task in load_tasks(source, seed=0)
    }
    console = Console(stderr=True, highlight=False)
    with (
        _alone(dataset),
        RewardWorkers(options.reward, count=options.workers, timeout_s=options.timeout) as workers,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("judging", total=len(index.entries))
        result = rescore(
            dataset,
            index.entries,
            workers,
            label=options.reward,
            references=references,
            dry_run=options.dry_run,
            on_judged=lambda: progress.advance(bar),
        )
    document = _document(result, index.entries, options.dry_run)
    print(json.dumps(document, indent=2) if options.json else _text(document))
    return 1 if result.failures else 0


def _alone(dataset: Dataset) -> contextlib.AbstractContextManager[None]:
    """Two at once would judge twice. In an object store there is no lock: there the later commit counts."""
    if isinstance(dataset.root, Path):
        return lock_directory(dataset.root / "rescore.lock", "Rescoring")
    return contextlib.nullcontext()


def _document(result: Rescoring, entries: Sequence[Entry], dry_run: bool) -> dict[str, Any]:
    new = {change.entry.rollout_id: change.after for change in result.changed}
    before = [entry.reward for entry in entries if entry.reward is not None]
    now = [new.get(entry.rollout_id, entry.reward) for entry in entries]
    after = [reward for reward in now if reward is not None]
    largest = sorted(result.changed, key=_distance, reverse=True)[:SHOWN]
    return {
        "dry_run": dry_run,
        "judged": result.judged,
        "changed": len(result.changed),
        "failures": dict(result.failures),
        "examples": result.examples,
        "before": vars(mean_interval(before)) if before else None,
        "after": vars(mean_interval(after)) if after else None,
        "largest": [
            {"rollout_id": c.entry.rollout_id, "before": c.before, "after": c.after, "rewards": c.rewards}
            for c in largest
        ],
    }


def _distance(change: Change) -> float:
    if change.before is None or change.after is None:
        return float("inf")
    return abs(change.after - change.before)


def _text(document: dict[str, Any]) -> str:
    verb = "would change" if document["dry_run"] else "changed"
    lines = [f"{document['judged']} rollouts judged, {document['changed']} {verb}."]
    for name in ("before", "after"):
        if (spread := document[name]) is not None:
            interval = f"95 % interval [{spread['low']:.3f}, {spread['high']:.3f}]"
            lines.append(
                f"  mean reward {name:<7}{spread['mean']:.3f}  {interval} over {spread['n']} rollouts"
            )
    if document["largest"]:
        lines.append("  largest changes")
    for change in document["largest"]:
        lines.append(f"    {change['rollout_id']}  {_number(change['before'])} → {_number(change['after'])}")
    for failure, count in document["failures"].items():
        example = document["examples"].get(failure)
        lines.append(f"  {count} kept their rewards: {failure}" + (f" ({example})" if example else ""))
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
