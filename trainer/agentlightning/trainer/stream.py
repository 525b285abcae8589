"""The asynchronous loop's groups: agents never idle, and a step takes the groups that are done.

What is under way while weights change is carried over. Nothing gets older than the bound, and nothing has to be thrown
away for it: a step uses its oldest groups first, a group is started only if the steps until it would be too old have
room for it behind all that were started before, and a step waits for a slow group that later steps could not take any
more. (AReaL, Fu et al. 2025, bounds staleness by admission, too; here the bound is strict, because stragglers are
waited for.)

Which groups make up a step is written down before they are trained: after a crash the same step is made of the same groups.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from agentlightning.proto.errors import DataError
from agentlightning.trainer.plans import Plans
from agentlightning.trainer.rollouts import Collected, Flow, Group, join
from agentlightning.trainer.supply import Score, Settings, StepBatch, make_batch
from agentlightning.trainer.tasks import Task, task_order

__all__ = ["StreamSupply", "feasible"]


@dataclass(eq=False)
class Started:
    """A group of the asynchronous loop that no step has used."""

    number: int
    """Place in the order of tasks."""
    version: int
    """Weights at its start: its oldest token cannot be older."""
    collected: Collected | None = None
    informative: bool | None = None
    """Whether its rewards differ; None: not known yet."""


@dataclass
class StreamSupply:
    """Groups flow; a step takes those that are done."""

    flow: Flow
    tasks: Sequence[Task]
    score: Score
    settings: Settings
    plans: Plans
    run_id: str
    seed: int
    concurrency: int
    """Agents that run at once."""
    staleness: int
    """How many versions old the weights may be that sampled any trained token."""
    announce: Callable[[str, int], None]
    _next: int = field(default=0, init=False)
    """Number of the next group: the data cursor."""
    _started: dict[int, Started] = field(default_factory=dict, init=False)
    _order: list[Task] = field(default_factory=list, init=False)
    _carried: list[tuple[int, int]] = field(default_factory=list, init=False)
    """After a restart: groups that were under way, with their versions."""

    async def next(self, step: int, version: int) -> StepBatch:
        seconds: dict[str, float] = {}
        began, read = time.monotonic(), self.flow.read_seconds
        self.announce(f"step {step}", self.settings.groups_per_step * self.settings.group_size)
        planned = self.plans.read(step)
        await self._carry_over(planned or (), version)
        while True:
            await self._admit(step, version)
            chosen = self._planned(planned) if planned is not None else self._choose(step, version)
            if chosen is not None:
                break
            self._store(await self.flow.ended())
            await asyncio.to_thread(self._judge)
        if planned is None:
            self.plans.write(step, [started.number for started in chosen])
        for started in chosen:
            del self._started[started.number]
        seconds["read"] = self.flow.read_seconds - read
        seconds["rollouts"] = time.monotonic() - began - seconds["read"]
        clock = time.monotonic()
        everything = join([_done(started) for started in chosen])
        samples, scored = await asyncio.to_thread(self.score, everything)
        seconds["merge"] = time.monotonic() - clock
        informative = sum(not group.zero_variance for group in scored.groups)
        batch = make_batch(everything, samples, scored, len(chosen), informative, seconds)
        batch.carried_over = self.flow.unfinished
        return batch

    def state(self) -> dict[str, Any]:
        return {
            "consumed": self._next,
            "started": [[started.number, started.version] for started in self._started.values()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["consumed"])
        self._carried = [(int(number), int(version)) for number, version in state["started"]]

    async def close(self) -> None:
        await self.flow.cancel()

    async def _carry_over(self, planned: Iterable[int], version: int) -> None:
        """After a restart: find again what was under way, and what the step had been made of."""
        missing = list(range(self._next, max(planned, default=-1) + 1))
        again, self._carried = self._carried, []
        if again or missing:
            await self._start([*again, *((number, version) for number in missing)])

    async def _admit(self, step: int, version: int) -> None:
        """Start groups while agents would idle, no started group could get too old, and steps are left to use them."""
        settings, unused = self.settings, len(self._unused())
        wanted = (settings.steps - step + 1) * settings.groups_per_step
        limit = min(wanted, (self.staleness + 1) * settings.groups_per_step)
        # One group more than run, so that the queue is never empty when an agent ends.
        room = self.concurrency + settings.group_size - self.flow.unfinished
        count = min(limit - unused, -(-room // settings.group_size))
        if count > 0:
            await self._start([(number, version) for number in range(self._next, self._next + count)])

    async def _start(self, numbers: Sequence[tuple[int, int]]) -> None:
        for number, version in numbers:
            self._started[number] = Started(number, version)
        self._next = max(self._next, *(number + 1 for number, _ in numbers))
        await self.flow.start([self._group(number) for number, _ in numbers])

    def _group(self, number: int) -> Group:
        if number >= len(self._order):
            order = task_order(list(self.tasks), seed=self.seed)
            self._order = list(islice(order, 2 * number + 64))
        return Group(f"{self.run_id}.g{number:06d}", self._order[number], self.settings.group_size)

    def _store(self, ended: Mapping[str, Collected]) -> None:
        by_id = {self._group(number).group_id: started for number, started in self._started.items()}
        for group_id, collected in ended.items():
            by_id[group_id].collected = collected

    def _judge(self) -> None:
        for started in self._started.values():
            if started.collected is not None and started.informative is None:
                _, scored = self.score(started.collected)
                started.informative = any(not group.zero_variance for group in scored.groups)

    def _unused(self) -> list[Started]:
        """Groups that take room in a step: those that may still say something."""
        return [s for s in self._started.values() if s.informative is not False]

    def _planned(self, numbers: Sequence[int]) -> list[Started] | None:
        missing = [number for number in numbers if number not in self._started]
        if missing:
            raise DataError(
                f"Group {missing[0]} belongs to the step that is to be repeated, but an earlier step has used it: "
                "the run's folder does not fit its checkpoint. Start a new run."
            )
        chosen = [self._started[number] for number in numbers]
        return chosen if all(started.collected is not None for started in chosen) else None

    def _choose(self, step: int, version: int) -> list[Started] | None:
        """The groups of a step, in their order; None while there are too few or the wrong ones."""
        settings = self.settings
        started = self._started.values()
        rejected = [s for s in started if s.informative is False]
        ready = sorted((s for s in started if s.informative), key=lambda s: (s.version, s.number))
        chosen = ready[: settings.groups_per_step]
        left = [s.version for s in self._unused() if s not in chosen]
        fits = feasible(left, version + 1, self.staleness, settings.groups_per_step)
        if not fits and self.flow.underway:
            return None
        full = len(chosen) == settings.groups_per_step
        patience = settings.refill_rounds * settings.groups_per_step
        if not full and len(chosen) + len(rejected) < settings.groups_per_step + patience:
            return None
        return sorted([*chosen, *rejected], key=lambda s: s.number)


def feasible(versions: Sequence[int], version: int, staleness: int, per_step: int) -> bool:
    """Whether steps from the weights of `version` on can use groups that were started at `versions` before any is
    more than `staleness` versions old, `per_step` groups a step."""
    ages = sorted((version - v for v in versions), reverse=True)
    return all(position < per_step * (staleness - age + 1) for position, age in enumerate(ages))


def _done(started: Started) -> Collected:
    assert started.collected is not None, "only groups that are done are chosen"
    return started.collected
