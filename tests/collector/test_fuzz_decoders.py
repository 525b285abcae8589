"""Decoders against anything: no input crashes or stalls them, and what is acknowledged can be read.

A short, deterministic run; `make fuzz` draws for minutes, and differently each time.
"""

import contextlib
import json
import os
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue

from agentlightning.collector.assemble import assemble
from agentlightning.collector.forward_bodies import portable
from agentlightning.collector.intake import Refused, gunzip
from agentlightning.collector.open_attempts import decode
from agentlightning.collector.records import Kind, Record
from agentlightning.collector.tables import tables
from agentlightning.collector.tokens import pack_array
from agentlightning.collector.wire import (
    Malformed,
    check_logs,
    check_logs_json,
    check_traces,
    check_traces_json,
)
from agentlightning.proto.packed import unpack_floats, unpack_ids

LONG = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def examples(count: int) -> settings:
    return settings(
        max_examples=LONG or count,
        derandomize=not LONG,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


short, dear = examples(100), examples(25)
CHECKS: dict[Kind, Any] = {
    Kind.TRACES: check_traces,
    Kind.TRACES_JSON: check_traces_json,
    Kind.LOGS: check_logs,
    Kind.LOGS_JSON: check_logs_json,
}
SECONDS = 20.0
"""No single small input may need so long, on the slowest machine."""

NAMES = [
    "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.input.messages", "gen_ai.output.messages",
    "gen_ai.prompt", "gen_ai.completion.0.content", "gen_ai.prompt.0.role", "gen_ai.usage.input_tokens",
    "gen_ai.evaluation.name", "gen_ai.evaluation.score.value", "gen_ai.response.finish_reasons",
    "openinference.span.kind", "llm.input_messages.0.message.content", "llm.token_count.prompt",
    "input.value", "output.value", "llm.invocation_parameters", "traceloop.span.kind",
    "traceloop.entity.input", "langsmith.span.kind", "langsmith.trace.name", "recipient_agent_type",
    "messaging.operation", "agentlightning.rollout.id", "agentlightning.attempt", "agentlightning.call.id",
    "agentlightning.prompt.token_ids", "agentlightning.response.token_ids", "agentlightning.request",
    "agentlightning.response.logprobs", "agentlightning.response", "agentlightning.model.versions",
    "agentlightning.choice", "agentlightning.rollout.state", "agentlightning.calls.expected", "event.name", "",
]  # fmt: skip
"""Attributes that some dialect reads."""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
texts = st.text(max_size=12) | json_values.map(lambda value: json.dumps(value))


def any_values() -> st.SearchStrategy[AnyValue]:
    leaves = st.one_of(
        st.just(AnyValue()),
        texts.map(lambda v: AnyValue(string_value=v.encode(errors="replace").decode())),
        st.booleans().map(lambda v: AnyValue(bool_value=v)),
        st.integers(-(2**63), 2**63 - 1).map(lambda v: AnyValue(int_value=v)),
        st.floats().map(lambda v: AnyValue(double_value=v)),
        st.binary(max_size=13).map(lambda v: AnyValue(bytes_value=v)),
    )

    def nest(inner: st.SearchStrategy[AnyValue]) -> st.SearchStrategy[AnyValue]:
        return st.lists(inner, max_size=4).map(lambda v: AnyValue(array_value=ArrayValue(values=v)))

    return st.recursive(leaves, nest, max_leaves=6)


def draw_attributes(draw: Any, target: Any) -> None:
    for _ in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(NAMES))
        target.add(key=name).value.CopyFrom(draw(any_values()))


