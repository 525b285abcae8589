"""The rollout queue: leases, fenced attempts, and states that are final once reached.

Rollout: `queued → running → succeeded | failed | cancelled`; a lost or infrastructure-failed attempt puts it back to
`queued` until `max_attempts`. Every function is one transaction over a Connection; each change is compare-and-set on
(attempt, version), and a change that ends an attempt leaves the span that tells so in the outbox, in the same
transaction: the state is committed first, and the span follows for certain.
"""

import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, bindparam, select, text, update

from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.listing import by_ids, chunks
from agentlightning.gateway.outcomes import TERMINAL, Ended, Outcome, end_attempts
from agentlightning.gateway.tables import rollouts

__all__ = ["cancel", "claim", "enqueue", "extend_leases", "heartbeat", "revoke", "sweep"]

_QUEUED: Final = text("state = 'queued'")
_RUNNING: Final = text("state = 'running'")
"""As text, not as values: only so do the planners see that the partial indices fit."""
_SWEPT: Final = 500
"""Attempts that one sweep ends."""

Row = dict[str, Any]  # Any: a database row, or JSON


_EXPIRED: Final = (
    select(rollouts)
    .where(_RUNNING, rollouts.c.lease_expires < bindparam("now"))
    .order_by(rollouts.c.lease_expires)
    .limit(_SWEPT)
)
_CLAIMABLE: Final = (
    select(rollouts.c.seq)
    .where(_QUEUED, rollouts.c.available <= bindparam("now"))
    .order_by(rollouts.c.priority.desc(), rollouts.c.seq)
    .limit(bindparam("limit"))
    .with_for_update(skip_locked=True)  # several gateways on one PostgreSQL; SQLite has one writer anyway
)
_TAKE: Final = (
    update(rollouts)
    .where(rollouts.c.seq.in_(bindparam("chosen", expanding=True)), _QUEUED)
    .values(
        state="running",
        attempt=rollouts.c.attempt + 1,
        version=rollouts.c.version + 1,
        controller_id=bindparam("b_controller"),
        lease_expires=bindparam("b_lease"),
        started=bindparam("b_now"),
        ended=None,
        cause=None,
        error=None,
    )
    .returning(rollouts)
)


def enqueue(connection: Connection, rows: Sequence[Row]) -> tuple[int, int]:
    """Add rollouts; those that are there already stay as they are. Returns (created, existing).

    Raises ApiError 409 if an id is there with another task: then nothing is added.
    """
    known: dict[str, RowMapping] = {}
    for chunk in chunks([row["rollout_id"] for row in rows]):
        for found in connection.execute(select(rollouts).where(rollouts.c.rollout_id.in_(chunk))).mappings():
            known[found["rollout_id"]] = found
    fresh: dict[str, Row] = {}
    now = time.time()
    for row in rows:
        earlier = known.get(row["rollout_id"]) or fresh.get(row["rollout_id"])
        if earlier is None:
            fresh[row["rollout_id"]] = {
                **row,
                "state": "queued",
                "attempt": -1,
                "revoked": -1,
                "version": 0,
                "available": 0.0,
                "created": now,
            }
        else:
            other = [
                key
                for key in ("run_id", "group_id", "task_id", "split", "policy", "input")
                if earlier[key] != row[key]
            ]
            if other:
                raise ApiError(
                    409,
                    "rollout_conflict",
                    f"Rollout {row['rollout_id']} exists already with another {', '.join(other)}: choose a new id.",
                )
    if fresh:
        connection.execute(rollouts.insert(), list(fresh.values()))
    return len(fresh), len(rows) - len(fresh)


def claim(connection: Connection, controller_id: str, limit: int, lease: float) -> list[Row]:
    """Start the next attempts of up to `limit` queued rollouts, highest priority first."""
    now = time.time()
    chosen = list(connection.execute(_CLAIMABLE, {"now": now, "limit": limit}).scalars())
    rows: list[Row] = []
    for chunk in chunks(chosen):
        values = {"chosen": chunk, "b_controller": controller_id, "b_lease": now + lease, "b_now": now}
        rows += map(dict, connection.execute(_TAKE, values).mappings())
    if not rows:
        return []
    return sorted(rows, key=lambda row: (-row["priority"], row["seq"]))


def heartbeat(
    connection: Connection, controller_id: str, lease: float, held: Sequence[tuple[str, int]]
) -> tuple[list[Row], list[Row]]:
    """Extend the leases of attempts. Returns those that are (lost, cancelled): their agents must be stopped."""
    now = time.time()
    rows = by_ids(connection, list({rollout_id for rollout_id, _ in held}), lock=True)
    current = {row["rollout_id"]: row for row in rows}
    alive: list[str] = []
    lost: list[Row] = []
    cancelled: list[Row] = []
    for rollout_id, attempt in held:
        row = current.get(rollout_id)
        if row is not None and row["attempt"] == attempt and row["controller_id"] == controller_id:
            if row["state"] == "running":
                alive.append(rollout_id)
                continue
            if row["state"] == "cancelled":
                cancelled.append({"rollout_id": rollout_id, "attempt": attempt})
                continue
        lost.append({"rollout_id": rollout_id, "attempt": attempt})
    for chunk in chunks(alive):
        mine = update(rollouts).where(rollouts.c.rollout_id.in_(chunk), rollouts.c.state == "running")
        connection.execute(mine.values(lease_expires=now + lease))
    return lost, cancelled


def sweep(connection: Connection) -> list[Ended]:
    """End the attempts whose lease has expired: `lost`."""
    expired = _EXPIRED.with_for_update(skip_locked=True)
    rows = list(connection.execute(expired, {"now": time.time()}).mappings())
    return end_attempts(
        connection,
        [
            Outcome(row, "failed", "lost", f"Controller {row['controller_id']} stopped sending heartbeats.")
            for row in rows
        ],
    )


def cancel(connection: Connection, *, rollout_ids: Sequence[str] | None, run_id: str | None) -> list[Ended]:
    """Cancel what has not ended, by ids or for a whole run."""
    if rollout_ids is not None:
        rows = by_ids(connection, list(set(rollout_ids)), lock=True)
    else:
        of_run = select(rollouts).where(rollouts.c.run_id == run_id, rollouts.c.state.not_in(TERMINAL))
        rows = list(connection.execute(of_run.order_by(rollouts.c.seq).with_for_update()).mappings())
    outcomes = [Outcome(row, "cancelled", "cancelled") for row in rows if row["state"] not in TERMINAL]
    return end_attempts(connection, outcomes)


def revoke(connection: Connection, rollout_ids: Sequence[str]) -> list[tuple[str, int]]:
    """Make the tokens of running attempts worthless. Returns the attempts."""
    rows = [row for row in by_ids(connection, list(set(rollout_ids)), lock=True) if row["state"] == "running"]
    for chunk in chunks([row["seq"] for row in rows]):
        connection.execute(
            update(rollouts).where(rollouts.c.seq.in_(chunk)).values(revoked=rollouts.c.attempt)
        )
    return [(row["rollout_id"], row["attempt"]) for row in rows]


def extend_leases(connection: Connection, grace: float) -> None:
    """After a restart: controllers could not reach us, which is no fault of theirs."""
    until = time.time() + grace
    connection.execute(
        update(rollouts).where(_RUNNING, rollouts.c.lease_expires < until).values(lease_expires=until)
    )
