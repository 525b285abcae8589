"""The rollout queue: leases, fenced attempts, and states that are final once reached.

Rollout: `queued → running → succeeded | failed | cancelled`; a lost or infrastructure-failed attempt puts it back to
`queued` until `max_attempts`. Every function is one transaction over a Connection; each change is compare-and-set on
(attempt, version), and a change that ends an attempt leaves the span that tells so in the outbox, in the same
transaction: the state is committed first, and the span follows for certain.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from sqlalchemy import Connection, RowMapping, and_, case, func, or_, select, update

from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.outbox import next_change, post
from agentlightning.gateway.spans import Identity, rollout_span
from agentlightning.gateway.tables import attempts, calls, rollouts

__all__ = [
    "CAUSES",
    "TERMINAL",
    "Ended",
    "cancel",
    "changed_since",
    "claim",
    "count_states",
    "enqueue",
    "extend_leases",
    "find",
    "finish",
    "heartbeat",
    "page",
    "sweep",
]

TERMINAL: Final = ("succeeded", "failed", "cancelled")
CAUSES: Final = ("agent_error", "timeout", "context_overflow", "lost", "infra_error", "cancelled")
OVERFLOW: Final = "context_length_exceeded"
"""OpenAI's code for a prompt that does not fit, which engines use, too."""
_RETRIED: Final = ("lost", "infra_error")
_MAX_BACKOFF: Final = 30.0
_CHUNK: Final = 500
"""Values in one IN list: SQLite and PostgreSQL both take many more, but plans stay small."""

Row = dict[str, Any]  # Any: a database row, or JSON


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that a change ended."""

    rollout_id: str
    attempt: int
    run_id: str
    state: str
    """The rollout's state now: terminal, or queued again."""
    cause: str | None
    will_retry: bool


def enqueue(connection: Connection, rows: Sequence[Row]) -> tuple[int, int]:
    """Add rollouts; those that are there already stay as they are. Returns (created, existing).

    Raises ApiError 409 if an id is there with another task: then nothing is added.
    """
    known: dict[str, RowMapping] = {}
    for chunk in _chunks([row["rollout_id"] for row in rows]):
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
    queued = (
        select(rollouts.c.seq)
        .where(rollouts.c.state == "queued", rollouts.c.available <= now)
        .order_by(rollouts.c.priority.desc(), rollouts.c.seq)
        .limit(limit)
        .with_for_update(skip_locked=True)  # several gateways on one PostgreSQL; SQLite has one writer anyway
    )
    chosen = list(connection.execute(queued).scalars())
    if not chosen:
        return []
    taken = (
        update(rollouts)
        .where(rollouts.c.seq.in_(chosen), rollouts.c.state == "queued")
        .values(
            state="running",
            attempt=rollouts.c.attempt + 1,
            version=rollouts.c.version + 1,
            controller_id=controller_id,
            lease_expires=now + lease,
            started=now,
            ended=None,
            cause=None,
            error=None,
        )
        .returning(rollouts)
    )
    rows = [dict(row) for row in connection.execute(taken).mappings()]
    connection.execute(
        attempts.insert(),
        [
            {
                "rollout_id": row["rollout_id"],
                "attempt": row["attempt"],
                "controller_id": controller_id,
                "state": "preparing",
                "started": now,
            }
            for row in rows
        ],
    )
    return sorted(rows, key=lambda row: (-row["priority"], row["seq"]))


def heartbeat(
    connection: Connection, controller_id: str, lease: float, held: Sequence[tuple[str, int]]
) -> tuple[list[Row], list[Row]]:
    """Extend the leases of attempts. Returns those that are (lost, cancelled): their agents must be stopped."""
    now = time.time()
    current = {row["rollout_id"]: row for row in _by_ids(connection, [rollout_id for rollout_id, _ in held])}
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
    for chunk in _chunks(alive):
        mine = and_(rollouts.c.rollout_id.in_(chunk), rollouts.c.state == "running")
        connection.execute(update(rollouts).where(mine).values(lease_expires=now + lease))
        connection.execute(
            update(attempts)
            .where(attempts.c.rollout_id.in_(chunk), attempts.c.state == "preparing")
            .values(state="running")
        )
    return lost, cancelled


