"""The exporter tells the truth about what arrived, and cannot hurt its host."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

import agentlightning.sdk as agl
from agentlightning.sdk._queue import Outcome, SpanQueue

WORK = """
import sys, time
import agentlightning.sdk as agl
agl.instrument(endpoint=sys.argv[1])
"""


def test_flush_is_true_when_all_arrived_and_only_then(traced):
    with agl.agent("a"):
        pass
    assert agl.flush()
    assert [span.name for span in traced.spans()] == ["invoke_agent a"]
    assert agl.flush(), "nothing new"
    traced.gate.clear()
    with agl.agent("b"):
        pass
    start = time.monotonic()
    assert not agl.flush(timeout=0.2), "the collector hangs"
    assert time.monotonic() - start < 2
    traced.gate.set()
    assert agl.flush()
    assert [span.name for span in traced.spans()] == ["invoke_agent a", "invoke_agent b"]


def test_spans_outlive_an_overloaded_collector(traced):
    traced.status = 503
    for number in range(5):
        agl.reward(number)
    traced.wait_for_attempts(2)
    assert not agl.flush(timeout=0.1)
    traced.status = 200
    assert agl.flush()
    values = [span.attributes["gen_ai.evaluation.score.value"] for span in traced.spans()]
    assert values == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_span_that_is_refused_does_not_take_its_neighbours_along(traced):
    traced.refuse = lambda span: span.attributes.get("gen_ai.evaluation.score.value") == 13.0
    before = agl.counters().get("spans_refused", 0)
    for number in range(40):
        agl.reward(number)
    assert not agl.flush(), "one was lost"
    assert sorted(span.attributes["gen_ai.evaluation.score.value"] for span in traced.spans()) == [
        float(number) for number in range(40) if number != 13
    ]
    assert agl.counters()["spans_refused"] == before + 1
    assert agl.flush(), "the loss has been told"


def test_rejections_of_a_partial_success_are_losses(traced):
    traced.reject = 1
    agl.reward(1)
    assert not agl.flush()
    traced.reject = 0
    assert agl.counters()["spans_rejected_by_collector"] >= 1


def test_a_span_that_cannot_be_encoded_is_lost_alone(traced):
    with trace.get_tracer("t").start_as_current_span("half a character: \ud83d"):
        agl.reward(1)
    assert not agl.flush()
    assert [span.name for span in traced.spans()] == ["gen_ai.evaluation.result"]


def test_headers_reach_the_collector(sink):
    agl.instrument(endpoint=sink.url, headers={"authorization": "Bearer collector-token"})
    try:
        agl.reward(1)
        assert agl.flush()
        assert sink.headers[0]["authorization"] == "Bearer collector-token"
    finally:
        agl.uninstrument()


class _Collector:
    """A sink in memory, for what needs no network: held until told."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.got: list[Any] = []

    def __call__(self, spans: Any) -> tuple[Outcome, int]:
        self.gate.wait(10)
        self.got.extend(spans)
        return Outcome.DELIVERED, 0

    def renew(self) -> None:
        pass


def span_of(size: int) -> ReadableSpan:
    return ReadableSpan("s", attributes={"text": "x" * size}, resource=SimpleNamespace())  # type: ignore[arg-type]


def test_a_full_queue_drops_chatter_and_keeps_what_training_needs():
    collector = _Collector()
    queue = SpanQueue(collector, at_start=lambda: None)
    start = time.monotonic()
    for _ in range(20_000):
        queue.put(span_of(10), vital=False)
    vital = [span_of(10) for _ in range(100)]
    for span in vital:
        queue.put(span, vital=True)
    assert queue.pending == 8192 + 100, "bounded"
    assert time.monotonic() - start < 5, "never waits"
    collector.gate.set()
    assert not queue.flush(10), "some were dropped"
    assert queue.flush(1)
    assert len(collector.got) == 8292
    assert all(any(span is got for got in collector.got) for span in vital[:3])


def test_bytes_are_bounded_too():
    collector = _Collector()
    queue = SpanQueue(collector, at_start=lambda: None)
    for _ in range(40):
        queue.put(span_of(1 << 20), vital=False)
    assert queue.pending < 40
    collector.gate.set()
    queue.close(10)


def test_a_dead_collector_costs_the_host_neither_error_nor_much_time_and_is_told_once(script):
    done = script(
        WORK
        + "for n in range(300):\n    with agl.agent('x'):\n        agl.reward(n)\nprint('host is well')\n",
        "http://127.0.0.1:9",
    )
    assert done.stdout == "host is well\n"
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "600 spans were left when the time to deliver them was over" in lines[0]
    assert "http://127.0.0.1:9/v1/traces" in lines[0]
    assert script.seconds < 15


def test_the_end_of_the_process_flushes_in_silence(script, sink):
    done = script(WORK + "agl.reward(7)\n", sink.url)
    assert (done.stdout, done.stderr) == ("", "")
    assert sink.one("gen_ai.evaluation.result").attributes["gen_ai.evaluation.score.value"] == 7.0


@pytest.mark.parametrize("start", ["fork", "multiprocessing", "spawn"])
def test_children_send_their_own_spans_and_no_others(script, sink, start):
    by_fork = """
agl.reward(1, "parent")
import os
pid = os.fork()
if pid == 0:
    agl.reward(2, "child")
    sys.exit(0)
os.waitpid(pid, 0)
agl.reward(3, "parent")
"""
    by_multiprocessing = """
import multiprocessing
def child():
    agl.instrument(endpoint=sys.argv[1])
    agl.reward(2, "child")
if __name__ == "__main__":
    agl.reward(1, "parent")
    process = multiprocessing.get_context("%s").Process(target=child)
    process.start()
    process.join()
    agl.reward(3, "parent")
"""
    how = "spawn" if start == "spawn" else "fork"
    done = script(WORK + (by_fork if start == "fork" else by_multiprocessing % how), sink.url)
    assert done.stderr == ""
    rewards = [
        (span.attributes["gen_ai.evaluation.name"], span.attributes["gen_ai.evaluation.score.value"])
        for span in sink.named("gen_ai.evaluation.result")
    ]
    assert sorted(rewards) == [("child", 2.0), ("parent", 1.0), ("parent", 3.0)]


def test_a_child_takes_identity_and_collector_from_its_own_environment(script, sink):
    done = script(
        """
import os, sys
import agentlightning.sdk as agl
agl.instrument(endpoint="http://127.0.0.1:9")   # a fork server imports the agent, which instruments
pid = os.fork()
if pid == 0:
    os.environ["OTEL_RESOURCE_ATTRIBUTES"] = "agentlightning.rollout.id=ro-7,agentlightning.attempt=2"
    agl.instrument(endpoint=sys.argv[1])
    agl.reward(1)
    sys.exit(0)
os.waitpid(pid, 0)
""",
        sink.url,
    )
    assert done.stderr == ""
    attributes = sink.one("gen_ai.evaluation.result").attributes
    assert attributes["agentlightning.rollout.id"] == "ro-7"
    assert attributes["agentlightning.attempt"] == 2
