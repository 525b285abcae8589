"""The control API: JSON over HTTP, for the trainer, the controller and the admin.

Every request may be repeated: it changes nothing the second time, and gets the same answer.
"""

import asyncio
import functools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import orjson
from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentlightning.gateway import http, ledger, rollouts
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.fields import Fields
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.outbox import post
from agentlightning.gateway.policies import check_sampling
from agentlightning.gateway.spans import Identity, evaluation_span
from agentlightning.gateway.tables import rewards
from agentlightning.gateway.tables import rollouts as rollouts_table
from agentlightning.gateway.tokens import PREFIX, RIGHTS, Claims, Denied, Role
from agentlightning.proto.attributes import DEFAULT_REWARD

__all__ = ["routes"]

logger = logging.getLogger(__name__)
MAX_WAIT: Final = 30.0
MAX_LEASE: Final = 3600.0
PAGE: Final = 1000
FOLLOW_BATCH: Final = 200
SETTLE_SECONDS: Final = 2.0
"""How long a finish waits for calls that the agent left behind to be recorded."""

Endpoint = Callable[[Request], Awaitable[Response]]
Handler = Callable[[Gateway, Request], Awaitable[Response]]


def routes(gateway: Gateway) -> list[Route]:
    """All routes of the control API. The admin may do whatever trainer and controller may."""
    table: list[tuple[str, str, Handler, tuple[Role, ...]]] = [
        ("POST", "/api/rollouts", enqueue, ("trainer",)),
        ("GET", "/api/rollouts", list_rollouts, ("trainer",)),
        ("POST", "/api/rollouts/claim", claim, ("controller",)),
        ("POST", "/api/rollouts/heartbeat", heartbeat, ("controller",)),
        ("POST", "/api/rollouts/cancel", cancel, ("trainer",)),
        ("POST", "/api/rollouts/query", query, ("trainer",)),
        ("GET", "/api/rollouts/follow", follow, ("trainer",)),
        ("GET", "/api/rollouts/{rollout_id}", get_rollout, ("trainer",)),
        ("POST", "/api/rollouts/{rollout_id}/finish", finish, ("controller",)),
        ("POST", "/api/rollouts/{rollout_id}/rewards", reward, ("controller",)),
        ("POST", "/api/policies", put_policy, ("trainer",)),
        ("POST", "/api/engines", put_engine, ()),
        ("GET", "/api/engines", list_engines, ("trainer",)),
        ("DELETE", "/api/engines/{engine_id}", remove_engine, ()),
        ("POST", "/api/engines/{engine_id}/probe", probe_engine, ("trainer",)),
        ("POST", "/api/hold", hold, ("trainer",)),
        ("POST", "/api/release", release, ("trainer",)),
        ("GET", "/api/stats", stats, ("trainer", "controller")),
    ]
    return [
        Route(path, _guard(gateway, handler, ("admin", *roles)), methods=[method])
        for method, path, handler, roles in table
    ]


def _guard(gateway: Gateway, handler: Handler, roles: tuple[Role, ...]) -> Endpoint:
    """Let a handler be reached by these roles only, and turn what it raises into answers."""

    @functools.wraps(handler)
    async def endpoint(request: Request) -> Response:
        try:
            _authorise(gateway, request, roles, own_rewards=handler is reward)
            return await handler(gateway, request)
        except ApiError as error:
            gateway.counters.add(error.code, request.scope.get("agl_run", ""))
            return Response(error.body(), error.status, media_type=http.JSON)
        except SQLAlchemyError as error:
            gateway.counters.add("database_failed")
            logger.error("the database failed: %s", error)
            refusal = ApiError(
                503, "database_failed", "The gateway's database cannot be used now: try again."
            )
            return Response(refusal.body(), 503, {"retry-after": "1"}, media_type=http.JSON)
        except ClientDisconnect:
            return Response(status_code=499)

    return endpoint


