"""The spans that the gateway writes: model calls, rewards, and the end of an attempt.

Span ids are derived from what the span tells, so sending one again changes nothing at the collector.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agentlightning.gateway.otlp import Value, encode_span
from agentlightning.proto import attributes as names
from agentlightning.proto import ids

__all__ = ["CLIENT", "Identity", "evaluation_span", "rollout_span"]

INTERNAL: Final = 1
CLIENT: Final = 3
"""Kinds of spans."""


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
) -> bytes:
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
    failed = state != "succeeded"
    if failed:
        attributes[names.ERROR_TYPE] = cause or state
    return encode_span(
        name=names.ROLLOUT_SPAN_NAME,
        kind=INTERNAL,
        trace_id=ids.derived_trace_id(identity.rollout_id, identity.attempt),
        span_id=ids.rollout_span_id(identity.rollout_id, identity.attempt),
        parent_id=None,
        start_ns=int(started * 1e9),
        end_ns=int(ended * 1e9),
        attributes=attributes,
        error=(error or "") if failed else None,
    )


def evaluation_span(
    identity: Identity,
    *,
    name: str,
    value: float,
    label: str | None,
    explanation: str | None,
    call_id: str = "",
    call: tuple[str, str, str | None] | None = None,
) -> bytes:
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
    return encode_span(
        name=names.EVALUATION_RESULT,
        kind=INTERNAL,
        trace_id=trace_id,
        span_id=ids.derived_span_id("evaluation", rollout_id, str(attempt), name, call_id),
        parent_id=parent_id,
        start_ns=now,
        end_ns=now,
        attributes=attributes,
    )
