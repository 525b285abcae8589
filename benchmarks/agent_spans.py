"""Spans as agents really make them, for benchmarks of whatever stores them.

A rollout is one trace: a root, agents, and per turn a model call and the tool call that it asked for. The history grows,
so that each prompt holds the one before; tokens are drawn by Zipf's law, as in text, and most log-probabilities lie near
zero. By default 1000 spans hold some 430 model calls and 0.94 million token ids.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from agentlightning.proto import attributes as names
from agentlightning.proto import ids
from agentlightning.proto.packed import pack_floats, pack_ids

__all__ = ["CALLS", "SPANS", "Rollout", "make_rollouts"]

CALLS = 6
"""Model calls per rollout."""
SPANS = 2 * CALLS + 2
"""Spans per rollout: the root, one agent, and a model and a tool call per turn."""
VOCABULARY = 150_000
WORDS = [
    "the",
    "agent",
    "calls",
    "a",
    "tool",
    "and",
    "reads",
    "what",
    "comes",
    "back",
    "before",
    "it",
    "answers",
    "the",
    "question",
    "again",
]


@dataclass
class Rollout:
    """One attempt at a task: the requests that carry its spans, oldest first."""

    rollout_id: str
    requests: list[bytes] = field(default_factory=list)
    spans: int = 0
    tokens: int = 0


def make_rollouts(
    name: str,
    count: int,
    per_request: int,
    *,
    packed: bool,
    identities: Sequence[tuple[str, str]] | None = None,
) -> list[Rollout]:
    """`count` rollouts whose spans travel `per_request` at a time.

    `identities`: (rollout id, attempt id) pairs that another system gave out; it is named on the resource as
    agentlightning 0.3 wants it. The same name gives the same spans, always.
    """
    rollouts = []
    for number in range(count):
        draw = random.Random(f"{name}/{number}")
        rollout_id, attempt_id = identities[number] if identities else (f"{name}-{number}", "0")
        rollout = Rollout(rollout_id)
        spans = list(_spans(rollout, draw, packed=packed))
        rollout.spans = len(spans)
        for first in range(0, len(spans), per_request):
            request = ExportTraceServiceRequest()
            resource = request.resource_spans.add()
            resource.resource.attributes.extend(
                [
                    _text("service.name", "agent"),
                    _text(names.RUN_ID, name),
                    _text(names.ROLLOUT_ID, rollout_id),
                    KeyValue(key=names.ATTEMPT, value=AnyValue(int_value=0)),
                    _text("agentlightning.rollout_id", rollout_id),
                    _text("agentlightning.attempt_id", attempt_id),
                ]
            )
            scope = resource.scope_spans.add()
            scope.scope.name = "benchmark"
            for fill in spans[first : first + per_request]:
                fill(scope.spans.add())
            rollout.requests.append(request.SerializeToString())
        rollouts.append(rollout)
    return rollouts


def _spans(rollout: Rollout, draw: random.Random, *, packed: bool) -> list[Any]:
    trace = ids.derived_trace_id(rollout.rollout_id, 0)
    root, agent = ids.rollout_span_id(rollout.rollout_id, 0), ids.derived_span_id("agent", rollout.rollout_id)
    history = _tokens(draw, 1500)
    text = " ".join(draw.choices(WORDS, k=1000))
    made: list[Any] = []

    def span(name: str, own: str, parent: str, turn: int, attributes: list[KeyValue]) -> None:
        def fill(proto: Any) -> None:
            proto.trace_id, proto.span_id = bytes.fromhex(trace), bytes.fromhex(own)
            proto.parent_span_id = bytes.fromhex(parent)
            proto.name, proto.kind = name, 3
            proto.start_time_unix_nano = 1_760_000_000_000_000_000 + turn * 1_000_000_000
            proto.end_time_unix_nano = proto.start_time_unix_nano + 400_000_000
            proto.attributes.extend(attributes)

        made.append(fill)

    for turn in range(CALLS):
        answer = _tokens(draw, 60)
        said = " ".join(draw.choices(WORDS, k=40))
        call = ids.call_id(rollout.rollout_id, 0, str(turn))
        request = {"model": "policy", "messages": [{"role": "user", "content": text}], "temperature": 1.0}
        response = {"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}
        logprobs = [-(draw.random() ** 8) * 6 for _ in answer]
        attributes = [
            _text(names.CALL_ID, call),
            _text(names.SOURCE, "gateway"),
            _text(names.POLICY, "policy"),
            KeyValue(key=names.MODEL_VERSION, value=AnyValue(int_value=3)),
            _text(names.OPERATION_NAME, "chat"),
            _text(names.REQUEST_MODEL, "policy"),
            _text(names.RESPONSE_ID, f"chatcmpl-{call}"),
            _text(names.REQUEST, json.dumps(request)),
            _text(names.RESPONSE, json.dumps(response)),
            _ids(names.PROMPT_TOKEN_IDS, history, packed),
            _ids(names.RESPONSE_TOKEN_IDS, answer, packed),
            _floats(names.RESPONSE_LOGPROBS, logprobs, packed),
        ]
        rollout.tokens += len(history) + len(answer)
        own = ids.derived_span_id("call", call)
        span("chat policy", own, agent, turn, attributes)
        result = " ".join(draw.choices(WORDS, k=80))
        tool = [
            _text(names.OPERATION_NAME, "execute_tool"),
            _text("gen_ai.tool.name", "search"),
            _text("gen_ai.tool.call.result", result),
        ]
        span("execute_tool search", ids.derived_span_id("tool", call), agent, turn, tool)
        history = history + answer + _tokens(draw, 200)
        text = f"{text} {said} {result}"
    span("invoke_agent worker", agent, root, 0, [_text("gen_ai.agent.name", "worker")])
    span("rollout", root, "", 0, [_text("task", "a question")])
    return made


def _tokens(draw: random.Random, count: int) -> list[int]:
    # ranks by Zipf's law; a fixed stride scatters them over the vocabulary, as a tokenizer's ids are
    return [int(draw.paretovariate(0.9)) * 7919 % VOCABULARY for _ in range(count)]


def _text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))


def _ids(key: str, values: Sequence[int], packed: bool) -> KeyValue:
    if packed:
        return KeyValue(key=key, value=AnyValue(bytes_value=pack_ids(values)))
    items = ArrayValue(values=[AnyValue(int_value=value) for value in values])
    return KeyValue(key=key, value=AnyValue(array_value=items))


def _floats(key: str, values: Sequence[float], packed: bool) -> KeyValue:
    if packed:
        return KeyValue(key=key, value=AnyValue(bytes_value=pack_floats(values)))
    items = ArrayValue(values=[AnyValue(double_value=value) for value in values])
    return KeyValue(key=key, value=AnyValue(array_value=items))
