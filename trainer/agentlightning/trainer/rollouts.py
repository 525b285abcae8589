"""Rollouts, from tasks to rows: enqueue, wait, seal, fetch.

Every rollout's id follows from its run, step and place, so asking again for the same rollouts – after a
crash, say – finds those that exist instead of sampling new ones.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from agentlightning.proto.errors import LightningError
from agentlightning.trainer.advantage import Outcome
from agentlightning.trainer.clients import GatewayClient, TransitionClient
from agentlightning.trainer.tasks import Task

__all__ = ["Collected", "Collector", "DeadlineExceeded", "Group"]

POLICY_CAUSES = frozenset({"agent_error", "timeout", "context_overflow"})
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})


class DeadlineExceeded(LightningError):
    """Rollouts did not finish in time."""


@dataclass(frozen=True)
class Group:
    """The rollouts of one task that are compared with each other."""

    group_id: str
    task: Task
    size: int

    @property
    def rollout_ids(self) -> list[str]:
        return [f"{self.group_id}.{number:02d}" for number in range(self.size)]


@dataclass
class Collected:
    """What a set of rollouts came to."""

    rows: dict[str, dict[str, Any]]
    """The gateway's ledger by rollout id."""
    outcomes: list[Outcome]
    transitions: pa.Table
    """Read back from Parquet; complete attempts only."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Rollout id → why it cannot be used."""
    counters: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def rewards(self) -> list[float]:
        """What evaluation counts: every reward, and 0 where the policy made the attempt fail.

        To leave such failures out would flatter a policy that fails often. Failures of the infrastructure
        say nothing about the policy and are left out.
        """
        rewards = []
        for outcome in self.outcomes:
            if outcome.state == "succeeded" and outcome.reward is not None:
                rewards.append(outcome.reward)
            elif outcome.state == "failed" and outcome.cause in POLICY_CAUSES:
                rewards.append(0.0)
        return rewards


class Collector:
    """Asks for rollouts, and brings back their rows."""

    def __init__(
        self,
        gateway: GatewayClient,
        transitions: TransitionClient,
        *,
        run_id: str,
        policy: str,
        max_attempts: int,
        rights: Sequence[str] = (),
        deadline_s: float,
        seal_timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        self._gateway = gateway
        self._transitions = transitions
        self._run_id = run_id
        self._policy = policy
        self._max_attempts = max_attempts
        self._rights = list(rights)
        self._deadline_s = deadline_s
        self._seal_timeout_s = seal_timeout_s
        self._check = check
        self._cursor = 0

    async def run(
        self,
        groups: Sequence[Group],
        *,
        split: str,
        sampling: Mapping[str, Any],
        on_finish: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> Collected:
        """Enqueue the groups' rollouts, wait until all have ended, and read what is on record.

        Raises:
            DeadlineExceeded: names the rollouts that are still open.
            ServiceError, ChildFailed: a component refused, or is gone for good.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._gateway.enqueue(
            [
                {
                    "rollout_id": rollout_id,
                    "run_id": self._run_id,
                    "group_id": group.group_id,
                    "task_id": group.task.task_id,
                    "split": split,
                    "policy": self._policy,
                    "input": group.task.input,
                    "reference": group.task.reference,
                    "sampling": dict(sampling),
                    "max_attempts": self._max_attempts,
                    "rights": self._rights,
                }
                for group in groups
                for rollout_id in group.rollout_ids
            ]
        )
        rows = await self._wait([i for group in groups for i in group.rollout_ids], on_finish)
        ended = clock()
        collected = await self._read(rows)
        collected.seconds = {"rollouts": ended - began, "read": clock() - ended}
        return collected

    async def _wait(
        self, rollout_ids: Sequence[str], on_finish: Callable[[dict[str, Any]], None]
    ) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        pending = set(rollout_ids)

        def settle(row: dict[str, Any]) -> None:
            # `change` is set once the collector has the rollout's own span, not before.
            if row["rollout_id"] in pending and row["state"] in TERMINAL and row["change"] is not None:
                pending.discard(row["rollout_id"])
                rows[row["rollout_id"]] = row
                on_finish(row)

        for row in (await self._gateway.query(rollout_ids)).values():
            settle(row)
        ended: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        follower = asyncio.create_task(self._follow(ended))
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        try:
            while pending:
                self._check()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        reported = await ended.get()
                    if reported is None:
                        await follower  # raises what ended it
                    else:
                        self._cursor = max(self._cursor, reported["change"])
                        settle(reported)
                if pending and asyncio.get_running_loop().time() > deadline:
                    raise DeadlineExceeded(await self._who_is_late(sorted(pending)))
        finally:
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError, LightningError):
                await follower
        return {rollout_id: rows[rollout_id] for rollout_id in rollout_ids}

    async def _follow(self, ended: asyncio.Queue[dict[str, Any] | None]) -> None:
        try:
            async for row in self._gateway.follow(self._run_id, self._cursor):
                ended.put_nowait(row)
        finally:
            ended.put_nowait(None)

    async def _who_is_late(self, pending: Sequence[str]) -> str:
        rows = await self._gateway.query(pending)
        states = Counter(row["state"] for row in rows.values())
        listing = ", ".join(f"{count} {state}" for state, count in states.most_common())
        return (
            f"{len(pending)} rollouts did not finish within {self._deadline_s:.0f} s ({listing}; first: "
            f"{pending[0]}): is a controller running, and do agents end? See the controller's log."
        )

    async def _read(self, rows: dict[str, dict[str, Any]]) -> Collected:
        attempts = {
            (rollout_id, int(row["attempt"])): int(row["calls"])
            for rollout_id, row in rows.items()
            if row["attempt"] is not None and row["state"] != "cancelled"
        }
        sealed = await self._transitions.seal(attempts, timeout_s=self._seal_timeout_s)
        excluded = {item.rollout_id: "incomplete_rollout" for item in sealed.incomplete}
        complete = [key for key in attempts if key[0] not in excluded]
        transitions = await self._transitions.fetch("transitions", complete)
        judged = await self._transitions.fetch("rollouts", complete)
        outcomes = _outcomes(rows, judged, excluded)
        counters = Counter[str]()
        for name in ("duplicate", "late", "orphan", "unparsed", "dropped_attributes"):
            counters[name] += sum(value or 0 for value in judged.column(name).to_pylist())
        counters["incomplete_rollout"] += len(excluded)
        counters["no_calls"] += sum(row["state"] == "succeeded" and not row["calls"] for row in rows.values())
        counters["retried_attempts"] += sum(int(row["attempt"] or 0) for row in rows.values())
        for row in rows.values():
            if row["state"] != "succeeded":
                counters[f"rollout_{row['cause'] or row['state']}"] += 1
        return Collected(rows, outcomes, transitions, excluded, +counters)


def _outcomes(
    rows: Mapping[str, Mapping[str, Any]], judged: pa.Table, excluded: Mapping[str, str]
) -> list[Outcome]:
    """State and cause as the ledger has them, rewards as they are in Parquet."""
    rewards = {
        row["rollout_id"]: row for row in judged.select(["rollout_id", "reward", "rewards"]).to_pylist()
    }
    outcomes = []
    for rollout_id, row in rows.items():
        if rollout_id in excluded:
            continue
        stored = rewards.get(rollout_id, {"reward": None, "rewards": None})
        outcomes.append(
            Outcome(
                rollout_id=rollout_id,
                group_id=row["group_id"],
                reward=stored["reward"],
                rewards=dict(stored["rewards"] or ()),
                state=row["state"],
                cause=row["cause"],
            )
        )
    return outcomes
