"""LangSmith's OpenTelemetry export: runs as spans, content as JSON text of LangChain's or OpenAI's form.

It writes `gen_ai.operation.name = chat` on prompt templates too, so its own `langsmith.span.kind` is
what counts.
"""

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.collector.bodies import (
    dump,
    finish_reason,
    normal_body,
    request_body,
    response_body,
    sampling_of,
    structured,
    usage_of,
)
from agentlightning.collector.dialects import genai, langchain, nodes
from agentlightning.collector.roles import Call, Other, Role, Tool, response_id, string
from agentlightning.collector.span import Span
from agentlightning.proto import attributes as names

__all__ = ["read"]

_KIND: Final = "langsmith.span.kind"
_METADATA: Final = "langsmith.metadata."


def read(span: Span) -> Role | Other | None:
    """What a span of LangSmith is."""
    attributes = span.attributes
    kind = attributes.get(_KIND)
    if not isinstance(kind, str):
        return None
    match kind:
        case "llm":
            return _call(span)
        case "tool":
            return Tool(string(attributes.get("gen_ai.tool.name")) or span.name)
        case "chain":
            return nodes.chain_role(_run_name(span), _metadata(attributes)) or Other()
    return Other()


def _call(span: Span) -> Call:
    attributes = span.attributes
    call = genai.read_common(span)
    metadata = _metadata(attributes)
    call.agent = nodes.node_of(metadata) or call.agent
    prompt, answer = _json(call, attributes, "gen_ai.prompt"), _json(call, attributes, "gen_ai.completion")
    call.model = call.model or string(metadata.get("ls_model_name"))
    given = {key.removeprefix("ls_"): value for key, value in metadata.items() if key.startswith("ls_")}
    call.sampling = {**sampling_of(given), **sampling_of(prompt), **call.sampling}
    if isinstance(prompt, dict) and _is_chat(prompt):
        call.request = dump(normal_body(prompt))
    elif prompt is not None:
        tools = structured(attributes.get("gen_ai.tool.definitions"))
        tools = tools if isinstance(tools, list) else _tools(attributes)
        body = request_body(call.model, langchain.chat_messages(prompt), tools, call.sampling)
        call.request = dump(body) if body["messages"] else None
    if isinstance(answer, dict) and isinstance(answer.get("choices"), list):
        body = normal_body(answer)
        call.response_id = call.response_id or response_id(answer.get("id"))
        call.response, choices = dump(body), body["choices"]
    else:
        call.response_id = call.response_id or langchain.result_id(answer)
        choices = langchain.choices(answer)
        usage = usage_of(attributes.get(names.USAGE_INPUT), attributes.get(names.USAGE_OUTPUT))
        if choices:
            call.response = dump(response_body(call.response_id, call.model, choices, usage))
    if call.finish_reason is None and choices:
        call.finish_reason = finish_reason(choices[0].get("finish_reason"))
    return call


def _tools(attributes: Mapping[str, Any]) -> list[Any]:
    parameters = structured(attributes.get("langsmith.invocation_params"))
    tools = parameters.get("tools") if isinstance(parameters, dict) else None
    return tools if isinstance(tools, list) else []


def _is_chat(value: Mapping[str, Any]) -> bool:
    messages = value.get("messages")
    return isinstance(messages, list) and all(isinstance(item, dict) and "role" in item for item in messages)


def _json(call: Call, attributes: Mapping[str, Any], name: str) -> Any:
    value = attributes.get(name)
    parsed = structured(value)
    if isinstance(parsed, str):
        call.unparsed.append(f"{name.rpartition('.')[2]}_text")
        return None
    return parsed


def _run_name(span: Span) -> str:
    return string(span.attributes.get("langsmith.span.name")) or span.name


def _metadata(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.removeprefix(_METADATA): value for key, value in attributes.items() if key.startswith(_METADATA)
    }
