"""Forwarding: another backend gets everything once at least; a dead one costs the collector nothing."""

import base64
import gzip
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from agentlightning.collector.forward import Cursor, Outcome, check_target, read_headers
from agentlightning.collector.forward_bodies import count, halves, portable
from agentlightning.collector.forwarder import Forwarder
from agentlightning.collector.journal import Journal, JournalReader, Kind
from agentlightning.proto.errors import ConfigError, DataError

CLIENT = httpx.Client(trust_env=False)
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def spans(*names: str, ids: bytes = b"\x01\x02\xff\x00") -> bytes:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for name in names:
        span = scope.spans.add(trace_id=b"t" * 16, span_id=os.urandom(8), name=name)
        span.attributes.add(key="agentlightning.prompt.token_ids").value.bytes_value = ids
    return request.SerializeToString()


def names_of(request: ExportTraceServiceRequest) -> list[str]:
    return [span.name for r in request.resource_spans for s in r.scope_spans for span in s.spans]


def send(
    collector: Any, body: bytes, media: str = "application/x-protobuf", path: str = "/v1/traces"
) -> None:
    answer = CLIENT.post(collector.http + path, content=body, headers={"content-type": media}, timeout=20)
    assert answer.status_code == 200


def forward_of(collector: Any) -> dict[str, Any]:
    status = CLIENT.get(collector.http + "/status").json()
    return dict(status["forward"])


def until(condition: Callable[[], Any], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)


class Backend:
    """Another OTLP/HTTP backend, which does what the test says."""

    def __init__(self) -> None:
        self.traces: list[ExportTraceServiceRequest] = []
        self.logs: list[ExportLogsServiceRequest] = []
        self.seen = threading.Condition()
        self.status: Callable[[ExportTraceServiceRequest], int] = lambda request: 200
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def names(self) -> Counter[str]:
        with self.seen:
            return Counter(name for request in self.traces for name in names_of(request))

    def start(self) -> None:
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = gzip.decompress(self.rfile.read(int(self.headers["content-length"])))
                status = 200
                with backend.seen:
                    backend.headers.append({k.lower(): v for k, v in self.headers.items()})
                    if self.path == "/v1/traces":
                        request = ExportTraceServiceRequest.FromString(body)
                        status = backend.status(request)
                        if status == 200:
                            backend.traces.append(request)
                    else:
                        backend.logs.append(ExportLogsServiceRequest.FromString(body))
                    backend.seen.notify_all()
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = Backend()
    backend.start()
    yield backend
    backend.stop()


def test_everything_arrives_with_bytes_as_base64_text(
    collectors: Callable[..., Any], backend: Backend, tmp_path: Path
) -> None:
    headers = tmp_path / "headers"
    headers.write_text("x-api-key: k-123\n")
    headers.chmod(0o600)
    collector = collectors().start("--forward", backend.url, "--forward-header-file", str(headers))
    send(collector, spans("protobuf"))
    span = {"traceId": "AB" * 16, "spanId": "cd" * 8, "name": "json", "startTimeUnixNano": "7", "kind": 3}
    span["attributes"] = [{"key": "k", "value": {"bytesValue": base64.b64encode(b"\xfe\xff").decode()}}]
    document = {"resourceSpans": [{"scopeSpans": [{"spans": [span], "unknown": 1}]}]}
    send(collector, json.dumps(document).encode(), "application/json")
    logs = ExportLogsServiceRequest()
    record = logs.resource_logs.add().scope_logs.add().log_records.add()
    record.body.kvlist_value.values.add(key="inner").value.bytes_value = b"\xff"
    send(collector, logs.SerializeToString(), path="/v1/logs")

    until(lambda: backend.logs and sum(backend.names().values()) == 2, "what was forwarded")
    got = [s for request in backend.traces for r in request.resource_spans for s in r.scope_spans[0].spans]
    assert [s.attributes[0].value.string_value for s in got] == ["AQL/AA==", "/v8="]
    assert (got[1].trace_id, got[1].span_id) == (b"\xab" * 16, b"\xcd" * 8)
    assert (got[1].start_time_unix_nano, got[1].kind) == (7, 3)
    body = backend.logs[0].resource_logs[0].scope_logs[0].log_records[0].body
    assert body.kvlist_value.values[0].value.string_value == "/w=="
    assert {h["x-api-key"] for h in backend.headers} == {"k-123"}
    until(lambda: forward_of(collector)["lag_bytes"] == 0, "the end of the lag")
    assert forward_of(collector)["counters"]["spans"] == 2
    assert "k-123" not in collector.log.read_text()


