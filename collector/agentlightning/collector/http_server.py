"""A small HTTP/1.1 server for bodies that are large, many, and come from anywhere.

One connection is one state machine over bytes. `httptools` judges the head; the body is read by the
kernel straight into the buffer that the journal later writes, so that a span is copied once on its way in.
Requests on one connection are answered in their order. The application sees the head before a byte of
the body is read, and every growth of the body before it is held in memory: it may refuse at either.

RFC 9112 for framing, RFC 9110 §10.1.1 for `Expect: 100-continue`. A refused client is answered at once,
and what it still sends is read and thrown away for a while: cut off, it would see no answer and try again.
"""

import asyncio
import contextlib
import functools
import logging
import ssl
from http import HTTPStatus
from typing import Any, Final, cast

import httptools

from agentlightning.collector.http_messages import Application, Request, Response

__all__ = ["HttpServer"]

log = logging.getLogger(__name__)

HEAD_BYTES: Final = 32 << 10
FIRST_BYTES: Final = 1 << 20
"""Room that a body gets before any of it has come; it grows with what really comes."""
KEEP_BYTES: Final = 1 << 20
"""The body of a refused request up to this size is read to its end, and the connection goes on."""
DISCARD_BYTES: Final = 512 << 20
DISCARD_SECONDS: Final = 10.0
"""Of any other refused body, at most so much is read before the connection ends."""
HEAD_SECONDS: Final = 30.0
BODY_SECONDS: Final = 60.0
"""A sender that needs longer for a head, or a body, is cut off."""
IDLE_SECONDS: Final = 75.0
"""Exporters send every few seconds over one connection."""
WRITE_SECONDS: Final = 30.0
"""A client that does not take its answer in this time is cut off."""
STOP_SECONDS: Final = 5.0
SWEEP_SECONDS: Final = 1.0
_CHUNK_LINE: Final = 256
_TRAILER_BYTES: Final = 8 << 10
_END: Final = b"\r\n\r\n"
_NEVER: Final = float("inf")


class HttpServer:
    """Serves an application on a listening socket, in the running event loop."""

    def __init__(self, application: Application, sock: Any, *, tls: ssl.SSLContext | None = None) -> None:
        self.application = application
        self.stopping = False
        self.connections: set[_Connection] = set()
        self.emptied = asyncio.Event()
        """Set when the last connection ends while the server stops."""
        self._socket = sock
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls, "ssl_handshake_timeout": 10}
        self._server = await loop.create_server(
            lambda: _Connection(self, loop), sock=self._socket, backlog=1024, **options
        )
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """No new connections; requests that are here are answered, within a few seconds."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.emptied.wait(), STOP_SECONDS)
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _sweep(self) -> None:
        """One clock for all connections: a timer each would cost more than a request."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = loop.time()
            for connection in [c for c in self.connections if c.deadline < now]:
                connection.overdue()


