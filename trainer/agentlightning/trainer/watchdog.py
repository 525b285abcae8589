"""The watchdog: a stage that does not move is named – who waits on whom, since when – and is helped, or ends the run.

It looks at the run as the components themselves tell of it. What counts as a move is that something got done: a
rollout began or ended, a call was answered, a token sampled, a micro-batch trained. After `stall_s` without one it says
what it sees, and then: a component that does not answer, or does not do its part, is started again; a hold that
nobody needs is released; agents within their time limit are named and left alone, because their controller ends them.
If that does not help either, or the component is not ours, the run ends with the sentence.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from agentlightning.proto.errors import LightningError

__all__ = ["Facts", "Finding", "Stalled", "Watchdog", "diagnose"]

TRIES = 2
"""How often the same remedy is tried before the run is given up."""
OWN_PATIENCE = 10
"""A computation of the trainer's own is given up after so many times `stall_s`: nothing else can be done about it."""


class Stalled(LightningError):
    """A stage does not move, and nothing that could be done has helped."""


@dataclass(frozen=True)
class Facts:
    """What the components say of themselves at one moment."""

    gateway: bool = True
    """Whether it answers; the same of the others."""
    collector: bool = True
    engine: bool = True
    states: Mapping[str, int] = field(default_factory=dict)
    """Of the rollouts that are waited for."""
    begun: int = 0
    """How many of them have an attempt."""
    calls: int = 0
    """Calls that they were answered."""
    oldest: tuple[str, float, int] | None = None
    """Of those that run, the one that began first: id, seconds since then, calls."""
    overdue: int = 0
    """Attempts that run longer than they may."""
    unreported: int = 0
    """Ended, but the gateway has not got rid of their span."""
    reading: int = 0
    """Attempts that the collector has been asked to seal."""
    hold: str | None = None
    """What holds the policy's calls."""
    generating: int = 0
    """Answers that the engine works on."""
    steps: int = 0
    """Steps that the engine has made."""
    paused: bool = False

    @property
    def done(self) -> tuple[int, ...]:
        """Changes if, and only if, something got done."""
        ended = sum(count for state, count in self.states.items() if state not in ("queued", "running"))
        return self.begun, ended, self.calls, self.steps, self.reading


@dataclass(frozen=True)
class Finding:
    """Who is waited on, and what helps."""

    culprit: str
    sentence: str
    restart: str | None = None
    release: bool = False
    patient: bool = False
    """It is slow, but does what it may."""


def diagnose(facts: Facts, *, stuck_steps: bool) -> Finding:
    """The first thing that is wrong, from the ground up. `stuck_steps`: the engine has not stepped meanwhile."""
    queued, running = facts.states.get("queued", 0), facts.states.get("running", 0)
    for name in ("gateway", "collector", "engine"):
        if not getattr(facts, name):
            return Finding(name, f"the {name}, which does not answer", restart=name)
    if facts.reading:
        return Finding(
            "collector",
            f"the collector, which does not convert {facts.reading} attempts that have ended",
            restart="collector",
        )
    if facts.unreported:
        return Finding(
            "collector",
            f"the collector, which has not taken the ends of {facts.unreported} rollouts from the gateway",
            restart="collector",
        )
    if facts.hold is not None or facts.paused:
        what = (
            f"the gateway, where {facts.hold} makes calls wait"
            if facts.hold
            else "the engine, which is paused"
        )
        return Finding("hold", f"{what}, though no weights are being changed", release=True)
    if facts.generating and stuck_steps:
        return Finding(
            "engine",
            f"the engine, which has {facts.generating} answers to give and makes no step",
            restart="engine",
        )
    if facts.overdue:
        return Finding(
            "controller",
            f"the controller, which lets {facts.overdue} attempts run longer than they may",
            restart="controller",
        )
    if running and facts.oldest is not None:
        rollout_id, seconds, calls = facts.oldest
        return Finding(
            "agents",
            f"{running} agents; the first, rollout {rollout_id}, runs since {seconds:.0f} s and has made {calls} calls",
            patient=True,
        )
    if queued:
        return Finding(
            "controller",
            f"the controller, which takes none of {queued} queued rollouts",
            restart="controller",
        )
    return Finding("nothing", "nothing that can be seen: no rollout is queued, runs, or waits to be read")


