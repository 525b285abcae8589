"""The loop: claim rollouts while there is room, keep their leases, and let nothing that was claimed be forgotten."""

import asyncio
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

from agentlightning.controller.attempt import Attempt, Workshop
from agentlightning.controller.gateway import patiently
from agentlightning.controller.rollout import Rollout, Verdict
from agentlightning.proto.errors import Conflict, DataError, ServiceError, Unavailable
from agentlightning.proto.ids import new_id

__all__ = ["Controller", "controller_id"]

log = logging.getLogger(__name__)

LONG_POLL = 20.0
"""Seconds that one claim waits for work."""
SUMMARY_EVERY = 30.0
"""Seconds between two lines about what has happened."""
STOP_MARGIN = 1.5
"""Seconds for reports, beyond the agents' grace, when stopping."""


def controller_id(state: Path) -> str:
    """This controller's name, the same after a restart, so that it may report what its predecessor left."""
    path = state / "controller_id"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        name = new_id("controller")
        path.write_text(name + "\n")
        return name


class Controller:
    """Runs rollouts, so many at a time."""

    def __init__(self, workshop: Workshop, concurrency: int, state: Path) -> None:
        self._shop = workshop
        self._concurrency = concurrency
        self._state = state
        self._active: dict[asyncio.Task[None], Attempt] = {}
        self._room = asyncio.Event()
        self._room.set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set. Raises what makes going on pointless: a token refused, a launcher that dies."""
        stopped = asyncio.create_task(stop.wait())
        loops = [asyncio.create_task(loop()) for loop in (self._claim, self._heartbeat, self._summarise)]
        launchers: list[asyncio.Future[None]] = [self._shop.agents.serving]
        if self._shop.evaluators is not None:
            launchers.append(self._shop.evaluators.serving)
        recovery = asyncio.create_task(self._recover(self._forgotten()))
        ends: list[asyncio.Future[Any]] = [self._failure, *loops, *launchers]
        watched: list[asyncio.Future[Any]] = [stopped, *ends]
        try:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._stop([*loops, recovery, stopped])
        for end in ends:
            if end in done:
                end.result()

    async def _stop(self, loops: list[asyncio.Task[Any]]) -> None:
        for task in loops:
            task.cancel()
        for attempt in self._active.values():
            attempt.stop("stopping")
        if self._active:
            log.info("stopping %d agents", len(self._active))
            _, late = await asyncio.wait(self._active, timeout=self._shop.grace + STOP_MARGIN)
            for task in late:  # the gateway cannot be reached: the next start of this controller reports them
                task.cancel()
        self._log_summary()

    async def _claim(self) -> None:
        """Take rollouts whenever there is room."""
        while True:
            await self._room.wait()
            free = self._concurrency - len(self._active)
            boot_id, rows = await patiently(self._shop.gateway.claim, free, self._shop.lease_s, LONG_POLL)
            for row in rows:
                try:
                    rollout = Rollout.read(row, boot_id)
                except DataError as error:
                    self._shop.counters["claim_unreadable"] += 1
                    log.error("%s Its lease will run out.", error)
                    continue
                self._start(rollout)
            if rows:
                self._remember()

    def _start(self, rollout: Rollout) -> None:
        attempt = Attempt(self._shop, rollout)
        task = asyncio.create_task(attempt.run())
        self._active[task] = attempt
        self._shop.counters["claimed"] += 1
        task.add_done_callback(self._ended)
        if len(self._active) >= self._concurrency:
            self._room.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._active[task]
        self._room.set()
        if task.cancelled():
            return  # remembered, so that it is reported later
        if (error := task.exception()) is not None:
            if not self._failure.done():
                self._failure.set_exception(error)
                self._failure.exception()  # when we are stopping, nobody asks for it, and it needs no warning
            return
        self._remember()

    async def _heartbeat(self) -> None:
        """Keep the leases of what runs, and hear what has been cancelled."""
        while True:
            await asyncio.sleep(self._shop.lease_s / 3)
            attempts = {(a.rollout.rollout_id, a.rollout.attempt): a for a in self._active.values()}
            if not attempts:
                continue
            try:
                _, lost, cancelled = await self._shop.gateway.heartbeat(
                    [attempt.rollout for attempt in attempts.values()], self._shop.lease_s
                )
            except Unavailable as error:  # the agents go on; the gateway gives them time after a restart
                self._shop.counters["heartbeat_missed"] += 1
                log.warning("heartbeat: %s", error)
                continue
            for key in lost:
                if key in attempts:
                    attempts[key].stop("lost")
            for key in cancelled:
                if key in attempts:
                    attempts[key].stop("cancelled")

    async def _summarise(self) -> None:
        before: Counter[str] = Counter()
        while True:
            await asyncio.sleep(SUMMARY_EVERY)
            if self._shop.counters != before:
                before = self._shop.counters.copy()
                self._log_summary()

    def _log_summary(self) -> None:
        counts = {name: count for name, count in sorted(self._shop.counters.items()) if count}
        log.info(
            "running %d; so far: %s",
            len(self._active),
            ", ".join(f"{n} {c}" for n, c in counts.items()) or "nothing",
        )
        _replace(self._state / "counters.json", json.dumps(counts) + "\n")

    def _remember(self) -> None:
        """Write down what is running, for a successor, should this process be killed."""
        running = [[a.rollout.rollout_id, a.rollout.attempt] for a in self._active.values()]
        _replace(self._state / "running.json", json.dumps(running) + "\n")

    def _forgotten(self) -> list[tuple[str, int]]:
        """What a predecessor was running when it was killed."""
        try:
            return [
                (str(rollout), int(attempt))
                for rollout, attempt in json.loads((self._state / "running.json").read_text())
            ]
        except FileNotFoundError:
            return []
        except (TypeError, ValueError):
            log.warning(
                "%s cannot be read: what it named will be retried when its leases run out.",
                self._state / "running.json",
            )
            return []

    async def _recover(self, forgotten: list[tuple[str, int]]) -> None:
        """Have the gateway retry at once what would else wait for its lease to run out."""
        verdict = Verdict("failed", "infra_error", "The controller was killed while the agent ran.")
        for rollout_id, attempt in forgotten:
            try:
                await patiently(self._shop.gateway.finish, rollout_id, attempt, verdict)
                self._shop.counters["recovered"] += 1
            except Conflict:
                continue  # it was reported before, or its lease has run out
            except ServiceError as error:
                log.info("%s/%d: %s", rollout_id, attempt, error)


def _replace(path: Path, text: str) -> None:
    # Not synced: it is for the death of this process, not of the machine.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
