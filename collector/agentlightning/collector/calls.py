"""What a span is – by the dialects –, what it judges, and what the gateway's ledger counts."""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.collector.dialects import DIALECTS, events, ours
from agentlightning.collector.roles import (
    GATEWAY,
    GATEWAY_SCOPE,
    SDK,
    Agent,
    Call,
    Other,
    Role,
    Tool,
    error_of,
    new_call,
    operation,
    source_of,
    string,
)
from agentlightning.collector.span import Span
from agentlightning.proto import attributes as names

__all__ = [
    "DIALECTS",
    "GATEWAY",
    "GATEWAY_SCOPE",
    "SDK",
    "Agent",
    "Call",
    "Evaluation",
    "Role",
    "Tool",
    "evaluations",
    "is_gateway_call",
    "ledger_key",
    "read_role",
]


log = logging.getLogger(__name__)

_SHAPES: Final = (TypeError, ValueError, LookupError, AttributeError, RecursionError)


@dataclass(slots=True)
class Evaluation:
    """A judgement of something: a reward."""

    name: str
    value: float | None
    """None if it is absent or no number; NaN and infinity stay, for the reader to refuse and count."""
    trace_id: str
    span_id: str | None
    """The span that is judged, or lies within what is judged; None if it is the whole."""
    call_id: str | None
    response_id: str | None
    time_ns: int
    origin: str
    """Breaks ties between evaluations of one thing at one time."""


def read_role(span: Span, records: Iterable[Span] = ()) -> Role | None:
    """What a span is, by the first dialect that knows it.

    Args:
        records: log records that were written in the span: they may hold its content.
    """
    if span.signal != "span":
        return None
    told = span
    for name, dialect in (
        DIALECTS[-1:] if span.scope == GATEWAY_SCOPE else DIALECTS
    ):  # it speaks the conventions
        try:
            told = events.laid_on(span, records)
            role = dialect(told)
        except _SHAPES as error:
            # Content of a shape that nobody has foreseen costs itself, never the process.
            log.warning("A span's content is left out: dialect %s failed with %r.", name, error)
            role = _without_content(span, name)
        if role is None:
            continue
        if isinstance(role, Other):
            return None
        if isinstance(role, Call):
            role.span = span
            ours.complete(role, told)
        return role
    return None


def _without_content(span: Span, dialect: str) -> Call | None:
    kind = str(span.attributes.get("openinference.span.kind", span.attributes.get("langsmith.span.kind")))
    if operation(span) not in names.LLM_OPERATIONS and kind.upper() != "LLM":
        return None
    call = new_call(span)
    call.unparsed.append(f"{dialect}_content")
    return call


def evaluations(span: Span) -> Iterator[Evaluation]:
    """The judgements that a span or log record carries: itself, or its events."""
    if span.name == names.EVALUATION_RESULT or names.EVALUATION_NAME in span.attributes:
        if span.signal == "log":
            judged: str | None = span.span_id or None
        elif operation(span) in names.LLM_OPERATIONS:
            judged = span.span_id  # the verdict was put on the call itself
        else:
            judged = span.parent_span_id
        yield _evaluation(span, span.attributes, judged, span.end_ns, f"{span.trace_id}{span.span_id}")
    for index, event in enumerate(span.events):
        if event.name == names.EVALUATION_RESULT or names.EVALUATION_NAME in event.attributes:
            origin = f"{span.trace_id}{span.span_id}.{index:06d}"
            yield _evaluation(span, event.attributes, span.span_id, event.time_ns, origin)


def ledger_key(span: Span) -> str | None:
    """The call that the gateway's ledger counts for this span, else None.

    The ledger counts a call when its answer was handed out: gateway spans without an error.
    """
    if not is_gateway_call(span) or error_of(span) is not None:
        return None
    return string(span.attributes.get(names.CALL_ID)) or f"{span.trace_id}{span.span_id}"


def is_gateway_call(span: Span) -> bool:
    """Whether the gateway recorded a call with this span, answered or not."""
    return span.signal == "span" and operation(span) in names.LLM_OPERATIONS and source_of(span) == GATEWAY


def _evaluation(
    span: Span, attributes: dict[str, Any], judged: str | None, time_ns: int, origin: str
) -> Evaluation:
    return Evaluation(
        string(attributes.get(names.EVALUATION_NAME)) or names.DEFAULT_REWARD,
        _number(attributes.get(names.EVALUATION_SCORE)),
        span.trace_id,
        judged,
        string(attributes.get(names.CALL_ID)),
        string(attributes.get(names.RESPONSE_ID)),
        time_ns,
        origin,
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None
    except OverflowError:
        return math.inf