def _authorise(gateway: Gateway, request: Request, roles: tuple[Role, ...], *, own_rewards: bool) -> None:
    token = http.bearer(request.scope)
    if token is not None and token.startswith(PREFIX):
        try:
            claims = gateway.signer.verify(token)
        except Denied as error:
            raise ApiError(401, error.code, str(error)) from None
        if (
            own_rewards
            and "reward" in claims.rights
            and claims.rollout_id == request.path_params["rollout_id"]
        ):
            request.scope["agl_claims"] = claims
            return
        raise ApiError(403, "forbidden", "A rollout's token does not allow this.")
    if gateway.roles.open:
        return
    role = gateway.roles.of(token)
    if role is None:
        raise ApiError(401, "unauthorized", "A valid bearer token is needed.")
    if role not in roles:
        raise ApiError(403, "forbidden", f"The role {role} may not do this: it takes {' or '.join(roles)}.")


async def _read(gateway: Gateway, request: Request) -> Fields:
    try:
        body = await http.read_body(request.scope, request.receive, gateway.settings.max_body_bytes)
    except http.BodyTooLarge as error:
        raise ApiError(413, "request_too_large", str(error)) from None
    except http.ClientLeft:
        raise ClientDisconnect from None
    try:
        return Fields(orjson.loads(body))
    except ValueError as error:
        problem = error
    try:
        # What Python's own json writes and strict JSON lacks: NaN, Infinity, lone surrogates. A report of an agent's
        # end must not be refused for them. Rewards that are not finite are, by name.
        lenient = json.dumps(json.loads(body), ensure_ascii=False).encode(errors="replace")
    except (ValueError, RecursionError):
        raise ApiError(400, "bad_request", f"The request body is not valid JSON: {problem}.") from None
    gateway.counters.add("json_repaired")
    return Fields(json.loads(lenient))


def _answer(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type=http.JSON)


# -------------------------------------------------------------------- rollouts


async def enqueue(gateway: Gateway, request: Request) -> Response:
    fields = await _read(gateway, request)
    items = fields.items("rollouts")
    fields.done()
    rows = [_rollout(item, f"rollouts[{number}].") for number, item in enumerate(items)]
    created, existing = await gateway.database.write(rollouts.enqueue, rows)
    if created:
        gateway.queued.fire()
    return _answer({"created": created, "existing": existing})


def _rollout(item: Any, where: str) -> dict[str, Any]:
    fields = Fields(item, where)
    rollout_id = fields.identifier("rollout_id")
    task_input, reference = fields.raw("input"), fields.raw("reference")
    if not isinstance(task_input, dict) or not isinstance(reference, dict | None):
        raise ApiError(
            400, "bad_request", f"{where}input must be an object, {where}reference an object or null."
        )
    sampling = check_sampling(fields.raw("sampling"), f"{where}sampling")
    rights = fields.raw("rights") or []
    if not isinstance(rights, list) or not RIGHTS.issuperset(rights):
        raise ApiError(400, "bad_request", f"{where}rights must be a list of {', '.join(RIGHTS)}.")
    row = {
        "rollout_id": rollout_id,
        "run_id": fields.identifier("run_id"),
        "group_id": fields.identifier("group_id", rollout_id),
        "task_id": fields.identifier("task_id", rollout_id),
        "split": fields.choice("split", ("train", "val"), "train"),
        "policy": fields.identifier("policy"),
        "input": _dump(task_input),
        "reference": None if reference is None else _dump(reference),
        "sampling": None if sampling is None else _dump(sampling),
        "rights": _dump(rights) if rights else None,
        "max_attempts": fields.integer("max_attempts", 3, low=1, high=100),
        "priority": fields.integer("priority", 0, low=-(2**31)),
    }
    fields.done()
    return row


