"""Rollouts, from tasks to rows: enqueue, wait, seal, fetch.

A group is done when all of its rollouts have ended and been read; a rollout that the infrastructure lost is replaced
within its group, in bounded rounds, so that it neither counts nor makes the group smaller. Every rollout's id follows
from its run, group and place, so asking again for the same rollouts – after a crash, say – finds those that exist
instead of sampling new ones.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from agentlightning.proto.errors import LightningError
from agentlightning.trainer.advantage import Outcome
from agentlightning.trainer.clients import GatewayClient, TransitionClient
from agentlightning.trainer.tasks import Task

__all__ = ["Collected", "Collector", "DeadlineExceeded", "Flow", "Group", "join"]

POLICY_CAUSES = frozenset({"agent_error", "timeout", "context_overflow"})
TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
CHECK_EVERY = 1.0
"""Seconds between two looks at whether the components are alive."""

Row = dict[str, Any]  # Any: JSON of the gateway's ledger


class DeadlineExceeded(LightningError):
    """Rollouts did not finish in time."""


@dataclass(frozen=True)
class Group:
    """The rollouts of one task that are compared with each other."""

    group_id: str
    task: Task
    size: int

    def rollout_id(self, number: int) -> str:
        """Numbers from `size` on are replacements."""
        return f"{self.group_id}.{number:02d}"

    @property
    def rollout_ids(self) -> list[str]:
        return [self.rollout_id(number) for number in range(self.size)]


@dataclass
class Collected:
    """What a set of rollouts came to."""

    rows: dict[str, Row]
    """The gateway's ledger by rollout id."""
    outcomes: list[Outcome]
    transitions: pa.Table
    """Read back from Parquet; complete attempts only."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Rollout id → why it cannot be used."""
    counters: Counter[str] = field(default_factory=Counter)

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

    def lost(self) -> list[str]:
        """Rollouts that say nothing about the policy: lost by the infrastructure, or not on record completely."""
        return [
            rollout_id
            for rollout_id, row in self.rows.items()
            if rollout_id in self.excluded
            or row["state"] == "cancelled"
            or (row["state"] == "failed" and row["cause"] not in POLICY_CAUSES)
        ]


def join(parts: Sequence[Collected]) -> Collected:
    """Several sets of rollouts as one."""
    return Collected(
        rows={key: row for part in parts for key, row in part.rows.items()},
        outcomes=[outcome for part in parts for outcome in part.outcomes],
        transitions=pa.concat_tables([part.transitions for part in parts]),
        excluded={key: reason for part in parts for key, reason in part.excluded.items()},
        counters=sum((part.counters for part in parts), Counter()),
    )


@dataclass(eq=False)
class Underway:
    """A group whose rollouts have not all ended, or have not been read."""

    group: Group
    deadline: float
    rounds: int
    """How often rollouts that get lost will still be replaced."""
    pending: set[str] = field(default_factory=set)
    ended: dict[str, Row] = field(default_factory=dict)
    """Not read yet."""
    parts: list[Collected] = field(default_factory=list)
    numbers: int = 0
    """Rollouts asked for."""


