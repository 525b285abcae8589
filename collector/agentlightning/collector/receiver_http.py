"""OTLP over HTTP: /v1/traces and /v1/logs, protobuf and JSON; health, metrics and status beside them.

The answer to an export is sent when the journal has the body, never before.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import orjson
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from agentlightning.collector.access import Tokens
from agentlightning.collector.http_messages import Failure, Reply, Request, Response
from agentlightning.collector.intake import RETRY_SECONDS, Hold, Intake, Refused, Storing, gunzip
from agentlightning.collector.journal import Kind
from agentlightning.collector.wire import Checked
from agentlightning.proto.errors import ConfigError

__all__ = ["HttpReceiver", "listen"]

INLINE_GZIP: Final = 256 << 10
"""Compressed bodies above this are decompressed beside the event loop."""

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
_MEDIA: Final = {
    b"application/x-protobuf": PROTOBUF,
    b"application/protobuf": PROTOBUF,
    b"application/json": JSON,
}
_KINDS: Final = {
    ("/v1/traces", PROTOBUF): Kind.TRACES,
    ("/v1/traces", JSON): Kind.TRACES_JSON,
    ("/v1/logs", PROTOBUF): Kind.LOGS,
    ("/v1/logs", JSON): Kind.LOGS_JSON,
}
_EXPORTS: Final = ("/v1/traces", "/v1/logs")
_CODES: Final = {
    400: 3,
    401: 16,
    404: 5,
    405: 12,
    408: 4,
    413: 8,
    415: 3,
    417: 3,
    431: 3,
    500: 13,
    501: 12,
    503: 14,
    505: 12,
}
"""google.rpc.Code for an HTTP status."""

Page = Callable[[], tuple[str, bytes]]
"""Makes a page: its media type and content."""


class HttpReceiver:
    """The application of the HTTP server."""

    def __init__(
        self, intake: Intake, *, tokens: Tokens | None = None, pages: Mapping[str, Page] | None = None
    ) -> None:
        """
        Args:
            tokens: what an export, and a page, must bring one of; `/healthz` and `/readyz` are open.
            pages: what GET shows, by path.
        """
        self._intake = intake
        self._tokens = tokens
        self._pages = dict(pages or {})

    def begin(self, request: Request) -> Response | None:
        if request.path not in _EXPORTS:
            # Nothing else here wants a body.
            return self._page(request) if request.length != 0 else None
        if request.method != "POST":
            return _refusal(JSON, 405, "Export with POST.", {"allow": "POST"})
        media = _media(request)
        request.state = _Export(self._intake, media)
        try:
            self._authorize(request)
            if media is None:
                given = request.headers.get(b"content-type", b"").decode("latin-1")
                raise Refused(
                    "media_type", f"The content type {given!r} is not OTLP: use {PROTOBUF} or {JSON}."
                )
            if _encoding(request) not in (b"identity", b"gzip", b""):
                given = _encoding(request).decode("latin-1")
                raise Refused("media_type", f"The content encoding {given!r} is unknown: use gzip.")
            limit = self._intake.body_bytes
            if request.length is not None and request.length > limit:
                raise Refused("too_large", f"The body has {request.length} bytes, the limit is {limit}.")
        except Refused as refused:
            return self._refuse(request, refused)
        return None

    def grow(self, request: Request, size: int) -> Response | None:
        limit = self._intake.body_bytes
        try:
            if len(request.body) + size > limit:
                raise Refused("too_large", f"The body is larger than the limit of {limit} bytes.")
            request.state.hold.add(size)
        except Refused as refused:
            return self._refuse(request, refused)
        return None

    def answer(self, request: Request, reply: Reply) -> None:
        if request.state is None:
            reply(self._page(request))
        elif request.body and _encoding(request) == b"gzip":
            if len(request.body) > INLINE_GZIP:
                task = asyncio.ensure_future(asyncio.to_thread(gunzip, request.body, self._intake.body_bytes))
                task.add_done_callback(lambda done: self._store(request, done.result, reply))
            else:
                self._store(request, lambda: gunzip(request.body, self._intake.body_bytes), reply)
        else:
            self._store(request, lambda: request.body, reply)

    def _store(self, request: Request, body_of: Callable[[], bytes | bytearray], reply: Reply) -> None:
        """Reply when the body is in the journal, or why it is not."""
        export: _Export = request.state
        try:
            body = body_of()
            if body is not request.body:
                export.hold.add(len(body))
            storing = self._intake.store(_KINDS[request.path, cast(str, export.media)], body)
        except Refused as refused:
            reply(self._refuse(request, refused))
            return

        def stored(done: "asyncio.Future[int]") -> None:
            error = done.exception()
            if error is None:
                reply(self._success(request, storing))
            else:
                reply(self._refuse(request, Refused("journal_unavailable", str(error))))

        if storing.stored is None:
            reply(self._success(request, storing))
        else:
            storing.stored.add_done_callback(stored)

    def _success(self, request: Request, storing: Storing) -> Response:
        return Response(200, request.state.media, _success(storing.kind, self._intake.count(storing)))

    def fail(self, reason: Failure, status: int, message: str) -> Response:
        self._intake.refused[reason] += 1
        return _refusal(JSON, status, message)

    def end(self, request: Request) -> None:
        if request.state is not None:
            request.state.hold.release()

    def _authorize(self, request: Request) -> None:
        if self._tokens is not None and not self._tokens.accept(request.headers.get(b"authorization", b"")):
            raise Refused("unauthorized", "The bearer token is missing or wrong.")

    def _refuse(self, request: Request, refused: Refused) -> Response:
        self._intake.refused[refused.reason] += 1
        headers = {}
        if refused.retryable:
            headers["retry-after"] = str(RETRY_SECONDS)
        if refused.status == 401:
            headers["www-authenticate"] = "Bearer"
        media = request.state.media if request.state is not None else None
        return _refusal(media or JSON, refused.status, str(refused), headers)

    def _page(self, request: Request) -> Response:
        path = request.path
        if path in ("/healthz", "/readyz", *self._pages) and request.method not in ("GET", "HEAD"):
            return _refusal(JSON, 405, "Read this with GET.", {"allow": "GET, HEAD"})
        if path == "/healthz":
            return Response(200, JSON, b'{"status":"ok"}')
        if path == "/readyz":
            reason = self._intake.unready
            if reason:
                return Response(503, JSON, orjson.dumps({"status": "unavailable", "message": reason}))
            return Response(200, JSON, b'{"status":"ready"}')
        if path in self._pages:
            try:
                self._authorize(request)
            except Refused as refused:
                return self._refuse(request, refused)
            media, content = self._pages[path]()
            return Response(200, media, content)
        if path == "/v1/metrics":
            # 404 and not 501: the official exporters would retry a 501 for ever.
            return _refusal(
                _media(request) or JSON, 404, "This collector takes traces and logs, not metrics."
            )
        return _refusal(
            _media(request) or JSON, 404, f"There is nothing at {path}: use /v1/traces or /v1/logs."
        )


class _Export:
    """What is kept about one export while it is here."""

    __slots__ = ("hold", "media")

    def __init__(self, intake: Intake, media: str | None) -> None:
        self.hold = Hold(intake)
        self.media = media


def listen(host: str, port: int, what: str) -> socket.socket:
    """A listening socket. Raises ConfigError if there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"{what} cannot listen on {host}:{port}: {error.strerror or error}. Choose another port, or 0."
        ) from None


