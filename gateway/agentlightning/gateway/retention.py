"""What the database forgets: ended rollouts of runs that nobody goes on with.

A run that is resumed enqueues its rollouts again, and gets the outcomes of those that are there: so a run is forgotten
as a whole, and only when it is idle: nothing of it is open, all its ends are at the collector, and nothing was added to
it for a while. What is forgotten is counted, per run; the data set is not touched.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, delete, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from agentlightning.gateway.database import Database
from agentlightning.gateway.tables import attempts, calls, rewards, rollouts

__all__ = ["Idle", "Keep", "Retention"]

logger = logging.getLogger(__name__)
EVERY_SECONDS: Final = 600.0
BATCH: Final = 500
"""Rollouts forgotten in one transaction: others want to write, too."""
GRACE_SECONDS: Final = 3600.0
"""A run to which something was added within this time is not idle, however many rollouts there are."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How much is kept; None: all."""

    seconds: float | None = None
    """Of idle runs, since something was last added to them."""
    rollouts: int | None = None
    """Ended rollouts of idle runs, all together: the oldest runs go first."""
    grace: float = GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class Idle:
    """A run that nobody goes on with."""

    run_id: str
    since: float
    rollouts: int


class Retention:
    """Forgets, now and then."""

    def __init__(self, database: Database, keep: Keep, count: Callable[[str, str, int], None]) -> None:
        self._database = database
        self._keep = keep
        self._count = count

    async def run(self) -> None:
        """Look every ten minutes, for ever."""
        while True:
            try:
                await self.look()
            except SQLAlchemyError as error:
                logger.warning("nothing could be forgotten: %s", type(error).__name__)
            await asyncio.sleep(EVERY_SECONDS)

    async def look(self) -> None:
        """Forget what is not kept."""
        if self._keep.seconds is None and self._keep.rollouts is None:
            return
        runs = await self._database.read(_idle, self._keep.grace)
        for run in _chosen(runs, self._keep, time.time()):
            forgotten = 0
            while deleted := await self._database.write(_forget, run.run_id):
                forgotten += deleted
            self._count("rollouts_forgotten", run.run_id, forgotten)
            logger.info("run %s: %d ended rollouts are forgotten", run.run_id, forgotten)


def _chosen(runs: list[Idle], keep: Keep, now: float) -> list[Idle]:
    """Those to forget: what is too old, and the oldest of what is too much."""
    left = sum(run.rollouts for run in runs)
    chosen = []
    for run in sorted(runs, key=lambda run: run.since):
        old = keep.seconds is not None and now - run.since > keep.seconds
        if old or (keep.rollouts is not None and left > keep.rollouts):
            chosen.append(run)
            left -= run.rollouts
    return chosen


def _idle(connection: Connection, grace: float) -> list[Idle]:
    busy: set[str] = set()
    for condition in (
        "state = 'queued'",
        "state = 'running'",
    ):  # of partial indices: few, however many have ended
        busy.update(connection.execute(select(rollouts.c.run_id).where(text(condition)).distinct()).scalars())
    found = []
    counts = select(rollouts.c.run_id, func.count()).group_by(rollouts.c.run_id)
    for run_id, count in connection.execute(counts):
        newest = select(rollouts.c.created).where(rollouts.c.run_id == run_id)
        since = connection.execute(newest.order_by(rollouts.c.seq.desc()).limit(1)).scalar_one()
        if run_id not in busy and time.time() - since >= grace:
            found.append(Idle(run_id, since, count))
    return found


def _forget(connection: Connection, run_id: str) -> int:
    """Forget some rollouts of a run. Returns how many; none if it has come to life, or is not at the collector."""
    of_run = rollouts.c.run_id == run_id
    for open_ in ("state = 'queued'", "state = 'running'"):
        if connection.execute(select(rollouts.c.seq).where(of_run, text(open_)).limit(1)).first():
            return 0
    some = select(rollouts.c.rollout_id).where(of_run, rollouts.c.change.is_not(None)).limit(BATCH)
    names = list(connection.execute(some.with_for_update(skip_locked=True)).scalars())
    if names:
        for table in (calls, rewards, attempts, rollouts):
            connection.execute(delete(table).where(table.c.rollout_id.in_(names)))
    return len(names)
