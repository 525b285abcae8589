"""What the OTLP specification asks of a receiver on every transport. `docs/conformance.md` lists the cases."""

import threading
from collections import Counter
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from otlp_clients import TRANSPORTS, export, log_records, spans

from agentlightning.collector.open_attempts import decode

everywhere = pytest.mark.parametrize("transport", TRANSPORTS)


def stored(collector: Any) -> list[Any]:
    """What has been acknowledged, as the converter reads it."""
    counters: Counter[str] = Counter()
    return [span for record in collector.journal() for span in decode(record, counters)]


def one_span(request: ExportTraceServiceRequest) -> Any:
    return request.resource_spans[0].scope_spans[0].spans[0]


@everywhere
def test_c01_an_export_is_answered_by_the_response_of_its_signal(shared: Any, transport: str) -> None:
    assert export(shared, transport, spans(3)).ok
    assert export(shared, transport, log_records("hello"), signal="logs").ok
    assert [span.signal for span in stored(shared)] == ["span"] * 3 + ["log"]


@everywhere
def test_c02_success_leaves_partial_success_unset(shared: Any, transport: str) -> None:
    answer = export(shared, transport, spans())
    assert (answer.ok, answer.partial) == (True, False)
    assert not export(shared, transport, log_records("hello"), signal="logs").partial


@everywhere
def test_c03_an_empty_request_succeeds(shared: Any, transport: str) -> None:
    for signal in ("traces", "logs"):
        assert export(shared, transport, b"", signal=signal).ok
    if transport == "json":
        assert export(shared, transport, b"{}").ok
    empty = ExportTraceServiceRequest()
    empty.resource_spans.add().scope_spans.add()
    assert export(shared, transport, empty).ok
    assert shared.journal() == []


@everywhere
def test_c04_partial_success_counts_exactly_what_was_rejected(shared: Any, transport: str) -> None:
    request = spans(4)
    bad = request.resource_spans[0].scope_spans[0].spans
    bad[1].span_id, bad[3].trace_id = bytes(8), bytes(16)
    answer = export(shared, transport, request)
    assert (answer.ok, answer.partial, answer.rejected) == (True, True, 2)
    assert [span.name for span in stored(shared)] == ["s0", "s2"]


@everywhere
def test_c05_partial_success_says_in_words_what_is_wrong(shared: Any, transport: str) -> None:
    request = spans()
    one_span(request).span_id = bytes(8)
    answer = export(shared, transport, request)
    assert answer.rejected == 1
    assert "span id" in answer.message


@everywhere
@pytest.mark.parametrize("length", [0, 1, 7, 9, 16])
def test_c06_an_id_of_a_wrong_length_is_invalid(shared: Any, transport: str, length: int) -> None:
    request = spans()
    one_span(request).span_id = b"\x01" * length
    assert export(shared, transport, request).rejected == 1
    request = spans()
    one_span(request).trace_id = b"\x01" * (length if length != 16 else 17)
    assert export(shared, transport, request).rejected == 1
    assert stored(shared) == []


@everywhere
def test_c07_a_signal_that_is_not_taken_is_refused_for_good(shared: Any, transport: str) -> None:
    answer = export(shared, transport, b"", signal="metrics")
    assert answer.code == ("UNIMPLEMENTED" if transport == "grpc" else "404")
    assert not answer.retryable
    assert "not metrics" in answer.message


@everywhere
def test_c08_unknown_fields_are_ignored(shared: Any, transport: str) -> None:
    if transport == "json":
        span = b'{"traceId":"%s","spanId":"%s","name":"n","future":{"a":[1]}}' % (b"ab" * 16, b"cd" * 8)
        body = b'{"resourceSpans":[{"new":1,"scopeSpans":[{"spans":[%s]}]}],"x":null}' % span
    else:
        # Field 1000, length-delimited, behind a whole request; and in a span.
        request = spans(name="n")
        one_span(request).MergeFromString(b"\xc2\x3e\x03new")
        body = request.SerializeToString() + b"\xc2\x3e\x03new"
    assert export(shared, transport, body).ok
    assert [span.name for span in stored(shared)] == ["n"]