def finish(
    connection: Connection,
    rollout_id: str,
    attempt: int,
    controller_id: str,
    *,
    state: str,
    cause: str | None,
    error: str | None,
    output: str | None,
) -> tuple[Row, Ended | None]:
    """End an attempt as its controller says. Returns the answer, and what ended (None: it had ended so before).

    Raises ApiError 404, or 409 if the attempt is not the current one any more.
    """
    row = _one(connection, rollout_id)
    key = and_(attempts.c.rollout_id == rollout_id, attempts.c.attempt == attempt)
    tried = connection.execute(select(attempts).where(key)).mappings().first()
    reported = orjson.dumps([controller_id, state, cause, error, output]).decode()
    if tried is not None and tried["reported"] == reported:
        return orjson.loads(tried["answer"]), None
    if row["state"] == "cancelled" and state == "cancelled" and row["attempt"] == attempt:
        return {"state": "cancelled", "attempt": attempt, "will_retry": False}, None
    if row["state"] != "running" or row["attempt"] != attempt or row["controller_id"] != controller_id:
        raise _stale(row, attempt, controller_id)
    if cause == "agent_error":
        cause, error = _true_cause(connection, rollout_id, attempt, error)
    ended = _end(connection, row, state=state, cause=cause, error=error, output=output)
    answer = {"state": ended.state, "attempt": attempt, "will_retry": ended.will_retry}
    connection.execute(
        update(attempts).where(key).values(reported=reported, answer=orjson.dumps(answer).decode())
    )
    return answer, ended


def sweep(connection: Connection) -> list[Ended]:
    """End the attempts whose lease has expired: `lost`."""
    expired = select(rollouts).where(rollouts.c.state == "running", rollouts.c.lease_expires < time.time())
    rows = list(connection.execute(expired.limit(_CHUNK).with_for_update(skip_locked=True)).mappings())
    return [
        _end(
            connection,
            row,
            state="failed",
            cause="lost",
            error=f"Controller {row['controller_id']} stopped sending heartbeats.",
            output=None,
        )
        for row in rows
    ]


def cancel(connection: Connection, *, rollout_ids: Sequence[str] | None, run_id: str | None) -> list[Ended]:
    """Cancel what has not ended, by ids or for a whole run."""
    if rollout_ids is not None:
        rows = _by_ids(connection, rollout_ids)
    else:
        of_run = select(rollouts).where(rollouts.c.run_id == run_id, rollouts.c.state.not_in(TERMINAL))
        rows = list(connection.execute(of_run).mappings())
    return [
        _end(connection, row, state="cancelled", cause="cancelled", error=None, output=None)
        for row in rows
        if row["state"] not in TERMINAL
    ]


def extend_leases(connection: Connection, grace: float) -> None:
    """After a restart: controllers could not reach us, which is no fault of theirs."""
    until = time.time() + grace
    connection.execute(
        update(rollouts)
        .where(rollouts.c.state == "running", rollouts.c.lease_expires < until)
        .values(lease_expires=until)
    )


def find(connection: Connection, rollout_ids: Sequence[str]) -> list[Row]:
    """Rollouts by id, as the trainer sees them; unknown ids are left out."""
    return _describe(connection, _by_ids(connection, rollout_ids))


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
    for column, value in ((rollouts.c.run_id, run_id), (rollouts.c.state, state), (rollouts.c.split, split)):
        if value is not None:
            query = query.where(column == value)
    rows = list(connection.execute(query).mappings())
    more = len(rows) > limit
    return _describe(connection, rows[:limit]), rows[limit - 1]["seq"] if more else None


def changed_since(connection: Connection, run_id: str | None, cursor: int, limit: int) -> list[Row]:
    """Terminal rollouts whose span the collector has, after `cursor`, oldest first."""
    query = select(rollouts).where(rollouts.c.change > cursor).order_by(rollouts.c.change).limit(limit)
    if run_id is not None:
        query = query.where(rollouts.c.run_id == run_id)
    return _describe(connection, list(connection.execute(query).mappings()))


def count_states(connection: Connection) -> dict[str, int]:
    """How many rollouts are in each state."""
    query = select(rollouts.c.state, func.count()).group_by(rollouts.c.state)
    return {row[0]: row[1] for row in connection.execute(query)}