class Watchdog:
    """Watches the stages of one run, from within its event loop."""

    def __init__(
        self,
        *,
        stall_s: float,
        look: Callable[[], Awaitable[Facts]],
        computed: Callable[[], int],
        restart: Callable[[str], bool],
        starting: Callable[[], Sequence[str]],
        release: Callable[[], Awaitable[None]],
        say: Callable[[str], None],
        record: Callable[..., Any],
        abandon: Callable[[str], NoReturn],
    ) -> None:
        """
        Args:
            look: gather the facts; takes its time limits from `stall_s`.
            computed: a count that grows while the trainer computes.
            restart: start a component again; False if it is not ours.
            starting: the components that do not serve yet, and may take their time.
            release: end whatever holds the policy's calls.
            abandon: end the process, because a thread of it cannot be ended.
        """
        self._stall_s = stall_s
        self._look, self._computed = look, computed
        self._restart, self._starting, self._release = restart, starting, release
        self._say, self._record, self._abandon = say, record, abandon
        self._stage = ""
        self._kind = "idle"
        self._moved = time.monotonic()
        self._stepped = self._moved
        self._last: tuple[int, ...] = ()
        self._steps = -1
        self._said = ""
        self._tries = Counter[str]()
        self.stalls = Counter[str]()
        """How often each was waited on in vain."""

    @contextlib.contextmanager
    def stage(self, name: str, kind: str) -> Iterator[None]:
        """Within, `name` is what the trainer does. `kind`: rollouts, engine or own."""
        before = self._stage, self._kind
        self._enter(name, kind)
        try:
            yield
        finally:
            self._enter(*before)

    async def run(self) -> None:
        """Watch until cancelled. Raises Stalled."""
        while True:
            await asyncio.sleep(min(self._stall_s / 6, 5.0))
            if self._kind == "own":
                self._own()
            elif self._kind != "idle":
                await self._others()

    def _enter(self, name: str, kind: str) -> None:
        self._stage, self._kind = name, kind
        self._move()

    def _move(self) -> None:
        self._moved = self._stepped = time.monotonic()
        self._said = ""
        self._tries.clear()

    def _own(self) -> None:
        if (computed := self._computed(),) != self._last:
            self._last = (computed,)
            self._move()
            return
        idle = time.monotonic() - self._moved
        if idle < self._stall_s:
            return
        finding = Finding("trainer", "its own computation or disk", patient=True)
        self._tell(finding, "", idle)
        if idle > OWN_PATIENCE * self._stall_s:
            self._abandon(f"{self._stage}: nothing has moved for {idle:.0f} s.")

    async def _others(self) -> None:
        if self._starting():
            self._wait_again()
            return
        stage = self._stage
        facts = await self._look()
        now = time.monotonic()
        if self._stage != stage:
            return
        if facts.engine and facts.steps != self._steps:
            self._steps, self._stepped = facts.steps, now
        reachable = facts.gateway and facts.collector and facts.engine
        if reachable and self._kind == "rollouts" and facts.done != self._last:
            self._last = facts.done
            self._move()
            return
        idle = now - self._moved
        if idle < self._stall_s:
            return
        stuck = now - self._stepped >= self._stall_s
        finding = diagnose(facts, stuck_steps=stuck)
        if self._kind == "engine" and not finding.restart:
            finding = Finding("engine", "the engine, which does not take the new weights", restart="engine")
        counts = ", ".join(f"{count} {state}" for state, count in sorted(facts.states.items())) or "none"
        self._tell(finding, f" (rollouts: {counts})", idle)
        if not finding.patient:
            await self._help(finding, idle)

    def _tell(self, finding: Finding, counts: str, idle: float) -> None:
        """Once for each thing that is found, until something moves."""
        if self._said == finding.culprit:
            return
        self._said = finding.culprit
        self.stalls[finding.culprit] += 1
        sentence = (
            f"{self._stage} has not moved for {idle:.0f} s: the trainer waits on {finding.sentence}{counts}."
        )
        self._say(sentence)
        self._record("stalled", stage=self._stage, waits_on=finding.culprit, seconds=round(idle, 1))

    async def _help(self, finding: Finding, idle: float) -> None:
        self._tries[finding.culprit] += 1
        tries = self._tries[finding.culprit]
        if tries <= TRIES and finding.release:
            await self._release()
            self._say("Released.")
        elif tries <= TRIES and finding.restart is not None and self._restart(finding.restart):
            self._say(f"The {finding.restart} is started again.")
        else:
            raise Stalled(f"{self._stage} has not moved: the trainer waits on {finding.sentence}.")
        self._wait_again()

    def _wait_again(self) -> None:
        """Give a remedy time to work, without forgetting what has been tried."""
        self._moved = self._stepped = time.monotonic()
        self._said = ""
