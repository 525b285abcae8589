"""An agent's own spans, through the gateway: whose they are is not for the agent to say."""

import gzip
import time

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agentlightning.gateway.tokens import Claims
from agentlightning.gateway.traces import restrict
from agentlightning.proto import attributes as names

PROTOBUF = "application/x-protobuf"


def text(key, value):
    return KeyValue(key=key, value=AnyValue(string_value=value))


def export(*spans):
    """An export request: (name, attributes, event names) per span, from a process that claims to be another rollout."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.extend([text("service.name", "agent"), text(names.ROLLOUT_ID, "another")])
    scope = resource.scope_spans.add()
    scope.scope.name = "my.scope"
    for number, (name, attributes, events) in enumerate(spans, 1):
        span = scope.spans.add(name=name, trace_id=b"t" * 16, span_id=bytes([number] * 8))
        span.attributes.extend([text(key, value) for key, value in attributes.items()])
        for event in events:
            span.events.add(name=event)
    return request


def claims(*rights):
    return Claims("mine", 2, "run", "group", "task", "train", "policy", time.time() + 60, rights)


def post(gateway, key, body, **headers):
    headers = {"content-type": PROTOBUF, "authorization": f"Bearer {key}"} | headers
    return gateway.http.post("/v1/traces", content=body, headers=headers)


def test_spans_get_the_identity_that_the_token_proves():
    request = export(("chat", {names.RUN_ID: "other", names.SOURCE: "gateway", "mine": "kept"}, []))
    assert not restrict(request, claims())
    resource = request.resource_spans[0]
    found = {a.key: a.value.string_value or a.value.int_value for a in resource.resource.attributes}
    assert found == {
        "service.name": "agent",
        names.ROLLOUT_ID: "mine",
        names.ATTEMPT: 2,
        names.RUN_ID: "run",
        names.GROUP_ID: "group",
        names.TASK_ID: "task",
        names.SPLIT: "train",
    }
    (span,) = resource.scope_spans[0].spans
    assert {a.key: a.value.string_value for a in span.attributes} == {"mine": "kept", names.SOURCE: "sdk"}
    assert resource.scope_spans[0].scope.name == "my.scope"


def test_rewards_and_the_end_of_an_attempt_are_not_the_agents_to_tell():
    spans = [
        (names.EVALUATION_RESULT, {}, []),
        ("disguised", {names.EVALUATION_SCORE: "1"}, []),
        (names.ROLLOUT_SPAN_NAME, {names.ROLLOUT_STATE: "succeeded"}, []),
        ("work", {names.CALLS_EXPECTED: "0"}, [names.EVALUATION_RESULT, "note"]),
    ]
    request = export(*spans)
    removed = restrict(request, claims())
    assert removed == {"reward_not_granted": 3, "rollout_span_refused": 1}
    (span,) = request.resource_spans[0].scope_spans[0].spans
    assert (span.name, [event.name for event in span.events], len(span.attributes)) == ("work", ["note"], 0)

    request = export(*spans)
    assert restrict(request, claims("reward")) == {"rollout_span_refused": 1}
    assert len(request.resource_spans[0].scope_spans[0].spans) == 3


def test_an_agents_spans_reach_the_collector_plain_and_compressed(gateway, sink):
    key = gateway.begin("traced")["token"]
    body = export(("chat", {}, []), (names.EVALUATION_RESULT, {}, [])).SerializeToString()
    assert post(gateway, key, body).status_code == 200
    assert post(gateway, key, gzip.compress(body), **{"content-encoding": "gzip"}).status_code == 200
    assert [(span["name"], span["scope"]) for span in sink.spans if span["scope"] == "my.scope"] == [
        ("chat", "my.scope")
    ] * 2
    assert gateway.counters()["reward_not_granted"] == 2


def test_spans_without_a_rollouts_token_or_that_cannot_be_read_are_refused(gateway, sink):
    key = gateway.begin("strict")["token"]
    body = export(("chat", {}, [])).SerializeToString()
    assert post(gateway, "trainer-token-0123456789", body).status_code == 401
    assert post(gateway, key + "x", body).status_code == 401
    assert post(gateway, key, b"\xff\xff\xff").status_code == 400
    assert post(gateway, key, b"no gzip", **{"content-encoding": "gzip"}).status_code == 400
    assert post(gateway, key, body, **{"content-type": "application/json"}).status_code == 415
    assert not [span for span in sink.spans if span["scope"] == "my.scope"]


def test_a_collector_that_is_busy_makes_the_agents_exporter_try_again(gateway, sink):
    key = gateway.begin("later")["token"]
    sink.mode = "busy"
    refused = post(gateway, key, export(("chat", {}, [])).SerializeToString())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
