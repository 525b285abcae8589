"""Which rollouts of a data set are meant, and in what batches they are learnt from.

An index of the rollouts (ids, rewards, outcomes) is held in memory; their calls are read batch by batch, from the files
that hold them alone, so a data set may be larger than memory.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from agentlightning.proto.dataset import Dataset
from agentlightning.trainer.credit import Outcome

__all__ = ["Entry", "Index", "Selection", "batches", "read_index", "recorded_steps"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Filters; None lets everything pass."""

    runs: tuple[str, ...] | None = None
    splits: tuple[str, ...] | None = ("train",)
    """A rollout of which nobody said the split counts as `train`."""
    min_reward: float | None = None
    best_of_group: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """The newest attempt of a rollout."""

    rollout_id: str
    attempt: int
    group_id: str
    """Where nobody named a group, the rollouts of one task in one run are one; without a task, each is its own."""
    task_id: str | None
    run_id: str | None
    split: str
    state: str
    cause: str | None
    reward: float | None
    rewards: dict[str, float]

    @property
    def key(self) -> tuple[str, int]:
        return self.rollout_id, self.attempt

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.rollout_id, self.group_id, self.reward, self.rewards, self.state, self.cause)


@dataclass(frozen=True, slots=True)
class Index:
    """The selected rollouts by group, groups and rollouts in order of their ids; and what was left out, by reason."""

    groups: tuple[tuple[Entry, ...], ...]
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def entries(self) -> list[Entry]:
        return [entry for group in self.groups for entry in group]


def read_index(dataset: Dataset, selection: Selection | None = None) -> Index:
    """Find the rollouts that a selection means. Incomplete ones are left out: nothing is learnt from half a record."""
    selection = selection or Selection()
    names = ["rollout_id", "attempt", "group_id", "task_id", "run_id", "split", "state", "cause"]
    names += ["reward", "rewards", "calls_expected", "calls_stored"]
    newest: dict[str, tuple[Entry, bool]] = {}
    for row in (row for piece in dataset.pieces("rollouts", columns=names) for row in piece.to_pylist()):
        known = newest.get(row["rollout_id"])
        if known is not None and known[0].attempt >= row["attempt"]:
            continue
        task = None if row["task_id"] is None else f"{row['run_id'] or ''}/{row['task_id']}"
        entry = Entry(
            rollout_id=row["rollout_id"],
            attempt=row["attempt"],
            group_id=row["group_id"] or task or row["rollout_id"],
            task_id=row["task_id"],
            run_id=row["run_id"],
            split=row["split"] or "train",
            state=row["state"] or "succeeded",
            cause=row["cause"],
            reward=row["reward"],
            rewards=dict(row["rewards"] or ()),
        )
        expected = row["calls_expected"]
        newest[row["rollout_id"]] = entry, expected is None or row["calls_stored"] >= expected
    left_out = Counter[str]()
    groups: dict[str, list[Entry]] = {}
    for rollout_id in sorted(newest):
        entry, complete = newest[rollout_id]
        if (reason := _refused(entry, complete, selection)) is not None:
            left_out[reason] += 1
        else:
            groups.setdefault(entry.group_id, []).append(entry)
    if selection.best_of_group is not None:
        for group_id, entries in groups.items():
            best = sorted(entries, key=lambda entry: -(entry.reward or 0.0))[: selection.best_of_group]
            left_out["not_best_of_group"] += len(entries) - len(best)
            groups[group_id] = sorted(best, key=lambda entry: entry.rollout_id)
    return Index(tuple(tuple(groups[group_id]) for group_id in sorted(groups)), +left_out)


def batches(
    groups: Sequence[Sequence[Entry]],
    *,
    groups_per_batch: int,
    passes: int,
    seed: int,
    steps: dict[str, int] | None = None,
) -> Iterator[list[Entry]]:
    """The batches of every pass: the first in the order of the record, later ones shuffled; groups stay whole.

    Args:
        steps: group id → the online step that used it. Then the batches are those steps', in every pass.
    """
    batch_list: list[list[Sequence[Entry]]] = []
    if steps is not None:
        by_step: dict[int, list[Sequence[Entry]]] = {}
        for group in groups:
            by_step.setdefault(steps[group[0].group_id], []).append(group)
        batch_list = [by_step[step] for step in sorted(by_step)]
    for number in range(passes):
        order = list(groups)
        if number:
            shuffle = random.Random(f"{seed}/{number}").shuffle
            shuffle(batch_list)
            shuffle(order)
        if steps is None:
            batch_list = [order[i : i + groups_per_batch] for i in range(0, len(order), groups_per_batch)]
        for batch in batch_list:
            yield sorted((entry for group in batch for entry in group), key=lambda entry: entry.rollout_id)


def recorded_steps(dataset: Dataset, groups: Collection[Sequence[Entry]]) -> dict[str, int]:
    """Group id → the step that was made of it, as the `samples` table says; groups of which it says nothing are missing."""
    table = dataset.table("samples", columns=["rollout_id", "step"])
    step_of = dict(zip(table.column("rollout_id").to_pylist(), table.column("step").to_pylist(), strict=True))
    steps = {}
    for group in groups:
        known = [step_of[entry.rollout_id] for entry in group if entry.rollout_id in step_of]
        if known:
            steps[group[0].group_id] = known[0]
    return steps


def _refused(entry: Entry, complete: bool, selection: Selection) -> str | None:
    if selection.runs is not None and entry.run_id not in selection.runs:
        return "other_run"
    if selection.splits is not None and entry.split not in selection.splits:
        return "other_split"
    if not complete:
        return "incomplete_rollout"
    if selection.min_reward is not None or selection.best_of_group is not None:
        if entry.reward is None:
            return "no_reward"
        if entry.state != "succeeded":
            return entry.cause or entry.state
        if selection.min_reward is not None and entry.reward < selection.min_reward:
            return "below_min_reward"
    return None
