"""The model proxy's front: who calls, which policy answers, and whether the answer was given before.

`call.py` serves the call itself.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson
from starlette.types import Receive, Scope, Send

from agentlightning.gateway import http
from agentlightning.gateway.call import ChatCall, Given
from agentlightning.gateway.chat import BadRequest, ChatRequest, replay_chunks
from agentlightning.gateway.errors import ModelError
from agentlightning.gateway.live import Attempt
from agentlightning.gateway.policies import Policy
from agentlightning.gateway.spans import Identity
from agentlightning.gateway.tokens import PREFIX, Claims, Denied
from agentlightning.proto import attributes as names
from agentlightning.proto import ids

if TYPE_CHECKING:
    from agentlightning.gateway.gateway import Gateway

__all__ = ["Caller", "ChatEndpoint", "ModelsEndpoint", "NotServed", "Replays"]

logger = logging.getLogger(__name__)
MAX_REPLAYS: Final = 2_000
MAX_REPLAY_BYTES: Final = 64 << 20

ReplayKey = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a model call."""

    identity: Identity
    policy: str | None
    """The only policy that it may call; None: any."""
    attempt: Attempt | None
    """None: it belongs to no rollout of this gateway."""
    token: str | None
    trace_id: str
    parent_id: str | None


class Replays:
    """Answers that a client's retry gets again instead of a new sample; the oldest are forgotten."""

    def __init__(self) -> None:
        self._entries: OrderedDict[ReplayKey, asyncio.Future[Given | None]] = OrderedDict()
        self._bytes = 0

    def get(self, key: ReplayKey) -> "asyncio.Future[Given | None] | None":
        return self._entries.get(key)

    def begin(self, key: ReplayKey) -> "asyncio.Future[Given | None]":
        """A place for the answer that a call is about to get: None if it gets none."""
        place: asyncio.Future[Given | None] = asyncio.get_running_loop().create_future()
        self._forget(key)
        self._entries[key] = place
        return place

    def end(self, key: ReplayKey, place: "asyncio.Future[Given | None]", given: Given | None) -> None:
        if not place.done():
            place.set_result(given)
        if self._entries.get(key) is not place:
            return
        if given is None:
            del self._entries[key]
            return
        self._bytes += given.size
        while self._entries and (len(self._entries) > MAX_REPLAYS or self._bytes > MAX_REPLAY_BYTES):
            self._forget(next(iter(self._entries)))

    def _forget(self, key: ReplayKey) -> None:
        place = self._entries.pop(key, None)
        if place is not None and place.done() and (given := place.result()) is not None:
            self._bytes -= given.size


class _Endpoint:
    """What the model proxy's endpoints share: refusals in OpenAI's shape, counted."""

    def __init__(self, gateway: "Gateway") -> None:
        self.gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.serve(scope, receive, send)
        except ModelError as error:
            self.gateway.counters.add(error.code)
            await refuse(send, error)
        except http.ClientLeft:
            self.gateway.counters.add("client_left_early")

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def identify(self, scope: Scope) -> Caller:
        """Who calls. Raises ModelError 401 or 403."""
        gateway = self.gateway
        token = scope["path_params"].get("token") or http.bearer(scope)
        trace = http.trace_of(scope)
        if token is not None and token.startswith(PREFIX):
            try:
                claims = gateway.signer.verify(token)
            except Denied as error:
                raise ModelError(401, error.code, str(error)) from None
            return await self._agent(claims, token, trace)
        if not gateway.roles.open and gateway.roles.of(token) not in ("admin", "trainer"):
            raise ModelError(401, "invalid_api_key", "The API key must be the rollout's token.")
        identity = self._declared(scope, trace)
        trace_id = trace.trace_id if trace is not None else secrets.token_hex(16)
        identity = identity or Identity(rollout_id=trace_id)
        return Caller(identity, None, None, None, trace_id, trace.parent_id if trace is not None else None)

    async def _agent(self, claims: Claims, token: str, trace: http.Trace | None) -> Caller:
        attempt = await self.gateway.live.find(claims.rollout_id, claims.attempt)
        if attempt is None:
            raise ModelError(
                403,
                "attempt_ended",
                f"Attempt {claims.attempt} of rollout {claims.rollout_id} is not running any more.",
            )
        identity = Identity(
            claims.rollout_id, claims.attempt, claims.run_id, claims.group_id, claims.task_id, claims.split
        )
        if trace is None:
            trace_id = ids.derived_trace_id(claims.rollout_id, claims.attempt)
            parent_id = ids.rollout_span_id(claims.rollout_id, claims.attempt)
            return Caller(identity, claims.policy, attempt, token, trace_id, parent_id)
        return Caller(identity, claims.policy, attempt, token, trace.trace_id, trace.parent_id)

    def _declared(self, scope: Scope, trace: http.Trace | None) -> Identity | None:
        """Without a token, the baggage may say which rollout this is: nobody else's, for there are no others."""
        items = http.baggage(scope)
        if names.ROLLOUT_ID not in items:
            return None
        try:
            for key in names.IDENTITY:
                if key in items:
                    ids.check_id(items[key], key)
            attempt = int(items.get(names.ATTEMPT, "0"))
        except ValueError:
            self.gateway.counters.add("bad_baggage")
            return None
        return Identity(
            items[names.ROLLOUT_ID],
            attempt,
            *(items.get(key, "") for key in (names.RUN_ID, names.GROUP_ID, names.TASK_ID, names.SPLIT)),
        )

    def policy_for(self, caller: Caller, model: str) -> Policy:
        """The policy that a model's name stands for. Raises ModelError 404."""
        gateway = self.gateway
        allowed = [policy for policy in gateway.policies if caller.policy in (None, policy.name)]
        for policy in allowed:
            if model in (policy.name, policy.base_model):
                return policy
        for policy in allowed:
            if any(model == engine.model for engine in gateway.engines.of(policy.name)):
                return policy
        if caller.policy == model:  # known by its token, but no engine has come yet
            raise ModelError(
                503, "no_engine", f"No engine serves policy {model} yet.", fault=True, retry_after=1
            )
        served = ", ".join(policy.name for policy in allowed) or "none"
        raise ModelError(
            404,
            "model_not_found",
            f"The model {model!r} does not exist here. Models for this key: {served}.",
            param="model",
        )


