"""What happened, counted under names: nothing is lost in silence.

Counts are kept per run and written to the database once a second and on stop, so that a run's report adds up over
restarts of the gateway; `kill -9` loses at most that second of them.
"""

import asyncio
import contextlib
import logging
from collections import Counter

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError

from agentlightning.gateway.database import Database, insert_ignore
from agentlightning.gateway.tables import counters

__all__ = ["Counters"]

logger = logging.getLogger(__name__)
FLUSH_SECONDS = 1.0


class Counters:
    """Named counts, by run (the empty run: what belongs to none)."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pending: Counter[tuple[str, str]] = Counter()
        self.total: Counter[str] = Counter()
        """Since this process began, over all runs: for /metrics."""

    def add(self, name: str, run_id: str = "", amount: int = 1) -> None:
        self._pending[run_id, name] += amount
        self.total[name] += amount

    async def of(self, run_id: str | None) -> dict[str, int]:
        """All counts of one run, or of all runs together."""
        await self.flush()
        return await self._database.read(_read, run_id)

    async def flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, Counter()
            try:
                await self._database.write(_add, dict(pending))
            except SQLAlchemyError:
                self._pending.update(pending)
                raise

    async def run(self) -> None:
        """Flush for ever."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            with contextlib.suppress(
                SQLAlchemyError
            ):  # kept, and tried again; writes of the queue will say so
                await self.flush()


def _add(connection: Connection, pending: dict[tuple[str, str], int]) -> None:
    insert_ignore(connection, counters, [{"run_id": run, "name": name, "value": 0} for run, name in pending])
    for (run, name), amount in pending.items():
        connection.execute(
            counters.update()
            .where(counters.c.run_id == run, counters.c.name == name)
            .values(value=counters.c.value + amount)
        )


def _read(connection: Connection, run_id: str | None) -> dict[str, int]:
    query = select(counters.c.name, func.sum(counters.c.value)).group_by(counters.c.name)
    if run_id is not None:
        query = query.where(counters.c.run_id == run_id)
    return {name: int(value) for name, value in connection.execute(query.order_by(counters.c.name))}
