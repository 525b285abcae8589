"""What the journal holds, as any OTLP backend takes it: protobuf, and bytes as base64 text.

Few backends show or even keep attributes of type bytes; token ids are such. So a value of bytes becomes
the same bytes in base64, a string. Spans that were refused when they came (an invalid id) stay behind.
"""

import base64
import binascii
from collections import Counter
from typing import Any, Final

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentlightning.collector.forward import Signal
from agentlightning.collector.otlp_json import parse_json
from agentlightning.collector.records import Kind
from agentlightning.collector.tokens import TOKEN_ATTRIBUTES
from agentlightning.collector.wire import valid_id

__all__ = ["SIGNALS", "count", "halves", "portable"]

SIGNALS: Final[dict[Kind, Signal]] = {
    Kind.TRACES: "traces",
    Kind.TRACES_JSON: "traces",
    Kind.LOGS: "logs",
    Kind.LOGS_JSON: "logs",
}
_IDS: Final = {"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"}
_CONTAINERS: Final = {"array_value", "kvlist_value"}

Request = Any  # ExportTraceServiceRequest or ExportLogsServiceRequest


def portable(kind: Kind, body: bytes, counters: Counter[str]) -> Request:
    """A journal's body as a request for another backend. What cannot be told is counted `unforwardable`."""
    empty: Request = ExportTraceServiceRequest() if SIGNALS[kind] == "traces" else ExportLogsServiceRequest()
    try:
        if kind in (Kind.TRACES, Kind.LOGS):
            empty.MergeFromString(body)
            request = empty
        else:
            request = ParseDict(_protobuf_json(parse_json(body)), empty, ignore_unknown_fields=True)
    except (DecodeError, ParseError, ValueError, RecursionError):
        counters["unforwardable"] += 1
        return type(empty)()
    if SIGNALS[kind] == "traces":
        _mend_traces(request)
    else:
        for resource in request.resource_logs:
            _mend(resource.resource.attributes)
            for scope in resource.scope_logs:
                _mend(scope.scope.attributes)
                for record in scope.log_records:
                    _mend(record.attributes)
                    _mend_value(record.body)
    return request


def count(request: Request) -> int:
    """Spans, or log records."""
    if isinstance(request, ExportTraceServiceRequest):
        return sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
    return sum(len(scope.log_records) for resource in request.resource_logs for scope in resource.scope_logs)


def halves(request: Request) -> list[Request]:
    """Two requests that together hold what this one does."""
    middle = count(request) // 2
    traces = isinstance(request, ExportTraceServiceRequest)
    parts = []
    for low, high in ((0, middle), (middle, count(request))):
        part = type(request)()
        part.CopyFrom(request)
        at = 0
        for resource in part.resource_spans if traces else part.resource_logs:
            for scope in resource.scope_spans if traces else resource.scope_logs:
                items = scope.spans if traces else scope.log_records
                size = len(items)
                del items[max(0, high - at) :]
                del items[: max(0, min(low - at, len(items)))]
                at += size
        parts.append(part)
    return parts


def _mend_traces(request: Request) -> None:
    for resource in request.resource_spans:
        _mend(resource.resource.attributes)
        for scope in resource.scope_spans:
            _mend(scope.scope.attributes)
            spans = scope.spans
            for index in reversed(range(len(spans))):
                if not valid_id(spans[index].trace_id, spans[index].span_id):
                    del spans[index]
            for span in spans:
                _mend(span.attributes)
                for event in span.events:
                    _mend(event.attributes)
                for link in span.links:
                    _mend(link.attributes)


def _mend(attributes: Any) -> None:  # repeated KeyValue
    for item in attributes:
        kind = item.value.WhichOneof("value")
        if kind == "bytes_value":
            item.value.string_value = _text(item.value.bytes_value)
        elif kind in _CONTAINERS:
            values = item.value.array_value.values if kind == "array_value" else ()
            if item.key in TOKEN_ATTRIBUTES and values and values[0].WhichOneof("value") == "int_value":
                continue  # thousands of numbers
            _mend_value(item.value)


def _mend_value(value: Any) -> None:  # AnyValue; protobuf's parser limits its depth
    kind = value.WhichOneof("value")
    if kind == "bytes_value":
        value.string_value = _text(value.bytes_value)
    elif kind == "array_value":
        for item in value.array_value.values:
            _mend_value(item)
    elif kind == "kvlist_value":
        for item in value.kvlist_value.values:
            _mend_value(item.value)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _protobuf_json(value: Any, depth: int = 0) -> Any:
    """OTLP/JSON as protobuf's own JSON mapping: that one has identifiers in base64."""
    if isinstance(value, dict):
        made = {}
        for key, item in value.items():
            if key in _IDS and isinstance(item, str):
                try:
                    made[key] = _text(binascii.unhexlify(item))
                except (binascii.Error, ValueError):
                    made[key] = ""
            else:
                made[key] = _protobuf_json(item, depth + 1)
        return made
    if isinstance(value, list):
        return [_protobuf_json(item, depth + 1) for item in value]
    return value
