"""Rewards over HTTP: stored once, and confirmed when the collector has the span."""

from typing import Any

from sqlalchemy import Connection, select

from agentlightning.gateway import ledger
from agentlightning.gateway.control import models
from agentlightning.gateway.control.operations import Call
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.listing import by_ids
from agentlightning.gateway.outbox import post
from agentlightning.gateway.outcomes import stale
from agentlightning.gateway.spans import Identity, evaluation_span
from agentlightning.gateway.tables import rewards

__all__ = ["reward"]


async def reward(gateway: Gateway, call: Call[models.Reward]) -> dict[str, Any]:
    """Judge a running attempt, or one of its calls. The same again changes nothing; another value is refused."""
    rollout_id, asked, claims = call.path["rollout_id"], call.asked, call.claims
    attempt = asked.attempt
    if claims is not None:
        if attempt not in (None, claims.attempt):
            raise ApiError(403, "forbidden", "A rollout's token allows rewards of its own attempt only.")
        if await gateway.live.find(rollout_id, claims.attempt) is None:
            raise ApiError(403, "attempt_ended", "This attempt has ended, or its token was revoked.")
        attempt = claims.attempt
    if attempt is None:
        raise ApiError(400, "bad_request", "attempt is missing.")
    key = f"reward {rollout_id} {attempt} {asked.name} {asked.call_id or ''}"
    await gateway.database.write(_store, key, rollout_id, attempt, asked)
    if not await gateway.outbox.delivery(key, gateway.settings.collector_timeout_s):
        raise ApiError(503, "capture_failed", "The collector has not taken the reward yet: post it again.")
    return {"rollout_id": rollout_id, "attempt": attempt, "name": asked.name, "value": asked.value}


def _store(connection: Connection, key: str, rollout_id: str, attempt: int, asked: models.Reward) -> None:
    call_id = asked.call_id or ""
    place = {"rollout_id": rollout_id, "attempt": attempt, "name": asked.name, "call_id": call_id}
    rows = by_ids(connection, [rollout_id], lock=True)
    stored = select(rewards.c.value).filter_by(**place)
    if (earlier := connection.execute(stored).scalar()) is not None:
        if earlier == asked.value:
            return
        raise ApiError(
            409,
            "reward_conflict",
            f"The reward {asked.name!r} of this attempt is {earlier} already, not {asked.value}.",
        )
    if not rows:
        raise ApiError(404, "unknown_rollout", f"There is no rollout {rollout_id!r}.")
    row = rows[0]
    if row["attempt"] != attempt or row["state"] != "running":
        raise stale(row, attempt, None)
    call = None
    if call_id and (call := ledger.call_of(connection, call_id, rollout_id, attempt)) is None:
        raise ApiError(404, "unknown_call", f"Attempt {attempt} of {rollout_id} has no call {call_id!r}.")
    span = evaluation_span(
        Identity(rollout_id, attempt, row["run_id"], row["group_id"], row["task_id"], row["split"]),
        name=asked.name,
        value=asked.value,
        label=asked.label,
        explanation=asked.explanation,
        call_id=call_id,
        call=call,
    )
    connection.execute(rewards.insert().values(**place, value=asked.value))
    post(connection, [(key, span, None)])
