"""How attempts end: many in one transaction, each compare-and-set, each with the span that tells of it.

A lost or infrastructure-failed attempt puts its rollout back to `queued` until `max_attempts`; any other end is the
rollout's. The span lies in the outbox in the same transaction: the state is committed first, and the span follows for
certain.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from sqlalchemy import Connection, RowMapping, bindparam, select, update

from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.listing import by_ids, chunks
from agentlightning.gateway.outbox import next_changes, post
from agentlightning.gateway.spans import Identity, rollout_span
from agentlightning.gateway.tables import attempts, calls, rollouts

__all__ = ["CAUSES", "TERMINAL", "Ended", "Outcome", "Report", "end_attempts", "finish", "stale"]

TERMINAL: Final = ("succeeded", "failed", "cancelled")
CAUSES: Final = ("agent_error", "timeout", "context_overflow", "lost", "infra_error", "cancelled")
OVERFLOW: Final = "context_length_exceeded"
"""OpenAI's code for a prompt that does not fit, which engines use, too."""
_RETRIED: Final = ("lost", "infra_error")
_MAX_BACKOFF: Final = 30.0

Answer = dict[str, Any]

_END_ROLLOUT: Final = (
    update(rollouts)
    .where(
        rollouts.c.seq == bindparam("b_seq"),
        rollouts.c.attempt == bindparam("b_attempt"),
        rollouts.c.version == bindparam("b_version"),
    )
    .values(
        version=rollouts.c.version + 1,
        state=bindparam("b_state"),
        cause=bindparam("b_cause"),
        error=bindparam("b_error"),
        output=bindparam("b_output"),
        available=bindparam("b_available"),
        ended=bindparam("b_ended"),
        change=bindparam("b_change"),
        lease_expires=None,
    )
)
_CALLS: Final = select(
    calls.c.rollout_id, calls.c.attempt, calls.c.call_id, calls.c.digest, calls.c.error, calls.c.fault
).where(calls.c.rollout_id.in_(bindparam("ids", expanding=True)))
_ATTEMPTS: Final = select(
    attempts.c.rollout_id, attempts.c.attempt, attempts.c.reported, attempts.c.answer
).where(attempts.c.rollout_id.in_(bindparam("ids", expanding=True)), attempts.c.reported.is_not(None))


@dataclass(frozen=True, slots=True)
class Report:
    """What a controller says of an attempt's end."""

    rollout_id: str
    attempt: int
    controller_id: str
    state: str
    cause: str | None = None
    error: str | None = None
    output: str | None = None

    @property
    def text(self) -> str:
        said = [self.controller_id, self.state, self.cause, self.error, self.output]
        return orjson.dumps(said).decode()


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that a change ended."""

    rollout_id: str
    attempt: int
    run_id: str
    state: str
    """The rollout's state now: terminal, or queued again."""
    cause: str | None
    error: str | None
    will_retry: bool

    @property
    def answer(self) -> Answer:
        return {"state": self.state, "attempt": self.attempt, "will_retry": self.will_retry}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How to end the current attempt of a rollout (`row`, locked), if it has one, and with it the rollout."""

    row: RowMapping
    state: str
    cause: str | None
    error: str | None = None
    output: str | None = None
    reported: str | None = None
    """The controller's report: the same again gets the same answer."""

    @property
    def key(self) -> tuple[str, int]:
        return self.row["rollout_id"], self.row["attempt"]


def finish(connection: Connection, reports: Sequence[Report]) -> list[tuple[Answer, Ended | None] | ApiError]:
    """End attempts as their controllers say. For each: the answer, and what ended (None: it had ended so before);
    or ApiError 404, or 409 if the attempt is not the current one any more."""
    rows = {
        row["rollout_id"]: row for row in by_ids(connection, list({r.rollout_id for r in reports}), lock=True)
    }
    known = _reported(connection, list(rows))
    results: list[tuple[Answer, Ended | None] | ApiError | None] = [None] * len(reports)
    outcomes: dict[int, Outcome] = {}
    ending: dict[str, int] = {}
    repeated: dict[int, int] = {}
    for number, report in enumerate(reports):
        row = rows.get(report.rollout_id)
        if row is None:
            results[number] = ApiError(404, "unknown_rollout", f"There is no rollout {report.rollout_id!r}.")
            continue
        tried = known.get((report.rollout_id, report.attempt))
        if tried is not None and tried["reported"] == report.text:
            results[number] = orjson.loads(tried["answer"]), None
        elif row["state"] == report.state == "cancelled" and row["attempt"] == report.attempt:
            results[number] = {"state": "cancelled", "attempt": report.attempt, "will_retry": False}, None
        elif report.rollout_id in ending:  # two reports of one attempt at once: the first has won
            repeated[number] = ending[report.rollout_id]
        elif (
            row["state"] != "running"
            or row["attempt"] != report.attempt
            or row["controller_id"] != report.controller_id
        ):
            results[number] = stale(row, report.attempt, report.controller_id)
        else:
            ending[report.rollout_id] = number
            outcomes[number] = Outcome(
                row, report.state, report.cause, report.error, report.output, report.text
            )
    for number, ended in zip(outcomes, end_attempts(connection, list(outcomes.values())), strict=True):
        results[number] = ended.answer, ended
    for number, winner in repeated.items():
        first = results[winner]
        assert isinstance(first, tuple), "the winner ended"
        same = (
            reports[winner].text == reports[number].text
            and reports[winner].attempt == reports[number].attempt
        )
        results[number] = (first[0], None) if same else _lost_race(reports[number], first[0])
    return [result for result in results if result is not None]


