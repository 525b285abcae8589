"""The ledger of model calls: an answer reaches its agent only after its row is here.

Rows of concurrent calls share a transaction. A row of an attempt that has ended is
refused: that agent must not get the answer, for nobody would count it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, select

from agentlightning.gateway.database import Database, Gathering
from agentlightning.gateway.tables import calls, rollouts

__all__ = ["CallRow", "Ledger", "call_of"]

_RUNNING: Final = (
    select(rollouts.c.rollout_id, rollouts.c.attempt)
    .where(
        rollouts.c.rollout_id.in_(bindparam("ids", expanding=True)),
        rollouts.c.state == "running",
        rollouts.c.revoked < rollouts.c.attempt,
    )
    .order_by(rollouts.c.seq)
    .with_for_update(read=True)
)


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


class Ledger(Gathering[Sequence[CallRow], bool]):
    """`await ledger.add(rows)` writes the rows of one call: all of them, or none and False if their attempt is not
    running any more."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, _insert)


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
    wanted = sorted({rows[0].rollout_id for rows in batch if rows[0].fenced})
    found = connection.execute(_RUNNING, {"ids": wanted}) if wanted else ()
    running = {(rollout_id, attempt) for rollout_id, attempt in found}
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
