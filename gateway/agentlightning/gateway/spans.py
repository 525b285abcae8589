"""The spans that the gateway writes: model calls, rewards, and the end of an attempt.

Span ids are derived from what the span tells, so sending one again changes nothing at the collector.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from agentlightning.proto import attributes as names
from agentlightning.proto import ids

__all__ = ["Identity", "Value", "evaluation_span", "make_span", "rollout_span", "set_error"]

Value = str | bool | int | float | bytes | Sequence[str] | Sequence[int]
_SAMPLED: Final = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """Which attempt of which rollout a span belongs to."""

    rollout_id: str
    attempt: int = 0
    run_id: str = ""
    group_id: str = ""
    task_id: str = ""
    split: str = ""

    def attributes(self) -> dict[str, Value]:
        values: dict[str, Value] = {names.ROLLOUT_ID: self.rollout_id, names.ATTEMPT: self.attempt}
        for name, value in (
            (names.RUN_ID, self.run_id),
            (names.GROUP_ID, self.group_id),
            (names.TASK_ID, self.task_id),
            (names.SPLIT, self.split),
        ):
            if value:
                values[name] = value
        return values


def make_span(
    *,
    name: str,
    trace_id: str,
    span_id: str,
    parent_id: str | None,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, Value],
    kind: int = Span.SPAN_KIND_INTERNAL,
) -> Span:
    """A span as OTLP has it."""
    return Span(
        trace_id=bytes.fromhex(trace_id),
        span_id=bytes.fromhex(span_id),
        parent_span_id=bytes.fromhex(parent_id) if parent_id else b"",
        flags=_SAMPLED,
        name=name,
        kind=kind,  # type: ignore[arg-type]  # the stubs know the enum by another type
        start_time_unix_nano=start_ns,
        end_time_unix_nano=max(start_ns, end_ns),
        attributes=[KeyValue(key=key, value=_any(value)) for key, value in attributes.items()],
    )


def set_error(span: Span, kind: str, message: str) -> None:
    """Mark the span failed: `error.type` says what kind of failure."""
    span.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=message))
    span.attributes.append(KeyValue(key=names.ERROR_TYPE, value=AnyValue(string_value=kind)))


def rollout_span(
    identity: Identity,
    *,
    state: str,
    cause: str | None,
    error: str | None,
    task_input: str,
    calls_answered: Sequence[str],
    started: float,
    ended: float,
) -> Span:
    """The end of an attempt: the root of its derived trace."""
    attributes = identity.attributes()
    attributes[names.ROLLOUT_STATE] = state
    if cause is not None:
        attributes[names.ROLLOUT_CAUSE] = cause
    if error is not None:
        attributes[names.ROLLOUT_ERROR] = error
    attributes[names.TASK_INPUT] = task_input
    attributes[names.CALLS_EXPECTED] = len(calls_answered)
    attributes[names.CALLS_ANSWERED] = calls_answered
    span = make_span(
        name=names.ROLLOUT_SPAN_NAME,
        trace_id=ids.derived_trace_id(identity.rollout_id, identity.attempt),
        span_id=ids.rollout_span_id(identity.rollout_id, identity.attempt),
        parent_id=None,
        start_ns=int(started * 1e9),
        end_ns=int(ended * 1e9),
        attributes=attributes,
    )
    if state != "succeeded":
        set_error(span, cause or state, error or "")
    return span


def evaluation_span(
    identity: Identity,
    *,
    name: str,
    value: float,
    label: str | None,
    explanation: str | None,
    call_id: str = "",
    call: tuple[str, str, str | None] | None = None,
) -> Span:
    """A reward. `call`: trace id, span id and response id of the call that it judges, else it judges the rollout."""
    attributes = identity.attributes()
    attributes[names.EVALUATION_NAME] = name
    attributes[names.EVALUATION_SCORE] = value
    if label is not None:
        attributes[names.EVALUATION_LABEL] = label
    if explanation is not None:
        attributes[names.EVALUATION_EXPLANATION] = explanation
    rollout_id, attempt = identity.rollout_id, identity.attempt
    trace_id, parent_id = ids.derived_trace_id(rollout_id, attempt), ids.rollout_span_id(rollout_id, attempt)
    if call is not None:
        trace_id, parent_id, response_id = call
        if response_id is not None:
            attributes[names.RESPONSE_ID] = response_id
    now = time.time_ns()
    return make_span(
        name=names.EVALUATION_RESULT,
        trace_id=trace_id,
        span_id=ids.derived_span_id("evaluation", rollout_id, str(attempt), name, call_id),
        parent_id=parent_id,
        start_ns=now,
        end_ns=now,
        attributes=attributes,
    )


def _any(value: Value) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bytes):
        return AnyValue(bytes_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_any(item) for item in value]))