@everywhere
def test_c09_bad_data_is_refused_for_good(shared: Any, transport: str) -> None:
    bad = b"{" if transport == "json" else b"\xff\xff not a message"
    for signal in ("traces", "logs"):
        answer = export(shared, transport, bad, signal=signal)
        assert answer.code == ("INVALID_ARGUMENT" if transport == "grpc" else "400")
        assert not answer.retryable
        assert answer.delay is None
        assert answer.message
    assert shared.journal() == []


@everywhere
def test_c10_gzip_is_taken(shared: Any, transport: str) -> None:
    assert export(shared, transport, spans(2, size=10_000), gzip=True).ok
    assert len(stored(shared)) == 2


@everywhere
def test_c11_requests_come_side_by_side(shared: Any, transport: str) -> None:
    answers: list[bool] = []

    def work() -> None:
        for _ in range(5):
            answers.append(export(shared, transport, spans(3)).ok)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 40
    assert len(stored(shared)) == 120


@everywhere
def test_c12_every_type_of_attribute_is_kept(shared: Any, transport: str) -> None:
    request = spans()
    add = one_span(request).attributes.add
    values: dict[str, Any] = {
        "string": "Zürich \U0001f642 \x01",
        "bool": True,
        "int": -(2**63),
        "large": 2**53 + 1,
        "double": 0.1,
        "infinite": float("-inf"),
        "bytes": b"\x00\xff",
        "array": ["a", 1, None, [b"x"]],
        "map": {"inner": {"k": 2.5}},
        "empty": None,
    }
    for key, value in values.items():
        fill(add(key=key).value, value)
    assert export(shared, transport, request).ok
    [span] = stored(shared)
    assert span.attributes == values
    assert {key: type(value) for key, value in span.attributes.items()} == {
        key: type(value) for key, value in values.items()
    }


def fill(target: AnyValue, value: Any) -> None:
    match value:
        case bool():
            target.bool_value = value
        case str():
            target.string_value = value
        case int():
            target.int_value = value
        case float():
            target.double_value = value
        case bytes():
            target.bytes_value = value
        case list():
            target.array_value.SetInParent()
            for item in value:
                fill(target.array_value.values.add(), item)
        case dict():
            for key, item in value.items():
                fill(target.kvlist_value.values.add(key=key).value, item)


@everywhere
def test_c13_every_field_of_a_span_is_kept(shared: Any, transport: str) -> None:
    request = spans()
    resource = request.resource_spans[0]
    resource.schema_url = "https://opentelemetry.io/schemas/1.30.0"
    resource.resource.attributes.add(key="service.name").value.string_value = "agent"
    scope = resource.scope_spans[0].scope
    scope.name, scope.version = "tracer", "1.2"
    span = one_span(request)
    span.trace_state, span.flags, span.kind = "a=b", 0x101, 3
    span.start_time_unix_nano, span.end_time_unix_nano = 1_700_000_000_000_000_001, 1_700_000_000_000_000_002
    span.dropped_attributes_count, span.dropped_events_count = 1, 2
    span.status.code, span.status.message = 2, "failed"
    span.events.add(name="e", time_unix_nano=5, dropped_attributes_count=3)
    link = span.links.add(trace_id=b"l" * 16, span_id=b"k" * 8, trace_state="c=d", flags=1)
    link.attributes.add(key="k").value.int_value = 4
    assert export(shared, transport, request).ok
    [kept] = stored(shared)
    assert kept.trace_id == (b"t" * 16).hex()
    assert kept.span_id == span.span_id.hex()
    assert kept.parent_span_id == (b"p" * 8).hex()
    assert (kept.trace_state, kept.flags, kept.kind) == ("a=b", 0x101, 3)
    assert (kept.start_ns, kept.end_ns) == (span.start_time_unix_nano, span.end_time_unix_nano)
    assert (kept.dropped_attributes, kept.dropped_events) == (1, 2)
    assert (kept.status_code, kept.status_message) == (2, "failed")
    assert (kept.scope, kept.scope_version) == ("tracer", "1.2")
    assert kept.resource.attributes == {"service.name": "agent"}
    assert [(e.name, e.time_ns, e.dropped_attributes) for e in kept.events] == [("e", 5, 3)]
    assert [(k.trace_id, k.span_id, k.trace_state, k.flags, k.attributes) for k in kept.links] == [
        ((b"l" * 16).hex(), (b"k" * 8).hex(), "c=d", 1, {"k": 4})
    ]


