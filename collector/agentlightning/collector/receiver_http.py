"""OTLP over HTTP: /v1/traces and /v1/logs, protobuf and JSON; health and metrics beside them.

One ASGI callable. The answer to an export is sent when the journal has the body, never before.
"""

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final

import orjson
import uvicorn
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from agentlightning.collector.intake import RETRY_SECONDS, Intake, Refused, gunzip
from agentlightning.collector.journal import Kind
from agentlightning.collector.wire import Checked
from agentlightning.proto.errors import ConfigError

__all__ = ["HttpReceiver", "HttpServer", "listen"]

log = logging.getLogger(__name__)

BODY_SECONDS: Final = 60.0
"""A sender that needs longer than this for one body is cut off."""
DISCARD_BYTES: Final = 512 << 20
DISCARD_SECONDS: Final = 10.0
"""Of a refused body, at most so much is read."""
INLINE_GZIP: Final = 256 << 10
"""Compressed bodies above this are decompressed beside the event loop."""

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
_KINDS: Final = {
    ("/v1/traces", PROTOBUF): Kind.TRACES,
    ("/v1/traces", JSON): Kind.TRACES_JSON,
    ("/v1/logs", PROTOBUF): Kind.LOGS,
    ("/v1/logs", JSON): Kind.LOGS_JSON,
}
_CODES: Final = {400: 3, 401: 16, 404: 5, 405: 12, 408: 4, 413: 8, 415: 3, 503: 14}
"""google.rpc.Code for an HTTP status."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class _Gone(Exception):
    """The client closed its connection before its body was whole."""


class HttpReceiver:
    """The ASGI application."""

    def __init__(
        self, intake: Intake, *, token: str | None = None, metrics: Callable[[], str] = lambda: ""
    ) -> None:
        self._intake = intake
        self._authorization = f"Bearer {token}".encode() if token else None
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path in ("/v1/traces", "/v1/logs"):
            await self._export(scope, receive, send)
        elif path == "/healthz":
            await _answer(send, 200, JSON, b'{"status":"ok"}')
        elif path == "/readyz":
            failed = self._intake.journal.failed
            await _answer(
                send,
                503 if failed else 200,
                JSON,
                orjson.dumps({"status": "unavailable", "message": failed} if failed else {"status": "ready"}),
            )
        elif path == "/metrics":
            await _answer(send, 200, "text/plain; version=0.0.4; charset=utf-8", self._metrics().encode())
        elif path == "/v1/metrics":
            # 404 and not 501: the official exporters would retry a 501 for ever.
            await _refuse(send, JSON, 404, "This collector takes traces and logs, not metrics.")
        else:
            await _refuse(send, JSON, 404, f"There is nothing at {path}: use /v1/traces or /v1/logs.")

    async def _export(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        media = headers.get(b"content-type", b"").split(b";")[0].strip().lower().decode("latin-1")
        media = PROTOBUF if media == "application/protobuf" else media
        if scope["method"] != "POST":
            return await _refuse(send, JSON, 405, "Export with POST.", [(b"allow", b"POST")])
        upload = _Upload(receive)
        try:
            self._authorize(headers)
            kind = _KINDS.get((scope["path"], media))
            if kind is None:
                raise Refused(
                    "media_type", f"The content type {media!r} is not OTLP: use {PROTOBUF} or {JSON}."
                )
            with self._intake.holding() as hold:
                body = await self._body(headers, upload, hold.add)
                checked = await self._intake.accept(kind, body)
        except Refused as refused:
            self._intake.refused[refused.reason] += 1
            extra: Headers = []
            if refused.retryable:
                extra.append((b"retry-after", str(RETRY_SECONDS).encode()))
            if refused.status == 401:
                extra.append((b"www-authenticate", b"Bearer"))
            if not upload.complete:
                extra.append((b"connection", b"close"))
                if b"expect" not in headers and refused.reason != "slow":
                    await upload.discard()
            return await _refuse(send, media, refused.status, str(refused), extra)
        except _Gone:
            self._intake.refused["client_gone"] += 1
            return
        await _answer(send, 200, media, _success(kind, checked))

    def _authorize(self, headers: dict[bytes, bytes]) -> None:
        if self._authorization is None:
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._authorization):
            raise Refused("unauthorized", "The bearer token is missing or wrong.")

    async def _body(
        self, headers: dict[bytes, bytes], upload: "_Upload", hold: Callable[[int], None]
    ) -> bytes:
        """The whole body, decompressed."""
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b"gzip", b""):
            raise Refused(
                "media_type", f"The content encoding {encoding.decode('latin-1')!r} is unknown: use gzip."
            )
        limit = self._intake.body_bytes
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise Refused("too_large", f"The body has {int(length)} bytes, the limit is {limit}.")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await upload.read(limit, hold)
        except TimeoutError:
            raise Refused("slow", f"The body took longer than {BODY_SECONDS:.0f} s.") from None
        if encoding == b"gzip" and body:
            if len(body) > INLINE_GZIP:
                body = await asyncio.to_thread(gunzip, body, limit)
            else:
                body = gunzip(body, limit)
            hold(len(body))
        return body


class _Upload:
    """The body of one request, as it comes."""

    def __init__(self, receive: Receive) -> None:
        self.complete = False
        self._receive = receive

    async def read(self, limit: int, hold: Callable[[int], None]) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while not self.complete:
            chunk = await self._next()
            size += len(chunk)
            if size > limit:
                raise Refused("too_large", f"The body is larger than the limit of {limit} bytes.")
            hold(len(chunk))
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def discard(self) -> None:
        """Read what a refused client still sends: cut off, it would see no answer, and try again for ever."""
        size = 0
        with contextlib.suppress(TimeoutError, _Gone):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self.complete and size < DISCARD_BYTES:
                    size += len(await self._next())

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        self.complete = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk


class HttpServer:
    """uvicorn around an application, in the running event loop, without its signal handlers."""

    def __init__(self, application: HttpReceiver, sock: socket.socket) -> None:
        config = uvicorn.Config(
            application,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,  # exporters send every few seconds over one connection
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config)
        self._socket = sock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                await self._task  # raises what went wrong
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the process has its own way of stopping


def listen(host: str, port: int, what: str) -> socket.socket:
    """A listening socket. Raises ConfigError if there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"{what} cannot listen on {host}:{port}: {error.strerror or error}. Choose another port, or 0."
        ) from None


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


async def _refuse(send: Send, media: str, status: int, message: str, extra: Headers | None = None) -> None:
    """An error as google.rpc.Status, in the request's encoding."""
    code = _CODES[status]
    if media == PROTOBUF:
        body = Status(code=code, message=message).SerializeToString()
    else:
        media, body = JSON, orjson.dumps({"code": code, "message": message})
    await _answer(send, status, media, body, extra)


async def _answer(send: Send, status: int, media: str, body: bytes, extra: Headers | None = None) -> None:
    headers = [(b"content-type", media.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers + (extra or [])})
    await send({"type": "http.response.body", "body": body})
