"""Receiver, journal, converter and transition service together: what a trainer relies on."""

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pyarrow as pa
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agentlightning.proto import ids
from agentlightning.proto import transitions_pb2 as pb
from agentlightning.proto.dataset import open_dataset
from agentlightning.proto.packed import pack_floats, pack_ids
from agentlightning.proto.transitions_pb2_grpc import TransitionsStub

Key = tuple[str, int]
CLIENT = httpx.Client(trust_env=False)


def attributes(values: dict[str, Any]) -> Iterator[KeyValue]:
    for key, value in values.items():
        match value:
            case str():
                yield KeyValue(key=key, value=AnyValue(string_value=value))
            case int():
                yield KeyValue(key=key, value=AnyValue(int_value=value))
            case bytes():
                yield KeyValue(key=key, value=AnyValue(bytes_value=value))


def request_of(rollout_id: str, attempt: int, spans: Iterable[dict[str, Any]]) -> bytes:
    """An export request as the gateway sends it."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.extend(
        attributes(
            {
                "agentlightning.run.id": "run",
                "agentlightning.rollout.id": rollout_id,
                "agentlightning.attempt": attempt,
            }
        )
    )
    scope = resource.scope_spans.add()
    scope.scope.name = "agentlightning.gateway"
    for span in spans:
        scope.spans.add(
            trace_id=bytes.fromhex(ids.derived_trace_id(rollout_id, attempt)),
            span_id=bytes.fromhex(span["span_id"]),
            parent_span_id=bytes.fromhex(span.get("parent", "")),
            name=span["name"],
            kind=3,
            start_time_unix_nano=span["start"],
            end_time_unix_nano=span["start"] + 1_000_000,
            attributes=attributes(span["attributes"]),
        )
    return request.SerializeToString()


def llm_span(rollout_id: str, attempt: int, call: int) -> dict[str, Any]:
    return {
        "name": "chat policy",
        "span_id": ids.derived_span_id("call", rollout_id, str(attempt), str(call)),
        "parent": ids.rollout_span_id(rollout_id, attempt),
        "start": 1_700_000_000_000_000_000 + call * 1_000_000_000,
        "attributes": {
            "agentlightning.call.id": ids.call_id(rollout_id, attempt, str(call)),
            "agentlightning.source": "gateway",
            "agentlightning.policy": "policy",
            "agentlightning.prompt.token_ids": pack_ids([1, 2, call]),
            "agentlightning.response.token_ids": pack_ids([3, call]),
            "agentlightning.response.logprobs": pack_floats([-0.5, -0.25]),
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "policy",
        },
    }


def rollout_span(rollout_id: str, attempt: int, calls: int) -> dict[str, Any]:
    return {
        "name": "agentlightning.rollout",
        "span_id": ids.rollout_span_id(rollout_id, attempt),
        "start": 1_700_000_000_000_000_000,
        "attributes": {
            "agentlightning.rollout.state": "succeeded",
            "agentlightning.calls.expected": calls,
            "agentlightning.task.input": "{}",
        },
    }


def send(collector: Any, body: bytes) -> None:
    answer = CLIENT.post(
        collector.http + "/v1/traces",
        content=body,
        headers={"content-type": "application/x-protobuf"},
        timeout=30,
    )
    assert answer.status_code == 200


def whole(rollout_id: str, calls: int, attempt: int = 0) -> bytes:
    spans = [llm_span(rollout_id, attempt, n) for n in range(calls)]
    return request_of(rollout_id, attempt, [*spans, rollout_span(rollout_id, attempt, calls)])


def seal(
    collector: Any, attempts: dict[Key, int | None], timeout_s: float = 20
) -> tuple[dict[Key, pb.SealedAttempt], dict[Key, pb.IncompleteAttempt]]:
    request = pb.SealRequest(
        attempts=[
            pb.Attempt(rollout_id=rollout_id, attempt=attempt, calls_expected=expected)
            for (rollout_id, attempt), expected in attempts.items()
        ],
        timeout_s=timeout_s,
    )
    with grpc.insecure_channel(collector.grpc) as channel:
        answer = TransitionsStub(channel).Seal(request, timeout=timeout_s + 20)
    return (
        {(a.rollout_id, a.attempt): a for a in answer.sealed},
        {(a.rollout_id, a.attempt): a for a in answer.incomplete},
    )


def fetch(collector: Any, **request: Any) -> pa.Table:
    with grpc.insecure_channel(collector.grpc) as channel:
        parts = [
            pa.ipc.open_stream(part.ipc_stream).read_all()
            for part in TransitionsStub(channel).Fetch(pb.FetchRequest(**request), timeout=30)
        ]
    return pa.concat_tables(parts)


def test_a_sealed_attempt_is_fetched_as_it_was_sent(collector: Any) -> None:
    send(collector, whole("r1", 3))
    send(collector, whole("r2", 1))
    sealed, incomplete = seal(collector, {("r1", 0): 3, ("r2", 0): None})
    assert not incomplete
    assert {key: entry.calls_stored for key, entry in sealed.items()} == {("r1", 0): 3, ("r2", 0): 1}
    assert all(entry.manifest > 0 and entry.run_id == "run" for entry in sealed.values())

    rows = fetch(collector, table="transitions", attempts=[pb.Attempt(rollout_id="r1")])
    assert rows.column("prompt_token_ids").to_pylist() == [[1, 2, 0], [1, 2, 1], [1, 2, 2]]
    assert rows.column("response_token_ids").to_pylist() == [[3, 0], [3, 1], [3, 2]]
    assert rows.column("response_logprobs").to_pylist() == [[-0.5, -0.25]] * 3
    assert rows.column("done").to_pylist() == [False, False, True]
    everything = fetch(collector, table="transitions", columns=["rollout_id", "seq"])
    assert everything.column_names == ["rollout_id", "seq"]
    assert sorted(everything.column("rollout_id").to_pylist()) == ["r1", "r1", "r1", "r2"]
    assert fetch(collector, table="rollouts", run_id="run").column("state").to_pylist() == ["succeeded"] * 2
    assert len(fetch(collector, table="transitions", run_id="another")) == 0
    assert open_dataset(collector.data).table("transitions").num_rows == 4


def test_sealing_again_answers_at_once_and_changes_nothing(collector: Any) -> None:
    send(collector, whole("r1", 2))
    first, _ = seal(collector, {("r1", 0): 2})
    began = time.monotonic()
    again, _ = seal(collector, {("r1", 0): 2}, timeout_s=0)
    assert time.monotonic() - began < 1
    assert again == first
    assert len(list((collector.data / "transitions").iterdir())) == 1


def test_a_seal_with_missing_calls_says_so_and_is_fulfilled_when_they_come(collector: Any) -> None:
    spans = [llm_span("r1", 0, n) for n in range(3)]
    send(collector, request_of("r1", 0, [*spans[:2], rollout_span("r1", 0, 3)]))
    for _ in range(20):  # the converter may still be starting
        sealed, incomplete = seal(collector, {("r1", 0): 3}, timeout_s=0.5)
        assert not sealed
        missing = incomplete["r1", 0]
        if missing.calls_stored:
            break
    assert (missing.calls_expected, missing.calls_stored) == (3, 2)
    assert missing.reason

    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(seal(collector, {("r1", 0): 3})))
    waiting.start()
    send(collector, request_of("r1", 0, spans[2:]))
    waiting.join(20)
    assert answers[0][0]["r1", 0].calls_stored == 3
    assert len(fetch(collector, table="transitions")) == 3


def test_what_is_there_can_be_sealed_when_the_rest_never_comes(collector: Any) -> None:
    send(collector, request_of("r1", 0, [llm_span("r1", 0, 0), rollout_span("r1", 0, 5)]))
    _, incomplete = seal(collector, {("r1", 0): 5}, timeout_s=0.5)
    assert incomplete
    sealed, _ = seal(collector, {("r1", 0): None})
    assert sealed["r1", 0].calls_stored == 1
    _, incomplete = seal(collector, {("r1", 0): 5}, timeout_s=0.5)
    assert incomplete["r1", 0].calls_stored == 1


def test_an_attempt_without_any_call_can_be_sealed(collector: Any) -> None:
    send(collector, request_of("r1", 0, [rollout_span("r1", 0, 0)]))
    sealed, _ = seal(collector, {("r1", 0): 0, ("never-seen", 0): 0})
    assert {key: entry.calls_stored for key, entry in sealed.items()} == {("r1", 0): 0, ("never-seen", 0): 0}


def test_a_late_span_makes_a_new_generation(collector: Any) -> None:
    send(collector, whole("r1", 1))
    first, _ = seal(collector, {("r1", 0): 1})
    send(collector, request_of("r1", 0, [llm_span("r1", 0, 1)]))
    second, _ = seal(collector, {("r1", 0): 2})
    assert second["r1", 0].generation == first["r1", 0].generation + 1
    assert len(fetch(collector, table="transitions")) == 2
    with grpc.insecure_channel(collector.grpc) as channel:
        counters = TransitionsStub(channel).Stats(pb.StatsRequest()).counters
    assert counters["late"] >= 1
    assert counters["accepted.spans"] == 3


def test_follow_gives_sealed_attempts_in_order_and_goes_on_from_a_cursor(collector: Any) -> None:
    with grpc.insecure_channel(collector.grpc) as channel:
        stub = TransitionsStub(channel)
        stream = stub.Follow(pb.FollowRequest(cursor=0), timeout=60)
        got = []
        for n in range(3):
            send(collector, whole(f"r{n}", 1))
            seal(collector, {(f"r{n}", 0): 1})
            got.append(next(stream))
        stream.cancel()
        assert [entry.rollout_id for entry in got] == ["r0", "r1", "r2"]
        assert [entry.manifest for entry in got] == sorted({entry.manifest for entry in got})
        later = stub.Follow(pb.FollowRequest(cursor=got[0].cursor, run_id="run"), timeout=60)
        assert [next(later).rollout_id, next(later).rollout_id] == ["r1", "r2"]
        later.cancel()


def test_ten_thousand_rollouts_are_followed_and_fetched_by_a_client_that_breaks_off(collector: Any) -> None:
    count, slice_ = 10_000, 500
    names = [f"r{n:05d}" for n in range(count)]
    for first in range(0, count, slice_):
        some = names[first : first + slice_]
        request = ExportTraceServiceRequest()
        for name in some:
            request.MergeFromString(request_of(name, 0, [llm_span(name, 0, 0), rollout_span(name, 0, 1)]))
        send(collector, request.SerializeToString())
        sealed, incomplete = seal(collector, {(name, 0): 1 for name in some}, timeout_s=60)
        assert (len(sealed), len(incomplete)) == (slice_, 0)

    followed: list[str] = []
    cursor = 0
    draw = random.Random(1)
    while len(followed) < count:  # now and then the connection breaks, in the middle of a commit too
        with grpc.insecure_channel(collector.grpc) as channel:
            stream = TransitionsStub(channel).Follow(pb.FollowRequest(cursor=cursor), timeout=60)
            for _ in range(min(count - len(followed), draw.randrange(1, 2500))):
                entry = next(stream)
                followed.append(entry.rollout_id)
                cursor = entry.cursor
            stream.cancel()
    assert followed == names

    fetched: set[str] = set()
    with grpc.insecure_channel(collector.grpc) as channel:
        stub = TransitionsStub(channel)
        broken = stub.Fetch(pb.FetchRequest(table="transitions"), timeout=60)
        part = pa.ipc.open_stream(next(broken).ipc_stream).read_all()
        assert 0 < len(part) < count
        broken.cancel()
        for first in range(0, count, 2500):  # and goes on with what it has not got
            wanted = [pb.Attempt(rollout_id=name) for name in names[first : first + 2500]]
            rows = fetch(collector, table="transitions", attempts=wanted, columns=["rollout_id"])
            assert len(rows) == 2500
            fetched.update(rows.column("rollout_id").to_pylist())
    assert fetched == set(names)
    status = Path(f"/proc/{collector.pid}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) < 400 << 10  # KiB


def test_wrong_requests_are_one_sentence(collector: Any) -> None:
    with grpc.insecure_channel(collector.grpc) as channel:
        stub = TransitionsStub(channel)
        for request, hint in (
            (pb.FetchRequest(table="transition"), "transitions, rollouts"),
            (pb.FetchRequest(table="rollouts", columns=["rewrd"]), "'rewrd'"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Fetch(request, timeout=10))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert hint in (caught.value.details() or "")
        with pytest.raises(grpc.RpcError) as caught:
            stub.Seal(pb.SealRequest(attempts=[pb.Attempt()]), timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_large_tables_come_in_batches_that_any_client_takes(collector: Any) -> None:
    filler = "x" * 300_000
    spans = []
    for n in range(20):
        span = llm_span("r1", 0, n)
        span["attributes"]["agentlightning.request"] = json.dumps({"messages": [filler]})
        spans.append(span)
    send(collector, request_of("r1", 0, [*spans, rollout_span("r1", 0, 20)]))
    seal(collector, {("r1", 0): 20})
    rows = fetch(collector, table="transitions")  # gRPC's default limit is 4 MiB a message
    assert sum(len(request) for request in rows.column("request").to_pylist()) > 20 * 300_000


def test_a_step_of_64_attempts_is_sealed_quickly(collector: Any) -> None:
    send(collector, whole("warm", 1))
    seal(collector, {("warm", 0): 1})
    seconds = []
    for step in range(3):
        keys = [f"step{step}-{n}" for n in range(64)]
        for key in keys:
            send(collector, whole(key, 2))
        began = time.monotonic()
        sealed, _ = seal(collector, {(key, 0): 2 for key in keys})
        seconds.append(time.monotonic() - began)
        assert len(sealed) == 64
    # 0.15 s is the aim on an idle machine; a crowded one must not fail the tests.
    assert min(seconds) < 2.0, seconds


@pytest.mark.parametrize("victim", ["receiver", "converter", "both"])
def test_acknowledged_spans_survive_kill_9_exactly_once(collectors: Callable[..., Any], victim: str) -> None:
    draw = random.Random(victim)
    collector = collectors().start()
    acknowledged: dict[str, int] = {}
    for turn in range(2):
        bodies = []
        for n in range(12):
            rollout_id = f"r{turn}-{n}"
            spans = [llm_span(rollout_id, 0, call) for call in range(3)]
            spans.append(rollout_span(rollout_id, 0, 3))
            # In two parts, in any order, some of them twice.
            bodies += [(rollout_id, request_of(rollout_id, 0, part)) for part in (spans[:2], spans[2:])]
            if draw.random() < 0.3:
                bodies.append((rollout_id, request_of(rollout_id, 0, spans[1:])))
        draw.shuffle(bodies)
        die_at = draw.randrange(len(bodies) // 2, len(bodies))
        for index, (rollout_id, body) in enumerate(bodies):
            if index == die_at:
                # A seal in flight, so that the converter is at work when it dies.
                with grpc.insecure_channel(collector.grpc) as channel:
                    known = [pb.Attempt(rollout_id=key, attempt=0, calls_expected=3) for key in acknowledged]
                    TransitionsStub(channel).Seal.future(pb.SealRequest(attempts=known, timeout_s=5))
                    time.sleep(draw.random() * 0.1)
                if victim in ("converter", "both"):
                    os.kill(collector.converter_pid(), 9)
                if victim in ("receiver", "both"):
                    collector.kill()
                    collector.start()
            send(collector, body)
            acknowledged[rollout_id] = 3
        sealed, incomplete = seal(collector, {(key, 0): n for key, n in acknowledged.items()})
        assert not incomplete
        assert len(sealed) == len(acknowledged)
    rows = open_dataset(collector.data).table("transitions")
    expected = sorted((key, ids.call_id(key, 0, str(n))) for key in acknowledged for n in range(3))
    got = sorted(zip(rows.column("rollout_id").to_pylist(), rows.column("call_id").to_pylist(), strict=True))
    assert got == expected
    assert collector.stop() == 0


def test_sigterm_lets_the_converter_finish_and_exits_0(collector: Any) -> None:
    send(collector, whole("r1", 2))
    with grpc.insecure_channel(collector.grpc) as channel:
        TransitionsStub(channel).Seal(
            pb.SealRequest(attempts=[pb.Attempt(rollout_id="r1", calls_expected=2)], timeout_s=0), timeout=10
        )
    converter = collector.converter_pid()
    assert collector.stop() == 0
    assert not os.path.exists(f"/proc/{converter}")
    assert open_dataset(collector.data).attempts["r1", 0].calls_stored == 2
    collector.start()
    assert seal(collector, {("r1", 0): 2}, timeout_s=0)[0]["r1", 0].generation == 0


def test_the_converter_does_not_outlive_a_killed_receiver(collector: Any) -> None:
    converter = collector.converter_pid()
    collector.kill()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{converter}"):
        assert time.monotonic() < deadline, "the converter is an orphan"
        time.sleep(0.02)
