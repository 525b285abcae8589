"""OTLP bodies, protobuf and JSON, as light records.

A `Span` holds what any later step needs, with plain Python values. Log records take the same form: an
evaluation may come as one. Unknown fields are ignored; a record whose identifiers name nothing is
left out and counted, and so is an attribute that cannot be read.
"""

import base64
import binascii
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from google.protobuf.message import DecodeError

from agentlightning.collector import wire
from agentlightning.collector.tokens import TOKEN_ATTRIBUTES, pack_array
from agentlightning.proto.attributes import ATTEMPT, ROLLOUT_ID

__all__ = [
    "Event",
    "Resource",
    "Span",
    "attributes_dump",
    "attributes_from_json",
    "attributes_to_json",
    "decode_logs",
    "decode_logs_json",
    "decode_traces",
    "decode_traces_json",
]

STATUS_ERROR: Final = 2
_MAX_TIME: Final = 2**63 - 1
_MAX_ATTEMPT: Final = 2**31 - 1
_MAX_COUNT: Final = 2**32 - 1
_MAX_DEPTH: Final = 32
"""Of values within values: what is deeper is nobody's message."""
_HEADS: dict[str, bytes] = {}  # what stands before a value: emitters use few different keys
_MAX_HEADS: Final = 4096
# protobuf's JSON mapping writes what JSON has no number for as strings.
_NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


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


def decode_traces(body: bytes, counters: Counter[str]) -> list[Span]:
    """Spans of an ExportTraceServiceRequest or TracesData. Raises ValueError if it is neither."""
    try:
        request = wire.TraceRequest.FromString(body)
    except DecodeError:
        raise ValueError("it is not an OTLP protobuf message of spans") from None
    spans: list[Span] = []
    for resource_spans in request.resource_spans:
        resource = Resource(_attributes(resource_spans.resource.attributes, counters))
        for scope_spans in resource_spans.scope_spans:
            scope, version = scope_spans.scope.name, scope_spans.scope.version
            for message in scope_spans.spans:
                if not wire.valid_id(message.trace_id, message.span_id):
                    counters["invalid_id"] += 1
                    continue
                status = message.status
                span = Span(
                    "span",
                    message.trace_id.hex(),
                    message.span_id.hex(),
                    message.parent_span_id.hex() if any(message.parent_span_id) else None,
                    message.name,
                    _time(message.start_time_unix_nano),
                    _time(message.end_time_unix_nano),
                    _attributes(message.attributes, counters),
                    resource,
                    scope,
                    version,
                    message.kind,
                    message.trace_state,
                    message.flags,
                    status.code,
                    status.message,
                    [_event(event, counters) for event in message.events],
                    [_link(link, counters) for link in message.links],
                    message.dropped_attributes_count,
                    message.dropped_events_count,
                )
                spans.append(_identify(span, counters))
    return spans


def decode_logs(body: bytes, counters: Counter[str]) -> list[Span]:
    """Log records of an ExportLogsServiceRequest or LogsData. Raises ValueError if it is neither."""
    try:
        request = wire.LogsRequest.FromString(body)
    except DecodeError:
        raise ValueError("it is not an OTLP protobuf message of log records") from None
    spans: list[Span] = []
    for resource_logs in request.resource_logs:
        resource = Resource(_attributes(resource_logs.resource.attributes, counters))
        for scope_logs in resource_logs.scope_logs:
            for record in scope_logs.log_records:
                attributes = _attributes(record.attributes, counters)
                moment = _time(record.time_unix_nano or record.observed_time_unix_nano)
                span = Span(
                    "log",
                    record.trace_id.hex() if any(record.trace_id) else "",
                    record.span_id.hex() if any(record.span_id) else "",
                    None,
                    record.event_name or _text(attributes.get("event.name")),
                    moment,
                    moment,
                    attributes,
                    resource,
                    scope_logs.scope.name,
                    scope_logs.scope.version,
                    flags=record.flags,
                    dropped_attributes=record.dropped_attributes_count,
                )
                spans.append(_identify(span, counters))
    return spans