class ChatEndpoint(_Endpoint):
    """`POST /v1/chat/completions`."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self.gateway
        caller = await self.identify(scope)
        run_id = caller.identity.run_id
        try:
            request = ChatRequest.parse(await http.read_body(scope, receive, gateway.settings.max_body_bytes))
        except http.BodyTooLarge as error:
            raise ModelError(413, "request_too_large", str(error)) from None
        except BadRequest as error:
            raise ModelError(400, "invalid_request", str(error), param=error.param) from None
        policy = self.policy_for(caller, request.model)
        call = ChatCall(gateway, caller, request, policy, send)
        if caller.attempt is None:
            await call.run(receive)
            return
        key = (caller.identity.rollout_id, caller.identity.attempt, request.digest)
        retries = http.header(scope, b"x-stainless-retry-count") or "0"
        if retries.isdigit() and int(retries) > 0:
            while (earlier := gateway.replays.get(key)) is not None:
                # Shielded: this client may leave, others may wait for the same answer.
                given = await asyncio.shield(earlier)
                if given is not None:
                    gateway.counters.add("calls_replayed", run_id)
                    await _replay(send, request, given)
                    return
        place = gateway.replays.begin(key)
        try:
            await call.run(receive)
        finally:
            gateway.replays.end(key, place, call.given)


class ModelsEndpoint(_Endpoint):
    """`GET /v1/models` and `GET /v1/models/{model}`."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self.identify(scope)
        wanted = scope["path_params"].get("model")
        if wanted is not None:
            self.policy_for(caller, wanted)
        served = (
            [wanted] if wanted else [p.name for p in self.gateway.policies if caller.policy in (None, p.name)]
        )
        models: list[dict[str, Any]] = [
            {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"} for name in served
        ]
        body = models[0] if wanted else {"object": "list", "data": models}
        await http.respond(send, 200, orjson.dumps(body))


class NotServed(_Endpoint):
    """Every other path under `/v1`."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise ModelError(
            404,
            "unknown_path",
            f"{scope['method']} {scope['path'].rpartition('/v1/')[2]!r} is not served: "
            "this gateway has POST /v1/chat/completions and GET /v1/models.",
        )


async def refuse(send: Send, error: ModelError) -> None:
    """Answer with an error, when nothing has been sent yet."""
    headers = {} if error.retry_after is None else {"retry_after": str(error.retry_after)}
    await http.respond(send, error.status, error.body(), **headers)


async def _replay(send: Send, request: ChatRequest, given: Given) -> None:
    if request.stream:
        events = b"".join(replay_chunks(request, [orjson.loads(answer) for answer in given.answers]))
        await http.respond(send, 200, events, http.EVENTS, x_agentlightning_call_id=given.call_id)
    else:
        await http.respond(send, 200, given.body, x_agentlightning_call_id=given.call_id)
