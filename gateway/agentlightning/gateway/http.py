"""Reading requests and writing answers: bounded bodies, bearer tokens, trace context."""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

__all__ = ["BodyTooLarge", "ClientLeft", "Trace", "bearer", "header", "read_body", "respond", "trace_of"]

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream; charset=utf-8"
DRAINED: Final = 256 << 20
"""Bytes of an oversized body that are read and thrown away, so that its sender gets to see the refusal."""
_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


class BodyTooLarge(Exception):
    """A request body above the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than {limit} bytes.")


class ClientLeft(Exception):
    """The client closed the connection."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Where in which trace a request belongs, by its `traceparent`; and the baggage that came with it."""

    trace_id: str
    parent_id: str


def header(scope: Scope, name: bytes) -> str | None:
    """The value of a request header; `name` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def bearer(scope: Scope) -> str | None:
    """The caller's key: `Authorization: Bearer`, or `x-api-key` as Anthropic's clients send it."""
    authorization = header(scope, b"authorization")
    if authorization is not None:
        scheme, _, token = authorization.partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""
    return header(scope, b"x-api-key")


def trace_of(scope: Scope) -> Trace | None:
    """The trace context of a request. Flags are not looked at, so that new ones do no harm."""
    value = header(scope, b"traceparent")
    match = None if value is None else _TRACEPARENT.fullmatch(value.strip().encode("latin-1"))
    if match is None or match[1] == b"ff" or not match[2].strip(b"0") or not match[3].strip(b"0"):
        return None
    return Trace(match[2].decode(), match[3].decode())


def baggage(scope: Scope) -> dict[str, str]:
    """The W3C baggage of a request, properties left out."""
    found = {}
    for member in (header(scope, b"baggage") or "").split(","):
        key, separator, value = member.partition(";")[0].partition("=")
        if separator:
            found[key.strip()] = unquote(value.strip())
    return found


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request's body. Raises BodyTooLarge beyond `limit`, of which no more is kept, and ClientLeft if it never came
    whole. What is too large is read to its end, within DRAINED: a client that is still sending reads no answer."""
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientLeft
        body: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(body)
        if size <= limit:
            chunks.append(body)
        else:
            chunks.clear()
            if size > DRAINED:
                break
    if size > limit:
        raise BodyTooLarge(limit)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def respond(send: Send, status: int, body: bytes, content_type: str = JSON, **headers: str) -> None:
    """Send a whole answer. Keyword names become header names, `_` for `-`."""
    raw = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    raw += [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
