"""Spans as agents and the gateway send them, as OTLP protobuf."""

import base64
import json
from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from agentlightning.proto import attributes as names
from agentlightning.proto import ids
from agentlightning.proto.packed import pack_floats, pack_ids

SECOND = 1_000_000_000
START = 1_790_000_000 * SECOND


def value(content: Any) -> AnyValue:
    match content:
        case bool():
            return AnyValue(bool_value=content)
        case str():
            return AnyValue(string_value=content)
        case int():
            return AnyValue(int_value=content)
        case float():
            return AnyValue(double_value=content)
        case bytes():
            return AnyValue(bytes_value=content)
        case list():
            return AnyValue(array_value=ArrayValue(values=[value(item) for item in content]))
        case dict():
            return AnyValue(kvlist_value=KeyValueList(values=attributes(content)))
    return AnyValue()


def attributes(contents: dict[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=value(content)) for key, content in contents.items()]


def span(
    name: str,
    span_id: str,
    *,
    trace: str = "a" * 32,
    parent: str | None = None,
    start: int = 0,
    end: int | None = None,
    scope: str = "test",
    error: str = "",
    events: Iterable[tuple[str, dict[str, Any]]] = (),
    resource: dict[str, Any] | None = None,
    **attrs: Any,
) -> tuple[dict[str, Any], str, Span]:
    """One span with its resource's attributes and its scope; times are seconds after START."""
    made = Span(
        trace_id=bytes.fromhex(trace),
        span_id=bytes.fromhex(span_id),
        parent_span_id=bytes.fromhex(parent or ""),
        name=name,
        kind=Span.SPAN_KIND_CLIENT,
        start_time_unix_nano=START + start * SECOND,
        end_time_unix_nano=START + (start + 1 if end is None else end) * SECOND,
        attributes=attributes({key.replace("__", "."): content for key, content in attrs.items()}),
    )
    for event_name, contents in events:
        made.events.add(
            name=event_name, time_unix_nano=made.end_time_unix_nano, attributes=attributes(contents)
        )
    if error:
        made.status.code = Status.STATUS_CODE_ERROR
        made.status.message = error
    return resource or {}, scope, made


Piece = tuple[dict[str, Any], str, Span]


def request(pieces: Iterable[Piece]) -> ExportTraceServiceRequest:
    """One export request; spans of one resource and scope are grouped as exporters do."""
    grouped: dict[tuple[str, str], tuple[dict[str, Any], str, list[Span]]] = {}
    for resource, scope, made in pieces:
        grouped.setdefault((repr(sorted(resource.items())), scope), (resource, scope, []))[2].append(made)
    message = ExportTraceServiceRequest()
    for resource, scope, spans in grouped.values():
        resource_spans = message.resource_spans.add()
        resource_spans.resource.attributes.extend(attributes(resource))
        scope_spans = resource_spans.scope_spans.add()
        scope_spans.scope.name = scope
        scope_spans.spans.extend(spans)
    return message


def body(*pieces: Piece) -> bytes:
    return request(pieces).SerializeToString()


