"""OTLP/protobuf bodies as spans.

Unknown fields are ignored; a record whose identifiers name nothing is left out and counted, and so is
an attribute that cannot be read.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from google.protobuf.message import DecodeError

from agentlightning.collector import wire
from agentlightning.collector.span import (
    LOG_BODY,
    MAX_DEPTH,
    Event,
    Link,
    Resource,
    Span,
    clamp_time,
    identify,
)
from agentlightning.collector.tokens import TOKEN_ATTRIBUTES, pack_array

__all__ = ["decode_logs", "decode_traces"]


def decode_traces(body: bytes, counters: Counter[str]) -> list[Span]:
    """Spans of an ExportTraceServiceRequest or TracesData. Raises ValueError if it is neither."""
    try:
        request = wire.RawTraceRequest.FromString(body)
    except DecodeError:
        raise ValueError("it is not an OTLP protobuf message of spans") from None
    spans: list[Span] = []
    for resource_spans in request.resource_spans:
        resource = _resource(resource_spans.resource, counters)
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
                    clamp_time(message.start_time_unix_nano),
                    clamp_time(message.end_time_unix_nano),
                    _raw_attributes(message.attributes, counters),
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
                spans.append(identify(span, counters))
    return spans


def decode_logs(body: bytes, counters: Counter[str]) -> list[Span]:
    """Log records of an ExportLogsServiceRequest or LogsData. Raises ValueError if it is neither."""
    try:
        request = wire.RawLogsRequest.FromString(body)
    except DecodeError:
        raise ValueError("it is not an OTLP protobuf message of log records") from None
    spans: list[Span] = []
    for resource_logs in request.resource_logs:
        resource = _resource(resource_logs.resource, counters)
        for scope_logs in resource_logs.scope_logs:
            for record in scope_logs.log_records:
                attributes = _raw_attributes(record.attributes, counters)
                kind = record.body.WhichOneof("value")
                if kind is not None:
                    try:
                        attributes.setdefault(LOG_BODY, _value(record.body, kind))
                    except (DecodeError, ValueError):
                        counters["unparsed_attribute"] += 1
                moment = clamp_time(record.time_unix_nano or record.observed_time_unix_nano)
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
                spans.append(identify(span, counters))
    return spans


def _resource(raw: bytes, counters: Counter[str]) -> Resource:
    resource = _RESOURCES.get(raw)
    if resource is None:
        found: Counter[str] = Counter()
        try:
            resource = Resource(_attributes(wire.Resource.FromString(raw).attributes, found))
        except DecodeError:
            raise ValueError("a resource in it is not OTLP") from None
        if found:
            counters.update(found)  # and again next time
        elif len(raw) <= _RESOURCE_BYTES:
            if len(_RESOURCES) >= _MAX_RESOURCES:
                _RESOURCES.clear()
            _RESOURCES[raw] = resource
    return resource


_RESOURCES: dict[bytes, Resource] = {}
_RESOURCE_BYTES: Final = 4096
_MAX_RESOURCES: Final = 1024
_SEEN: dict[bytes, tuple[str, Any]] = {}  # emitters repeat most of what they say
_SEEN_BYTES: Final = 96
_MAX_SEEN: Final = 8192
_KEY: Final = 0x0A  # tag of KeyValue.key
_VALUE: Final = 0x12  # of KeyValue.value
_STRING: Final = 0x0A  # of AnyValue.string_value
_BYTES: Final = 0x3A  # of AnyValue.bytes_value


def _raw_attributes(items: Iterable[bytes], counters: Counter[str]) -> dict[str, Any]:
    """Attributes from the bytes of each: short ones are remembered, long ones copied once."""
    attributes: dict[str, Any] = {}
    for raw in items:
        seen = _SEEN.get(raw)
        if seen is not None:
            attributes[seen[0]] = seen[1]
            continue
        short = len(raw) <= _SEEN_BYTES
        pair = None if short else _long_attribute(raw)
        if pair is None:
            try:
                item = wire.KeyValue.FromString(raw)
            except DecodeError:
                counters["unparsed_attribute"] += 1
                continue
            value = item.value
            kind = value.WhichOneof("value")
            if kind == "array_value" or kind == "kvlist_value":
                found = _attributes((item,), counters)
                attributes.update(found)
                if not short or found[item.key] is None:
                    continue
                pair = (item.key, found[item.key])
            else:
                pair = (item.key, None if kind is None else getattr(value, kind))
        attributes[pair[0]] = pair[1]
        if short:
            if len(_SEEN) >= _MAX_SEEN:
                _SEEN.clear()
            _SEEN[raw] = pair
    return attributes


def _long_attribute(raw: bytes) -> tuple[str, Any] | None:
    """Key and value of long text or bytes as every encoder writes them; None if it is anything else."""
    size = len(raw)
    key_end = 2 + raw[1]
    if raw[0] != _KEY or raw[1] >= 0x80 or key_end + 130 > size or raw[key_end] != _VALUE:
        return None
    inner = _behind_length(raw, key_end + 1, size)
    tag = raw[inner] if inner else 0
    if tag != _STRING and tag != _BYTES:
        return None
    begin = _behind_length(raw, inner + 1, size)
    if not begin:
        return None
    try:
        return (raw[2:key_end].decode(), raw[begin:] if tag == _BYTES else raw[begin:].decode())
    except UnicodeDecodeError:
        return None


def _behind_length(raw: bytes, at: int, size: int) -> int:
    """Where what has its length at `at` begins, if it is all that is left and the length takes 2 or 3 bytes."""
    left = size - at - 2
    if left < 0x4000:
        return at + 2 if raw[at] == left & 0x7F | 0x80 and raw[at + 1] == left >> 7 else 0
    left -= 1
    whole = left & 0x7F | 0x80 | (left >> 7 & 0x7F | 0x80) << 8 | left >> 14 << 16
    return at + 3 if left < 0x200000 and int.from_bytes(raw[at : at + 3], "little") == whole else 0


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
        if depth > MAX_DEPTH:
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
        clamp_time(event.time_unix_nano),
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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
