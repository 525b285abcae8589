"""`POST /v1/traces`: an agent's own spans, with the rollout's token as the key.

An agent needs no other address and no other key than the gateway's. Its spans go on to the collector with the identity
that the token proves, whatever they claimed; what only the gateway may say (how an attempt ended, that a record is the
gateway's) is removed, and rewards are let through only where the token allows them. Everything removed is counted.
The answer is the collector's: 200 means that the spans are on disk.
"""

import gzip
import io
import logging
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from starlette.types import Receive, Scope, Send

from agentlightning.gateway import http
from agentlightning.gateway.collector import CaptureFailed
from agentlightning.gateway.tokens import PREFIX, Claims, Denied
from agentlightning.proto import attributes as names

if TYPE_CHECKING:
    from agentlightning.gateway.gateway import Gateway

__all__ = ["TracesEndpoint", "restrict"]

logger = logging.getLogger(__name__)
PROTOBUF: Final = "application/x-protobuf"
RESERVED: Final = frozenset(
    {
        *names.IDENTITY,
        names.SOURCE,
        names.ROLLOUT_STATE,
        names.ROLLOUT_CAUSE,
        names.ROLLOUT_ERROR,
        names.CALLS_EXPECTED,
        names.CALLS_ANSWERED,
    }
)


class TracesEndpoint:
    """Takes OTLP/HTTP protobuf, plain or gzip."""

    def __init__(self, gateway: "Gateway") -> None:
        self.gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self.gateway
        token = scope["path_params"].get("token") or http.bearer(scope)
        if token is None or not token.startswith(PREFIX):
            return await self._refuse(
                send, 401, "traces_unauthorized", "Spans need the rollout's token as the key."
            )
        try:
            claims = gateway.signer.verify(token)
        except Denied as error:
            return await self._refuse(send, 401, error.code, str(error))
        if await gateway.live.revoked(claims.rollout_id, claims.attempt):
            return await self._refuse(send, 403, "token_revoked", "This token was revoked.")
        content_type = (http.header(scope, b"content-type") or "").partition(";")[0].strip().lower()
        if content_type != PROTOBUF:
            return await self._refuse(
                send, 415, "traces_encoding", f"Send OTLP as {PROTOBUF}, not {content_type!r}."
            )
        try:
            body = await http.read_body(scope, receive, gateway.settings.max_body_bytes)
            if (http.header(scope, b"content-encoding") or "identity").lower() == "gzip":
                body = _gunzip(body, gateway.settings.max_body_bytes)
            request = ExportTraceServiceRequest.FromString(body)
        except http.BodyTooLarge as error:
            return await self._refuse(send, 413, "request_too_large", str(error))
        except http.ClientLeft:
            return gateway.counters.add("client_left_early", claims.run_id)
        except (DecodeError, OSError, EOFError, zlib.error):
            return await self._refuse(
                send, 400, "traces_malformed", "The body is not an OTLP export request."
            )
        removed = restrict(request, claims)
        for name, count in removed.items():
            gateway.counters.add(name, claims.run_id, amount=count)
        try:
            await gateway.exporter.forward(request.SerializeToString())
        except CaptureFailed as error:
            status = 503 if error.retryable else 400
            return await self._refuse(send, status, "traces_not_taken", str(error))
        await http.respond(send, 200, b"", PROTOBUF)

    async def _refuse(self, send: Send, status: int, code: str, message: str) -> None:
        self.gateway.counters.add(code)
        body = Status(message=message).SerializeToString()
        headers = {"retry_after": "1"} if status == 503 else {}
        await http.respond(send, status, body, PROTOBUF, **headers)


def restrict(request: ExportTraceServiceRequest, claims: Claims) -> Counter[str]:
    """Leave in a request only what the bearer of `claims` may say, about its own attempt. Returns what was removed."""
    removed = Counter[str]()
    identity = _identity(claims)
    may_reward = "reward" in claims.rights
    for resource in request.resource_spans:
        attributes = resource.resource.attributes
        kept = [attribute for attribute in attributes if attribute.key not in RESERVED]
        del attributes[:]
        attributes.extend([*kept, *identity])
        for scope in resource.scope_spans:
            spans = [span for span in scope.spans if not _forbidden(span, may_reward, removed)]
            del scope.spans[:]
            scope.spans.extend(spans)
    return removed


def _forbidden(span: Span, may_reward: bool, removed: Counter[str]) -> bool:
    """Clean a span; True if nothing of it may pass."""
    if span.name == names.ROLLOUT_SPAN_NAME:
        removed["rollout_span_refused"] += 1
        return True
    if not may_reward and _judges(span.name, span.attributes):
        removed["reward_not_granted"] += 1
        return True
    reserved = [attribute for attribute in span.attributes if attribute.key in RESERVED]
    if reserved:
        kept = [attribute for attribute in span.attributes if attribute.key not in RESERVED]
        del span.attributes[:]
        span.attributes.extend(kept)
        if any(a.key == names.SOURCE for a in reserved):  # whatever it claimed, it came from an agent
            span.attributes.append(_text(names.SOURCE, "sdk"))
    if not may_reward:
        events = [event for event in span.events if not _judges(event.name, event.attributes)]
        if len(events) < len(span.events):
            removed["reward_not_granted"] += len(span.events) - len(events)
            del span.events[:]
            span.events.extend(events)
    return False


def _judges(name: str, attributes: Iterable[KeyValue]) -> bool:
    """Whether a span or event is an evaluation result, by its name or by what it carries."""
    return name == names.EVALUATION_RESULT or any(a.key == names.EVALUATION_SCORE for a in attributes)


def _identity(claims: Claims) -> list[KeyValue]:
    texts = {
        names.RUN_ID: claims.run_id,
        names.GROUP_ID: claims.group_id,
        names.TASK_ID: claims.task_id,
        names.ROLLOUT_ID: claims.rollout_id,
        names.SPLIT: claims.split,
    }
    attempt = KeyValue(key=names.ATTEMPT, value=AnyValue(int_value=claims.attempt))
    return [*(_text(name, value) for name, value in texts.items()), attempt]


def _text(name: str, value: str) -> KeyValue:
    return KeyValue(key=name, value=AnyValue(string_value=value))


def _gunzip(body: bytes, limit: int) -> bytes:
    """Decompress at most `limit` bytes. Raises BodyTooLarge beyond."""
    with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise http.BodyTooLarge(limit)
    return data
