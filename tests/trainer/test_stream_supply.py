"""The asynchronous loop's choice of groups, on rollouts whose durations and rewards are drawn, in simulated time.

The flow stands for gateway, controller and agents: it ends groups in the order of their durations. Everything that is
proven here about order and age is decided by the real supply.
"""

import asyncio
import heapq
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agentlightning.proto.schemas import TRANSITIONS
from agentlightning.trainer.advantage import AdvantageSettings, Outcome, Scored, score
from agentlightning.trainer.credit import CreditSettings
from agentlightning.trainer.plans import Plans
from agentlightning.trainer.rollouts import Collected, Group
from agentlightning.trainer.samples import SampleSet
from agentlightning.trainer.stream import StreamSupply, feasible
from agentlightning.trainer.tasks import Task

TASKS = [Task(f"t{n}", {}, None) for n in range(7)]


@dataclass
class Settings:
    steps: int = 40
    groups_per_step: int = 3
    group_size: int = 4
    refill_rounds: int = 1


class SimulatedFlow:
    """Agents that take log-normal times, `concurrency` at once; a share of groups has rewards without variance."""

    def __init__(self, *, seed: int, concurrency: int, group_size: int, flat: float, sigma: float) -> None:
        self.underway: dict[str, Group] = {}
        self.read_seconds = 0.0
        self.now = 0.0
        self.started: list[str] = []
        self.busy = 0.0
        self._slots = [0.0] * concurrency
        self._ends: list[tuple[float, str]] = []
        self._random = random.Random(seed)
        self._size, self._flat, self._sigma = group_size, flat, sigma

    @property
    def unfinished(self) -> int:
        return len(self.underway) * self._size

    async def start(self, groups: list[Group]) -> None:
        for group in groups:
            self.started.append(group.group_id)
            self.underway[group.group_id] = group
            ends = []
            for _ in range(self._size):
                begin = max(heapq.heappop(self._slots), self.now)
                end = begin + self._random.lognormvariate(0, self._sigma)
                heapq.heappush(self._slots, end)
                ends.append(end)
            heapq.heappush(self._ends, (max(ends), group.group_id))

    async def ended(self) -> dict[str, Collected]:
        self.now, group_id = heapq.heappop(self._ends)
        group = self.underway.pop(group_id)
        flat = random.Random(group_id).random() < self._flat
        outcomes = [
            Outcome(i, group_id, reward=0.0 if flat else float(n), rewards={}, state="succeeded", cause=None)
            for n, i in enumerate(group.rollout_ids)
        ]
        rows = {i: {"state": "succeeded", "cause": None, "error": None} for i in group.rollout_ids}
        return {group_id: Collected(rows, outcomes, TRANSITIONS.empty_table())}

    async def cancel(self) -> int:
        return 0


def judge(collected: Collected) -> tuple[SampleSet, Scored]:
    """By the real estimator; what makes a group say something here is its rewards, since there are no tokens."""
    samples = SampleSet()
    scored = score(samples, collected.outcomes, credit=CreditSettings(), advantage=AdvantageSettings())
    rewards: dict[str, set[float]] = {}
    for outcome in collected.outcomes:
        assert outcome.reward is not None
        rewards.setdefault(outcome.group_id or "", set()).add(outcome.reward)
    groups = tuple(replace(group, zero_variance=len(rewards[group.group_id]) < 2) for group in scored.groups)
    return samples, replace(scored, groups=groups)


def make(
    folder: Path, flow: SimulatedFlow, *, staleness: int, concurrency: int, **settings: Any
) -> StreamSupply:
    return StreamSupply(
        flow,  # type: ignore[arg-type]
        TASKS,
        judge,
        Settings(**settings),
        Plans(folder),
        run_id="r",
        seed=0,
        concurrency=concurrency,
        staleness=staleness,
        announce=lambda what, total: None,
    )


