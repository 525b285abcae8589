"""Spans and log records as light records, with plain Python values.

Log records take the same form as spans: an evaluation may come as one.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.proto.attributes import ATTEMPT, ROLLOUT_ID

__all__ = [
    "LOG_BODY",
    "MAX_DEPTH",
    "MAX_INT32",
    "STATUS_ERROR",
    "Event",
    "Link",
    "Resource",
    "Span",
    "clamp_time",
    "identify",
]

LOG_BODY: Final = "log.body"
"""The attribute under which a log record keeps its body."""
STATUS_ERROR: Final = 2
MAX_INT32: Final = 2**31 - 1
MAX_DEPTH: Final = 32
"""Of values within values: what is deeper is nobody's message."""
_MAX_TIME: Final = 2**63 - 1
_MAX_DIGITS: Final = 10


@dataclass(slots=True, eq=False)
class Resource:
    """What one process says about itself; all of its spans share the object."""

    attributes: dict[str, Any]  # attribute values: str, bool, int, float, bytes, list, dict, None
    json: bytes | None = None
    """The attributes as OTLP/JSON, made once when first needed."""


@dataclass(slots=True)
class Event:
    """An event on a span."""

    name: str
    time_ns: int
    attributes: dict[str, Any]
    dropped_attributes: int = 0


@dataclass(slots=True)
class Link:
    """A span's reference to another."""

    trace_id: str
    span_id: str
    attributes: dict[str, Any]
    trace_state: str = ""
    flags: int = 0
    dropped_attributes: int = 0


@dataclass(slots=True, eq=False)
class Span:
    """One span, or one log record (`signal` says which)."""

    signal: str
    trace_id: str
    span_id: str
    """Of a log record: the span that it was written in."""
    parent_span_id: str | None
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: Resource
    scope: str = ""
    scope_version: str = ""
    kind: int = 0
    trace_state: str = ""
    flags: int = 0
    status_code: int = 0
    status_message: str = ""
    events: list[Event] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    dropped_attributes: int = 0
    dropped_events: int = 0
    rollout_id: str = ""
    attempt: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """The attempt that the span belongs to."""
        return (self.rollout_id, self.attempt)


def identify(span: Span, counters: Counter[str]) -> Span:
    """Set the attempt that the span belongs to: its own attributes win over the resource's."""
    rollout = span.attributes.get(ROLLOUT_ID) or span.resource.attributes.get(ROLLOUT_ID)
    # A span of no rollout belongs to the one that its trace stands for.
    span.rollout_id = rollout if isinstance(rollout, str) else span.trace_id
    attempt = span.attributes.get(ATTEMPT)
    if attempt is None:
        attempt = span.resource.attributes.get(ATTEMPT)
    if attempt is not None:
        # OTEL_RESOURCE_ATTRIBUTES can only give text.
        if isinstance(attempt, str) and attempt.isdecimal() and len(attempt) <= _MAX_DIGITS:
            attempt = int(attempt)
        if isinstance(attempt, int) and not isinstance(attempt, bool) and 0 <= attempt <= MAX_INT32:
            span.attempt = attempt
        else:
            counters["invalid_attempt"] += 1
    return span


def clamp_time(nanoseconds: int) -> int:
    """A time that the tables can hold; what cannot be one is zero."""
    return nanoseconds if 0 <= nanoseconds <= _MAX_TIME else 0
