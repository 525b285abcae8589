"""What the watchdog makes of what it sees. (tests/system has it watch real components.)"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from agentlightning.trainer.watchdog import Facts, Stalled, Watchdog, diagnose

AT_WORK = Facts(states={"running": 2, "queued": 1}, begun=2, oldest=("r.1", 70.0, 3), steps=5)


@pytest.mark.parametrize(
    ("facts", "stuck", "culprit", "words"),
    [
        (replace(AT_WORK, gateway=False), True, "gateway", "which does not answer"),
        (replace(AT_WORK, collector=False), True, "collector", "which does not answer"),
        (replace(AT_WORK, engine=False), True, "engine", "which does not answer"),
        (replace(AT_WORK, reading=4), True, "collector", "does not convert 4 attempts"),
        (replace(AT_WORK, unreported=3), True, "collector", "the ends of 3 rollouts"),
        (replace(AT_WORK, hold="hold_7"), True, "hold", "where hold_7 makes calls wait"),
        (replace(AT_WORK, paused=True), True, "hold", "the engine, which is paused"),
        (replace(AT_WORK, generating=2), True, "engine", "2 answers to give and makes no step"),
        (replace(AT_WORK, generating=2), False, "agents", "the first, rollout r.1, runs since 70 s"),
        (replace(AT_WORK, overdue=1), True, "controller", "lets 1 attempts run longer than they may"),
        (AT_WORK, True, "agents", "2 agents; the first, rollout r.1, runs since 70 s and has made 3 calls"),
        (Facts(states={"queued": 5}), True, "controller", "takes none of 5 queued rollouts"),
        (Facts(), True, "nothing", "nothing that can be seen"),
    ],
)
def test_each_cause_is_found_by_what_the_components_say(
    facts: Facts, stuck: bool, culprit: str, words: str
) -> None:
    finding = diagnose(facts, stuck_steps=stuck)
    assert finding.culprit == culprit
    assert words in finding.sentence
    assert bool(finding.restart or finding.release) == (culprit not in ("agents", "nothing"))


class Abandoned(Exception):
    """The process would have ended."""


class World:
    """Components as a script has them, and what is done to them."""

    def __init__(self, script: Iterator[Facts], *, ours: bool = True) -> None:
        self.said: list[str] = []
        self.restarted: list[str] = []
        self.released = 0
        self._script, self._ours = script, ours
        self.watchdog = Watchdog(
            stall_s=0.06,
            look=self.look,
            computed=lambda: 0,
            restart=self.restart,
            starting=lambda: [],
            release=self.release,
            say=self.said.append,
            record=lambda event, **values: None,
            abandon=self.abandon,
        )

    async def look(self) -> Facts:
        return next(self._script)

    def restart(self, name: str) -> bool:
        self.restarted.append(name)
        return self._ours

    async def release(self) -> None:
        self.released += 1

    def abandon(self, sentence: str) -> NoReturn:
        raise Abandoned(sentence)

    async def watch(self, kind: str) -> Any:
        with self.watchdog.stage("Step 3", kind):
            await self.watchdog.run()


def always(facts: Facts) -> Iterator[Facts]:
    while True:
        yield facts


def test_a_component_that_restarts_do_not_help_ends_the_run_with_a_sentence() -> None:
    world = World(always(replace(AT_WORK, engine=False)))
    with pytest.raises(
        Stalled, match="Step 3 has not moved: the trainer waits on the engine, which does not"
    ):
        asyncio.run(world.watch("rollouts"))
    assert world.restarted == ["engine", "engine"]
    assert "(rollouts: 1 queued, 2 running)" in world.said[0]


def test_a_component_of_others_is_named_and_ends_the_run() -> None:
    world = World(always(replace(AT_WORK, collector=False)), ours=False)
    with pytest.raises(Stalled, match="the collector, which does not answer"):
        asyncio.run(world.watch("rollouts"))
    assert world.restarted == ["collector"]


def test_a_forgotten_hold_is_released_and_what_moves_is_left_alone() -> None:
    def script() -> Iterator[Facts]:
        held = replace(AT_WORK, hold="hold_1")
        while not world.released:
            yield held
        for steps in range(6, 40):  # it moves: nothing is said
            yield replace(AT_WORK, steps=steps)
        raise StopAsyncIteration

    world = World(script())
    with pytest.raises((RuntimeError, StopAsyncIteration)):
        asyncio.run(world.watch("rollouts"))
    assert world.released == 1
    assert [line for line in world.said if line != "Released."] == world.said[:1]


def test_agents_within_their_limit_are_named_once_and_waited_for() -> None:
    def script() -> Iterator[Facts]:
        for _ in range(60):
            yield AT_WORK
        raise StopAsyncIteration

    world = World(script())
    with pytest.raises((RuntimeError, StopAsyncIteration)):
        asyncio.run(world.watch("rollouts"))
    assert len(world.said) == 1
    assert "2 agents" in world.said[0]
    assert not world.restarted


def test_a_computation_of_our_own_that_never_ends_ends_the_process() -> None:
    world = World(always(Facts()))
    with pytest.raises(Abandoned, match="Step 3: nothing has moved for"):
        asyncio.run(world.watch("own"))
    assert "its own computation" in world.said[0]


def test_an_engine_that_does_not_take_weights_is_started_again() -> None:
    world = World(always(Facts()))
    with pytest.raises(Stalled):
        asyncio.run(world.watch("engine"))
    assert world.restarted == ["engine", "engine"]
