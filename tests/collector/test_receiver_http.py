"""OTLP over HTTP, against a real collector: what the specification asks of a receiver."""

import gzip
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from agentlightning.collector.journal import Kind

PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}
CLIENT = httpx.Client(trust_env=False)


def spans(count: int = 1, *, size: int = 0, trace_id: bytes = b"t" * 16) -> bytes:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for _ in range(count):
        span = scope.spans.add(trace_id=trace_id, span_id=os.urandom(8), parent_span_id=b"p" * 8, name="s")
        if size:
            span.attributes.add(key="filler").value.string_value = "x" * size
    return request.SerializeToString()


def post(
    collector: Any, body: bytes, headers: dict[str, str] = PROTOBUF, path: str = "/v1/traces"
) -> httpx.Response:
    return CLIENT.post(collector.http + path, content=body, headers=headers, timeout=30)


def raw(collector: Any, data: bytes, *, shut: bool = False) -> bytes:
    """Send bytes as they are; returns everything that comes back until the answer's end or the close."""
    address = urlsplit(collector.http)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(data)
        if shut:
            return b""
        received = b""
        connection.settimeout(0.3)
        try:
            while part := connection.recv(65536):
                received += part
        except TimeoutError:
            pass
        return received


def test_an_acknowledged_body_is_in_the_journal_as_it_came(shared: Any) -> None:
    body = spans(3)
    answer = post(shared, body)
    assert (answer.status_code, answer.content) == (200, b"")  # success leaves partial_success unset
    assert answer.headers["content-type"] == "application/x-protobuf"
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.add().body.string_value = "hello"
    assert post(shared, logs.SerializeToString(), path="/v1/logs").status_code == 200
    document = json.dumps({"resourceSpans": []}).encode()
    assert post(shared, document, JSON).content == b"{}"  # nothing in it: nothing to keep
    span = {"traceId": "AB" * 16, "spanId": "cd" * 8, "name": "n", "startTimeUnixNano": "1", "unknown": {}}
    document = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()
    answer = post(shared, document, {"content-type": "Application/JSON; charset=utf-8"})
    assert (answer.status_code, answer.content) == (200, b"{}")
    assert [(record.kind, record.body) for record in shared.journal()] == [
        (Kind.TRACES, body),
        (Kind.LOGS, logs.SerializeToString()),
        (Kind.TRACES_JSON, document),
    ]


@pytest.mark.parametrize("headers", [PROTOBUF, JSON])
def test_an_empty_body_succeeds(shared: Any, headers: dict[str, str]) -> None:
    for path in ("/v1/traces", "/v1/logs"):
        assert post(shared, b"", headers, path).status_code == 200
    assert shared.journal() == []


def test_refusals_are_a_status_in_the_encoding_of_the_request(shared: Any) -> None:
    answer = post(shared, b"\xff not protobuf")
    assert answer.status_code == 400
    status = Status.FromString(answer.content)
    assert (status.code, "cannot be parsed" in status.message) == (3, True)

    for bad in (b"{", b"[]", b'{"resourceSpans": 3}', b'{"resourceSpans": [1]}'):
        answer = post(shared, bad, JSON)
        assert answer.status_code == 400
        assert answer.json()["code"] == 3

    answer = post(shared, spans(), {"content-type": "text/plain"})
    assert answer.status_code == 415
    assert "application/x-protobuf" in answer.json()["message"]
    assert post(shared, spans(), {**PROTOBUF, "content-encoding": "br"}).status_code == 415
    assert post(shared, b"", path="/v1/metrics").status_code == 404
    assert "not metrics" in Status.FromString(post(shared, b"", path="/v1/metrics").content).message
    assert post(shared, b"", path="/v2/traces").status_code == 404
    got = CLIENT.get(shared.http + "/v1/traces")
    assert (got.status_code, got.headers["allow"]) == (405, "POST")
    assert shared.journal() == []


def test_spans_without_a_valid_id_are_rejected_exactly(shared: Any) -> None:
    request = ExportTraceServiceRequest.FromString(spans(2))
    scope = request.resource_spans[0].scope_spans[0]
    scope.spans.add(trace_id=bytes(16), span_id=b"s" * 8)
    scope.spans.add(trace_id=b"t" * 16, span_id=b"short")
    answer = post(shared, request.SerializeToString())
    assert answer.status_code == 200
    assert ExportTraceServiceResponse.FromString(answer.content).partial_success.rejected_spans == 2
    span = {"traceId": "zz", "spanId": "cd" * 8}
    answer = post(shared, json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode(), JSON)
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"
    assert 'refused_total{reason="invalid_id"} 3.0' in CLIENT.get(shared.http + "/metrics").text


