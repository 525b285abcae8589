"""New rewards for rollouts on record, as a new generation of the data set.

Each changed attempt is written again, whole, with its new reward and an evaluation among its spans, so that deriving the
data set from the spans gives the new rewards too. What has not changed is not written: doing it again does nothing.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from agentlightning.proto import attributes as names
from agentlightning.proto.dataset import AttemptEntry, Dataset, commit_manifest, write_files
from agentlightning.proto.schemas import TABLES
from agentlightning.trainer.conversation import exchanges
from agentlightning.trainer.recorded import Entry
from agentlightning.trainer.reward_workers import Judged, RecordedRollout, RewardWorkers

__all__ = ["Change", "Rescoring", "rescore"]

BATCH = 256
"""Rollouts that are held in memory, and that one commit holds."""


@dataclass(frozen=True)
class Change:
    """One rollout's rewards, before and after."""

    entry: Entry
    rewards: dict[str, float]
    """The new ones by name. Names that the function does not return stay as they were."""

    @property
    def before(self) -> float | None:
        return self.entry.reward

    @property
    def after(self) -> float | None:
        return self.rewards.get(names.DEFAULT_REWARD)


@dataclass
class Rescoring:
    """What came of it."""

    judged: int = 0
    changed: list[Change] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """Failure → the first rollout that had it, and why."""


def rescore(
    dataset: Dataset,
    entries: Sequence[Entry],
    workers: RewardWorkers,
    *,
    label: str,
    references: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    on_judged: Callable[[], None] = lambda: None,
) -> Rescoring:
    """Judge the rollouts anew, and write those whose rewards differ.

    Args:
        entries: newest attempts, as `read_index` finds them.
        label: the function's name; goes into the evaluation.
        references: task id → what the task's answer is compared with.
        dry_run: write nothing.
    """
    result = Rescoring()
    # In the order of the commits, so that each file is read as rarely as can be.
    ordered = sorted(entries, key=lambda e: (dataset.manifest_of(*e.key) or 0, e.rollout_id))
    for start in range(0, len(ordered), BATCH):
        batch = {entry.rollout_id: entry for entry in ordered[start : start + BATCH]}
        changes = []
        for judged in workers.judge(_rollouts(dataset, batch, references or {})):
            result.judged += 1
            on_judged()
            if (change := _change(batch[judged.rollout_id], judged, result)) is not None:
                changes.append(change)
        if changes and not dry_run:
            changes = _write(dataset, changes, label, result)
        result.changed += changes
    return result


def _rollouts(
    dataset: Dataset, entries: Mapping[str, Entry], references: Mapping[str, Any]
) -> Iterator[RecordedRollout]:
    keys = [entry.key for entry in entries.values()]
    calls: dict[str, list[dict[str, Any]]] = {rollout_id: [] for rollout_id in entries}
    for row in dataset.table("transitions", attempts=keys).to_pylist():
        calls[row["rollout_id"]].append(row)
    for row in dataset.table("rollouts", attempts=keys).to_pylist():
        entry = entries[row["rollout_id"]]
        rows = sorted(calls[entry.rollout_id], key=lambda call: call["seq"])
        said = exchanges(rows)
        yield RecordedRollout(
            rollout_id=entry.rollout_id,
            task={
                "task_id": row["task_id"],
                "input": _parse(row["input"]),
                "reference": references.get(row["task_id"] or ""),
            },
            messages=[dict(message) for message in said[-1].whole] if said else [],
            transitions=[_plain(call) for call in rows],
            reward=row["reward"],
            rewards=dict(row["rewards"] or ()),
            state=row["state"],
            cause=row["cause"],
            group_id=row["group_id"],
            run_id=row["run_id"],
            split=row["split"],
            attempt=row["attempt"],
        )


def _change(entry: Entry, judged: Judged, result: Rescoring) -> Change | None:
    if judged.failure is not None:
        result.failures[judged.failure] += 1
        result.examples.setdefault(judged.failure, f"{entry.rollout_id}: {judged.detail}".rstrip(": "))
        return None
    rewards = {**entry.rewards, **judged.rewards}
    return None if rewards == entry.rewards else Change(entry, rewards)