def test_a_dead_backend_slows_and_loses_nothing(collectors: Callable[..., Any], backend: Backend) -> None:
    backend.stop()
    collector = collectors().start("--forward", backend.url)
    sent = [f"span-{n}" for n in range(50)]
    for name in sent:
        send(collector, spans(name))
    until(lambda: forward_of(collector)["error"], "the backend's failure")
    shown = forward_of(collector)
    assert not shown["up"]
    assert shown["lag_bytes"] > 0
    assert CLIENT.get(collector.http + "/readyz").status_code == 200
    metrics = CLIENT.get(collector.http + "/metrics").text
    assert "agentlightning_collector_forward_up 0.0" in metrics
    backend.start()
    until(lambda: len(backend.names()) == len(sent), "what the backend had missed")
    assert backend.names() == Counter(sent)  # and nothing twice: no request was half done
    until(lambda: forward_of(collector)["up"], "the recovery")


def test_killed_at_any_moment_everything_is_forwarded(
    collectors: Callable[..., Any], backend: Backend
) -> None:
    """kill -9 of forwarder and collector, and a backend that comes and goes."""
    draw = random.Random(4)
    collector = collectors().start("--forward", backend.url)
    sent: list[str] = []
    for turn in range(6):
        for _ in range(20):
            sent.append(f"span-{len(sent)}")
            send(collector, spans(sent[-1]))
        if turn % 3 == 0:
            os.kill(forwarder_pid(collector), signal.SIGKILL)
        elif turn % 3 == 1:
            collector.kill()
            collector.start("--forward", backend.url)
        else:
            with backend.seen:
                backend.status = lambda request: 503 if draw.random() < 0.7 else 200
    backend.status = lambda request: 200
    until(lambda: len(backend.names()) == len(sent), "everything", 60)
    assert set(backend.names()) == set(sent)


def forwarder_pid(collector: Any) -> int:
    def find() -> list[int]:
        children = Path(f"/proc/{collector.pid}/task/{collector.pid}/children").read_text().split()
        return [
            int(child)
            for child in children
            if b"agentlightning.collector.forwarder" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]

    until(find, "the forwarder")
    return find()[0]


def test_what_the_backend_refuses_for_good_is_counted_and_the_rest_arrives(
    collectors: Callable[..., Any], backend: Backend
) -> None:
    backend.status = lambda request: 400 if "bad" in names_of(request) else 200
    collector = collectors().start("--forward", backend.url)
    send(collector, spans("a", "b", "bad", "c", "d"))
    until(lambda: forward_of(collector)["counters"].get("refused"), "the refusal")
    assert backend.names() == Counter("abcd")
    assert forward_of(collector)["counters"]["refused"] == 1
    # A wrong key is nobody's bad data: it waits until somebody has set it right.
    backend.status = lambda request: 401
    send(collector, spans("later"))
    until(lambda: "401" in forward_of(collector)["error"], "the refusal of the key")
    backend.status = lambda request: 200
    until(lambda: backend.names()["later"] == 1, "what had to wait")