def document(*pieces: Piece) -> dict[str, Any]:
    """The same as OTLP/JSON: identifiers in hex."""
    found: dict[str, Any] = MessageToDict(request(pieces), use_integers_for_enums=True)
    for resource_spans in found["resourceSpans"]:
        for scope_spans in resource_spans["scopeSpans"]:
            for item in scope_spans["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    if key in item:
                        item[key] = _hex(item[key])
    return found


def log_body(
    event: str, contents: dict[str, Any], *, trace: str = "a" * 32, parent: str = "", time: int = 0
) -> bytes:
    message = ExportLogsServiceRequest()
    record = message.resource_logs.add().scope_logs.add().log_records.add()
    record.event_name = event
    record.trace_id, record.span_id = bytes.fromhex(trace), bytes.fromhex(parent)
    record.time_unix_nano = START + time * SECOND
    record.attributes.extend(attributes(contents))
    return message.SerializeToString()


def identity(rollout_id: str, attempt: int = 0) -> dict[str, Any]:
    return {
        names.RUN_ID: "run",
        names.GROUP_ID: "group",
        names.TASK_ID: "task",
        names.SPLIT: "train",
        names.ROLLOUT_ID: rollout_id,
        names.ATTEMPT: attempt,
    }


def gateway_call(
    rollout_id: str,
    number: int,
    *,
    attempt: int = 0,
    trace: str | None = None,
    parent: str | None = None,
    error: str = "",
    prompt: list[int] | None = None,
    response: list[int] | None = None,
    **more: Any,
) -> Piece:
    """The gateway's span of one answered call: number is its place in the attempt."""
    prompt = [1, 2, 3 + number] if prompt is None else prompt
    response = [10 + number, 11, 12] if response is None else response
    contents = {
        **identity(rollout_id, attempt),
        names.OPERATION_NAME: "chat",
        names.SOURCE: "gateway",
        names.CALL_ID: ids.call_id(rollout_id, attempt, str(number)),
        names.POLICY: "policy",
        names.MODEL_VERSION: 3,
        names.REQUEST_MODEL: "policy",
        names.RESPONSE_ID: f"chatcmpl-{rollout_id}-{attempt}-{number}",
        names.FINISH_REASONS: ["stop"],
        names.REQUEST: json.dumps(
            {"model": "policy", "messages": [{"role": "user", "content": f"q{number}"}]}
        ),
        names.RESPONSE: json.dumps(
            {"choices": [{"index": 0, "message": {"role": "assistant", "content": f"a{number}"}}]}
        ),
        "gen_ai.request.temperature": 0.7,
        names.PROMPT_TOKEN_IDS: pack_ids(prompt),
        names.RESPONSE_TOKEN_IDS: pack_ids(response),
        names.RESPONSE_LOGPROBS: pack_floats([-0.25 * (1 + n) for n in range(len(response))]),
        **({names.ERROR_TYPE: error} if error else {}),
        **{key.replace("__", "."): content for key, content in more.items()},
    }
    return span(
        "chat policy",
        ids.derived_span_id("gateway", rollout_id, str(attempt), str(number)),
        trace=trace or ids.derived_trace_id(rollout_id, attempt),
        parent=parent or ids.rollout_span_id(rollout_id, attempt),
        start=10 * (number + 1),
        scope="agentlightning.gateway",
        error=error,
        **{key.replace(".", "__"): content for key, content in contents.items() if content is not None},
    )


def rollout_span(
    rollout_id: str, calls: int, *, attempt: int = 0, state: str = "succeeded", **more: Any
) -> Piece:
    contents = {
        **identity(rollout_id, attempt),
        names.ROLLOUT_STATE: state,
        names.CALLS_EXPECTED: calls,
        names.TASK_INPUT: '{"question": "?"}',
        **more,
    }
    return span(
        names.ROLLOUT_SPAN_NAME,
        ids.rollout_span_id(rollout_id, attempt),
        trace=ids.derived_trace_id(rollout_id, attempt),
        end=1000,
        scope="agentlightning.gateway",
        **{key.replace(".", "__"): content for key, content in contents.items()},
    )


def evaluation(
    span_id: str,
    score: Any,
    *,
    name: str = "reward",
    trace: str = "a" * 32,
    parent: str | None = None,
    **more: Any,
) -> Piece:
    return span(
        names.EVALUATION_RESULT,
        span_id,
        trace=trace,
        parent=parent,
        start=more.pop("start", 500),
        resource=more.pop("resource", None),
        **{
            "gen_ai__evaluation__name": name,
            **({} if score is None else {"gen_ai__evaluation__score__value": score}),
            **more,
        },
    )


def _hex(text: str) -> str:
    return base64.b64decode(text).hex()
