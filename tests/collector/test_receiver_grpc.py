"""OTLP over gRPC, and the official exporters over both transports."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from agentlightning.collector.journal import Kind

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"


def spans(count: int = 1, size: int = 0) -> bytes:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for _ in range(count):
        span = scope.spans.add(trace_id=b"t" * 16, span_id=os.urandom(8), parent_span_id=b"p" * 8, name="s")
        span.attributes.add(key="filler").value.string_value = "x" * size
    return request.SerializeToString()


def call(collector: Any, method: str, body: bytes, **options: Any) -> bytes:
    with grpc.insecure_channel(collector.grpc) as channel:
        method_of: Any = channel.unary_unary(method)  # the stubs know no method without serialisers
        return bytes(method_of(body, timeout=20, **options))


def refused(collector: Any, method: str, body: bytes, **options: Any) -> grpc.Call:
    with pytest.raises(grpc.RpcError) as caught:
        call(collector, method, body, **options)
    return caught.value  # type: ignore[return-value]  # an RpcError of a call is a Call


def details(error: grpc.Call) -> Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return Status.FromString(value)
    return None


def test_an_acknowledged_message_is_in_the_journal_as_it_came(shared: Any) -> None:
    body = spans(2)
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.add().body.string_value = "hello"
    assert call(shared, TRACES, body) == b""
    assert call(shared, TRACES, body, compression=grpc.Compression.Gzip) == b""
    assert call(shared, LOGS, logs.SerializeToString()) == b""
    assert call(shared, TRACES, b"") == b""
    assert [(record.kind, record.body) for record in shared.journal()] == [
        (Kind.TRACES, body),
        (Kind.TRACES, body),
        (Kind.LOGS, logs.SerializeToString()),
    ]


def test_refusals_have_the_codes_that_clients_do_not_repeat(collectors: Callable[..., Any]) -> None:
    collector = collectors().start("--max-body-mib", "1")
    error = refused(collector, TRACES, b"\xff not protobuf")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = details(error)
    assert status is not None
    assert status.code == 3
    assert not status.details
    error = refused(collector, METRICS, b"")
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "not metrics" in (error.details() or "")
    assert refused(collector, "/no.Such/Method", b"").code() is grpc.StatusCode.UNIMPLEMENTED

    large = refused(collector, TRACES, spans(size=2 << 20))
    bomb = refused(collector, TRACES, spans(size=20 << 20), compression=grpc.Compression.Gzip)
    for error in (large, bomb):
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error) is None  # with RetryInfo, clients would retry for ever
    assert collector.journal() == []


def test_spans_without_a_valid_id_are_rejected_exactly(shared: Any) -> None:
    request = ExportTraceServiceRequest.FromString(spans())
    request.resource_spans[0].scope_spans[0].spans.add(trace_id=b"t" * 16, span_id=bytes(8))
    answer = ExportTraceServiceResponse.FromString(call(shared, TRACES, request.SerializeToString()))
    assert answer.partial_success.rejected_spans == 1


def test_senders_wait_when_the_converter_is_too_far_behind(collectors: Callable[..., Any]) -> None:
    collector = collectors().start("--journal-limit-mib", "1")
    assert call(collector, TRACES, spans(size=1200 << 10)) == b""
    error = refused(collector, TRACES, spans())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    status = details(error)
    retry = RetryInfo()
    assert status is not None
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.seconds == 1


def test_a_wrong_token_is_refused(collectors: Callable[..., Any], tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret-token\n")
    token_file.chmod(0o600)
    collector = collectors().start("--token-file", str(token_file))
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        error = refused(collector, TRACES, spans(), metadata=metadata)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        error = refused(collector, "/agentlightning.v1.Transitions/Stats", b"", metadata=metadata)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert call(collector, TRACES, spans(), metadata=(("authorization", "Bearer secret-token"),)) == b""


@pytest.mark.parametrize("transport", ["http", "grpc"])
@pytest.mark.parametrize("compressed", [False, True])
def test_the_official_exporters_arrive(shared: Any, transport: str, compressed: bool) -> None:
    if transport == "http":
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        exporter: Any = HttpExporter(
            shared.http + "/v1/traces",
            compression=Compression.Gzip if compressed else Compression.NoCompression,
        )
    else:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter = GrpcExporter(
            shared.grpc,
            insecure=True,
            compression=grpc.Compression.Gzip if compressed else grpc.Compression.NoCompression,
        )
    provider = TracerProvider(resource=Resource.create({"agentlightning.rollout.id": "r1"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    for n in range(20):
        with tracer.start_as_current_span("chat model", attributes={"n": n}):
            pass
    assert provider.force_flush()
    provider.shutdown()
    names = [
        span.name
        for record in shared.journal()
        for resource in ExportTraceServiceRequest.FromString(record.body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert names == ["chat model"] * 20


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port"])
def test_a_port_in_use_is_one_sentence_and_exit_2(shared: Any, tmp_path: Path, option: str) -> None:
    taken = shared.grpc if option == "--grpc-port" else shared.http
    ports = {"--grpc-port": "0", "--http-port": "0", option: taken.rsplit(":", 1)[1]}
    command = "import sys; from agentlightning.collector.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command, "--data", str(tmp_path / "d"), "--state", str(tmp_path / "s")]
        + [word for pair in ports.items() for word in pair],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert "cannot listen on" in done.stderr
    assert "Traceback" not in done.stderr
