"""What a span is: a model call, an agent, a tool, an evaluation.

Instrumentations speak dialects. Each dialect is one function that says what a span is, or None if it
is not of that dialect; `DIALECTS` lists them, ours first. A new dialect is one more function.

A `Call` keeps its token ids packed, as they came. Ids that cannot be trusted (a length that is no
multiple of four, log-probabilities that are not one per response id) are left out, and `unparsed`
says why.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from agentlightning.collector import genai_messages, tokens
from agentlightning.collector.span import STATUS_ERROR, Span
from agentlightning.proto import attributes as names

__all__ = [
    "DIALECTS",
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

GATEWAY: Final = "gateway"
SDK: Final = "sdk"
GATEWAY_SCOPE: Final = "agentlightning.gateway"

_AGENT_OPERATIONS: Final = {"invoke_agent": names.AGENT_NAME, "invoke_workflow": "gen_ai.workflow.name"}
_SAMPLING: Final = {
    # OpenAI's name: the conventions' name
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "stop": "gen_ai.request.stop_sequences",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "n": "gen_ai.request.choice.count",
}
_SAMPLING_IN_REQUEST: Final = (
    *_SAMPLING,
    "max_completion_tokens",
    "min_p",
    "repetition_penalty",
    "logit_bias",
)


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


Role = Call | Agent | Tool


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


def read_role(span: Span) -> Role | None:
    """What a span is, by the first dialect that knows it."""
    if span.signal != "span":
        return None
    for _, dialect in DIALECTS:
        role = dialect(span)
        if role is not None:
            return role
    return None


def own(span: Span) -> Role | None:
    """Our own spans: the gateway's, and those that our transport hook has completed."""
    attributes = span.attributes
    if (
        names.CALL_ID not in attributes
        and names.REQUEST not in attributes
        and names.RESPONSE_TOKEN_IDS not in attributes
        and span.scope != GATEWAY_SCOPE
    ):
        return None
    if _operation(span) not in names.LLM_OPERATIONS:
        return None
    call = _call(span)
    call.call_id = _string(attributes.get(names.CALL_ID))
    call.policy = _string(attributes.get(names.POLICY))
    call.model_version = _int64(attributes.get(names.MODEL_VERSION))
    versions = genai_messages.structured(attributes.get(names.MODEL_VERSIONS))
    if isinstance(versions, list) and all(_int64(version) is not None for version in versions):
        call.model_versions = versions
    elif versions is not None:
        call.unparsed.append("model_versions")
    call.choice = _int64(attributes.get(names.CHOICE)) or 0
    _read_tokens(call)
    call.request = _string(attributes.get(names.REQUEST))
    call.response = _string(attributes.get(names.RESPONSE))
    if not call.sampling:
        call.sampling = _sampling_of_request(call.request)
    _rebuild_bodies(call)
    return call


def genai(span: Span) -> Role | None:
    """The current GenAI conventions: content as JSON text or structured."""
    operation = _operation(span)
    if operation in names.LLM_OPERATIONS:
        call = _call(span)
        _rebuild_bodies(call)
        return call
    if operation in _AGENT_OPERATIONS:
        name = _string(span.attributes.get(_AGENT_OPERATIONS[operation]))
        return Agent(name or span.name.removeprefix(operation).strip() or operation)
    if operation == "execute_tool":
        return Tool(_string(span.attributes.get("gen_ai.tool.name")) or span.name)
    return None


Dialect = Callable[[Span], Role | None]
DIALECTS: Final[tuple[tuple[str, Dialect], ...]] = (("agentlightning", own), ("genai", genai))
"""By name, in the order in which they are asked."""


def evaluations(span: Span) -> Iterator[Evaluation]:
    """The judgements that a span or log record carries: itself, or its events."""
    if span.name == names.EVALUATION_RESULT or names.EVALUATION_NAME in span.attributes:
        if span.signal == "log":
            judged: str | None = span.span_id or None
        elif _operation(span) in names.LLM_OPERATIONS:
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
    if not is_gateway_call(span) or _error(span) is not None:
        return None
    return _string(span.attributes.get(names.CALL_ID)) or f"{span.trace_id}{span.span_id}"


def is_gateway_call(span: Span) -> bool:
    """Whether the gateway recorded a call with this span, answered or not."""
    return span.signal == "span" and _operation(span) in names.LLM_OPERATIONS and _source(span) == GATEWAY


