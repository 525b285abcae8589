"""OTLP/JSON as spans, and attributes as OTLP/JSON: how the spans table keeps them.

JSON is read leniently where the specification is lenient: identifiers in any case, integers as numbers
or text, names in camel or snake case, unknown fields ignored. What is malformed beyond that is counted.
"""

import base64
import binascii
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final

import orjson

from agentlightning.collector.span import (
    LOG_BODY,
    MAX_DEPTH,
    MAX_INT32,
    Event,
    Link,
    Resource,
    Span,
    clamp_time,
    identify,
)

__all__ = [
    "attributes_dump",
    "attributes_from_json",
    "attributes_to_json",
    "decode_logs_json",
    "decode_traces_json",
    "event_from_json",
    "event_to_json",
    "link_from_json",
    "link_to_json",
    "parse_json",
]

_MAX_COUNT: Final = 2**32 - 1
# protobuf's JSON mapping writes what JSON has no number for as strings.
_NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def parse_json(body: bytes) -> Any:
    """A body that was acknowledged as JSON. Raises ValueError if it is none.

    orjson takes no number beyond a double's range; whoever sent one sent JSON all the same.
    """
    if not body.strip():
        return {}
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(body)


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
                    clamp_time(_integer(_field(item, "startTimeUnixNano"))),
                    clamp_time(_integer(_field(item, "endTimeUnixNano"))),
                    _attributes_json(item, counters),
                    resource,
                    _text(scope.get("name")),
                    _text(scope.get("version")),
                    _enum(item.get("kind")),
                    _text(_field(item, "traceState")),
                    _count(item.get("flags")),
                    _enum(status.get("code")),
                    _text(status.get("message")),
                    [event_from_json(event, counters) for event in _parts(item, "events", counters)],
                    [link_from_json(link, counters) for link in _parts(item, "links", counters)],
                    _count(_field(item, "droppedAttributesCount")),
                    _count(_field(item, "droppedEventsCount")),
                )
                spans.append(identify(span, counters))
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
                if item.get("body"):
                    try:
                        attributes.setdefault(LOG_BODY, _value_from_json(item["body"]))
                    except (ValueError, TypeError, KeyError, AttributeError):
                        counters["unparsed_attribute"] += 1
                moment = clamp_time(
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
                spans.append(identify(span, counters))
    return spans


def attributes_to_json(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attributes as OTLP/JSON's list of key and value, every type as it was."""
    return [{"key": key, "value": _value_to_json(value)} for key, value in attributes.items()]


def attributes_dump(attributes: Mapping[str, Any], elsewhere: Collection[str] = ()) -> bytes:
    """The same as JSON text; of those whose values are kept `elsewhere` only the keys."""
    parts: list[bytes] = []
    for key, value in attributes.items():
        if key in elsewhere:
            value = None
        kind = type(value)  # 1, 1.0 and True are one key of a dict, and so are 0.0 and -0.0
        known = (key, kind, value) if kind in _PLAIN or (kind is float and value) else None
        part = _DUMPED.get(known) if known is not None else None
        if part is None:
            part = orjson.dumps({"key": key, "value": _value_to_json(value)})
            if known is not None and len(part) <= _DUMPED_BYTES:
                if len(_DUMPED) >= _MAX_DUMPED:
                    _DUMPED.clear()
                _DUMPED[known] = part
        parts.append(part)
    return b"[%b]" % b",".join(parts)


_PLAIN: Final = (str, int, bool, type(None))
_DUMPED: Final[dict[tuple[str, type, Any], bytes]] = {}  # emitters repeat most of what they say
_DUMPED_BYTES: Final = 160
_MAX_DUMPED: Final = 8192


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


def event_to_json(event: Event) -> dict[str, Any]:
    """An event as OTLP/JSON."""
    return {
        "name": event.name,
        "timeUnixNano": str(event.time_ns),
        "attributes": attributes_to_json(event.attributes),
        "droppedAttributesCount": event.dropped_attributes,
    }


def event_from_json(event: dict[str, Any], counters: Counter[str]) -> Event:
    """The reverse."""
    return Event(
        _text(event.get("name")),
        clamp_time(_integer(_field(event, "timeUnixNano"))),
        _attributes_json(event, counters),
        _count(_field(event, "droppedAttributesCount")),
    )


def link_to_json(link: Link) -> dict[str, Any]:
    """A link as OTLP/JSON."""
    return {
        "traceId": link.trace_id,
        "spanId": link.span_id,
        "attributes": attributes_to_json(link.attributes),
        "traceState": link.trace_state,
        "flags": link.flags,
        "droppedAttributesCount": link.dropped_attributes,
    }


def link_from_json(link: dict[str, Any], counters: Counter[str]) -> Link:
    """The reverse."""
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
    if depth > MAX_DEPTH:
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
    return number if number <= MAX_INT32 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
