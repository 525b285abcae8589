"""One way to export a request over each of OTLP's transports, and to read what a receiver answers."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
from google.protobuf.json_format import MessageToDict
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

TRANSPORTS = ("grpc", "http", "json")
PROTOBUF = "application/x-protobuf"
JSON = "application/json"
METHODS = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}
RETRYABLE = {
    *("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"),
    *("429", "502", "503", "504"),
}
"""What the specification lets a client try again: gRPC codes, HTTP statuses."""

_IDS = {"traceId", "spanId", "parentSpanId"}
_HTTP = httpx.Client(trust_env=False)


@dataclass(frozen=True)
class Answer:
    """What came back, in words that all transports share."""

    code: str
    """A gRPC code, or an HTTP status."""
    message: str
    """Of the google.rpc.Status; empty on success."""
    rejected: int
    partial: bool
    """Whether `partial_success` is set."""
    delay: float | None
    """What RetryInfo or Retry-After asks for."""

    @property
    def ok(self) -> bool:
        return self.code in ("OK", "200")

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE


def spans(count: int = 1, *, size: int = 0, name: str = "s", start: int = 1) -> ExportTraceServiceRequest:
    """A request; its spans have ids that no other has."""
    import os

    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for n in range(count):
        span = scope.spans.add(trace_id=b"t" * 16, span_id=os.urandom(8), parent_span_id=b"p" * 8)
        span.name, span.start_time_unix_nano = (name if count == 1 else f"{name}{n}"), start
        if size:
            span.attributes.add(key="filler").value.string_value = "x" * size
    return request


def to_json(request: Any) -> bytes:
    """A message as OTLP/JSON: protobuf's mapping, with identifiers in hex and enums as numbers."""

    def fix(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: base64.b64decode(item).hex() if key in _IDS else fix(item) for key, item in value.items()
            }
        return [fix(item) for item in value] if isinstance(value, list) else value

    return json.dumps(fix(MessageToDict(request, use_integers_for_enums=True))).encode()


def encode(transport: str, request: Any) -> bytes:
    return to_json(request) if transport == "json" else bytes(request.SerializeToString())


def export(
    collector: Any,
    transport: str,
    request: Any,
    *,
    signal: str = "traces",
    gzip: bool = False,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Export a message, or bytes as they are."""
    body = request if isinstance(request, bytes) else encode(transport, request)
    if transport == "grpc":
        return _export_grpc(collector, signal, body, gzip, headers or {})
    return _export_http(
        collector, JSON if transport == "json" else PROTOBUF, signal, body, gzip, headers or {}
    )


def _export_grpc(collector: Any, signal: str, body: bytes, gzip: bool, headers: dict[str, str]) -> Answer:
    with channel(collector) as open_channel:
        method: Any = open_channel.unary_unary(METHODS[signal])  # bytes in, bytes out
        compression = grpc.Compression.Gzip if gzip else None
        try:
            content = method(body, timeout=30, compression=compression, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            return _grpc_error(error)
    return _success("OK", signal, content)


@contextmanager
def channel(collector: Any) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(collector.grpc, options) as opened:
        yield opened


def _grpc_error(error: Any) -> Answer:
    delay = None
    message = error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = Status.FromString(value)
            assert (status.code, status.message) == (error.code().value[0], error.details())
            for detail in status.details:
                info = RetryInfo()
                if detail.Unpack(info):
                    delay = info.retry_delay.ToNanoseconds() / 1e9
    return Answer(error.code().name, message, 0, False, delay)


def _export_http(
    collector: Any, media: str, signal: str, body: bytes, gzip: bool, headers: dict[str, str]
) -> Answer:
    import gzip as gzip_module

    headers = {"content-type": media, **headers}
    if gzip:
        headers["content-encoding"], body = "gzip", gzip_module.compress(body)
    answer = _HTTP.post(f"{collector.http}/v1/{signal}", content=body, headers=headers, timeout=60)
    assert answer.headers["content-type"] == media  # in the request's encoding, whatever it says
    if answer.status_code == 200:
        if media == PROTOBUF:
            return _success("200", signal, answer.content)
        part = answer.json().get("partialSuccess")
        rejected = (part or {}).get("rejectedSpans", (part or {}).get("rejectedLogRecords", "0"))
        assert isinstance(rejected, str)  # protobuf's JSON mapping writes 64 bits as text
        return Answer("200", (part or {}).get("errorMessage", ""), int(rejected), part is not None, None)
    if media == PROTOBUF:
        message = Status.FromString(answer.content).message
    else:
        message = answer.json()["message"]
    delay = answer.headers.get("retry-after")
    return Answer(str(answer.status_code), message, 0, False, float(delay) if delay else None)


def _success(code: str, signal: str, content: bytes) -> Answer:
    if signal == "logs":
        logs = ExportLogsServiceResponse.FromString(content)
        part: Any = logs.partial_success
        return Answer(
            code, part.error_message, part.rejected_log_records, logs.HasField("partial_success"), None
        )
    traces = ExportTraceServiceResponse.FromString(content)
    part = traces.partial_success
    return Answer(code, part.error_message, part.rejected_spans, traces.HasField("partial_success"), None)


def log_records(*bodies: str) -> ExportLogsServiceRequest:
    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add().scope_logs.add()
    for body in bodies:
        scope.log_records.add(time_unix_nano=1).body.string_value = body
    return request


def address(collector: Any) -> tuple[str, int]:
    """Where the HTTP receiver listens."""
    url = urlsplit(collector.http)
    assert url.hostname is not None
    assert url.port is not None
    return url.hostname, url.port