def _call(span: Span) -> Call:
    """What the conventions say, whoever emitted it."""
    attributes = span.attributes
    call = Call(span, _source(span))
    call.response_id = _string(attributes.get(names.RESPONSE_ID))
    call.model = _string(attributes.get(names.RESPONSE_MODEL)) or _string(attributes.get(names.REQUEST_MODEL))
    for name, attribute in _SAMPLING.items():
        value = attributes.get(attribute)
        if value is not None:
            call.sampling[name] = value
    finish = attributes.get(names.FINISH_REASONS)
    if isinstance(finish, list) and finish:
        choice = _int64(attributes.get(names.CHOICE)) or 0
        call.finish_reason = genai_messages.finish_reason(finish[choice if 0 <= choice < len(finish) else 0])
    call.error = _error(span)
    call.agent = _string(attributes.get(names.AGENT_NAME))
    path = genai_messages.structured(attributes.get(names.AGENT_PATH))
    if isinstance(path, list) and path and all(isinstance(name, str) for name in path):
        call.agent_path = path
    return call


def _rebuild_bodies(call: Call) -> None:
    """Where the exact bodies are not there: OpenAI chat bodies from the messages."""
    attributes = call.span.attributes
    finish = attributes.get(names.FINISH_REASONS)
    if call.request is None:
        model = _string(attributes.get(names.REQUEST_MODEL)) or call.model
        call.request = _json(genai_messages.chat_request(attributes, model, call.sampling))
    if call.response is None:
        reasons = [reason for reason in finish if isinstance(reason, str)] if isinstance(finish, list) else []
        call.response = _json(genai_messages.chat_response(attributes, call.response_id, call.model, reasons))


def _read_tokens(call: Call) -> None:
    attributes = call.span.attributes
    call.prompt_ids = _tokens(call, names.PROMPT_TOKEN_IDS, "prompt_token_ids")
    call.response_ids = _tokens(call, names.RESPONSE_TOKEN_IDS, "response_token_ids")
    if call.response_ids is None:
        if attributes.get(names.RESPONSE_LOGPROBS) is not None:
            call.unparsed.append("response_logprobs_without_ids")
        return
    call.logprobs = _tokens(call, names.RESPONSE_LOGPROBS, "response_logprobs")
    if call.logprobs is not None and len(call.logprobs) != len(call.response_ids):
        # Which of the two is wrong cannot be known: neither is used.
        call.response_ids = call.logprobs = None
        call.unparsed.append("response_logprobs_not_parallel")


def _tokens(call: Call, attribute: str, what: str) -> bytes | None:
    try:
        return tokens.pack(call.span.attributes.get(attribute), floats=tokens.TOKEN_ATTRIBUTES[attribute])
    except ValueError as error:
        call.unparsed.append(f"{what}_{error}")
        return None


def _sampling_of_request(request: str | None) -> dict[str, Any]:
    body = genai_messages.structured(request)
    if not isinstance(body, dict):
        return {}
    return {name: body[name] for name in _SAMPLING_IN_REQUEST if body.get(name) is not None}


def _operation(span: Span) -> str:
    operation = span.attributes.get(names.OPERATION_NAME)
    return operation if isinstance(operation, str) else ""


def _source(span: Span) -> str:
    source = span.attributes.get(names.SOURCE)
    if source in (GATEWAY, SDK):
        return str(source)
    return GATEWAY if span.scope == GATEWAY_SCOPE else SDK


def _error(span: Span) -> str | None:
    """`type: message`, as far as the span says; None on success."""
    kind = _string(span.attributes.get(names.ERROR_TYPE))
    if span.status_code != STATUS_ERROR and kind is None:
        return None
    message = span.status_message
    if kind and message and not message.startswith(kind):
        return f"{kind}: {message}"
    return message or kind or "error"


def _evaluation(
    span: Span, attributes: dict[str, Any], judged: str | None, time_ns: int, origin: str
) -> Evaluation:
    return Evaluation(
        _string(attributes.get(names.EVALUATION_NAME)) or names.DEFAULT_REWARD,
        _number(attributes.get(names.EVALUATION_SCORE)),
        span.trace_id,
        judged,
        _string(attributes.get(names.CALL_ID)),
        _string(attributes.get(names.RESPONSE_ID)),
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


def _int64(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**63 else None


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _json(body: dict[str, Any] | None) -> str | None:
    return None if body is None else orjson.dumps(body, default=repr).decode()