class Flow:
    """Groups on their way, of one kind; used by one task. `Collector.flow` makes it."""

    def __init__(
        self,
        collector: "Collector",
        *,
        split: str,
        sampling: Mapping[str, Any],
        replace_rounds: int,
        priority: int,
        on_finish: Callable[[Row], None],
    ) -> None:
        self.underway: dict[str, Underway] = {}
        """By group id."""
        self.read_seconds = 0.0
        self.replaced = 0
        """Rollouts that were asked for in place of lost ones."""
        self._collector = collector
        self._split = split
        self._sampling = dict(sampling)
        self._replace_rounds = replace_rounds
        self._priority = priority
        self._on_finish = on_finish
        self._news: asyncio.Queue[Row] = asyncio.Queue()

    @property
    def unfinished(self) -> int:
        """Rollouts that are queued or run."""
        return sum(len(underway.pending) for underway in self.underway.values())

    async def start(self, groups: Sequence[Group]) -> None:
        """Ask for the groups' rollouts; those that exist already are found again."""
        deadline = asyncio.get_running_loop().time() + self._collector.deadline_s
        fresh = [Underway(group, deadline, self._replace_rounds) for group in groups]
        for underway in fresh:
            self.underway[underway.group.group_id] = underway
        await self._ask([(underway, underway.group.size) for underway in fresh])

    async def ended(self) -> dict[str, Collected]:
        """The next groups that are done, by id: at least one.

        Raises:
            DeadlineExceeded: names the rollouts that are still open.
            ServiceError, ChildFailed: a component refused, or is gone for good.
        """
        assert self.underway, "groups are started before they end"
        while True:
            while not self._news.empty():
                self._settle(self._news.get_nowait())
            waiting = [underway for underway in self.underway.values() if not underway.pending]
            if waiting and (done := await self._read(waiting)):
                return done
            await self._wait()

    async def cancel(self) -> int:
        """Give up what is under way. Returns how many rollouts that were."""
        pending = [rollout for underway in self.underway.values() for rollout in sorted(underway.pending)]
        self.underway.clear()
        if pending:
            await self._collector.gateway.cancel(pending)
        self._collector.forget(pending)
        return len(pending)

    def tell(self, row: Row) -> None:
        self._news.put_nowait(row)

    async def _ask(self, wanted: Sequence[tuple[Underway, int]]) -> None:
        """Enqueue so many more rollouts of each group."""
        asked: list[str] = []
        bodies = []
        for underway, count in wanted:
            group = underway.group
            for number in range(underway.numbers, underway.numbers + count):
                rollout_id = group.rollout_id(number)
                underway.pending.add(rollout_id)
                asked.append(rollout_id)
                bodies.append(
                    {
                        "rollout_id": rollout_id,
                        "group_id": group.group_id,
                        "task_id": group.task.task_id,
                        "input": group.task.input,
                        "reference": group.task.reference,
                        "split": self._split,
                        "sampling": self._sampling,
                        "priority": self._priority,
                    }
                )
            underway.numbers += count
        for row in await self._collector.enqueue(self, asked, bodies):
            self.tell(row)

    async def _wait(self) -> None:
        self._collector.check()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_EVERY):
                self._settle(await self._news.get())
        now = asyncio.get_running_loop().time()
        late = [i for u in self.underway.values() if now > u.deadline for i in sorted(u.pending)]
        if late:
            raise DeadlineExceeded(await self._collector.who_is_late(late))

    def _settle(self, row: Row) -> None:
        underway = self.underway.get(row["group_id"])
        # `change` is set once the collector has the rollout's own span, not before.
        if underway is None or row["state"] not in TERMINAL or row["change"] is None:
            return
        if row["rollout_id"] in underway.pending:
            underway.pending.discard(row["rollout_id"])
            underway.ended[row["rollout_id"]] = row
            self._on_finish(row)

    async def _read(self, waiting: Sequence[Underway]) -> dict[str, Collected]:
        """Read what has ended of these groups; those without a loss to replace are done."""
        clock = asyncio.get_running_loop().time
        began = clock()
        # In the order of the rollouts' numbers, not of their ends: the same rollouts give the same batch.
        rows = [{i: underway.ended[i] for i in sorted(underway.ended)} for underway in waiting]
        parts = await self._collector.read(rows)
        self.read_seconds += clock() - began
        again: list[tuple[Underway, int]] = []
        done: dict[str, Collected] = {}
        for underway, part in zip(waiting, parts, strict=True):
            underway.parts.append(part)
            underway.ended.clear()
            lost = len(part.lost())
            if lost and underway.rounds > 0:
                underway.rounds -= 1
                self.replaced += lost
                again.append((underway, lost))
            else:
                del self.underway[underway.group.group_id]
                self._collector.forget([i for p in underway.parts for i in p.rows])
                done[underway.group.group_id] = join(underway.parts)
        if again:
            await self._ask(again)
        return done


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
        self.gateway = gateway
        self.deadline_s = deadline_s
        """Seconds from a group's start to its end."""
        self.reading = 0
        """Attempts that are being sealed and fetched."""
        self._transitions = transitions
        self._run_id = run_id
        self._common = {
            "run_id": run_id,
            "policy": policy,
            "max_attempts": max_attempts,
            "rights": list(rights),
        }
        self._seal_timeout_s = seal_timeout_s
        self._check_components = check
        self._owners: dict[str, Flow] = {}
        self._follower: asyncio.Task[None] | None = None

    def flow(
        self,
        *,
        split: str,
        sampling: Mapping[str, Any],
        replace_rounds: int = 0,
        priority: int = 0,
        on_finish: Callable[[Row], None] = lambda row: None,
    ) -> Flow:
        """Groups that are started now and then, and end in any order."""
        return Flow(
            self,
            split=split,
            sampling=sampling,
            replace_rounds=replace_rounds,
            priority=priority,
            on_finish=on_finish,
        )

    async def run(
        self,
        groups: Sequence[Group],
        *,
        split: str,
        sampling: Mapping[str, Any],
        replace_rounds: int = 0,
        priority: int = 0,
        on_finish: Callable[[Row], None] = lambda row: None,
    ) -> Collected:
        """Start groups and wait until all are done. Raises as `Flow.ended`."""
        flow = self.flow(
            split=split,
            sampling=sampling,
            replace_rounds=replace_rounds,
            priority=priority,
            on_finish=on_finish,
        )
        await flow.start(groups)
        done: dict[str, Collected] = {}
        while flow.underway:
            done |= await flow.ended()
        return join([done[group.group_id] for group in groups])

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError, LightningError):
                await self._follower

    def check(self) -> None:
        """Raise what makes waiting pointless."""
        self._check_components()
        if self._follower is not None and self._follower.done():
            self._follower.result()

    def pending(self) -> list[str]:
        """Rollouts of all flows that have not ended, as far as is known."""
        return sorted(
            rollout_id
            for flow in set(self._owners.values())
            for underway in flow.underway.values()
            for rollout_id in underway.pending
        )

    def forget(self, rollout_ids: Iterable[str]) -> None:
        for rollout_id in rollout_ids:
            self._owners.pop(rollout_id, None)

    async def enqueue(self, flow: Flow, rollout_ids: Sequence[str], bodies: Sequence[Row]) -> list[Row]:
        """Put rollouts into the queue, for `flow` to be told of their ends. Returns what is known of them."""
        self._owners.update(dict.fromkeys(rollout_ids, flow))
        if self._follower is None:
            self._follower = asyncio.create_task(self._follow())
        await self.gateway.enqueue([{**self._common, **body} for body in bodies])
        return list((await self.gateway.query(rollout_ids)).values())

    async def _follow(self) -> None:
        async for row in self.gateway.follow(self._run_id):
            if (flow := self._owners.get(row["rollout_id"])) is not None:
                flow.tell(row)

    async def who_is_late(self, pending: Sequence[str]) -> str:
        rows = await self.gateway.query(pending)
        states = Counter(row["state"] for row in rows.values())
        listing = ", ".join(f"{count} {state}" for state, count in states.most_common())
        return (
            f"{len(pending)} rollouts did not finish within {self.deadline_s:.0f} s ({listing}; first: "
            f"{pending[0]}): is a controller running, and do agents end? See the controller's log."
        )

    async def read(self, sets: Sequence[dict[str, Row]]) -> list[Collected]:
        """What is on record of sets of rollouts that have ended."""
        attempts = {
            (rollout_id, int(row["attempt"])): int(row["calls"])
            for rows in sets
            for rollout_id, row in rows.items()
            if row["attempt"] is not None and row["state"] != "cancelled"
        }
        self.reading = len(attempts)
        try:
            return await self._seal_and_fetch(sets, attempts)
        finally:
            self.reading = 0

    async def _seal_and_fetch(
        self, sets: Sequence[dict[str, Row]], attempts: Mapping[tuple[str, int], int]
    ) -> list[Collected]:
        sealed = await self._transitions.seal(attempts, timeout_s=self._seal_timeout_s)
        while any(item.unconverted for item in sealed.incomplete):
            self.check()  # nothing is missing: the collector is behind, and somebody watches how long
            sealed = await self._transitions.seal(attempts, timeout_s=self._seal_timeout_s)
        excluded = {item.rollout_id: "incomplete_rollout" for item in sealed.incomplete}
        complete = [key for key in attempts if key[0] not in excluded]
        transitions = await self._transitions.fetch("transitions", complete)
        judged = await self._transitions.fetch("rollouts", complete)
        if len(sets) == 1:
            return [_collected(sets[0], excluded, transitions, judged)]
        return [_collected(rows, excluded, _of(transitions, rows), _of(judged, rows)) for rows in sets]


