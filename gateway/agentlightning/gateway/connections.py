"""What a client may take of a connection: so much header, and so much time.

uvicorn bounds neither. A client that sends its request byte by byte, or reads its answer so, would keep a connection
for ever, and a header without an end would fill the memory.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["Limits", "guarded"]

BODY_BYTES_PER_SECOND: Final = 16 << 10
"""A body may take so much longer than the limit of time: one of 16 MiB some 17 minutes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of every connection."""

    header_bytes: int
    """Request line and headers together."""
    seconds: float
    """For the headers to come, for the body to begin to come, and for a client to read what it is sent."""
    count: Callable[[str], None]
    """Called with the name of what was refused."""


def guarded(limits: Limits) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, within limits."""
    return type("GuardedProtocol", (_Guarded,), {"limits": limits})


class _Guarded(HttpToolsProtocol):
    limits: Limits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: int | None = 0
        """Bytes that came since the head of the request began; None outside of heads."""
        self._body_bytes = 0
        self._body_began = 0.0
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._served: list[RequestResponseCycle] = []
        """The request whose answer is being made; with pipelining it is not the newest."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._disconnect()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head is None and self._reading is None and self._idle():
            self._expect_head()  # the next request on this connection has begun
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > self.limits.header_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._reading is None:  # it came in one piece with the end of another request
            self._expect_head()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.header_bytes:
            self._head = size
            raise ValueError("too many headers")  # the parser stops, and `send_400_response` tells
        self._head = None
        self._stop_reading()
        self._body_bytes, self._body_began = 0, self.loop.time()
        super().on_headers_complete()
        self._reading = self.loop.call_later(self.limits.seconds, self._check_body)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_reading()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._stop_reading()
        if self._head is not None and self._head > self.limits.header_bytes:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.limits.seconds, self._drop, "slow_reader_dropped")

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = [cycle]
        super()._start_asgi_task(cycle, app)

    def _disconnect(self) -> None:
        """Let the request that is being served know: uvicorn would tell the newest only."""
        for cycle in self._served:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head = 0
        self._reading = self.loop.call_later(self.limits.seconds, self._drop, "slow_headers_dropped")

    def _check_body(self) -> None:
        allowed = self.limits.seconds + self._body_bytes / BODY_BYTES_PER_SECOND
        left = allowed - (self.loop.time() - self._body_began)
        if left > 0 or self.flow.read_paused:  # paused: it is we who do not read
            self._reading = self.loop.call_later(max(left, 0.1), self._check_body)
        else:
            self._drop("slow_body_dropped")

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _refuse_head(self) -> None:
        self._stop_reading()
        if not self.transport.is_closing():
            self.limits.count("headers_too_large")
            text = f"Request line and headers are larger than {self.limits.header_bytes} bytes.".encode()
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
                b"content-type: text/plain\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)
            )
            self.transport.close()

    def _drop(self, name: str) -> None:
        self.limits.count(name)
        self._disconnect()
        self.transport.abort()
