"""The ledger of model calls: an answer reaches its agent only after its row is here.

Rows of concurrent calls share a transaction; an idle ledger writes at once. A row of an attempt that has ended is
refused: that agent must not get the answer, for nobody would count it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from agentlightning.gateway.database import Database
from agentlightning.gateway.tables import calls, rollouts

__all__ = ["CallRow", "Ledger", "call_of"]


@dataclass(frozen=True, slots=True)
class CallRow:
    """One choice of one model call. `error` is None if the agent gets the answer."""

    call_id: str
    rollout_id: str
    attempt: int
    digest: str
    trace_id: str
    span_id: str
    response_id: str | None
    started: float
    error: str | None = None
    fault: bool = False
    fenced: bool = True
    """Whether the attempt must be running; False for a call that belongs to no rollout of ours."""


class Ledger:
    """Writes call rows."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[Sequence[CallRow], asyncio.Future[bool]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def add(self, rows: Sequence[CallRow]) -> bool:
        """Write the rows of one call. Returns False, and writes none, if their attempt is not running any more."""
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((rows, written))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())
        return await written

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                try:
                    accepted = await self._database.write(_insert, [rows for rows, _ in batch])
                except Exception as error:  # noqa: BLE001  whatever it is, it is for those who wait
                    for _, written in batch:
                        if not written.done():
                            written.set_exception(error)
                else:
                    for (_, written), good in zip(batch, accepted, strict=True):
                        if not written.done():
                            written.set_result(good)
        finally:
            self._writer = None


def call_of(
    connection: Connection, call_id: str, rollout_id: str, attempt: int
) -> tuple[str, str, str | None] | None:
    """Trace id, span id and response id of a call, if it is that attempt's."""
    query = select(calls.c.trace_id, calls.c.span_id, calls.c.response_id).where(
        calls.c.call_id == call_id, calls.c.rollout_id == rollout_id, calls.c.attempt == attempt
    )
    row = connection.execute(query).first()
    return None if row is None else (row[0], row[1], row[2])


def _insert(connection: Connection, batch: list[Sequence[CallRow]]) -> list[bool]:
    wanted = {rows[0].rollout_id for rows in batch if rows[0].fenced}
    query = (
        select(rollouts.c.rollout_id, rollouts.c.attempt)
        .where(rollouts.c.rollout_id.in_(wanted), rollouts.c.state == "running")
        .with_for_update(read=True)
    )
    running = (
        {(rollout_id, attempt) for rollout_id, attempt in connection.execute(query)} if wanted else set()
    )
    accepted = [not rows[0].fenced or (rows[0].rollout_id, rows[0].attempt) in running for rows in batch]
    values = [
        {
            "call_id": row.call_id,
            "rollout_id": row.rollout_id,
            "attempt": row.attempt,
            "digest": row.digest,
            "trace_id": row.trace_id,
            "span_id": row.span_id,
            "response_id": row.response_id,
            "started": row.started,
            "error": row.error,
            "fault": row.fault,
        }
        for rows, good in zip(batch, accepted, strict=True)
        if good
        for row in rows
    ]
    if values:
        connection.execute(calls.insert(), values)
    return accepted