def decode_traces_json(document: Any, counters: Counter[str]) -> list[Span]:
    """Spans of an OTLP/JSON document that has been parsed. Raises ValueError if it is none."""
    spans: list[Span] = []
    for resource_spans in _objects(document, "resourceSpans"):
        resource = Resource(_attributes_json(_get(resource_spans, "resource"), counters))
        for scope_spans in _objects(resource_spans, "scopeSpans"):
            scope = _get(scope_spans, "scope")
            for item in _objects(scope_spans, "spans"):
                trace_id, span_id = _hex(item, "traceId"), _hex(item, "spanId")
                if len(trace_id) != 32 or len(span_id) != 16:
                    counters["invalid_id"] += 1
                    continue
                status = _get(item, "status")
                span = Span(
                    "span",
                    trace_id,
                    span_id,
                    _hex(item, "parentSpanId") or None,
                    _text(item.get("name")),
                    _time(_integer(_field(item, "startTimeUnixNano"))),
                    _time(_integer(_field(item, "endTimeUnixNano"))),
                    _attributes_json(item, counters),
                    resource,
                    _text(scope.get("name")),
                    _text(scope.get("version")),
                    _enum(item.get("kind")),
                    _text(_field(item, "traceState")),
                    _count(item.get("flags")),
                    _enum(status.get("code")),
                    _text(status.get("message")),
                    [_event_json(event, counters) for event in _parts(item, "events", counters)],
                    [_link_json(link, counters) for link in _parts(item, "links", counters)],
                    _count(_field(item, "droppedAttributesCount")),
                    _count(_field(item, "droppedEventsCount")),
                )
                spans.append(_identify(span, counters))
    return spans


def decode_logs_json(document: Any, counters: Counter[str]) -> list[Span]:
    """Log records of an OTLP/JSON document that has been parsed. Raises ValueError if it is none."""
    spans: list[Span] = []
    for resource_logs in _objects(document, "resourceLogs"):
        resource = Resource(_attributes_json(_get(resource_logs, "resource"), counters))
        for scope_logs in _objects(resource_logs, "scopeLogs"):
            scope = _get(scope_logs, "scope")
            for item in _objects(scope_logs, "logRecords"):
                attributes = _attributes_json(item, counters)
                moment = _time(
                    _integer(_field(item, "timeUnixNano")) or _integer(_field(item, "observedTimeUnixNano"))
                )
                span = Span(
                    "log",
                    _hex(item, "traceId"),
                    _hex(item, "spanId"),
                    None,
                    _text(_field(item, "eventName")) or _text(attributes.get("event.name")),
                    moment,
                    moment,
                    attributes,
                    resource,
                    _text(scope.get("name")),
                    _text(scope.get("version")),
                    flags=_count(item.get("flags")),
                    dropped_attributes=_count(_field(item, "droppedAttributesCount")),
                )
                spans.append(_identify(span, counters))
    return spans