def _end(
    connection: Connection,
    row: RowMapping,
    *,
    state: str,
    cause: str | None,
    error: str | None,
    output: str | None,
) -> Ended:
    """End the current attempt (if any), and with it the rollout unless it is tried again."""
    now = time.time()
    rollout_id, attempt = row["rollout_id"], row["attempt"]
    retry = state == "failed" and cause in _RETRIED and attempt + 1 < row["max_attempts"]
    values: Row = {
        "version": row["version"] + 1,
        "cause": cause,
        "error": error,
        "controller_id": row["controller_id"],
    }
    if retry:
        pause = min(2.0**attempt, _MAX_BACKOFF) if cause == "infra_error" else 0.0
        values |= {"state": "queued", "available": now + pause, "lease_expires": None}
    else:
        values |= {"state": state, "ended": now, "output": output, "lease_expires": None}
    if attempt < 0 and not retry:  # it was never tried: there is no span to wait for
        values["change"] = next_change(connection)
    changed = connection.execute(
        update(rollouts)
        .where(
            rollouts.c.seq == row["seq"], rollouts.c.attempt == attempt, rollouts.c.version == row["version"]
        )
        .values(values)
    )
    if changed.rowcount != 1:
        raise _stale(_one(connection, rollout_id), attempt, None)
    if attempt >= 0:
        key = and_(attempts.c.rollout_id == rollout_id, attempts.c.attempt == attempt)
        outcome = {"state": "succeeded" if state == "succeeded" else "failed", "cause": cause, "error": error}
        connection.execute(update(attempts).where(key).values(**outcome, ended=now))
        span = rollout_span(
            Identity(rollout_id, attempt, row["run_id"], row["group_id"], row["task_id"], row["split"]),
            state=state,
            cause=cause,
            error=error,
            task_input=row["input"],
            calls_expected=_call_counts(connection, [(rollout_id, attempt)]).get(rollout_id, (0, 0))[0],
            started=row["started"],
            ended=now,
        )
        post(connection, f"rollout {rollout_id} {attempt}", span, finishes=None if retry else rollout_id)
    return Ended(rollout_id, attempt, row["run_id"], "queued" if retry else state, cause, retry)


def _true_cause(
    connection: Connection, rollout_id: str, attempt: int, error: str | None
) -> tuple[str, str | None]:
    """Why an agent failed: by itself, or because a model call did that was not mended by trying again."""
    query = select(calls.c.digest, calls.c.error, calls.c.fault).where(
        calls.c.rollout_id == rollout_id, calls.c.attempt == attempt
    )
    rows = list(connection.execute(query))
    mended = {digest for digest, failure, _ in rows if failure is None}
    failures = [(failure, fault) for digest, failure, fault in rows if failure and digest not in mended]
    for failure, fault in failures:
        if fault:
            return "infra_error", f"A model call had failed ({failure}). {error or ''}".strip()
    if any(failure == OVERFLOW for failure, _ in failures):
        return "context_overflow", error
    return "agent_error", error


def _stale(row: RowMapping, attempt: int, controller_id: str | None) -> ApiError:
    current = None if row["attempt"] < 0 else row["attempt"]
    if controller_id is not None and row["attempt"] == attempt and row["state"] == "running":
        what = f"is held by controller {row['controller_id']}, not by {controller_id}"
    elif row["attempt"] == attempt:
        what = f"has ended: the rollout is {row['state']}"
    else:
        what = f"is not the current one, which is {current}"
    return ApiError(
        409,
        "stale_attempt",
        f"Attempt {attempt} of rollout {row['rollout_id']} {what}.",
        attempt=current,
        state=row["state"],
    )


def _one(connection: Connection, rollout_id: str) -> RowMapping:
    query = select(rollouts).where(rollouts.c.rollout_id == rollout_id).with_for_update()
    row = connection.execute(query).mappings().first()
    if row is None:
        raise ApiError(404, "unknown_rollout", f"There is no rollout {rollout_id!r}.")
    return row


def _by_ids(connection: Connection, rollout_ids: Sequence[str]) -> list[RowMapping]:
    rows: list[RowMapping] = []
    for chunk in _chunks(rollout_ids):
        query = select(rollouts).where(rollouts.c.rollout_id.in_(chunk)).order_by(rollouts.c.seq)
        rows += connection.execute(query).mappings()
    return rows


def _call_counts(connection: Connection, keys: Sequence[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Calls (answered, failed) by rollout, of the attempt given with it."""
    counts: dict[str, tuple[int, int]] = {}
    answered = func.sum(case((calls.c.error.is_(None), 1), else_=0))
    for chunk in _chunks(keys):
        wanted = or_(
            *(
                and_(calls.c.rollout_id == rollout_id, calls.c.attempt == attempt)
                for rollout_id, attempt in chunk
            )
        )
        query = select(calls.c.rollout_id, answered, func.count()).where(wanted).group_by(calls.c.rollout_id)
        for rollout_id, good, total in connection.execute(query):
            counts[rollout_id] = (int(good), int(total) - int(good))
    return counts


def _describe(connection: Connection, rows: Sequence[RowMapping]) -> list[Row]:
    counts = _call_counts(connection, [(row["rollout_id"], row["attempt"]) for row in rows])
    described = []
    for row in rows:
        answered, failed = counts.get(row["rollout_id"], (0, 0))
        described.append(
            {
                **{
                    key: row[key]
                    for key in ("rollout_id", "run_id", "group_id", "task_id", "split", "policy")
                },
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


def _load(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)


def _chunks(values: Sequence[Any]) -> list[Sequence[Any]]:
    return [values[start : start + _CHUNK] for start in range(0, len(values), _CHUNK)]
