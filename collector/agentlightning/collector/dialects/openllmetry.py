"""OpenLLMetry: the GenAI conventions with `traceloop.*` around them; before 0.5x, flattened messages.

Model calls of today's releases are read as the conventions'; the flattened ones (`gen_ai.prompt.N.…`,
`gen_ai.completion.N.…`, `llm.request.functions.N.…`) are read here.
"""

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.collector.bodies import (
    choice,
    dump,
    finish_reason,
    request_body,
    response_body,
    structured,
    unflatten,
    usage_of,
)
from agentlightning.collector.dialects import genai, nodes
from agentlightning.collector.roles import Agent, Call, Other, Role, Tool, operation, string
from agentlightning.collector.span import Span
from agentlightning.proto import attributes as names

__all__ = ["read"]

_ASSOCIATION: Final = "traceloop.association.properties."
_LLM_REQUESTS: Final = {"chat", "completion", "text_completion"}
_FLATTENED: Final = frozenset(
    f"gen_ai.{side}.0.{name}"
    for side in ("prompt", "completion")
    for name in ("role", "content", "user", "finish_reason")
)
_LANGCHAIN: Final = "opentelemetry.instrumentation.langchain"
_AGENTS: Final = "opentelemetry.instrumentation.openai_agents"


def read(span: Span) -> Role | Other | None:
    """What a span of OpenLLMetry is."""
    attributes = span.attributes
    if _is_call(span):
        return _call(span)
    kind = attributes.get("traceloop.span.kind")
    if not isinstance(kind, str):
        return None
    name = (
        string(attributes.get("traceloop.entity.name"))
        or string(attributes.get(names.AGENT_NAME))
        or string(attributes.get("traceloop.workflow.name"))
        or span.name.rpartition(".")[0]
        or span.name
    )
    match kind:
        case "agent":
            return Agent(string(attributes.get(names.AGENT_NAME)) or name)
        case "workflow":
            if name.startswith("Runnable"):
                return Other()  # a chain that nobody gave a name
            if span.scope != _LANGCHAIN or operation(span) == "invoke_agent":
                return Agent(string(attributes.get(names.AGENT_NAME)) or name)
            return _chain(name, attributes)
        case "task":
            return _chain(name, attributes)
        case "tool":
            return Tool(string(attributes.get("gen_ai.tool.name")) or name)
    return None


def _chain(name: str, attributes: Mapping[str, Any]) -> Role | None:
    """A graph or a node; a task of the user's own is nobody's work."""
    return nodes.chain_role(name, _properties(attributes))


def _is_call(span: Span) -> bool:
    attributes = span.attributes
    request = attributes.get("llm.request.type")
    if request not in (None, "unknown", *_LLM_REQUESTS):
        return False  # an embedding, a ranking: with a prompt of its own
    if request is None and isinstance(attributes.get("traceloop.span.kind"), str):
        return False  # an agent's span may repeat what its calls said
    if request in _LLM_REQUESTS or not _FLATTENED.isdisjoint(attributes):
        return True
    ours = span.scope.startswith("opentelemetry.instrumentation.") and not span.scope.startswith(
        "opentelemetry.instrumentation.genai."
    )
    marked = ours or any(key.startswith("traceloop.") for key in attributes)
    return marked and operation(span) in names.LLM_OPERATIONS


def _call(span: Span) -> Call:
    attributes = span.attributes
    flattened = any(key.startswith(("gen_ai.prompt.", "gen_ai.completion.")) for key in attributes)
    call = genai.read_call(span) if not flattened else _flattened(span)
    call.agent = nodes.node_of(_properties(attributes)) or call.agent
    if span.scope == _AGENTS and (call.response_id or "").startswith("resp_"):
        # Of the Responses API it writes the response's settings: defaults, not what was asked for.
        for name in call.sampling:
            _forget(call, name)
        call.sampling = {}
    return call


def _forget(call: Call, name: str) -> None:
    body = structured(call.request)
    if isinstance(body, dict):
        body.pop(name, None)
        call.request = dump(body)


def _flattened(span: Span) -> Call:
    attributes = span.attributes
    call = genai.read_common(span)
    model = string(attributes.get(names.REQUEST_MODEL)) or call.model
    prompts = unflatten(attributes, "gen_ai.prompt.")
    stream = attributes.get("llm.is_streaming") is True or attributes.get("gen_ai.is_streaming") is True
    completion = attributes.get("llm.request.type") in ("completion", "text_completion") or any(
        "user" in item for item in prompts
    )
    if completion and prompts:
        texts = [item.get("user", item.get("content")) for item in prompts]
        prompt: Any = texts[0] if len(texts) == 1 else texts
        body = {"model": model, "prompt": prompt, **call.sampling}
        call.request = dump({**body, "stream": True} if stream else body)
    elif prompts:
        tools = unflatten(attributes, "llm.request.functions.")
        messages = [_message(item) for item in prompts]
        call.request = dump(request_body(model, messages, tools, call.sampling, stream=stream))
    answers = unflatten(attributes, "gen_ai.completion.")
    choices: list[dict[str, Any]] = []
    for index, item in enumerate(answers):
        if completion:
            reason = finish_reason(item.get("finish_reason"))
            choices.append({"index": index, "text": item.get("content"), "finish_reason": reason})
        else:
            choices.append(choice(index, _message(item), item.get("finish_reason")))
    if choices:
        usage = usage_of(
            attributes.get(names.USAGE_INPUT, attributes.get("gen_ai.usage.prompt_tokens")),
            attributes.get(names.USAGE_OUTPUT, attributes.get("gen_ai.usage.completion_tokens")),
        )
        call.finish_reason = call.finish_reason or string(choices[0]["finish_reason"])
        call.response = dump(response_body(call.response_id, call.model, choices, usage))
    return call


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in item.items() if key not in ("finish_reason", "content")}
    content = item.get("content")
    parts = structured(content)
    # Content of several parts was written as JSON text.
    listed = (
        isinstance(parts, list) and parts and all(isinstance(part, dict) and "type" in part for part in parts)
    )
    return {**made, "content": parts if listed else content}


def _properties(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.removeprefix(_ASSOCIATION): value
        for key, value in attributes.items()
        if key.startswith(_ASSOCIATION)
    }
