"""One model call on its way through an HTTP client, and the span that it is recorded on.

The record goes on the LLM span that is current when the request is sent, if an instrumentation made
one, else on a span of our own. It is complete before the caller can see the end of the answer, since
instrumentations end their spans there. Nothing here may raise into the caller, nor change what it sees.
"""

import json
import time
from collections.abc import Mapping
from typing import Any, Protocol

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agentlightning.proto import attributes as names
from agentlightning.proto.ids import call_id
from agentlightning.sdk import _bodies, _streams, lineage
from agentlightning.sdk._encodings import Decode, decoder
from agentlightning.sdk._identity import baggage_header, from_context, from_environment
from agentlightning.sdk._instrument import tracer
from agentlightning.sdk._losses import count, guarded
from agentlightning.sdk._processor import is_llm_span
from agentlightning.sdk._secrets import redact_body, remember

__all__ = ["Call", "begin"]

MAX_BODY = 32 << 20
"""Bytes of an answer that are kept. A larger one passes through, is counted, and recorded without its body."""
CALL_ID_HEADER = "x-agentlightning-call-id"
"""With it our gateway says which call of its record this is. It answers only when it has that on disk, so what is
recorded of such a call here is its id and who made it."""
_INJECTED = "agentlightning.injected"
_propagator = TraceContextTextMapPropagator()


class _Request(Protocol):  # what httpx.Request and httpx2.Request have in common
    method: str
    url: Any
    headers: Any
    content: bytes
    extensions: Any


@guarded("begin to record a model call")
def begin(request: _Request) -> "Call | None":
    """Start recording if this request is a model call."""
    if request.method != "POST":
        return None
    api = _bodies.api_of(request.url.path)
    if api is None or context_api.get_value(_SUPPRESS_INSTRUMENTATION_KEY):
        return None
    try:
        content = request.content
    except Exception:  # noqa: BLE001 - RequestNotRead of either library: a body that is itself a stream
        count("request_bodies_streamed")
        return None
    current = trace.get_current_span()
    if current.is_recording() and is_llm_span(current):
        call = Call(api, request, content, current, own=False)
    else:
        body = _bodies.loads(content)
        if not _bodies.looks_like_call(api, body):
            return None
        attributes = _bodies.request_attributes(api, body)
        attributes["server.address"] = request.url.host
        if request.url.port is not None:
            attributes["server.port"] = request.url.port
        name = f"{attributes[names.OPERATION_NAME]} {attributes.get(names.REQUEST_MODEL, '')}".rstrip()
        span = tracer().start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
        if not span.is_recording():
            count("calls_not_sampled")
        call = Call(api, request, content, span, own=True)
    lineage.stamp(call.span)
    _inject(request, call.context)
    return call


