"""Rollouts as the trainer sees them: by id, in pages, and as they become final."""

from collections.abc import Sequence
from typing import Any, Final

import orjson
from sqlalchemy import Connection, RowMapping, bindparam, case, func, select, text

from agentlightning.gateway.tables import calls, rollouts

__all__ = ["by_ids", "changed_since", "chunks", "count_open", "find", "page"]

Row = dict[str, Any]  # Any: a database row, or JSON
_CHUNK: Final = 500
"""Values in one IN list: SQLite and PostgreSQL both take many more, but plans stay small."""

_BY_IDS: Final = select(rollouts).where(rollouts.c.rollout_id.in_(bindparam("ids", expanding=True)))
_COUNTS: Final = (
    select(
        calls.c.rollout_id,
        calls.c.attempt,
        func.sum(case((calls.c.error.is_(None), 1), else_=0)),
        func.count(),
    )
    .where(calls.c.rollout_id.in_(bindparam("ids", expanding=True)))
    .group_by(calls.c.rollout_id, calls.c.attempt)
)
_OPEN: Final = select(
    *(
        select(func.count()).select_from(rollouts).where(text(f"state = '{state}'")).scalar_subquery()
        for state in ("queued", "running")
    )
)


def find(connection: Connection, rollout_ids: Sequence[str]) -> list[Row]:
    """Rollouts by id; unknown ids are left out."""
    return _describe(connection, by_ids(connection, rollout_ids))


def page(
    connection: Connection,
    *,
    run_id: str | None,
    state: str | None,
    split: str | None,
    cursor: int,
    limit: int,
) -> tuple[list[Row], int | None]:
    """Rollouts in the order of enqueueing, after `cursor`. Returns rows and the next cursor (None: no more)."""
    query = select(rollouts).where(rollouts.c.seq > cursor).order_by(rollouts.c.seq).limit(limit + 1)
    for column, value in ((rollouts.c.run_id, run_id), (rollouts.c.split, split)):
        if value is not None:
            query = query.where(column == value)
    if state is not None:
        # As text, for its partial index; `state` is one of the five.
        query = query.where(
            text("state = :state").bindparams(bindparam("state", state, literal_execute=True))
        )
    rows = list(connection.execute(query).mappings())
    more = len(rows) > limit
    return _describe(connection, rows[:limit]), rows[limit - 1]["seq"] if more else None


def changed_since(connection: Connection, run_id: str | None, cursor: int, limit: int) -> list[Row]:
    """Terminal rollouts whose span the collector has, after `cursor`, oldest first."""
    query = select(rollouts).where(rollouts.c.change > cursor).order_by(rollouts.c.change).limit(limit)
    if run_id is not None:
        query = query.where(rollouts.c.run_id == run_id)
    return _describe(connection, list(connection.execute(query).mappings()))


def count_open(connection: Connection) -> dict[str, int]:
    """How many rollouts are queued and running: from partial indices, however many have ended."""
    queued, running = connection.execute(_OPEN).one()
    return {"queued": queued, "running": running}


def by_ids(connection: Connection, rollout_ids: Sequence[str], *, lock: bool = False) -> list[RowMapping]:
    """Rows by rollout id, in the order of enqueueing. `lock`: for a change; always in one order, against deadlocks."""
    rows: list[RowMapping] = []
    query = _BY_IDS.order_by(rollouts.c.seq)
    if lock:
        query = query.with_for_update()
    for chunk in chunks(sorted(rollout_ids)):
        rows += connection.execute(query, {"ids": chunk}).mappings()
    return sorted(rows, key=lambda row: row["seq"])


def chunks(values: Sequence[Any]) -> list[Sequence[Any]]:
    return [values[start : start + _CHUNK] for start in range(0, len(values), _CHUNK)]


def _describe(connection: Connection, rows: Sequence[RowMapping]) -> list[Row]:
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    for chunk in chunks([row["rollout_id"] for row in rows if row["attempt"] >= 0]):
        for rollout_id, attempt, answered, total in connection.execute(_COUNTS, {"ids": chunk}):
            counts[rollout_id, attempt] = (int(answered), int(total) - int(answered))
    described = []
    for row in rows:
        answered, failed = counts.get((row["rollout_id"], row["attempt"]), (0, 0))
        described.append(
            {
                **{key: row[key] for key in _IDENTITY},
                **{key: _load(row[key]) for key in ("input", "reference")},
                "state": row["state"],
                "attempt": None if row["attempt"] < 0 else row["attempt"],
                "cause": row["cause"],
                "error": row["error"],
                "output": _load(row["output"]),
                "calls": answered,
                "calls_failed": failed,
                **{key: row[key] for key in ("created", "started", "ended", "change")},
            }
        )
    return described


_IDENTITY: Final = ("rollout_id", "run_id", "group_id", "task_id", "split", "policy")


def _load(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)