def _dump(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError as error:  # a number beyond 64 bits, a lone surrogate
        raise ApiError(400, "bad_request", f"A value cannot be kept as JSON: {error}.") from None


async def claim(gateway: Gateway, request: Request) -> Response:
    fields = await _read(gateway, request)
    controller_id = fields.identifier("controller_id")
    limit = fields.integer("limit", low=1, high=10_000)
    lease = fields.number("lease_s", low=1, high=MAX_LEASE)
    deadline = time.monotonic() + fields.number("wait_s", 0, low=0, high=MAX_WAIT)
    fields.done()
    while True:
        queued = gateway.queued.next()
        if gateway.stopping.is_set():
            return _answer({"boot_id": gateway.boot_id, "rollouts": []})
        if await request.is_disconnected():  # nobody would run what is claimed now
            raise ClientDisconnect
        rows = await gateway.database.write(rollouts.claim, controller_id, limit, lease)
        left = deadline - time.monotonic()
        if rows or left <= 0:
            return _answer({"boot_id": gateway.boot_id, "rollouts": [_claimed(gateway, row) for row in rows]})
        try:
            async with asyncio.timeout(min(left, 1.0)):  # a retry's pause ends without anybody saying so
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


async def heartbeat(gateway: Gateway, request: Request) -> Response:
    fields = await _read(gateway, request)
    controller_id = fields.identifier("controller_id")
    lease = fields.number("lease_s", low=1, high=MAX_LEASE)
    held = [_attempt_key(item, f"attempts[{n}].") for n, item in enumerate(fields.items("attempts"))]
    fields.done()
    lost, cancelled = await gateway.database.write(rollouts.heartbeat, controller_id, lease, held)
    if lost:
        gateway.counters.add("stale_heartbeat", amount=len(lost))
    return _answer({"boot_id": gateway.boot_id, "lost": lost, "cancelled": cancelled})


def _attempt_key(item: Any, where: str) -> tuple[str, int]:
    fields = Fields(item, where)
    key = fields.text("rollout_id"), fields.integer("attempt")
    fields.done()
    return key


async def finish(gateway: Gateway, request: Request) -> Response:
    rollout_id = request.path_params["rollout_id"]
    fields = await _read(gateway, request)
    attempt = fields.integer("attempt")
    controller_id = fields.identifier("controller_id")
    state = fields.choice("state", ("succeeded", "failed", "cancelled"))
    cause = fields.raw("cause")
    error = fields.optional_text("error", limit=1 << 20)
    output = fields.raw("output")
    fields.done()
    if state == "failed" and cause not in rollouts.CAUSES:
        raise ApiError(400, "bad_request", f"cause must be one of {', '.join(rollouts.CAUSES)}.")
    if state == "succeeded" and cause is not None:
        raise ApiError(400, "bad_request", "cause must be null where the state is succeeded.")
    await gateway.live.settle(rollout_id, attempt, SETTLE_SECONDS)
    answer, ended = await gateway.database.write(
        rollouts.finish,
        rollout_id,
        attempt,
        controller_id,
        state=state,
        cause="cancelled" if state == "cancelled" else cause,
        error=error,
        output=None if output is None else _dump(output),
    )
    if ended is not None:
        gateway.ended(ended)
    return _answer(answer)


async def reward(gateway: Gateway, request: Request) -> Response:
    rollout_id = request.path_params["rollout_id"]
    claims: Claims | None = request.scope.get("agl_claims")
    fields = await _read(gateway, request)
    attempt = fields.integer("attempt", None if claims is None else claims.attempt)
    if claims is not None and attempt != claims.attempt:
        raise ApiError(403, "forbidden", "A rollout's token allows rewards of its own attempt only.")
    name = fields.text("name", DEFAULT_REWARD)
    value = fields.finite("value")
    label, explanation = fields.optional_text("label"), fields.optional_text("explanation", limit=100_000)
    call_id = fields.optional_text("call_id") or ""
    fields.done()
    key = f"reward {rollout_id} {attempt} {name} {call_id}"
    await gateway.database.write(
        _reward, key, rollout_id, attempt, name, call_id, value=value, label=label, explanation=explanation
    )
    if not await gateway.outbox.delivery(key, gateway.settings.collector_timeout_s):
        raise ApiError(503, "capture_failed", "The collector has not taken the reward yet: post it again.")
    return _answer({"rollout_id": rollout_id, "attempt": attempt, "name": name, "value": value})


def _reward(
    connection: Connection,
    key: str,
    rollout_id: str,
    attempt: int,
    name: str,
    call_id: str,
    *,
    value: float,
    label: str | None,
    explanation: str | None,
) -> None:
    """Store a reward and post its span; the same reward again changes nothing."""
    place = {"rollout_id": rollout_id, "attempt": attempt, "name": name, "call_id": call_id}
    stored = select(rewards.c.value).filter_by(**place)
    if (earlier := connection.execute(stored).scalar()) is not None:
        if earlier == value:
            return
        raise ApiError(
            409, "reward_conflict", f"The reward {name!r} of this attempt is {earlier} already, not {value}."
        )
    row = (
        connection.execute(
            select(rollouts_table).where(rollouts_table.c.rollout_id == rollout_id).with_for_update()
        )
        .mappings()
        .first()
    )
    if row is None:
        raise ApiError(404, "unknown_rollout", f"There is no rollout {rollout_id!r}.")
    if row["attempt"] != attempt:
        raise ApiError(
            409,
            "stale_attempt",
            f"Attempt {attempt} of {rollout_id} is not the current one.",
            attempt=row["attempt"],
        )
    if row["state"] != "running":
        raise ApiError(
            409,
            "attempt_ended",
            f"Attempt {attempt} of {rollout_id} has ended: the rollout is {row['state']}.",
        )
    call = None
    if call_id and (call := ledger.call_of(connection, call_id, rollout_id, attempt)) is None:
        raise ApiError(404, "unknown_call", f"Attempt {attempt} of {rollout_id} has no call {call_id!r}.")
    span = evaluation_span(
        Identity(rollout_id, attempt, row["run_id"], row["group_id"], row["task_id"], row["split"]),
        name=name,
        value=value,
        label=label,
        explanation=explanation,
        call_id=call_id,
        call=call,
    )
    connection.execute(rewards.insert().values(**place, value=value))
    post(connection, key, span)


async def cancel(gateway: Gateway, request: Request) -> Response:
    fields = await _read(gateway, request)
    run_id = fields.optional_text("run_id")
    rollout_ids = None if run_id is not None else fields.identifiers("rollout_ids")
    fields.done()
    ends = await gateway.database.write(rollouts.cancel, rollout_ids=rollout_ids, run_id=run_id)
    gateway.ended(*ends)
    return _answer({"cancelled": len(ends)})


async def list_rollouts(gateway: Gateway, request: Request) -> Response:
    options = request.query_params
    rows, cursor = await gateway.database.read(
        rollouts.page,
        run_id=options.get("run_id"),
        state=options.get("state"),
        split=options.get("split"),
        cursor=_integer(options.get("cursor"), 0, "cursor"),
        limit=min(PAGE, max(1, _integer(options.get("limit"), PAGE, "limit"))),
    )
    return _answer({"rollouts": rows, "next_cursor": cursor})


async def get_rollout(gateway: Gateway, request: Request) -> Response:
    rollout_id = request.path_params["rollout_id"]
    rows = await gateway.database.read(rollouts.find, [rollout_id])
    if not rows:
        raise ApiError(404, "unknown_rollout", f"There is no rollout {rollout_id!r}.")
    return _answer({"rollouts": rows, "next_cursor": None})


async def query(gateway: Gateway, request: Request) -> Response:
    fields = await _read(gateway, request)
    rollout_ids = fields.identifiers("rollout_ids")
    fields.done()
    rows = await gateway.database.read(rollouts.find, rollout_ids)
    return _answer({"rollouts": rows, "next_cursor": None})


async def follow(gateway: Gateway, request: Request) -> Response:
    options = request.query_params
    cursor = _integer(request.headers.get("last-event-id") or options.get("cursor"), 0, "cursor")
    return StreamingResponse(_changes(gateway, options.get("run_id"), cursor), media_type=http.EVENTS)


async def _changes(gateway: Gateway, run_id: str | None, cursor: int) -> AsyncIterator[bytes]:
    yield b": following\n\n"
    while not gateway.stopping.is_set():
        finished = gateway.finished.next()
        rows = await gateway.database.read(rollouts.changed_since, run_id, cursor, FOLLOW_BATCH)
        for row in rows:
            cursor = row["change"]
            yield b"id: %d\ndata: %s\n\n" % (cursor, orjson.dumps(row))
        if not rows:
            try:
                async with asyncio.timeout(gateway.settings.keep_alive_s):
                    await finished.wait()
            except TimeoutError:
                yield b": keep-alive\n\n"


def _integer(text: str | None, default: int, name: str) -> int:
    if text is None:
        return default
    if not text.isdigit() or len(text) > 18:
        raise ApiError(400, "bad_request", f"{name} must be a whole number, not {text!r}.")
    return int(text)


# -------------------------------------------------------------------- policies and engines


async def put_policy(gateway: Gateway, request: Request) -> Response:
    fields = await _read(gateway, request)
    name = fields.identifier("policy")
    base_model = fields.optional_text("base_model", limit=1000)
    raw = fields.raw("sampling")
    fields.done()
    sampling = None
    if raw is not None:
        splits = Fields(raw, "sampling.")
        sampling = {}
        for split in ("train", "val"):
            if (settings := check_sampling(splits.raw(split), f"sampling.{split}")) is not None:
                sampling[split] = settings
        splits.done()
    policy = await gateway.policies.put(name, base_model=base_model, sampling=sampling)
    return _answer(
        {
            "policy": policy.name,
            "base_model": policy.base_model,
            "sampling": policy.sampling,
            "version": policy.version,
        }
    )


async def put_engine(gateway: Gateway, request: Request) -> Response:
    fields = await _read(gateway, request)
    engine_id, policy = fields.identifier("engine_id"), fields.identifier("policy")
    url = fields.text("url", limit=2000)
    model, token_file = (
        fields.optional_text("model", limit=1000),
        fields.optional_text("token_file", limit=4000),
    )
    fields.done()
    if gateway.policies.get(policy) is None:
        await gateway.policies.put(policy)
    engine = await gateway.engines.put(engine_id, policy=policy, url=url, model=model, token_file=token_file)
    return _answer(engine.describe())


async def list_engines(gateway: Gateway, request: Request) -> Response:
    return _answer({"engines": [engine.describe() for engine in gateway.engines]})


async def remove_engine(gateway: Gateway, request: Request) -> Response:
    await gateway.engines.remove(request.path_params["engine_id"])
    return _answer({"removed": request.path_params["engine_id"]})


async def probe_engine(gateway: Gateway, request: Request) -> Response:
    engine = gateway.engines.get(request.path_params["engine_id"])
    await gateway.engines.probe(engine)
    return _answer(engine.describe())


async def hold(gateway: Gateway, request: Request) -> Response:
    fields = await _read(gateway, request)
    policy = fields.identifier("policy")
    ttl = fields.number("ttl_s", 120, low=0, high=3600)
    drain = fields.number("drain_s", 30, low=0, high=3600)
    fields.done()
    return _answer(await gateway.policies.hold(policy, ttl, drain))


async def release(gateway: Gateway, request: Request) -> Response:
    fields = await _read(gateway, request)
    policy, hold_id = fields.identifier("policy"), fields.identifier("hold_id")
    version = fields.raw("version")
    if version is not None:
        version = fields.integer("version", high=2**62)
    fields.done()
    return _answer(await gateway.policies.release(policy, hold_id, version))


async def stats(gateway: Gateway, request: Request) -> Response:
    return _answer({"counters": await gateway.counters.of(request.query_params.get("run_id"))})