class Call:
    """A call being recorded. `feed` takes the answer's raw bytes; one of the other methods ends it, once."""

    done = True  # until there is something to do

    def __init__(self, api: str, request: _Request, content: bytes, span: trace.Span, *, own: bool) -> None:
        self.api = api
        self.span = span
        self.own = own
        self.context: Context = trace.set_span_in_context(span)
        self._started = time.time_ns()
        self._secrets: list[str] = []
        self._sent_headers = request.headers
        self._request = content
        self._status = 0
        self._gateway_call: str | None = None
        self._streamed = False
        self._data = bytearray()
        self._looked = 0  # up to where the end of a stream has been looked for
        self._length: int | None = None
        self._decode: Decode | None = None
        self._encoded = False
        self._too_large = False
        self.parsed: Any = None
        """The answer's JSON, for the caller to take instead of parsing it again."""
        self.done = False

    @guarded("record the head of an answer")
    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        """The answer's head has come; its body follows by `feed`, or whole by `complete`."""
        self._status = status
        self._gateway_call = headers.get(CALL_ID_HEADER)
        if self._gateway_call is not None and status < 400 and not self.own and self.span.is_recording():
            self.span.set_attributes({names.SOURCE: "sdk", names.CALL_ID: self._gateway_call})
            remember(self._sent_headers)
            self.done = True
            return
        self._streamed = headers.get("content-type", "").lower().startswith("text/event-stream")
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            self._decode = decoder(encoding)
            self._encoded = self._decode is None
        elif headers.get("content-length", "").isdecimal():
            self._length = int(headers["content-length"])

    @guarded("follow an answer")
    def feed(self, chunk: bytes) -> None:
        """A piece of the body, on its way to the caller."""
        if self.done or self._too_large or self._encoded:
            return
        self._data += chunk if self._decode is None else self._decode(chunk)
        if len(self._data) > MAX_BODY:
            self._too_large = True
            self._data.clear()
            count("bodies_too_large")
        elif self._streamed:
            ended, self._looked = _streams.look(self.api, self._data, self._looked)
            if ended:
                self._finish()
        elif self._length is not None and len(self._data) >= self._length:
            self._finish()

    @guarded("record a model call")
    def complete(self, content: bytes | None = None) -> None:
        """The body has ended; `content` is the whole of it, decoded, if it was not fed."""
        if self.done:
            return
        if content is not None:
            self._too_large = len(content) > MAX_BODY
            if self._too_large:
                count("bodies_too_large")
            self._encoded = False
            self._data = bytearray() if self._too_large else bytearray(content)
        self._finish()

    @guarded("record a failed model call")
    def fail(self, error: BaseException) -> None:
        """The call ended in an exception of the client."""
        if not self.done:
            cancelled = type(error).__name__ in ("CancelledError", "GeneratorExit", "KeyboardInterrupt")
            self._finish("aborted" if cancelled else _type_name(error))

    @guarded("record an abandoned model call")
    def abandon(self) -> None:
        """The caller closed the answer before its end."""
        if not self.done:
            self._finish("aborted")

    def __del__(self) -> None:  # an answer that was neither read nor closed
        if not self.done:
            self.abandon()

    def _finish(self, error: str | None = None) -> None:
        self.done = True
        self._secrets = remember(
            self._sent_headers
        )  # not earlier: the client's `auth` writes them while sending
        if not self.span.is_recording() and self.own:  # not sampled
            return
        if self._encoded:
            count("bodies_in_unknown_encoding")
        data = bytes(self._data)
        self._data = bytearray()
        if self._gateway_call is not None and self._status < 400:
            return self._refer(self._gateway_call, error)
        answer: Any = None
        text = ""
        if self._streamed:
            answer, reported = _streams.rebuild(self.api, data)
            if reported is not None:
                error = error or str(reported.get("type") or reported.get("code") or "stream_error")
            text = _dumps(answer) if answer else data.decode("utf-8", "replace") if reported else ""
        elif data:
            answer = self.parsed = _bodies.loads_plainly(data)
            text = data.decode("utf-8", "replace")
        if self._status >= 400:
            error = error or str(self._status)
        self._record(answer if isinstance(answer, dict) else {}, text, error)

    def _refer(self, call: str, error: str | None) -> None:
        """Our gateway has the bodies and tokens on disk, and it is the truth: this span only says who called."""
        self.span.set_attributes(
            {names.SOURCE: "sdk", names.CALL_ID: call, "http.response.status_code": self._status}
        )
        if error:
            self.span.set_attribute(names.ERROR_TYPE, error)
            self.span.set_status(StatusCode.ERROR, error)
        self.span.end()

    def _record(self, answer: dict[str, Any], text: str, error: str | None) -> None:
        attributes: dict[str, Any] = {
            names.SOURCE: "sdk",
            names.REQUEST: redact_body(self._request.decode("utf-8", "replace"), self._secrets),
        }
        if text:
            attributes[names.RESPONSE] = redact_body(text, self._secrets, answer)
        if self._gateway_call is not None:
            attributes[names.CALL_ID] = self._gateway_call
        facts = _bodies.response_attributes(answer)
        choices = list(_bodies.choices_of(answer)) if answer else []
        if choices:
            attributes.update(choices[0][1])
        span, own = self.span, self.own
        if not span.is_recording():
            # Ended before the answer did: a child of our own keeps the tokens, and the collector joins the two.
            count("llm_spans_ended_early")
            request = _bodies.loads(self._request)
            facts.update(_bodies.request_attributes(self.api, request if isinstance(request, dict) else {}))
            span, own = (
                tracer().start_span(span_name(span), self.context, SpanKind.CLIENT, start_time=self._started),
                True,
            )
        if own:
            attributes.update(facts)
            if self._status:
                attributes["http.response.status_code"] = self._status
            if error:
                attributes[names.ERROR_TYPE] = error
                span.set_status(StatusCode.ERROR, error)
        elif names.RESPONSE_ID in facts and names.RESPONSE_ID not in (
            getattr(span, "attributes", None) or {}
        ):
            attributes[names.RESPONSE_ID] = facts[names.RESPONSE_ID]
        if self._gateway_call is None:
            self._record_other_choices(attributes, answer, choices)
        span.set_attributes(attributes)
        if own:
            span.end()

    def _record_other_choices(
        self, first: dict[str, Any], answer: dict[str, Any], choices: list[tuple[int, dict[str, Any]]]
    ) -> None:
        """A request for n > 1 answers is n calls of one prompt: a span each, where the engine told their tokens."""
        exact = [(index, tokens) for index, tokens in choices if names.RESPONSE_TOKEN_IDS in tokens]
        if len(exact) < 2 or len(exact) != len(choices):
            return
        identity = from_context(self.context) or from_environment()
        rollout, attempt = (identity.rollout_id, identity.attempt or 0) if identity else ("", 0)
        nonce = answer.get("id") or str(self._started)
        shared = dict(first)
        for position, (index, tokens) in enumerate(exact):
            part = {**answer, "choices": [answer["choices"][position]]}
            mine = {
                **tokens,
                names.CHOICE: index,
                names.CALL_ID: call_id(rollout, attempt, f"{nonce}/{index}"),
                names.RESPONSE: redact_body(_dumps(part), self._secrets),
            }
            if position == 0:
                first.update(mine)
                continue
            request = _bodies.loads(self._request)
            facts = _bodies.request_attributes(self.api, request if isinstance(request, dict) else {})
            facts.update(_bodies.response_attributes(part))
            parent = getattr(self.span, "parent", None)
            context = trace.set_span_in_context(
                trace.NonRecordingSpan(parent or trace.INVALID_SPAN_CONTEXT), self.context
            )
            sibling = tracer().start_span(
                span_name(self.span),
                context,
                SpanKind.CLIENT,
                {**shared, **facts, **mine},
                start_time=self._started,
            )
            sibling.end()


def span_name(span: trace.Span) -> str:
    """A span's name, as far as its implementation tells."""
    return str(getattr(span, "name", "chat"))


def _inject(request: _Request, context: Context) -> None:
    """Tell the server which span and which rollout this is. What the caller set itself stays."""
    headers = request.headers
    if "traceparent" in headers and not request.extensions.get(_INJECTED):
        return
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    identity = from_context(context)
    if identity is not None and ("baggage" not in headers or request.extensions.get(_INJECTED)):
        carrier["baggage"] = baggage_header(identity)
    for name, value in carrier.items():
        headers[name] = value
    request.extensions[_INJECTED] = True  # a request sent again gets the new span's


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _dumps(value: Any) -> str:
    quick = _bodies.dumps(value)
    if quick is not None:
        return quick
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Half a character, as when a stream cuts an escaped emoji in two, is no UTF-8; escaped it keeps.
    return text if text.isascii() or _is_utf8(text) else json.dumps(value, separators=(",", ":"))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
