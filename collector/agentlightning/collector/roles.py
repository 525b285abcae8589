"""What a span can be – a model call, an agent, a tool – and the few readers that every dialect shares.

A `Call` keeps its token ids packed, as they came. Ids that cannot be trusted (a length that is no
multiple of four, log-probabilities that are not one per response id) are left out, and `unparsed`
says why.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.collector.span import STATUS_ERROR, Span
from agentlightning.proto import attributes as names

__all__ = [
    "GATEWAY",
    "GATEWAY_SCOPE",
    "SDK",
    "Agent",
    "Call",
    "Other",
    "Role",
    "Tool",
    "error_of",
    "int64",
    "new_call",
    "operation",
    "response_id",
    "source_of",
    "string",
]

GATEWAY: Final = "gateway"
SDK: Final = "sdk"
GATEWAY_SCOPE: Final = "agentlightning.gateway"
_CLASS: Final = re.compile(r"(\w+\.)+[A-Z]\w*")
_WRAPPED: Final = re.compile(
    r"(?:\{'message': 'Error getting response', 'data': |Error getting response: )\{'error': (['\"])(.*)\1\}+",
    re.DOTALL,
)
"""What the Agents SDK makes of an exception's text."""


@dataclass(slots=True)
class Call:
    """One LLM request and its response, as one span tells it."""

    span: Span
    source: str
    """`gateway` or `sdk`: who recorded it."""
    call_id: str | None = None
    response_id: str | None = None
    choice: int = 0
    policy: str | None = None
    model: str | None = None
    model_version: int | None = None
    model_versions: list[int] | None = None
    request: str | None = None
    response: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    prompt_ids: bytes | None = None
    """Packed, as is `response_ids`; `logprobs` is packed float32, one per response id."""
    response_ids: bytes | None = None
    logprobs: bytes | None = None
    finish_reason: str | None = None
    error: str | None = None
    agent: str | None = None
    """The agent's name, where the emitter stamps it on the call itself."""
    agent_path: list[str] | None = None
    unparsed: list[str] = field(default_factory=list)
    """Reasons, one per attribute that had to be left out."""


@dataclass(slots=True)
class Agent:
    """An agent's or a workflow's work: calls below it are its own."""

    name: str


@dataclass(slots=True)
class Tool:
    """A tool's work: a call below it is not the call above it."""

    name: str


@dataclass(slots=True)
class Other:
    """A span that a dialect knows to be none of these, whatever it looks like to another."""


Role = Call | Agent | Tool


def new_call(span: Span) -> Call:
    """A call of which nothing is known yet but who tells of it, and whether it failed."""
    return Call(span, source_of(span), error=error_of(span))


def operation(span: Span) -> str:
    """What the conventions say that the span is; empty if they say nothing."""
    value = span.attributes.get(names.OPERATION_NAME)
    return value if isinstance(value, str) else ""


def source_of(span: Span) -> str:
    """Who recorded a call."""
    source = span.attributes.get(names.SOURCE)
    if source in (GATEWAY, SDK):
        return str(source)
    return GATEWAY if span.scope == GATEWAY_SCOPE else SDK


def error_of(span: Span) -> str | None:
    """`type: message`, as far as the span says; None on success.

    The exception event says most: some dialects write a whole traceback into the status. The type is
    the class alone, as some do not say the module.
    """
    kind = string(span.attributes.get(names.ERROR_TYPE))
    if span.status_code != STATUS_ERROR and kind is None:
        return None
    message = span.status_message
    for event in reversed(span.events):
        raised = string(event.attributes.get("exception.type")) if event.name == "exception" else None
        if raised is not None:
            kind, message = raised, string(event.attributes.get("exception.message")) or ""
            break
    if kind is not None and _CLASS.fullmatch(kind):
        kind = kind.rpartition(".")[2]
    wrapped = _WRAPPED.fullmatch(message)
    message = wrapped[2] if wrapped else message
    if kind and message and not message.startswith(kind):
        return f"{kind}: {message}"
    return message or kind or "error"


def response_id(value: Any) -> str | None:
    """A provider's response id; None for what frameworks make up where there is none."""
    made_up = not isinstance(value, str) or not value or value.startswith(("__fake_id__", "lc_run-", "run-"))
    return None if made_up else value


def int64(value: Any) -> int | None:
    """An integer that the tables can hold."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**63 else None


def string(value: Any) -> str | None:
    """Text that says something."""
    return value if isinstance(value, str) and value else None
