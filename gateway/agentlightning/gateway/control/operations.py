"""An operation of the control API: who may do it, what it takes, what it gives; and the route made of that."""

import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.gateway import http
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.tokens import PREFIX, Claims, Denied, Role
from agentlightning.proto.errors import nearest

__all__ = ["Call", "Operation"]

logger = logging.getLogger(__name__)
Asked = TypeVar("Asked", bound=BaseModel | None)


@dataclass(frozen=True, slots=True)
class Call(Generic[Asked]):
    """One request that has been let in."""

    request: Request
    asked: Asked
    """The body, or of a GET the query parameters."""
    claims: Claims | None = None
    """Of the rollout's own token, where that is enough."""

    @property
    def path(self) -> dict[str, str]:
        return self.request.path_params


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. The admin may do whatever `roles` may."""

    method: str
    path: str
    handler: Callable[[Gateway, Call[Any]], Awaitable[dict[str, Any] | Response]]
    answer: type[BaseModel]
    asks: type[BaseModel] | None = None
    roles: tuple[Role, ...] = ()
    right: str | None = None
    """A right of rollout tokens that is enough, for the token's own rollout."""

    def route(self, gateway: Gateway) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                claims = self._authorise(gateway, request)
                call = Call(request, await self._read(gateway, request), claims)
                answer = await self.handler(gateway, call)
            except ApiError as error:
                gateway.counters.add(error.code)
                return Response(error.body(), error.status, media_type=http.JSON)
            except SQLAlchemyError as error:
                gateway.counters.add("database_failed")
                logger.error("the database failed: %s", getattr(error, "orig", None) or type(error).__name__)
                refusal = ApiError(
                    503, "database_failed", "The gateway's database cannot be used now: try again."
                )
                return Response(refusal.body(), 503, {"retry-after": "1"}, media_type=http.JSON)
            except ClientDisconnect:
                return Response(status_code=499)
            if isinstance(answer, Response):
                return answer
            return Response(orjson.dumps(answer), media_type=http.JSON)

        return Route(self.path, endpoint, methods=[self.method])

    def _authorise(self, gateway: Gateway, request: Request) -> Claims | None:
        token = http.bearer(request.scope)
        if token is not None and token.startswith(PREFIX):
            try:
                claims = gateway.signer.verify(token)
            except Denied as error:
                raise ApiError(401, error.code, str(error)) from None
            if self.right in claims.rights and claims.rollout_id == request.path_params["rollout_id"]:
                return claims
            raise ApiError(403, "forbidden", "A rollout's token does not allow this.")
        if gateway.roles.open:
            return None
        role = gateway.roles.of(token)
        if role is None:
            raise ApiError(401, "unauthorized", "A valid bearer token is needed.")
        if role != "admin" and role not in self.roles:
            takes = " or ".join(("admin", *self.roles))
            raise ApiError(403, "forbidden", f"The role {role} may not do this: it takes {takes}.")
        return None

    async def _read(self, gateway: Gateway, request: Request) -> BaseModel | None:
        if self.asks is None:
            return None
        data = dict(request.query_params) if self.method == "GET" else await _json(gateway, request)
        try:
            return self.asks.model_validate(data)
        except ValidationError as error:
            raise _refusal(self.asks, error.errors(include_url=False)[0]) from None


async def _json(gateway: Gateway, request: Request) -> Any:
    try:
        body = await http.read_body(request.scope, request.receive, gateway.settings.max_body_bytes)
    except http.BodyTooLarge as error:
        raise ApiError(413, "request_too_large", str(error)) from None
    except http.ClientLeft:
        raise ClientDisconnect from None
    try:
        return orjson.loads(body)
    except ValueError as error:
        problem = error
    try:
        # What Python's own json writes and strict JSON lacks: NaN, Infinity, lone surrogates. A report of an agent's
        # end must not be refused for them. Rewards that are not finite are, by name.
        lenient = json.dumps(json.loads(body), ensure_ascii=False).encode(errors="replace")
    except (ValueError, RecursionError):
        raise ApiError(400, "bad_request", f"The request body is not valid JSON: {problem}.") from None
    gateway.counters.add("json_repaired")
    return json.loads(lenient)


_WORDS: Final = {
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "list_type": "must be an array",
    "string_type": "must be text",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "missing": "is missing",
}


def _refusal(model: type[BaseModel], problem: ErrorDetails) -> ApiError:
    """What is wrong with a request, in a sentence that begins with the field's place."""
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(
        "."
    )
    kind = problem["type"]
    if kind == "value_error":  # a sentence of our own
        said = f"{where} {problem['ctx']['error']}".strip().rstrip(".")
        return ApiError(400, "bad_request", f"{said}.")
    if kind == "finite_number":
        return ApiError(
            400, "reward_not_finite", f"{where} is {problem['input']}: a reward must be a finite number."
        )
    if kind == "extra_forbidden":
        name = str(problem["loc"][-1])
        return ApiError(
            400, "bad_request", f"{where} is not a known field.{nearest(name, set(_field_names(model)))}"
        )
    said = _WORDS.get(kind) or problem["msg"].replace("Input should be ", "must be ")
    return ApiError(400, "bad_request", f"{where or 'The request body'} {said}.")


def _field_names(model: type[BaseModel]) -> Iterator[str]:
    schema = model.model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        yield from part.get("properties", ())