def end_attempts(connection: Connection, outcomes: Sequence[Outcome]) -> list[Ended]:
    """End the current attempts (if any), and with each its rollout unless it is tried again."""
    if not outcomes:
        return []
    now = time.time()
    made = _calls(
        connection, [outcome.row["rollout_id"] for outcome in outcomes if outcome.row["attempt"] >= 0]
    )
    ends: list[Ended] = []
    rollout_rows: list[Answer] = []
    attempt_rows: list[Answer] = []
    never_tried = iter(next_changes(connection, sum(outcome.row["attempt"] < 0 for outcome in outcomes)))
    for outcome in outcomes:
        row, (rollout_id, attempt) = outcome.row, outcome.key
        cause, error = outcome.cause, outcome.error
        its_calls = made[outcome.key]
        if outcome.state == "failed" and cause == "agent_error":
            cause, error = _true_cause(its_calls, error)
        retry = outcome.state == "failed" and cause in _RETRIED and attempt + 1 < row["max_attempts"]
        pause = min(2.0**attempt, _MAX_BACKOFF) if cause == "infra_error" else 0.0
        ended = Ended(
            rollout_id, attempt, row["run_id"], "queued" if retry else outcome.state, cause, error, retry
        )
        ends.append(ended)
        rollout_rows.append(
            {
                "b_cause": cause,
                "b_error": error,
                "b_attempt": attempt,
                "b_seq": row["seq"],
                "b_version": row["version"],
                "b_state": ended.state,
                "b_output": None if retry else outcome.output,
                "b_available": now + pause if retry else row["available"],
                "b_ended": None if retry else now,
                # A rollout that was never tried has no span to wait for: followers may see it at once.
                "b_change": next(never_tried) if attempt < 0 else None,
            }
        )
        if row["state"] != "running":  # cancelled before its first attempt, or before its next: none ends now
            continue
        attempt_rows.append(
            {
                "rollout_id": rollout_id,
                "attempt": attempt,
                "controller_id": row["controller_id"],
                "state": "succeeded" if outcome.state == "succeeded" else "failed",
                "cause": cause,
                "error": error,
                "started": row["started"],
                "ended": now,
                "reported": outcome.reported,
                "answer": orjson.dumps(ended.answer).decode(),
            }
        )
    changed = connection.execute(_END_ROLLOUT, rollout_rows)
    if changed.rowcount != len(rollout_rows):  # the rows are locked: it cannot be, and nothing is committed
        raise RuntimeError("a locked rollout changed under its transaction")
    if attempt_rows:
        connection.execute(attempts.insert(), attempt_rows)
    _post_spans(connection, outcomes, ends, made, now)
    return ends


def stale(row: RowMapping, attempt: int, controller_id: str | None) -> ApiError:
    """The refusal of a write to an attempt that is not the current one any more."""
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


def _lost_race(report: Report, answer: Answer) -> ApiError:
    return ApiError(
        409,
        "stale_attempt",
        f"Attempt {report.attempt} of rollout {report.rollout_id} has ended: the rollout is {answer['state']}.",
        attempt=answer["attempt"],
        state=answer["state"],
    )


def _post_spans(
    connection: Connection,
    outcomes: Sequence[Outcome],
    ends: Sequence[Ended],
    made: dict[tuple[str, int], list[Any]],
    now: float,
) -> None:
    entries = []
    for outcome, ended in zip(outcomes, ends, strict=True):
        row, (rollout_id, attempt) = outcome.row, outcome.key
        if attempt < 0:
            continue
        span = rollout_span(
            Identity(rollout_id, attempt, row["run_id"], row["group_id"], row["task_id"], row["split"]),
            state=outcome.state,
            cause=ended.cause,
            error=ended.error,
            task_input=row["input"],
            calls_answered=sorted(call.call_id for call in made[outcome.key] if call.error is None),
            started=row["started"],
            ended=now,
        )
        entries.append((f"rollout {rollout_id} {attempt}", span, None if ended.will_retry else rollout_id))
    post(connection, entries)


def _reported(connection: Connection, rollout_ids: Sequence[str]) -> dict[tuple[str, int], RowMapping]:
    found: dict[tuple[str, int], RowMapping] = {}
    for chunk in chunks(rollout_ids):
        for row in connection.execute(_ATTEMPTS, {"ids": chunk}).mappings():
            found[row["rollout_id"], row["attempt"]] = row
    return found


def _calls(connection: Connection, rollout_ids: Sequence[str]) -> dict[tuple[str, int], list[Any]]:
    """The ledger's rows, by attempt."""
    found: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
    for chunk in chunks(rollout_ids):
        for row in connection.execute(_CALLS, {"ids": chunk}):
            found[row.rollout_id, row.attempt].append(row)
    return found


def _true_cause(made: Sequence[Any], error: str | None) -> tuple[str, str | None]:
    """Why an agent failed: by itself, or because a model call did that was not mended by trying again."""
    mended = {call.digest for call in made if call.error is None}
    failures = [call for call in made if call.error is not None and call.digest not in mended]
    for call in failures:
        if call.fault:
            return "infra_error", f"A model call had failed ({call.error}). {error or ''}".strip()
    if any(call.error == OVERFLOW for call in failures):
        return "context_overflow", error
    return "agent_error", error