class _Head:
    """Collects what the parser finds in a head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: dict[bytes, bytes] = {}

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        known = self.headers.get(name)
        self.headers[name] = value if known is None else known + b", " + value


class _BadHttp(Exception):
    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


# What a connection is waiting for.
_HEAD, _LENGTH, _CHUNKS, _ANSWER, _SKIP, _LINGER = range(6)


class _Connection(asyncio.BufferedProtocol):
    """One client.

    `_input` holds bytes that are not understood yet: a head, chunks, or requests that came early. A body
    of known length bypasses it.
    """

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.deadline = loop.time() + HEAD_SECONDS
        self._server = server
        self._application = server.application
        self._loop = loop
        self._transport = cast(asyncio.Transport, None)  # set before anything else is called
        self._state = _HEAD
        self._input = bytearray(HEAD_BYTES)
        self._at = 0  # what of the input has been consumed
        self._filled = 0  # how far the input is filled
        self._request: Request | None = None
        self._keep_alive = True
        self._advancing = False
        self._body_at = 0  # how much of the body has come
        self._chunk_left = -1  # of the current chunk, with its line end; -1: its size comes next
        self._trailers = False
        self._skip = 0
        self._reading = True
        self._writable = True

    # ---- what the event loop calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._server.stopping and not self._server.connections:
            self._server.emptied.set()
        if self._state in (_LENGTH, _CHUNKS):
            self._application.fail("client_gone", 400, "The connection ended inside a body.")
        if self._state != _ANSWER:
            self._finish()
        # A request that is being answered goes on: what it has stored stays stored.

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._state == _LENGTH:
            return memoryview(cast(Request, self._request).body)[self._body_at :]
        return memoryview(self._input)[self._filled :]

    def buffer_updated(self, count: int) -> None:
        if self._state == _LENGTH:
            self._body_at += count
            self._body_grown()
        else:
            self._filled += count
        self._advance()

    def pause_writing(self) -> None:
        self._writable = False  # a client that sends and does not read its answers

    def resume_writing(self) -> None:
        self._writable = True
        self._advance()

    def eof_received(self) -> bool:
        # Half-closed after its last request: the answer is still wanted.
        if self._state == _ANSWER:
            self._keep_alive = False
            return True
        return False

    # ---- what the server calls ----

    def close_if_idle(self) -> None:
        if (self._state == _HEAD and not self._filled) or self._state in (_SKIP, _LINGER):
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def overdue(self) -> None:
        if self._state in (_LENGTH, _CHUNKS) or (self._state == _HEAD and self._filled):
            what = "head" if self._state == _HEAD else "body"
            response = self._application.fail("slow", 408, f"The {what} of the request took too long.")
            self._keep_alive = False
            self._send(response)
            self._finish()
            self._transport.close()
            self.deadline = self._loop.time() + WRITE_SECONDS
            self._state = _LINGER
        elif self._state != _ANSWER:
            # Idle, discarded long enough, or an answer that nobody takes.
            (self._transport.abort if self._transport.is_closing() else self._transport.close)()
            self.deadline = self._loop.time() + WRITE_SECONDS

    # ---- the state machine ----

    def _advance(self) -> None:
        """Understand as much of the input as there is."""
        self._advancing = True
        try:
            while not self._transport.is_closing():
                state = self._state
                if state == _HEAD:
                    again = self._read_head()
                elif state == _CHUNKS:
                    again = self._read_chunks()
                elif state in (_SKIP, _LINGER):
                    again = self._discard()
                else:
                    break
                if not again:
                    break
        except _BadHttp as error:
            self._keep_alive = False
            self._send(self._application.fail("bad_http", error.status, str(error)))
            self._finish()
            self._linger()
        self._advancing = False
        left = self._filled - self._at
        if self._at:  # once for all that was consumed
            self._input[:left] = self._input[self._at : self._filled]
            self._at, self._filled = 0, left
        if self._reading != (left < len(self._input)):  # no further than one buffer ahead of the answers
            self._reading = not self._reading
            (self._transport.resume_reading if self._reading else self._transport.pause_reading)()

    def _read_head(self) -> bool:
        if self._filled == self._at or not self._writable:
            return False
        if self._input[self._at : self._at + 2] == b"\r\n":
            self._at += 2  # RFC 9112 §2.2: an empty line before a request is ignored
            return True
        end = self._input.find(_END, self._at, self._filled)
        if end < 0:
            if self._filled - self._at == len(self._input):
                raise _BadHttp(f"The request's head is larger than {HEAD_BYTES} bytes.", 431)
            return False
        head, keep_alive, method, version = self._parse(bytes(self._input[self._at : end + 4]))
        self._at = end + 4
        self._keep_alive = keep_alive and not self._server.stopping
        coding = head.headers.get(b"transfer-encoding")
        if coding is not None and coding.strip().lower() != b"chunked":
            raise _BadHttp("The only transfer encoding is chunked.", 501)
        length = None if coding is not None else int(head.headers.get(b"content-length", b"0"))
        path = head.url.split(b"?", 1)[0].decode("latin-1")
        request = self._request = Request(method, path, head.headers, length=length)
        self.deadline = self._loop.time() + BODY_SECONDS
        expects = head.headers.get(b"expect", b"").strip().lower() if version != "1.0" else b""
        refusal = self._application.begin(request)
        if refusal is None and expects and expects != b"100-continue":
            refusal = self._application.fail("bad_http", 417, "The only expectation is 100-continue.")
        if refusal is not None:
            self._refuse(refusal, length, waits=bool(expects))
            return True
        if expects and length != 0 and self._filled == self._at:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if length is None:
            self._state, self._chunk_left, self._trailers = _CHUNKS, -1, False
        elif length == 0:
            self._answer()
        else:
            self._state, self._body_at = _LENGTH, 0
            self._make_room(min(length, FIRST_BYTES))
            if self._state == _LENGTH:
                early = min(self._filled - self._at, len(request.body))  # all of it: the input is smaller
                request.body[:early] = self._input[self._at : self._at + early]
                self._at += early
                self._body_at = early
                self._body_grown()
        return True

    def _parse(self, data: bytes) -> tuple[_Head, bool, str, str]:
        head = _Head()
        parser = httptools.HttpRequestParser(head)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # we may ignore the offer (RFC 9110 §7.8)
        except httptools.HttpParserError as error:
            raise _BadHttp(f"This is not an HTTP/1.1 request: {error}.") from None
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise _BadHttp(f"HTTP/{version} is not spoken here: use HTTP/1.1.", 505)
        return head, parser.should_keep_alive(), parser.get_method().decode(), version

    def _body_grown(self) -> None:
        request = cast(Request, self._request)
        length = cast(int, request.length)
        while self._state == _LENGTH and self._body_at == len(request.body):
            if self._body_at == length:
                self._answer()
                return
            self._make_room(min(length, 2 * len(request.body)) - len(request.body))

    def _make_room(self, size: int) -> None:
        """More memory for the body, if the application lets us."""
        request = cast(Request, self._request)
        refusal = self._application.grow(request, size)
        if refusal is None:
            # A new one: the event loop may still hold the old one's memory.
            request.body = request.body + bytes(size) if request.body else bytearray(size)
        else:
            length = request.length
            self._refuse(refusal, None if length is None else length - self._body_at)

    def _read_chunks(self) -> bool:
        """RFC 9112 §7.1; extensions and trailers are ignored."""
        request = cast(Request, self._request)
        while True:
            if self._chunk_left < 0 or self._trailers:
                end = self._input.find(b"\r\n", self._at, self._filled)
                most = _TRAILER_BYTES if self._trailers else _CHUNK_LINE
                if (end if end >= 0 else self._filled) - self._at > most:
                    raise _BadHttp("A chunk of the body has no size.")
                if end < 0:
                    return False
                line = bytes(self._input[self._at : end])
                self._at = end + 2
                if self._trailers:
                    if not line:
                        self._answer()
                        return True
                    continue
                digits = line.split(b";", 1)[0].strip()
                # int() takes more than RFC 9112 does: signs, underscores.
                if not digits or len(digits) > 15 or digits.strip(b"0123456789abcdefABCDEF"):
                    raise _BadHttp("A chunk of the body has no size.")
                size = int(digits, 16)
                if size == 0:
                    self._trailers = True
                else:
                    refusal = self._application.grow(request, size)
                    if refusal is not None:
                        self._refuse(refusal, None)
                        return True
                    self._chunk_left = size + 2
                continue
            have = min(self._filled - self._at, self._chunk_left)
            if not have:
                return False
            data = max(0, min(have, self._chunk_left - 2))
            request.body += self._input[self._at : self._at + data]
            ending = b"\r\n"[2 - min(2, self._chunk_left) :][: have - data]
            if self._input[self._at + data : self._at + have] != ending:
                raise _BadHttp("A chunk of the body is longer than its size.")
            self._chunk_left -= have
            self._at += have
            if self._chunk_left == 0:
                self._chunk_left = -1

    def _answer(self) -> None:
        self._state = _ANSWER
        self.deadline = _NEVER
        request = cast(Request, self._request)
        try:
            self._application.answer(request, functools.partial(self._reply, request))
        except Exception:  # a fault of ours must not end the server
            log.exception("A request to %s failed.", request.path)
            self._keep_alive = False
            self._reply(
                request, self._application.fail("internal", 500, "The collector failed; its log says how.")
            )

    def _reply(self, request: Request, response: Response) -> None:
        self._send(response)
        self._finish()
        self._state = _HEAD
        if not self._keep_alive or (self._server.stopping and not self._filled):
            self._transport.close()
            return
        self.deadline = self._loop.time() + (HEAD_SECONDS if self._filled else IDLE_SECONDS)
        if not self._advancing:
            self._advance()

    def _refuse(self, response: Response, left: int | None, *, waits: bool = False) -> None:
        """Answer before the body has come."""
        short = left is not None and left <= KEEP_BYTES and not waits
        self._keep_alive = self._keep_alive and short
        self._send(response)
        self._finish()
        if self._keep_alive:
            self._state, self._skip = _SKIP, cast(int, left)
        else:
            self._linger()

    def _linger(self) -> None:
        """Let the client read its answer before the connection goes."""
        self._state, self._skip = _LINGER, DISCARD_BYTES
        self.deadline = self._loop.time() + DISCARD_SECONDS
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _discard(self) -> bool:
        size = min(self._filled - self._at, self._skip)
        self._skip -= size
        self._at += size
        if self._state == _LINGER:
            if not self._skip:
                self._transport.close()
            return False
        if self._skip:
            return False
        self._state = _HEAD
        self.deadline = self._loop.time() + IDLE_SECONDS
        return True

    def _finish(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            self._application.end(request)

    def _send(self, response: Response) -> None:
        head = _head(response.status, response.media, len(response.body), self._keep_alive)
        if response.headers:
            lines = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
            head = head[:-2] + lines.encode("latin-1") + b"\r\n"
        if self._transport.is_closing():
            return
        without = self._request is not None and self._request.method == "HEAD"
        self._transport.write(head if without else head + response.body)


@functools.lru_cache(256)
def _head(status: int, media: str, length: int, keep_alive: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"content-type: {media}"]
    lines.append(f"content-length: {length}")
    if not keep_alive:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
