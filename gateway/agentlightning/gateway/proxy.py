"""The model proxy's front: who calls, by which API, which policy answers, and whether the answer was given before.

`call.py` serves the call itself.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from agentlightning.gateway import http, upstream
from agentlightning.gateway.answer import Answer
from agentlightning.gateway.call import ModelCall
from agentlightning.gateway.chat import Chat
from agentlightning.gateway.completions import Completions
from agentlightning.gateway.errors import ModelError
from agentlightning.gateway.live import Attempt
from agentlightning.gateway.memory import Memory
from agentlightning.gateway.messages import Messages
from agentlightning.gateway.policies import Policy
from agentlightning.gateway.replays import Given
from agentlightning.gateway.request import Api, ModelRequest
from agentlightning.gateway.responses import Responses
from agentlightning.gateway.rules import BadRequest
from agentlightning.gateway.spans import Identity
from agentlightning.gateway.tokens import PREFIX, Claims, Denied
from agentlightning.proto import attributes as names
from agentlightning.proto import ids

if TYPE_CHECKING:
    from agentlightning.gateway.gateway import Gateway

__all__ = [
    "APIS",
    "MESSAGES",
    "Caller",
    "CountTokens",
    "ModelEndpoint",
    "ModelsEndpoint",
    "NotServed",
    "PassThrough",
]

CHAT: Final = Chat()
MESSAGES: Final = Messages()
APIS: Final[tuple[Api, ...]] = (CHAT, Completions(), Responses(), MESSAGES)
"""Those whose answers are sampled, and recorded."""


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

    @property
    def owner(self) -> str:
        """Whose the memory of its answers is: the attempt's, or of all that have no rollout."""
        return f"{self.identity.rollout_id} {self.identity.attempt}" if self.attempt is not None else ""


class _Endpoint:
    """What the model proxy's endpoints share: refusals in the API's shape, counted."""

    def __init__(self, gateway: "Gateway", api: Api = CHAT) -> None:
        self.gateway = gateway
        self.api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.serve(scope, receive, send)
        except ModelError as error:
            self.gateway.counters.add(error.code)
            headers = {} if error.retry_after is None else {"retry_after": str(error.retry_after)}
            await http.respond(send, error.status, self.api.refusal(error), **headers)
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

    async def read(
        self,
        scope: Scope,
        receive: Receive,
        caller: Caller,
        parse: Callable[[bytes, Memory], ModelRequest],
        memory: Memory,
    ) -> ModelRequest:
        """The request. Raises ModelError 400 or 413."""
        gateway = self.gateway
        try:
            request = parse(await http.read_body(scope, receive, gateway.settings.max_body_bytes), memory)
        except http.BodyTooLarge as error:
            raise ModelError(413, "request_too_large", str(error)) from None
        except BadRequest as error:
            raise ModelError(400, error.code, str(error), param=error.param) from None
        for note in request.notes:
            gateway.counters.add(note, caller.identity.run_id)
        return request

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


class ModelEndpoint(_Endpoint):
    """An API whose answers are sampled and recorded."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self.gateway
        caller = await self.identify(scope)
        memory = gateway.recollections.of(caller.owner)
        request = await self.read(scope, receive, caller, self.api.parse, memory)
        policy = self.policy_for(caller, request.model)
        call = ModelCall(gateway, caller, request, policy, memory, send)
        if caller.attempt is None:
            await call.run(receive)
            return
        identity = caller.identity
        key = (identity.rollout_id, identity.attempt, request.digest)
        retries = http.header(scope, b"x-stainless-retry-count") or "0"
        given = await gateway.replays.find(key, retry=retries.isdigit() and int(retries) > 0)
        if given is not None:
            gateway.counters.add("calls_replayed", identity.run_id)
            await _replay(send, request, given)
            return
        place = gateway.replays.begin(key)
        try:
            await call.run(receive)
        finally:
            gateway.replays.end(key, place, call.given)


class PassThrough(_Endpoint):
    """An API that samples nothing: its answers are the engine's own, and not recorded."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self.identify(scope)
        memory = self.gateway.recollections.of(caller.owner)
        request = await self.read(scope, receive, caller, self.api.parse, memory)
        answer = await self.ask(caller, request)
        await http.respond(send, 200, answer)

    async def ask(self, caller: Caller, request: ModelRequest) -> bytes:
        """An engine's answer to what the request means in its API."""
        gateway, identity = self.gateway, caller.identity
        policy = self.policy_for(caller, request.model)
        await upstream.pass_gate(gateway, policy, identity.run_id)
        with upstream.counted(policy):
            return await upstream.ask_engines(
                gateway,
                policy,
                identity.rollout_id,
                identity.run_id,
                request.api.engine_path,
                lambda engine: {**request.chat, "model": engine.model},
                _whole,
            )


class CountTokens(PassThrough):
    """`POST /v1/messages/count_tokens`: an engine counts by reading the prompt and sampling one token, for nobody."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await self.identify(scope)
        memory = self.gateway.recollections.of(caller.owner)
        request = await self.read(scope, receive, caller, MESSAGES.parse_count, memory)
        answer = Answer()
        answer.read_plain(orjson.loads(await self.ask(caller, request)))
        await http.respond(send, 200, orjson.dumps({"input_tokens": answer.counts()[0]}))


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    return await response.read()


_MODEL: Final = {
    "object": "model",
    "created": 0,
    "owned_by": "agentlightning",
    "type": "model",
    "created_at": "1970-01-01T00:00:00Z",
}
"""What the clients of either provider look for."""


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
        models: list[dict[str, Any]] = [{"id": name, **_MODEL, "display_name": name} for name in served]
        ends = {"first_id": served[0], "last_id": served[-1]} if served else {}
        body = models[0] if wanted else {"object": "list", "data": models, "has_more": False, **ends}
        await http.respond(send, 200, orjson.dumps(body))


class NotServed(_Endpoint):
    """Every other path under `/v1`."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        paths = [*(api.path for api in APIS), "messages/count_tokens", "embeddings"]
        served = ", ".join(f"POST /v1/{path}" for path in paths)
        raise ModelError(
            404,
            "unknown_path",
            f"{scope['method']} {scope['path'].rpartition('/v1/')[2]!r} is not served: "
            f"this gateway has {served} and GET /v1/models.",
        )


async def _replay(send: Send, request: ModelRequest, given: Given) -> None:
    kind = http.EVENTS if request.stream else http.JSON
    await http.respond(send, 200, given.body, kind, x_agentlightning_call_id=given.call_id)