def test_gzip_is_unpacked_and_its_damage_and_bombs_are_refused(
    collectors: Callable[..., Any],
) -> None:
    collector = collectors().start("--max-body-mib", "1")
    headers = {**PROTOBUF, "content-encoding": "gzip"}
    body = spans(2)
    assert post(collector, gzip.compress(body), headers).status_code == 200
    half = len(body) // 2
    assert (
        post(collector, gzip.compress(body[:half]) + gzip.compress(body[half:]), headers).status_code == 200
    )
    assert [record.body for record in collector.journal()] == [body, body]

    assert post(collector, gzip.compress(body)[:-9], headers).status_code == 400
    assert post(collector, body, headers).status_code == 400
    bomb = post(collector, gzip.compress(bytes(50 << 20)), headers)
    assert bomb.status_code == 413
    assert Status.FromString(bomb.content).code == 8
    assert "retry-after" not in bomb.headers
    assert len(collector.journal()) == 2


def test_a_body_above_the_limit_is_refused_and_one_below_is_not(collectors: Callable[..., Any]) -> None:
    collector = collectors().start("--max-body-mib", "1")
    assert post(collector, spans(size=(1 << 20) - 100)).status_code == 200
    for size in (1 << 20, 30 << 20):  # the answer is seen even if most of the body is still to come
        assert post(collector, spans(size=size)).status_code == 413
    # Chunked, without a length: it shows only while it is read.
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    answer = raw(
        collector,
        b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"
        b"transfer-encoding: chunked\r\n\r\n" + chunk * 17 + b"0\r\n\r\n",
    )
    assert b"413" in answer.split(b"\r\n", 1)[0]
    assert CLIENT.get(collector.http + "/healthz").status_code == 200


def test_chunked_continued_and_pipelined_requests_are_read(shared: Any) -> None:
    body = spans()
    head = b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"
    chunked = b"".join(
        b"%x\r\n%s\r\n" % (len(body[i : i + 7]), body[i : i + 7]) for i in range(0, len(body), 7)
    )
    answer = raw(shared, head + b"transfer-encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    whole = head + b"content-length: %d\r\n" % len(body)
    # The body is here already: RFC 9110 §10.1.1 lets a server leave the 100 out.
    answer = raw(shared, whole + b"expect: 100-continue\r\n\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 200")
    answer = raw(shared, (whole + b"\r\n" + body) * 3)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert len(shared.journal()) == 5


def test_a_client_that_dies_in_its_body_leaves_nothing(shared: Any) -> None:
    raw(
        shared,
        b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"
        b"content-length: 1000\r\n\r\n" + spans()[:20],
        shut=True,
    )
    assert post(shared, spans()).status_code == 200
    assert len(shared.journal()) == 1


def test_a_wrong_token_is_refused_and_counted(collectors: Callable[..., Any], tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret-token\n")
    os.chmod(token_file, stat.S_IRUSR | stat.S_IWUSR)
    collector = collectors().start("--token-file", str(token_file))
    for headers in (PROTOBUF, {**PROTOBUF, "authorization": "Bearer wrong"}):
        answer = post(collector, spans(), headers)
        assert answer.status_code == 401
        assert Status.FromString(answer.content).code == 16
    assert post(collector, spans(), {**PROTOBUF, "authorization": "Bearer secret-token"}).status_code == 200
    assert CLIENT.get(collector.http + "/healthz").status_code == 200
    assert CLIENT.get(collector.http + "/metrics").status_code == 401
    page = CLIENT.get(collector.http + "/metrics", headers={"authorization": "bearer secret-token"})
    assert 'refused_total{reason="unauthorized"} 3.0' in page.text
    assert "secret-token" not in collector.log.read_text()


def test_senders_wait_when_the_converter_is_too_far_behind(collectors: Callable[..., Any]) -> None:
    collector = collectors().start("--journal-limit-mib", "1")
    # An attempt that nobody ends keeps its bytes in the journal.
    assert post(collector, spans(size=1200 << 10)).status_code == 200
    answer = post(collector, spans())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert Status.FromString(answer.content).code == 14
    assert len(collector.journal()) == 1


def test_a_deeply_nested_body_is_refused(shared: Any) -> None:
    nested = b'{"resourceSpans":[{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"
    assert post(shared, nested, JSON).status_code == 400
    assert CLIENT.get(shared.http + "/healthz").status_code == 200
