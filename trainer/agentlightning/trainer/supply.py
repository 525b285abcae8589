"""Where a step's groups come from; here those of the synchronous loop, sampled for the step (the other: `stream`).

Start the step's groups, wait for every one, and replace those that say nothing in bounded rounds.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from agentlightning.proto.errors import LightningError
from agentlightning.trainer.advantage import Scored
from agentlightning.trainer.figures import observe, step_figures
from agentlightning.trainer.rollouts import Collected, Collector, Group, Row, join
from agentlightning.trainer.samples import SampleSet
from agentlightning.trainer.tasks import Task, task_order

__all__ = ["Score", "Settings", "StepBatch", "StepSupply", "Supply", "make_batch"]

Score = Callable[[Collected], tuple[SampleSet, Scored]]


@dataclass
class StepBatch:
    """What one optimiser step is made of."""

    scored: Scored
    samples: SampleSet
    rewards: dict[str, float]
    """Rollout id → reward."""
    sampled_groups: int
    informative_groups: int
    counters: Counter[str]
    seconds: dict[str, float]
    figures: dict[str, Any]
    """What its rollouts were like, for the record."""
    carried_over: int = 0
    """Rollouts that are under way while the step is trained."""

    def staleness(self, version: int) -> dict[str, float]:
        """How many versions old the trained tokens are that `version` is about to be made better by."""
        versions = [s.versions[s.versions >= 0] for s in self.scored.samples]
        known = np.concatenate(versions) if versions else np.empty(0)
        if not known.size:
            return {}
        ages = np.maximum(version - known, 0)
        mixed = sum(bool(v.size and v.min() != v.max()) for v in versions)
        return {"max": int(ages.max()), "mean": round(float(ages.mean()), 3), "mixed_samples": mixed}


class Supply(Protocol):
    """A source of steps."""

    async def next(self, step: int, version: int) -> StepBatch:
        """The groups of a step that will be trained on the weights of `version`."""

    def state(self) -> dict[str, Any]:
        """JSON from which `restore` goes on after the step that was made last."""

    def restore(self, state: Mapping[str, Any]) -> None: ...

    async def close(self) -> None:
        """Give up what is under way."""


class Settings(Protocol):
    """Of `TrainSection`."""

    @property
    def groups_per_step(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def refill_rounds(self) -> int: ...
    @property
    def steps(self) -> int: ...


class StepSupply:
    """Every step samples its own groups, from the newest weights."""

    def __init__(
        self,
        collector: Collector,
        tasks: Sequence[Task],
        score: Score,
        settings: Settings,
        *,
        run_id: str,
        seed: int,
        sampling: Mapping[str, Any],
        announce: Callable[[str, int], None],
        on_finish: Callable[[Row], None],
    ) -> None:
        self._collector = collector
        self._tasks = list(tasks)
        self._score = score
        self._settings = settings
        self._run_id = run_id
        self._seed = seed
        self._sampling = sampling
        self._announce = announce
        self._on_finish = on_finish
        self._consumed = 0
        """How many tasks have been handed out: the data cursor."""

    async def next(self, step: int, version: int) -> StepBatch:
        settings = self._settings
        parts: list[Collected] = []
        sampled, wanted = 0, settings.groups_per_step
        seconds = dict.fromkeys(("rollouts", "merge"), 0.0)
        for round_ in range(1 + settings.refill_rounds):
            groups = [
                Group(f"{self._run_id}.{step:05d}.{round_}.{number:03d}", task, settings.group_size)
                for number, task in enumerate(self._next_tasks(wanted))
            ]
            sampled += len(groups)
            self._announce(f"step {step}", len(groups) * settings.group_size)
            clock = time.monotonic()
            parts.append(
                await self._collector.run(
                    groups,
                    split="train",
                    sampling=self._sampling,
                    replace_rounds=settings.refill_rounds,
                    on_finish=self._on_finish,
                )
            )
            seconds["rollouts"] += time.monotonic() - clock
            clock = time.monotonic()
            everything = join(parts)
            samples, scored = await asyncio.to_thread(self._score, everything)
            seconds["merge"] += time.monotonic() - clock
            informative = sum(not group.zero_variance for group in scored.groups)
            wanted = settings.groups_per_step - informative
            if wanted <= 0:
                break
        return make_batch(everything, samples, scored, sampled, informative, seconds)

    def state(self) -> dict[str, Any]:
        return {"consumed": self._consumed}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._consumed = int(state["consumed"])

    async def close(self) -> None: ...

    def _next_tasks(self, count: int) -> list[Task]:
        order = task_order(self._tasks, seed=self._seed)
        chosen = list(islice(order, self._consumed, self._consumed + count))
        self._consumed += count
        return chosen


def make_batch(
    everything: Collected,
    samples: SampleSet,
    scored: Scored,
    sampled: int,
    informative: int,
    seconds: Mapping[str, float],
) -> StepBatch:
    """A step's batch. Raises LightningError if the infrastructure lost all of it."""
    lost = everything.lost()
    if lost and len(lost) == len(everything.rows):
        first = everything.rows[lost[0]]
        raise LightningError(
            f"All {len(lost)} rollouts of a step were lost, and so were their replacements; the first ({lost[0]}): "
            f"{first['cause'] or everything.excluded.get(lost[0]) or first['state']}"
            + (f", {first['error']}" if first["error"] else ".")
            + " Nothing can be learnt from failures of the infrastructure: see the logs."
        )
    counters = everything.counters + samples.calls_left_out + scored.refused_rollouts
    rewards = {o.rollout_id: o.reward for o in everything.outcomes if o.reward is not None}
    figures = step_figures(observe(everything.transitions, everything.outcomes))
    return StepBatch(scored, samples, rewards, sampled, informative, +counters, dict(seconds), figures)