@st.composite
def traces(draw: Any) -> ExportTraceServiceRequest:
    """Requests that look like what the dialects look for, and mean nothing."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    draw_attributes(draw, resource.resource.attributes)
    scope = resource.scope_spans.add()
    scope.scope.name = draw(st.sampled_from(["", "openinference.x", "agentlightning.gateway", "autogen"]))
    for _ in range(draw(st.integers(0, 4))):
        span = scope.spans.add(
            trace_id=draw(st.sampled_from([b"t" * 16, b"u" * 16, bytes(16), b"x"])),
            span_id=draw(st.sampled_from([b"1" * 8, b"2" * 8, b"3" * 8, bytes(8)])),
            parent_span_id=draw(st.sampled_from([b"", b"1" * 8, b"2" * 8, b"4" * 8])),
            name=draw(
                st.sampled_from(["chat m", "agentlightning.rollout", "ChatOpenAI", "autogen process", ""])
            ),
            start_time_unix_nano=draw(st.integers(0, 2**64 - 1)),
            end_time_unix_nano=draw(st.integers(0, 2**64 - 1)),
            kind=draw(st.integers(0, 5)),
        )
        draw_attributes(draw, span.attributes)
        for _ in range(draw(st.integers(0, 2))):
            event = span.events.add(
                name=draw(st.sampled_from(["gen_ai.choice", "exception", "gen_ai.evaluation.result"]))
            )
            draw_attributes(draw, event.attributes)
    return request


def read(kind: Kind, body: bytes) -> list[Any]:
    """As the converter does, to the tables."""
    spans = decode(Record(0, 1, 0, 1, kind, body), Counter())
    groups: dict[tuple[str, int], list[Any]] = {}
    for span in spans:
        groups.setdefault(span.key, []).append(span)
    tables([assemble(*key, group) for key, group in groups.items() if key[0]])
    portable(kind, body, Counter())
    return spans


def accepted(kind: Kind, body: bytes) -> bool:
    """What is accepted must be read, in a short time; what is not must be refused with a sentence."""
    began = time.monotonic()
    refusal = ""
    try:
        checked = CHECKS[kind](body)
    except Malformed as error:
        refusal = str(error)
    if not refusal:
        assert len(read(kind, body)) == checked.items - checked.rejected
    assert time.monotonic() - began < SECONDS
    assert not refusal or len(refusal) > 10
    return not refusal


def mutate(draw: Any, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(draw(st.integers(0, 6))):
        if not changed:
            break
        at = draw(st.integers(0, len(changed) - 1))
        match draw(st.integers(0, 2)):
            case 0:
                changed[at] = draw(st.integers(0, 255))
            case 1:
                del changed[at : at + draw(st.integers(1, 9))]
            case _:
                changed[at:at] = draw(st.binary(min_size=1, max_size=5))
    return bytes(changed)


@short
@given(st.sampled_from(list(CHECKS)), st.binary(max_size=200))
def test_any_bytes(kind: Kind, body: bytes) -> None:
    accepted(kind, body)


@dear
@given(traces())
def test_any_attributes_of_every_dialect(request: ExportTraceServiceRequest) -> None:
    assert accepted(Kind.TRACES, request.SerializeToString())


@dear
@given(st.data())
def test_damaged_protobuf(data: Any) -> None:
    request = data.draw(traces())
    accepted(Kind.TRACES, mutate(data.draw, request.SerializeToString()))
    logs = ExportLogsServiceRequest()
    record = logs.resource_logs.add().scope_logs.add().log_records.add(time_unix_nano=1)
    record.body.CopyFrom(data.draw(any_values()))
    draw_attributes(data.draw, record.attributes)
    accepted(Kind.LOGS, mutate(data.draw, logs.SerializeToString()))


@dear
@given(st.data())
def test_damaged_json(data: Any) -> None:
    from otlp_clients import to_json

    accepted(Kind.TRACES_JSON, mutate(data.draw, to_json(data.draw(traces()))))


@short
@given(st.sampled_from([Kind.TRACES_JSON, Kind.LOGS_JSON]), st.data())
def test_json_of_a_wrong_shape(kind: Kind, data: Any) -> None:
    """Every place of a document may hold anything."""
    signal, items = ("Spans", "spans") if kind == Kind.TRACES_JSON else ("Logs", "logRecords")
    attribute = {"key": "k", "value": data.draw(json_values)}
    item: dict[str, Any] = {"traceId": "ab" * 16, "spanId": "cd" * 8, "attributes": [attribute]}
    fields = [
        "traceId",
        "name",
        "kind",
        "startTimeUnixNano",
        "attributes",
        "events",
        "links",
        "status",
        "body",
    ]
    for name in data.draw(st.lists(st.sampled_from(fields), max_size=4)):
        item[name] = data.draw(json_values)
    resource = data.draw(st.one_of(json_values, st.just({"attributes": [attribute]})))
    document = {f"resource{signal}": [{"resource": resource, f"scope{signal}": [{items: [item]}]}]}
    accepted(kind, json.dumps(document).encode(errors="replace"))


@short
@given(
    st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 300_000) | st.floats(width=32), max_size=40),
    st.booleans(),
)
def test_the_vectorised_decoder_is_the_plain_one(values: list[Any], floats: bool) -> None:
    array = ArrayValue()
    for value in values:
        if isinstance(value, float):
            array.values.add(double_value=value)
        else:
            array.values.add(int_value=min(max(value, -(2**63)), 2**63 - 1))
    raw = array.SerializeToString()
    packed = pack_array(raw, floats=floats)
    plain = [getattr(v, v.WhichOneof("value")) for v in ArrayValue.FromString(raw).values]
    kind = float if floats else int
    if packed is None:  # it leaves to the plain one what it does not know
        fits = all(type(v) is kind and (floats or 0 <= v < 2**31) for v in plain)
        assert not plain or not fits
        return
    found = unpack_floats(packed) if floats else unpack_ids(packed)
    expected = np.asarray(plain, np.float32 if floats else np.int64)
    np.testing.assert_array_equal(np.asarray(found, expected.dtype), expected)


@short
@given(st.binary(max_size=120), st.booleans())
def test_the_vectorised_decoder_takes_any_bytes(raw: bytes, floats: bool) -> None:
    began = time.monotonic()
    pack_array(raw, floats=floats)
    assert time.monotonic() - began < SECONDS


@short
@given(st.binary(max_size=200), st.booleans())
def test_gzip_of_any_bytes(data: bytes, valid: bool) -> None:
    import gzip

    packed = gzip.compress(data) if valid else b"\x1f\x8b\x08" + data
    if valid and len(data) <= 100:
        assert gunzip(packed, 100) == data
        return
    with contextlib.suppress(Refused):  # and nothing else
        assert len(gunzip(packed, 100)) <= 100


@pytest.mark.parametrize("kind", [Kind.TRACES_JSON, Kind.LOGS_JSON])
def test_depth_and_size_do_not_stall(kind: Kind) -> None:
    signal = "Spans" if kind == Kind.TRACES_JSON else "Logs"
    for body in (
        b'{"resource%s":' % signal.encode() + b"[" * 50_000,
        b'{"resource%s":[' % signal.encode() + b"{}," * 50_000 + b"{}]}",
        b'{"x":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"resource%s":[{"scope%s":[' % (signal.encode(), signal.encode()) + b"1" * 400_000 + b"]}]}",
    ):
        accepted(kind, body)