def _write(dataset: Dataset, changes: list[Change], label: str, result: Rescoring) -> list[Change]:
    """Commit a new generation of the changed attempts; those that changed on disk meanwhile are left to them."""
    read_at = {change.entry.key: dataset.attempts[change.entry.key] for change in changes}
    dataset.refresh()
    kept = [
        change
        for change in changes
        if (now := dataset.attempts.get(change.entry.key)) is not None
        and now.generation == read_at[change.entry.key].generation
    ]
    result.failures["written_meanwhile"] += len(changes) - len(kept)
    result.failures = +result.failures
    if not kept:
        return kept
    keys = {change.entry.key: change for change in kept}
    rollouts = []
    for row in dataset.table("rollouts", attempts=keys).to_pylist():
        change = keys[row["rollout_id"], row["attempt"]]
        rewards = sorted(change.rewards.items())
        rollouts.append({**row, "reward": change.after, "rewards": rewards})
    spans = dataset.table("spans", attempts=keys)
    tables = {
        "transitions": dataset.table("transitions", attempts=keys),
        "rollouts": pa.Table.from_pylist(rollouts, schema=TABLES["rollouts"]),
        "spans": pa.concat_tables([spans.cast(TABLES["spans"]), _evaluations(spans, keys, label)]),
    }
    entries = [_next_generation(dataset.attempts[key]) for key in keys]
    content = [[*key, dataset.attempts[key].generation, sorted(c.rewards.items())] for key, c in keys.items()]
    digest = hashlib.sha256(json.dumps(sorted(content)).encode()).hexdigest()[:20]
    files = write_files(dataset.store, f"rescore-{digest}", tables)
    commit_manifest(dataset.store, "rescore", files, attempts=entries)
    dataset.refresh()
    return kept


def _next_generation(entry: AttemptEntry) -> AttemptEntry:
    return replace(entry, generation=entry.generation + 1, since=0, place=0)


def _evaluations(spans: pa.Table, changes: Mapping[tuple[str, int], Change], label: str) -> pa.Table:
    """One log record per new reward, later than anything of its attempt: the latest judgement counts."""
    last: dict[tuple[str, int], tuple[int, dict[str, Any]]] = {}
    columns = spans.select(["rollout_id", "attempt", "trace_id", "resource"]).to_pylist()
    ends = spans.column("end_time").cast(pa.int64()).to_pylist()
    for row, end in zip(columns, ends, strict=True):
        key = row["rollout_id"], row["attempt"]
        if key not in last or (end or 0) > last[key][0]:
            last[key] = end or 0, row
    rows = []
    for key, change in changes.items():
        if key not in last:
            continue  # a data set without spans: there is nothing to derive again
        time_ns, row = last[key]
        for name, value in sorted(change.rewards.items()):
            if change.entry.rewards.get(name) != value:
                rows.append(_evaluation(row, name, value, time_ns + 1, label))
    return pa.Table.from_pylist(rows, schema=TABLES["spans"])


def _evaluation(row: Mapping[str, Any], name: str, value: float, time_ns: int, label: str) -> dict[str, Any]:
    content = {
        names.EVALUATION_NAME: {"stringValue": name},
        names.EVALUATION_SCORE: {"doubleValue": value},
        names.EVALUATION_EXPLANATION: {"stringValue": f"rescored by {label}"},
    }
    return {
        **row,
        "span_id": "",
        "name": names.EVALUATION_RESULT,
        "start_time": time_ns,
        "end_time": time_ns,
        "scope": "agentlightning.trainer.rescore",
        "attributes": json.dumps([{"key": key, "value": content[key]} for key in content]),
        "signal": "log",
    }


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A transition as JSON can hold it."""
    plain = {name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in row.items()}
    plain["rewards"] = dict(row["rewards"] or ())
    for name in ("request", "response", "sampling"):
        plain[name] = _parse(row[name])
    return plain


def _parse(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
