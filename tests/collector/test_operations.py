"""What an operator sees: health, readiness, metrics, status, logs, and how the collector stops."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

PROTOBUF = {"content-type": "application/x-protobuf"}
CLIENT = httpx.Client(trust_env=False)
STATUS = [
    sys.executable,
    "-c",
    "import sys; from agentlightning.collector.cli import main; sys.exit(main())",
    "status",
]


def spans(*span_ids: bytes, size: int = 0) -> bytes:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for span_id in span_ids or (os.urandom(8),):
        span = scope.spans.add(trace_id=b"t" * 16, span_id=span_id, parent_span_id=b"p" * 8, name="s")
        span.attributes.add(key="filler").value.string_value = "x" * size
    return request.SerializeToString()


def post(collector: Any, body: bytes) -> httpx.Response:
    return CLIENT.post(collector.http + "/v1/traces", content=body, headers=PROTOBUF, timeout=30)


def metrics(collector: Any) -> dict[str, float]:
    """By name and labels; the text must be what Prometheus reads."""
    answer = CLIENT.get(collector.http + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            label = "".join(f"{{{value}}}" for value in sample.labels.values())
            found[sample.name.removeprefix("agentlightning_collector_") + label] = sample.value
    return found


def status(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STATUS, *options], capture_output=True, text=True, timeout=30)


def until(condition: Callable[[], Any], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)


def test_metrics_count_what_came_and_what_was_refused(collectors: Callable[..., Any]) -> None:
    collector = collectors().start("--idle-timeout", "1")
    body = spans(b"a" * 8, b"b" * 8)
    assert post(collector, body).status_code == 200
    assert post(collector, body).status_code == 200  # a duplicate
    assert post(collector, spans(bytes(8))).status_code == 200  # an id that names nothing
    assert post(collector, b"\xff").status_code == 400
    found = metrics(collector)
    assert found["accepted_total{requests}"] == 3
    assert found["accepted_total{spans}"] == 4
    assert found["refused_total{malformed}"] == 1
    assert found["refused_total{invalid_id}"] == 1
    assert found["ack_seconds_count"] == 3
    assert found["ack_seconds_bucket{+Inf}"] == 3
    assert found["journal_unconverted_bytes"] > 0
    assert found["ready"] == 1
    # The attempt is written once it is idle; nothing new comes, and the figures move all the same.
    until(lambda: metrics(collector).get("sealed_attempts") == 1, "the attempt")
    found = metrics(collector)
    assert found["fidelity_total{duplicate}"] == 2
    assert found["fidelity_total{truncated}"] == 1
    assert post(collector, spans(b"c" * 8)).status_code == 200
    until(lambda: metrics(collector).get("fidelity_total{late}") == 1, "the late span")
    until(lambda: metrics(collector)["open_attempts"] == 0, "the end of the attempt")
    assert metrics(collector)["converter_silent_seconds"] < 10


def test_idle_the_converter_is_still_heard(collector: Any) -> None:
    until(lambda: metrics(collector)["converter_silent_seconds"] < 1, "a word of the converter")
    pid = collector.converter_pid()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: metrics(collector)["converter_silent_seconds"] > 2, "the silence")
    os.kill(pid, signal.SIGCONT)
    until(lambda: metrics(collector)["converter_silent_seconds"] < 1.5, "the converter again")
    os.kill(pid, signal.SIGKILL)
    until(lambda: metrics(collector)["converter_restarts_total"] == 1, "the restart")
    until(lambda: metrics(collector)["converter_up"] == 1, "the new converter")


def test_status_says_how_it_is(collectors: Callable[..., Any], tmp_path: Path) -> None:
    collector = collectors().start("--journal-limit-mib", "1")
    assert post(collector, spans()).status_code == 200
    shown = status("--url", collector.http)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"state +ready", shown.stdout)
    assert "1 requests, 1 spans" in shown.stdout
    assert post(collector, spans(size=1100 << 10)).status_code == 200
    assert CLIENT.get(collector.http + "/readyz").status_code == 503
    assert CLIENT.get(collector.http + "/healthz").status_code == 200
    shown = status("--url", collector.http, "--json")
    assert shown.returncode == 1
    document = json.loads(shown.stdout)
    assert "wait for conversion" in document["message"]
    assert document["accepted"]["spans"] == 2
    assert document["ack_seconds"]["p99"] > 0
    assert document["forward"] is None
    collector.stop()
    for url in (collector.http, "nonsense"):
        shown = status("--url", url)
        assert shown.returncode == 2
        assert shown.stderr.count("\n") == 1


def test_logs_are_json_lines_when_asked_for(collectors: Callable[..., Any]) -> None:
    collector = collectors().start("--log-format", "json", "--idle-timeout", "0.2")
    assert post(collector, spans()).status_code == 200
    until(lambda: "idle" in collector.log.read_text(), "the converter's warning")
    assert collector.stop() == 0
    lines = [json.loads(line) for line in collector.log.read_text().splitlines()]
    assert {"time", "level", "component", "logger", "message"} <= set(lines[0])
    assert {line["component"] for line in lines} == {"collector", "converter"}
    assert any("OTLP/HTTP at" in line["message"] for line in lines)


def test_sigterm_answers_what_is_here_and_loses_nothing(collectors: Callable[..., Any]) -> None:
    """Senders that never pause: whatever was answered 200 before the end is in the journal or the data set."""
    from agentlightning.proto.dataset import open_dataset

    collector = collectors().start("--idle-timeout", "0.5")
    acknowledged: list[str] = []
    odd: list[Any] = []
    begun = threading.Barrier(5)

    def work() -> None:
        client = httpx.Client(trust_env=False)
        begun.wait()
        while True:
            span_id = os.urandom(8)
            try:
                answer = client.post(collector.http + "/v1/traces", content=spans(span_id), headers=PROTOBUF)
            except httpx.TransportError:
                return
            if answer.status_code == 200:
                acknowledged.append(span_id.hex())
            elif answer.status_code != 503:
                odd.append(answer.status_code)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    until(lambda: len(acknowledged) > 50, "the load")
    assert collector.stop() == 0
    for thread in threads:
        thread.join()
    assert odd == []
    collector.start("--idle-timeout", "0.5")  # and what was not converted comes now

    def stored() -> list[str]:
        return open_dataset(collector.data).table("spans", columns=["span_id"])["span_id"].to_pylist()

    until(lambda: len(stored()) >= len(acknowledged), "everything")
    assert set(acknowledged) <= set(stored())
    assert len(stored()) == len(set(stored()))


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/status"])
def test_pages_are_for_reading(shared: Any, path: str) -> None:
    assert CLIENT.post(shared.http + path, content=b"x").status_code == 405
    head = CLIENT.head(shared.http + path)
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 0
