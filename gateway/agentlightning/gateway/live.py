"""The attempts that are running, as their model calls need to know them, and the calls that they have in flight.

A cache over the database, which has the last word: the ledger refuses a call whose attempt has ended there.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from sqlalchemy import Connection, select

from agentlightning.gateway.database import Database
from agentlightning.gateway.tables import rollouts

__all__ = ["Attempt", "InFlight", "Live"]


class InFlight(Protocol):
    """A model call that is being served."""

    settled: asyncio.Future[None]
    """Done when the call has been recorded, whatever became of it."""

    def interrupt(self, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class Attempt:
    """A running attempt."""

    sampling: dict[str, Any] | None = None
    calls: set[InFlight] = field(default_factory=set)
    begun: int = 0
    """Calls so far."""


class Live:
    """Running attempts, by rollout and attempt number."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._attempts: dict[tuple[str, int], Attempt] = {}

    def begin(self, rollout_id: str, attempt: int, sampling: str | None) -> None:
        self._attempts[rollout_id, attempt] = Attempt(None if sampling is None else orjson.loads(sampling))

    async def find(self, rollout_id: str, attempt: int) -> Attempt | None:
        """The attempt, if it is running."""
        found = self._attempts.get((rollout_id, attempt))
        if found is None and (row := await self._database.read(_running, rollout_id, attempt)) is not None:
            self.begin(rollout_id, attempt, row[0])
            found = self._attempts[rollout_id, attempt]
        return found

    async def settle(self, rollout_id: str, attempt: int, timeout: float) -> None:
        """Wait until the attempt's calls are recorded: its agent has gone, so they are about to be."""
        found = self._attempts.get((rollout_id, attempt))
        if found is not None and found.calls:
            await asyncio.wait([call.settled for call in found.calls], timeout=timeout)

    async def revoked(self, rollout_id: str, attempt: int) -> bool:
        """Whether the attempt's token was revoked; one of an attempt that ended was not."""
        if (rollout_id, attempt) in self._attempts:
            return False
        return await self._database.read(_revoked, rollout_id, attempt)

    def keys(self) -> list[tuple[str, int]]:
        """The attempts that are known here."""
        return list(self._attempts)

    def end(self, rollout_id: str, attempt: int) -> None:
        """Forget an attempt that has ended, and stop the calls that it has in flight."""
        found = self._attempts.pop((rollout_id, attempt), None)
        for call in list(found.calls) if found is not None else ():
            call.interrupt("attempt_ended")


def _revoked(connection: Connection, rollout_id: str, attempt: int) -> bool:
    query = select(rollouts.c.revoked).where(rollouts.c.rollout_id == rollout_id)
    row = connection.execute(query).first()
    return row is not None and row[0] >= attempt


def _running(connection: Connection, rollout_id: str, attempt: int) -> tuple[str | None] | None:
    query = select(rollouts.c.sampling).where(
        rollouts.c.rollout_id == rollout_id,
        rollouts.c.attempt == attempt,
        rollouts.c.state == "running",
        rollouts.c.revoked < attempt,
    )
    row = connection.execute(query).first()
    return None if row is None else (row[0],)