def test_over_grpc_retry_info_is_honoured_and_partial_success_counted(
    collectors: Callable[..., Any],
) -> None:
    from google.protobuf.any_pb2 import Any as AnyMessage
    from google.protobuf.duration_pb2 import Duration
    from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
    from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

    got: list[tuple[float, list[str]]] = []

    def export(request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        got.append((time.monotonic(), names_of(request)))
        if len(got) == 1:
            detail = AnyMessage()
            detail.Pack(RetryInfo(retry_delay=Duration(seconds=2)))
            status = Status(code=14, message="later", details=[detail]).SerializeToString()
            context.set_trailing_metadata((("grpc-status-details-bin", status),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "later")
        response = ExportTraceServiceResponse()
        response.partial_success.rejected_spans = 1
        return response

    with grpc_server(export) as port:
        collector = collectors().start("--forward", f"grpc://127.0.0.1:{port}")
        send(collector, spans("a", "b"))
        until(lambda: forward_of(collector)["counters"].get("rejected"), "the partial success")
        assert [names for _, names in got] == [["a", "b"], ["a", "b"]]
        assert got[1][0] - got[0][0] >= 2
        assert forward_of(collector)["counters"] == {"requests": 1, "spans": 1, "rejected": 1}


@contextmanager
def grpc_server(export: Callable[..., Any]) -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(2))
    handler: Any = grpc.unary_unary_rpc_method_handler(
        export,
        request_deserializer=ExportTraceServiceRequest.FromString,
        response_serializer=ExportTraceServiceResponse.SerializeToString,
    )
    service, method = EXPORT[1:].split("/")
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


def test_the_journal_keeps_only_so_much_for_a_dead_backend(tmp_path: Path) -> None:
    import asyncio

    async def write() -> None:
        journal = Journal(tmp_path / "journal", segment_bytes=4096)
        for n in range(20):
            await journal.append(Kind.TRACES, spans(f"s{n}", ids=bytes(1000)))
        journal.remove_below(journal.end - 6000)
        journal.close()

    asyncio.run(write())
    taken: list[ExportTraceServiceRequest] = []

    class Target:
        def send(self, signal: Any, body: bytes) -> Outcome:
            taken.append(ExportTraceServiceRequest.FromString(body))
            return Outcome("taken")

    reader = JournalReader(tmp_path / "journal")
    cursor = Cursor(tmp_path / "cursor.json", reader.id, position=100)
    forwarder = Forwarder(reader, cursor, Target())
    while forwarder.step():
        pass
    arrived = [name for request in taken for name in names_of(request)]
    assert arrived == [f"s{n}" for n in range(20)][-len(arrived) :]
    assert 0 < len(arrived) < 20
    assert cursor.counters["skipped_bytes"] > 10_000
    assert forwarder.caught_up


def test_a_request_is_halved_without_loss() -> None:
    request = ExportTraceServiceRequest.FromString(spans("a", "b") + spans("c") + spans("d", "e"))
    parts = halves(request)
    assert [names_of(part) for part in parts] == [["a", "b"], ["c", "d", "e"]]
    assert [count(part) for part in parts] == [2, 3]


def test_a_body_that_cannot_be_told_is_counted() -> None:
    counters: Counter[str] = Counter()
    deep: Any = {"stringValue": "x"}
    for _ in range(200):
        deep = {"arrayValue": {"values": [deep]}}
    span = {"traceId": "ab" * 16, "spanId": "cd" * 8, "attributes": [{"key": "k", "value": deep}]}
    document = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()
    assert count(portable(Kind.TRACES_JSON, document, counters)) == 0
    assert counters == {"unforwardable": 1}


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    for url in (
        "ftp://x:1",
        "grpc://host",
        "http://",
        "http://user:pw@host:1",
        "grpc://h:1/path",
        "http://h:x",
    ):
        with pytest.raises(ConfigError, match="no OTLP backend"):
            check_target(url, None)
    path = tmp_path / "headers"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_headers(path)
    path.write_text("no header\n")
    with pytest.raises(ConfigError, match="chmod 600"):
        read_headers(path)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="Line 1"):
        read_headers(path)
    (tmp_path / "forward").mkdir()
    (tmp_path / "forward" / "cursor.json").write_text("{}")
    with pytest.raises(DataError, match="damaged"):
        Cursor.load(tmp_path, "id")
