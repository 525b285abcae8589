"""The span encoder against the protobuf library."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from agentlightning.gateway.otlp import encode_request, encode_span

INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES = st.one_of(
    st.text(max_size=300),
    st.booleans(),
    INT64,
    st.floats(allow_nan=False),
    st.binary(max_size=300),
    st.lists(st.text(max_size=20), max_size=3),
    st.lists(INT64, max_size=3),
)


def value_of(value: Any) -> AnyValue:
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[value_of(item) for item in value]))
    kinds = {
        str: "string_value",
        bool: "bool_value",
        int: "int_value",
        float: "double_value",
        bytes: "bytes_value",
    }
    return AnyValue(**{kinds[type(value)]: value})


@given(
    name=st.text(max_size=200),
    parent=st.sampled_from([None, "ab" * 8]),
    start=st.integers(0, 2**63),
    took=st.integers(-5, 2**40),
    attributes=st.dictionaries(st.text(min_size=1, max_size=150), VALUES, max_size=6),
    error=st.sampled_from([None, "", "it broke", "é" * 100]),
)
def test_an_encoded_span_is_what_the_library_reads_as_that_span(name, parent, start, took, attributes, error):
    made = encode_span(
        trace_id="0f" * 16,
        span_id="1e" * 8,
        parent_id=parent,
        name=name,
        kind=3,
        start_ns=start,
        end_ns=start + took,
        attributes=attributes,
        error=error,
    )
    expected = Span(
        trace_id=bytes.fromhex("0f" * 16),
        span_id=bytes.fromhex("1e" * 8),
        parent_span_id=bytes.fromhex(parent or ""),
        name=name,
        kind=Span.SPAN_KIND_CLIENT,
        flags=1,
        start_time_unix_nano=start,
        end_time_unix_nano=max(start, start + took),
        attributes=[KeyValue(key=key, value=value_of(value)) for key, value in attributes.items()],
    )
    if error is not None:
        expected.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=error))
    assert Span.FromString(made) == expected
    request = ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(attributes=[KeyValue(key="service.name", value=value_of("service"))]),
                scope_spans=[ScopeSpans(spans=[expected, expected])],
            )
        ]
    )
    request.resource_spans[0].scope_spans[0].scope.name = "scope"
    assert ExportTraceServiceRequest.FromString(encode_request("service", "scope", [made, made])) == request