def _of(table: pa.Table, rows: Mapping[str, Row]) -> pa.Table:
    return table.filter(pc.is_in(table.column("rollout_id"), value_set=pa.array(rows, pa.string())))


def _collected(
    rows: dict[str, Row], excluded: Mapping[str, str], transitions: pa.Table, judged: pa.Table
) -> Collected:
    excluded = {rollout_id: excluded[rollout_id] for rollout_id in rows if rollout_id in excluded}
    counters = Counter[str]()
    for name in ("duplicate", "late", "orphan", "unparsed", "dropped_attributes"):
        counters[name] += sum(value or 0 for value in judged.column(name).to_pylist())
    counters["incomplete_rollout"] += len(excluded)
    counters["no_calls"] += sum(row["state"] == "succeeded" and not row["calls"] for row in rows.values())
    counters["retried_attempts"] += sum(int(row["attempt"] or 0) for row in rows.values())
    for row in rows.values():
        if row["state"] != "succeeded":
            counters[f"rollout_{row['cause'] or row['state']}"] += 1
    return Collected(rows, _outcomes(rows, judged, excluded), transitions, dict(excluded), +counters)


def _outcomes(rows: Mapping[str, Row], judged: pa.Table, excluded: Mapping[str, str]) -> list[Outcome]:
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
