"""Rollouts over HTTP: enqueue, claim, heartbeat, finish, cancel, list, follow. Every request may be repeated."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from agentlightning.gateway import http, listing, rollouts
from agentlightning.gateway.control import models
from agentlightning.gateway.control.operations import Call
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.outcomes import Report
from agentlightning.gateway.outcomes import finish as outcomes_of

__all__ = [
    "cancel",
    "claim",
    "enqueue",
    "finish",
    "finish_many",
    "follow",
    "get_rollout",
    "heartbeat",
    "list_rollouts",
    "query",
    "revoke",
]

LOOK_AGAIN: Final = 1.0
"""Seconds after which whoever waits looks by itself: other gateways on the same database say nothing here, nor does
a retry's pause that ends."""
FOLLOW_BATCH: Final = 200
SETTLE_SECONDS: Final = 2.0
"""How long a finish waits for calls that the agent left behind to be recorded."""


async def enqueue(gateway: Gateway, call: Call[models.Enqueue]) -> dict[str, Any]:
    """Add rollouts to the queue; one that is there already stays as it is."""
    rows = [_row(rollout) for rollout in call.asked.rollouts]
    created, existing = await gateway.database.write(rollouts.enqueue, rows)
    if created:
        gateway.queued.fire()
    return {"created": created, "existing": existing}


def _row(rollout: models.Rollout) -> dict[str, Any]:
    sampling = None if rollout.sampling is None else rollout.sampling.model_dump(exclude_none=True)
    return {
        "rollout_id": rollout.rollout_id,
        "run_id": rollout.run_id,
        "group_id": rollout.group_id or rollout.rollout_id,
        "task_id": rollout.task_id or rollout.rollout_id,
        "split": rollout.split,
        "policy": rollout.policy,
        "input": _dump(rollout.input),
        "reference": None if rollout.reference is None else _dump(rollout.reference),
        "sampling": _dump(sampling) if sampling else None,
        "rights": _dump(rollout.rights) if rollout.rights else None,
        "max_attempts": rollout.max_attempts,
        "priority": rollout.priority,
    }


