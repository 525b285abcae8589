"""What the HTTP server and its application say to each other: requests, responses, refusals."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = ["Application", "Failure", "Reply", "Request", "Response"]

Failure = Literal["slow", "client_gone", "bad_http", "internal"]


@dataclass(slots=True, eq=False)
class Request:
    """One request; `body` is whole when the application is asked for the answer."""

    method: str
    path: str
    headers: dict[bytes, bytes]
    """By name in lower case; values of one name are joined with commas."""
    body: bytearray = field(default_factory=bytearray)
    length: int | None = 0
    """Of the body, as announced; None if it comes in chunks."""
    state: Any = None  # whatever the application keeps about it


@dataclass(frozen=True, slots=True)
class Response:
    """An answer."""

    status: int
    media: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Reply = Callable[[Response], None]


class Application(Protocol):
    """What answers."""

    def begin(self, request: Request) -> Response | None:
        """The head has come. An answer refuses the request: its body is not read."""

    def grow(self, request: Request, size: int) -> Response | None:
        """The body needs `size` more bytes of memory. An answer refuses it."""

    def answer(self, request: Request, reply: Reply) -> None:
        """The request is whole: call `reply` once, now or later. No coroutine: a task costs what a sync does."""

    def fail(self, reason: Failure, status: int, message: str) -> Response:
        """A request ended before it was whole; the answer is for a client that can still read it."""

    def end(self, request: Request) -> None:
        """The request is over, however it went; called once for each that began."""
