"""An OTLP/JSON document of any size, read span by span.

The text is scanned for strings and brackets only; what is inside a span is parsed when the span is
whole. The invariant: at no time is more in memory than a few hundred spans – unless the writer put a
resource or a scope after its spans, then those of that resource.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

__all__ = ["documents"]

CHUNK: Final = 1 << 20
SPANS: Final = 256
"""Of one scope in one small document."""
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)
_OPEN: Final = (0x7B, 0x5B)
_QUOTE: Final = 0x22
_LISTS: Final = {
    b'"resourceSpans"': ("resourceSpans", "scopeSpans", "spans"),
    b'"resourceLogs"': ("resourceLogs", "scopeLogs", "logRecords"),
    b'"resource_spans"': ("resourceSpans", "scopeSpans", "spans"),
    b'"resource_logs"': ("resourceLogs", "scopeLogs", "logRecords"),
}
_SCOPES: Final = {b'"scopeSpans"', b'"scopeLogs"', b'"scope_spans"', b'"scope_logs"'}
_ITEMS: Final = {b'"spans"', b'"logRecords"', b'"log_records"'}
_RESOURCE_DEPTH, _SCOPE_DEPTH, _ITEM_DEPTH = 3, 5, 6  # brackets around a resource's field, a scope's, an item


@dataclass
class _Scope:
    scope: bytes | None = None
    items: list[bytes] = field(default_factory=list)


class _Reader:
    """What has been read of the resource at hand."""

    def __init__(self) -> None:
        self.names = _LISTS[b'"resourceSpans"']
        self.resource: bytes | None = None
        self.scope = _Scope()
        self.waiting: list[_Scope] = []

    def take(self, item: bytes) -> Iterator[Any]:
        self.scope.items.append(item)
        if len(self.scope.items) >= SPANS and self.resource is not None and self.scope.scope is not None:
            yield self._document([self.scope])
            self.scope.items = []

    def end_scope(self) -> Iterator[Any]:
        self.waiting.append(self.scope)
        self.scope = _Scope()
        if self.resource is not None:
            yield from self.end_resource(keep=True)

    def end_resource(self, *, keep: bool = False) -> Iterator[Any]:
        waiting = [scope for scope in self.waiting if scope.items]
        self.waiting = []
        if waiting:
            yield self._document(waiting)
        if not keep:
            self.resource = None

    def _document(self, scopes: list[_Scope]) -> Any:
        outer, middle, inner = self.names
        parts = [
            b'{"scope":%b,"%b":[%b]}' % (scope.scope or b"{}", inner.encode(), b",".join(scope.items))
            for scope in scopes
        ]
        text = b'{"%b":[{"resource":%b,"%b":[%b]}]}' % (
            outer.encode(),
            self.resource or b"{}",
            middle.encode(),
            b",".join(parts),
        )
        return orjson.loads(text)


def documents(read: Callable[[int], bytes]) -> Iterator[Any]:
    """Small OTLP/JSON documents that together are the large one. Raises ValueError where it is broken.

    Args:
        read: gives the next bytes of the text, at most so many; none at its end.
    """
    reader = _Reader()
    buffer = b""
    stack: list[tuple[int, bytes]] = []  # the brackets that are open, and the key of each
    string = b""
    begun = -1  # where the part that is parsed whole begins, in the buffer
    depth = 0  # of brackets within it
    what = ""
    scanned = 0  # how much of the buffer has been scanned
    ended = False
    while not ended:
        chunk = read(CHUNK)
        ended = not chunk
        keep = 0 if begun < 0 else begun
        buffer = buffer[keep:] + chunk if keep else buffer + chunk
        position = 0 if begun < 0 else scanned - keep
        begun = -1 if begun < 0 else 0
        scanned = len(buffer)
        for token in _TOKEN.finditer(buffer, position):
            first = buffer[token.start()]
            if first == _QUOTE:
                if token.end() - token.start() == 1:  # a string that goes on in the next chunk
                    scanned = token.start()
                    break
                if begun < 0:
                    string = token[0]
                continue
            if first in _OPEN:
                if begun >= 0:
                    depth += 1
                    continue
                what = _begins(stack, string)
                if what:
                    begun, depth = token.start(), 1
                    continue
                if len(stack) == 1 and string in _LISTS:
                    reader.names = _LISTS[string]
                stack.append((first, string))
                string = b""
                continue
            if begun >= 0:
                depth -= 1
                if depth:
                    continue
                part = buffer[begun : token.end()]
                begun = -1
                if what == "resource":
                    reader.resource = part
                elif what == "scope":
                    reader.scope.scope = part
                else:
                    yield from reader.take(part)
                string = b""
                continue
            if not stack:
                raise ValueError("a bracket closes that was never opened")
            stack.pop()
            string = b""
            if len(stack) == _SCOPE_DEPTH - 1 and stack[-1][1] in _SCOPES:
                yield from reader.end_scope()
            elif len(stack) == _RESOURCE_DEPTH - 1 and stack[-1][1] in _LISTS:
                yield from reader.end_resource()
        if begun < 0:
            buffer, scanned = buffer[scanned:], 0
    if stack or begun >= 0 or buffer.strip(b" \t\r\n}]"):
        raise ValueError("it ends in the middle")


def _begins(stack: list[tuple[int, bytes]], key: bytes) -> str:
    """Whether the bracket that opens here begins something that is parsed whole."""
    depth = len(stack)
    if depth == _ITEM_DEPTH and stack[-1][1] in _ITEMS and stack[3][1] in _SCOPES and stack[1][1] in _LISTS:
        return "item"
    if depth == _RESOURCE_DEPTH and key == b'"resource"' and stack[1][1] in _LISTS:
        return "resource"
    if depth == _SCOPE_DEPTH and key == b'"scope"' and stack[3][1] in _SCOPES:
        return "scope"
    return ""