def numbers(folder: Path, step: int) -> list[int]:
    plan = Plans(folder).read(step)
    assert plan is not None
    return plan


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_group_is_ever_older_than_the_bound_and_none_is_left_out(
    tmp_path: Path, seed: int, staleness: int
) -> None:
    """Long tails (a deviation of 1.5 in log time), and a third of the groups says nothing."""
    flow = SimulatedFlow(seed=seed, concurrency=24, group_size=4, flat=0.3, sigma=1.5)
    supply = make(tmp_path, flow, staleness=staleness, concurrency=24, refill_rounds=9)
    started_at: dict[str, int] = {}

    async def scenario() -> list[int]:
        used: list[int] = []
        for step in range(1, 41):
            version = step - 1
            batch = await supply.next(step, version)
            for group_id in flow.started:
                started_at.setdefault(group_id, version)
            chosen = numbers(tmp_path, step)
            assert batch.informative_groups == 3
            assert batch.sampled_groups == len(chosen)
            ages = [version - started_at[f"r.g{number:06d}"] for number in chosen]
            assert max(ages) <= staleness
            used += chosen
        return used

    used = asyncio.run(scenario())
    assert len(used) == len(set(used))  # none is used twice
    never = set(range(len(flow.started))) - set(used)
    assert len(never) <= len(flow.underway) + len(supply.state()["started"])  # only those at the very end
    if staleness:
        assert any(flow.underway) or len(never) == 0


def test_agents_never_idle_while_the_bound_allows_it(tmp_path: Path) -> None:
    flow = SimulatedFlow(seed=1, concurrency=16, group_size=4, flat=0.0, sigma=1.0)
    supply = make(tmp_path, flow, staleness=4, concurrency=16, steps=100)

    async def scenario() -> None:
        for step in range(1, 61):
            await supply.next(step, step - 1)
            # Every agent has work, or five steps' groups less those just used are started and unused.
            assert flow.unfinished >= 16 or len(supply.state()["started"]) == 12

    asyncio.run(scenario())


def test_groups_without_signal_are_replaced_in_bounded_rounds(tmp_path: Path) -> None:
    flow = SimulatedFlow(seed=0, concurrency=8, group_size=4, flat=1.0, sigma=1.0)
    supply = make(tmp_path, flow, staleness=4, concurrency=8, refill_rounds=2)
    batch = asyncio.run(supply.next(1, 0))
    assert (batch.informative_groups, batch.sampled_groups) == (0, 9)


def test_a_restarted_supply_makes_the_same_steps_again_and_goes_on_where_it_was(tmp_path: Path) -> None:
    async def steps(supply: StreamSupply, first: int, last: int) -> list[list[int]]:
        made = []
        for step in range(first, last + 1):
            await supply.next(step, step - 1)
            made.append(numbers(tmp_path, step))
        return made

    def flow(seed: int) -> SimulatedFlow:
        return SimulatedFlow(seed=seed, concurrency=8, group_size=4, flat=0.2, sigma=1.0)

    async def scenario() -> None:
        supply = make(tmp_path, flow(1), staleness=4, concurrency=8)
        await steps(supply, 1, 5)
        state = supply.state()  # as the checkpoint of step 5 has it
        planned = await steps(supply, 6, 8)

        again = make(tmp_path, flow(2), staleness=4, concurrency=8)  # everything ends at other times
        again.restore(state)
        assert await steps(again, 6, 8) == planned
        later = await steps(again, 9, 20)
        used = [number for step in range(1, 9) for number in numbers(tmp_path, step)]
        assert not set(used) & {number for step in later for number in step}
        Plans(tmp_path).forget(10)
        assert Plans(tmp_path).read(10) is None
        assert Plans(tmp_path).read(11) is not None

    asyncio.run(scenario())


def test_feasibility_is_a_schedule_by_deadline() -> None:
    assert feasible([], 5, 0, 1)
    assert feasible([5, 5], 5, 0, 2)
    assert not feasible([5, 5, 5], 5, 0, 2)  # three that must all be used now, and room for two
    assert feasible([4, 5, 5], 5, 1, 2)
    assert not feasible([4, 4, 4], 5, 1, 2)
    assert not feasible([3], 5, 1, 2)  # too old already