def _dump(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError as error:  # a number beyond 64 bits, a lone surrogate
        raise ApiError(400, "bad_request", f"A value cannot be kept as JSON: {error}.") from None


async def claim(gateway: Gateway, call: Call[models.Claim]) -> dict[str, Any]:
    """Start the next attempts of queued rollouts, under a lease; the highest priority first."""
    asked = call.asked
    deadline = time.monotonic() + asked.wait_s
    while True:
        queued = gateway.queued.next()
        if gateway.stopping.is_set():
            return {"boot_id": gateway.epoch, "rollouts": []}
        if await call.request.is_disconnected():  # nobody would run what is claimed now
            raise ClientDisconnect
        rows = await gateway.database.write(rollouts.claim, asked.controller_id, asked.limit, asked.lease_s)
        left = deadline - time.monotonic()
        if rows or left <= 0:
            return {"boot_id": gateway.epoch, "rollouts": [_claimed(gateway, row) for row in rows]}
        try:
            async with asyncio.timeout(min(left, LOOK_AGAIN)):
                await queued.wait()
        except TimeoutError:
            pass


def _claimed(gateway: Gateway, row: dict[str, Any]) -> dict[str, Any]:
    gateway.live.begin(row["rollout_id"], row["attempt"], row["sampling"])
    rights = orjson.loads(row["rights"] or "[]")
    return {
        **{key: row[key] for key in ("rollout_id", "run_id", "group_id", "task_id", "split", "policy")},
        **{key: orjson.loads(row[key] or "null") for key in ("input", "reference", "sampling")},
        **{key: row[key] for key in ("max_attempts", "priority", "attempt", "lease_expires")},
        "token": gateway.rollout_token(row, rights),
    }


async def heartbeat(gateway: Gateway, call: Call[models.Heartbeat]) -> dict[str, Any]:
    """Extend the leases of what this controller runs, and hear what it must stop."""
    asked = call.asked
    held = [(key.rollout_id, key.attempt) for key in asked.attempts]
    lost, cancelled = await gateway.database.write(
        rollouts.heartbeat, asked.controller_id, asked.lease_s, held
    )
    if lost:
        gateway.counters.add("stale_heartbeat", amount=len(lost))
    return {"boot_id": gateway.epoch, "lost": lost, "cancelled": cancelled}


async def finish(gateway: Gateway, call: Call[models.Finish]) -> dict[str, Any]:
    """Say how an attempt ended. A lost or infrastructure-failed one is tried again."""
    report = _report(call.path["rollout_id"], call.asked)
    await gateway.live.settle(report.rollout_id, report.attempt, SETTLE_SECONDS)
    answer, ended = await gateway.reports.add(report)
    if ended is not None:
        gateway.ended(ended)
    return answer


async def finish_many(gateway: Gateway, call: Call[models.Reports]) -> dict[str, Any]:
    """Say how several attempts ended; each is as by itself."""
    reports = [_report(asked.rollout_id, asked) for asked in call.asked.reports]
    await asyncio.gather(*(gateway.live.settle(r.rollout_id, r.attempt, SETTLE_SECONDS) for r in reports))
    outcomes = await gateway.database.write(outcomes_of, reports)
    results: list[dict[str, Any]] = []
    for report, outcome in zip(reports, outcomes, strict=True):
        if isinstance(outcome, ApiError):
            gateway.counters.add(outcome.code)
            results.append({"rollout_id": report.rollout_id, "error": outcome.content()})
        else:
            results.append({"rollout_id": report.rollout_id, "finished": outcome[0]})
    gateway.ended(*(o[1] for o in outcomes if not isinstance(o, ApiError) and o[1] is not None))
    return {"results": results}


def _report(rollout_id: str, asked: models.Finish) -> Report:
    return Report(
        rollout_id,
        asked.attempt,
        asked.controller_id,
        asked.state,
        "cancelled" if asked.state == "cancelled" else asked.cause,
        asked.error,
        None if asked.output is None else _dump(asked.output),
    )


async def cancel(gateway: Gateway, call: Call[models.Cancel]) -> dict[str, Any]:
    """Cancel rollouts that have not ended."""
    ends = await gateway.database.write(
        rollouts.cancel, rollout_ids=call.asked.rollout_ids, run_id=call.asked.run_id
    )
    gateway.ended(*ends)
    return {"cancelled": len(ends)}


async def revoke(gateway: Gateway, call: Call[models.Names]) -> dict[str, Any]:
    """Make the tokens of running attempts worthless, as when one has leaked. The attempts go on without a model."""
    revoked = await gateway.database.write(rollouts.revoke, call.asked.rollout_ids)
    for rollout_id, attempt in revoked:
        gateway.live.end(rollout_id, attempt)
    gateway.counters.add("tokens_revoked", amount=len(revoked))
    return {"revoked": len(revoked)}


async def list_rollouts(gateway: Gateway, call: Call[models.Query]) -> dict[str, Any]:
    """Rollouts in the order of enqueueing, page by page."""
    rows, cursor = await gateway.database.read(listing.page, **call.asked.model_dump())
    return {"rollouts": rows, "next_cursor": cursor}


async def get_rollout(gateway: Gateway, call: Call[None]) -> dict[str, Any]:
    """One rollout."""
    rollout_id = call.path["rollout_id"]
    rows = await gateway.database.read(listing.find, [rollout_id])
    if not rows:
        raise ApiError(404, "unknown_rollout", f"There is no rollout {rollout_id!r}.")
    return {"rollouts": rows, "next_cursor": None}


async def query(gateway: Gateway, call: Call[models.Names]) -> dict[str, Any]:
    """Rollouts by id; unknown ids are left out."""
    rows = await gateway.database.read(listing.find, call.asked.rollout_ids)
    return {"rollouts": rows, "next_cursor": None}


async def follow(gateway: Gateway, call: Call[models.Follow]) -> Response:
    """Rollouts as they become final, as server-sent events; goes on after `Last-Event-ID`."""
    cursor, last = call.asked.cursor, call.request.headers.get("last-event-id")
    if last is not None:
        if not last.isdigit() or len(last) > 18:
            raise ApiError(400, "bad_request", f"Last-Event-ID must be a whole number, not {last!r}.")
        cursor = int(last)
    return StreamingResponse(_changes(gateway, call.asked.run_id, cursor), media_type=http.EVENTS)


async def _changes(gateway: Gateway, run_id: str | None, cursor: int) -> AsyncIterator[bytes]:
    yield b": following\n\n"
    quiet = 0.0
    while not gateway.stopping.is_set():
        finished = gateway.finished.next()
        rows = await gateway.database.read(listing.changed_since, run_id, cursor, FOLLOW_BATCH)
        for row in rows:
            cursor = row["change"]
            yield b"id: %d\ndata: %s\n\n" % (cursor, orjson.dumps(row))
        if rows:
            quiet = 0.0
            continue
        pause = LOOK_AGAIN if gateway.database.shared else gateway.settings.keep_alive_s
        try:
            async with asyncio.timeout(pause):
                await finished.wait()
        except TimeoutError:
            quiet += pause
            if quiet >= gateway.settings.keep_alive_s:
                quiet = 0.0
                yield b": keep-alive\n\n"