@everywhere
def test_c14_an_empty_parent_is_a_root(shared: Any, transport: str) -> None:
    request = spans()
    one_span(request).parent_span_id = b""
    assert export(shared, transport, request).ok
    assert stored(shared)[0].parent_span_id is None


@everywhere
def test_c15_many_resources_and_scopes_come_in_one_request(shared: Any, transport: str) -> None:
    request = ExportTraceServiceRequest()
    for n in range(3):
        part = spans(2, name=f"r{n}-").resource_spans[0]
        part.resource.attributes.add(key="n").value.int_value = n
        request.resource_spans.add().CopyFrom(part)
    request.resource_spans[1].ClearField("resource")  # "no resource info is known"
    assert export(shared, transport, request).ok
    kept = [(span.name, span.resource.attributes.get("n")) for span in stored(shared)]
    assert kept == [("r0-0", 0), ("r0-1", 0), ("r1-0", None), ("r1-1", None), ("r2-0", 2), ("r2-1", 2)]


@everywhere
def test_c16_a_request_that_is_sent_twice_is_stored_once(collectors: Any, transport: str) -> None:
    from agentlightning.proto.dataset import open_dataset

    collector = collectors().start("--idle-timeout", "0.3")
    request = spans(3)
    assert export(collector, transport, request).ok
    assert export(collector, transport, request).ok
    assert export(collector, transport, request, gzip=True).ok
    import time

    deadline = time.monotonic() + 30
    while not (rows := open_dataset(collector.data).table("spans", columns=["span_id"])["span_id"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(rows) == 3


@everywhere
def test_c17_overload_asks_senders_to_wait(collectors: Any, transport: str) -> None:
    collector = collectors().start("--journal-limit-mib", "1")
    assert export(collector, transport, spans(size=1200 << 10)).ok
    answer = export(collector, transport, spans())
    assert answer.code == ("UNAVAILABLE" if transport == "grpc" else "503")
    assert answer.retryable
    assert answer.delay == 1
    assert export(collector, transport, b"").ok  # there is nothing in it to be stored
    assert len(collector.journal()) == 1


@everywhere
def test_c18_a_full_disk_asks_senders_to_wait_and_is_never_an_acknowledgement(
    collectors: Any, transport: str
) -> None:
    import resource
    import time

    import httpx

    collector = collectors().start()
    # The kernel refuses any file larger than this to the process: a segment of the journal is.
    limits = resource.prlimit(collector.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    answer = export(collector, transport, spans())
    assert answer.code == ("UNAVAILABLE" if transport == "grpc" else "503")
    assert answer.delay == 1
    assert collector.journal() == []
    ready = collector.http + "/readyz"
    assert httpx.get(ready, trust_env=False).status_code == 503
    resource.prlimit(collector.pid, resource.RLIMIT_FSIZE, limits)
    deadline = time.monotonic() + 20  # nobody sends: the collector itself finds out
    while httpx.get(ready, trust_env=False).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert export(collector, transport, spans()).ok


@everywhere
def test_c19_a_body_above_the_limit_is_refused_for_good(collectors: Any, transport: str) -> None:
    collector = collectors().start("--max-body-mib", "1")
    assert export(collector, transport, spans(size=(1 << 20) - 400)).ok
    for gzip in (False, True):  # compressed it is small: the limit holds after decompression too
        answer = export(collector, transport, spans(size=3 << 20), gzip=gzip)
        assert answer.code == ("RESOURCE_EXHAUSTED" if transport == "grpc" else "413")
        assert not answer.retryable
        assert answer.delay is None  # with it, gRPC's RESOURCE_EXHAUSTED would be tried again for ever
    assert len(collector.journal()) == 1


@everywhere
@pytest.mark.slow
def test_c20_a_body_of_many_mebibytes_is_taken(shared: Any, transport: str) -> None:
    """gRPC's own limit is 4 MiB; the collector's is 64."""
    assert export(shared, transport, spans(3, size=20 << 20)).ok
    assert len(stored(shared)) == 3


@everywhere
def test_c21_without_the_token_nothing_is_taken(collectors: Any, tmp_path: Any, transport: str) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    collector = collectors().start("--token-file", str(token))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        answer = export(collector, transport, spans(), headers=headers)
        assert answer.code == ("UNAUTHENTICATED" if transport == "grpc" else "401")
        assert not answer.retryable
    assert export(collector, transport, spans(), headers={"authorization": "Bearer secret"}).ok
    assert len(collector.journal()) == 1