def _encoding(request: Request) -> bytes:
    return request.headers.get(b"content-encoding", b"").strip().lower()


def _media(request: Request) -> str | None:
    given = request.headers.get(b"content-type", b"")
    return _MEDIA.get(given) or _MEDIA.get(given.split(b";")[0].strip().lower())


def _success(kind: Kind, checked: Checked) -> bytes:
    """The body of a 200: empty unless something was refused."""
    in_json = kind in (Kind.TRACES_JSON, Kind.LOGS_JSON)
    if not checked.rejected:
        return b"{}" if in_json else b""
    text = "Spans with an invalid trace or span id were refused."
    if in_json:
        return orjson.dumps(
            {"partialSuccess": {"rejectedSpans": str(checked.rejected), "errorMessage": text}}
        )
    if kind is Kind.LOGS:
        return ExportLogsServiceResponse().SerializeToString()
    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = checked.rejected
    response.partial_success.error_message = text
    return response.SerializeToString()


def _refusal(media: str, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as google.rpc.Status, in the request's encoding."""
    code = _CODES[status]
    body: Any
    if media == PROTOBUF:
        body = Status(code=code, message=message).SerializeToString()
    else:
        media, body = JSON, orjson.dumps({"code": code, "message": message})
    return Response(status, media, body, headers or {})