def attributes_to_json(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attributes as OTLP/JSON's list of key and value, every type as it was."""
    return [{"key": key, "value": _value_to_json(value)} for key, value in attributes.items()]


def attributes_dump(attributes: Mapping[str, Any]) -> bytes:
    """The same as JSON text. Made piece by piece: token ids are most of it, and are copied once."""
    parts = []
    for key, value in attributes.items():
        head = _HEADS.get(key)
        if head is None:
            if len(_HEADS) >= _MAX_HEADS:
                _HEADS.clear()
            head = _HEADS[key] = b'{"key":%b,"value":' % orjson.dumps(key)
        kind = type(value)
        if kind is str:
            parts.append(b'%b{"stringValue":%b}}' % (head, orjson.dumps(value)))
        elif kind is bytes:
            parts.append(b'%b{"bytesValue":"%b"}}' % (head, binascii.b2a_base64(value, newline=False)))
        elif kind is int:
            parts.append(b'%b{"intValue":"%d"}}' % (head, value))
        else:
            parts.append(b"%b%b}" % (head, orjson.dumps(_value_to_json(value))))
    return b"[%b]" % b",".join(parts)


def attributes_from_json(items: Any, counters: Counter[str]) -> dict[str, Any]:
    """The reverse. What cannot be read is null and counted `unparsed_attribute`."""
    attributes: dict[str, Any] = {}
    if items is not None and not isinstance(items, list):
        counters["unparsed_attribute"] += 1
        return attributes
    for item in items or ():
        if not isinstance(item, dict) or not isinstance(item.get("key"), str):
            counters["unparsed_attribute"] += 1
            continue
        try:
            attributes[item["key"]] = _value_from_json(item.get("value"))
        except (ValueError, TypeError, KeyError, AttributeError):
            counters["unparsed_attribute"] += 1
            attributes[item["key"]] = None
    return attributes


def _identify(span: Span, counters: Counter[str]) -> Span:
    """Set the attempt that the span belongs to: its own attributes win over the resource's."""
    rollout = span.attributes.get(ROLLOUT_ID) or span.resource.attributes.get(ROLLOUT_ID)
    # A span of no rollout belongs to the one that its trace stands for.
    span.rollout_id = rollout if isinstance(rollout, str) else span.trace_id
    attempt = span.attributes.get(ATTEMPT)
    if attempt is None:
        attempt = span.resource.attributes.get(ATTEMPT)
    if attempt is not None:
        # OTEL_RESOURCE_ATTRIBUTES can only give text.
        if isinstance(attempt, str) and attempt.strip().isdecimal():
            attempt = int(attempt)
        if isinstance(attempt, int) and not isinstance(attempt, bool) and 0 <= attempt <= _MAX_ATTEMPT:
            span.attempt = attempt
        else:
            counters["invalid_attempt"] += 1
    return span


def _attributes(items: Iterable[Any], counters: Counter[str]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for item in items:
        key, value = item.key, item.value
        kind = value.WhichOneof("value")
        if kind == "string_value":
            attributes[key] = value.string_value
        elif kind == "array_value" or kind == "kvlist_value":
            if kind == "array_value" and key in TOKEN_ATTRIBUTES:
                packed = pack_array(value.array_value, floats=TOKEN_ATTRIBUTES[key])
                if packed is not None:
                    attributes[key] = packed
                    continue
            try:
                attributes[key] = _value(value, kind)
            except (DecodeError, ValueError):
                counters["unparsed_attribute"] += 1
                attributes[key] = None
        else:
            attributes[key] = None if kind is None else getattr(value, kind)
    return attributes


def _value(value: Any, kind: str | None, depth: int = 0) -> Any:  # a message of wire's private pool
    if kind == "array_value" or kind == "kvlist_value":
        if depth > _MAX_DEPTH:
            raise ValueError("a value is nested too deep")
        if kind == "array_value":
            items = wire.ArrayValue.FromString(value.array_value).values
            return [_value(item, item.WhichOneof("value"), depth + 1) for item in items]
        pairs = wire.KeyValueList.FromString(value.kvlist_value).values
        return {pair.key: _value(pair.value, pair.value.WhichOneof("value"), depth + 1) for pair in pairs}
    return None if kind is None else getattr(value, kind)


def _event(event: Any, counters: Counter[str]) -> Event:
    return Event(
        event.name,
        _time(event.time_unix_nano),
        _attributes(event.attributes, counters),
        event.dropped_attributes_count,
    )


def _link(link: Any, counters: Counter[str]) -> Link:
    return Link(
        link.trace_id.hex(),
        link.span_id.hex(),
        _attributes(link.attributes, counters),
        link.trace_state,
        link.flags,
        link.dropped_attributes_count,
    )


def _time(nanoseconds: int) -> int:
    return nanoseconds if 0 <= nanoseconds <= _MAX_TIME else 0


# --- JSON -------------------------------------------------------------------------------------------


def _event_json(event: dict[str, Any], counters: Counter[str]) -> Event:
    return Event(
        _text(event.get("name")),
        _time(_integer(_field(event, "timeUnixNano"))),
        _attributes_json(event, counters),
        _count(_field(event, "droppedAttributesCount")),
    )


def _link_json(link: dict[str, Any], counters: Counter[str]) -> Link:
    return Link(
        _hex(link, "traceId"),
        _hex(link, "spanId"),
        _attributes_json(link, counters),
        _text(_field(link, "traceState")),
        _count(link.get("flags")),
        _count(_field(link, "droppedAttributesCount")),
    )


def _attributes_json(parent: dict[str, Any], counters: Counter[str]) -> dict[str, Any]:
    return attributes_from_json(parent.get("attributes"), counters)


def _value_from_json(value: Any, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("a value is nested too deep")
    for name, content in (value or {}).items():
        match name:
            case "stringValue" | "string_value":
                return _of_type(str, content)
            case "boolValue" | "bool_value":
                return _of_type(bool, content)
            case "intValue" | "int_value":
                number = int(content)
                if not -(2**63) <= number < 2**63:
                    raise ValueError("intValue is beyond 64 bits")
                return number
            case "doubleValue" | "double_value":
                return _NOT_FINITE[content] if content in _NOT_FINITE else float(content)
            case "bytesValue" | "bytes_value":
                return base64.b64decode(content, altchars=b"-_" if "-" in content or "_" in content else None)
            case "arrayValue" | "array_value":
                return [_value_from_json(item, depth + 1) for item in content.get("values") or ()]
            case "kvlistValue" | "kvlist_value":
                pairs = content.get("values") or ()
                return {
                    _of_type(str, pair["key"]): _value_from_json(pair.get("value"), depth + 1)
                    for pair in pairs
                }
    return None


def _of_type(kind: type, content: Any) -> Any:
    if not isinstance(content, kind):
        raise ValueError(f"{content!r} is no {kind.__name__}")
    return content


def _value_to_json(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        if math.isfinite(value):
            return {"doubleValue": value}
        return {"doubleValue": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, bytes):
        return {"bytesValue": base64.b64encode(value).decode("ascii")}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value_to_json(item) for item in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": attributes_to_json(value)}}
    return {}


def _field(parent: dict[str, Any], name: str) -> Any:
    value = parent.get(name)
    if value is None:  # protobuf's JSON mapping accepts the snake_case names too
        value = parent.get("".join(f"_{c.lower()}" if c.isupper() else c for c in name))
    return value


def _get(parent: dict[str, Any], name: str) -> dict[str, Any]:
    value = parent.get(name)
    return value if isinstance(value, dict) else {}


def _objects(parent: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(parent, dict):
        raise ValueError(f"it is not OTLP/JSON: an object with {name} was expected")
    value = _field(parent, name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"it is not OTLP/JSON: {name} must be a list of objects")
    return value


def _parts(parent: dict[str, Any], name: str, counters: Counter[str]) -> list[dict[str, Any]]:
    """Events or links: one that is malformed does not cost the span."""
    value = parent.get(name)
    if value is None:
        return []
    parts = value if isinstance(value, list) else [value]
    found = [part for part in parts if isinstance(part, dict)]
    counters["unparsed_attribute"] += len(parts) - len(found)
    return found


def _hex(parent: dict[str, Any], name: str) -> str:
    """An identifier in lower case; empty if it is absent, zero or no hex at all."""
    value = _field(parent, name)
    if not isinstance(value, str):
        return ""
    try:
        return value.lower() if any(binascii.unhexlify(value)) else ""
    except (binascii.Error, ValueError):
        return ""


def _integer(value: Any) -> int:
    """A time, a count or an enum's number: as a number or as text."""
    try:
        return int(value) if value is not None else 0
    except (ValueError, TypeError, OverflowError):
        return 0


def _count(value: Any) -> int:
    """An integer that 32 bits hold."""
    number = _integer(value)
    return number if 0 <= number <= _MAX_COUNT else 0


def _enum(value: Any) -> int:
    number = _count(value)
    return number if number <= _MAX_ATTEMPT else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
