"""The GenAI conventions: content as JSON text on the span, or structured.

Their older forms (content in events) are laid on the span before it is read, see `events`.
"""

from typing import Any, Final

from agentlightning.collector import genai_messages
from agentlightning.collector.bodies import dump, finish_reason
from agentlightning.collector.roles import Agent, Call, Role, Tool, new_call, operation, response_id, string
from agentlightning.collector.span import Span
from agentlightning.proto import attributes as names

__all__ = ["read", "read_call", "read_common"]

_AGENT_OPERATIONS: Final = {"invoke_agent": names.AGENT_NAME, "invoke_workflow": "gen_ai.workflow.name"}
_SAMPLING: Final = {
    # OpenAI's name: the conventions' names
    "temperature": ("gen_ai.request.temperature",),
    "top_p": ("gen_ai.request.top_p",),
    "top_k": ("gen_ai.request.top_k",),
    "max_tokens": ("gen_ai.request.max_tokens",),
    "seed": ("gen_ai.request.seed", "gen_ai.openai.request.seed"),
    "stop": ("gen_ai.request.stop_sequences",),
    "presence_penalty": ("gen_ai.request.presence_penalty", "llm.presence_penalty"),
    "frequency_penalty": ("gen_ai.request.frequency_penalty", "llm.frequency_penalty"),
    "n": ("gen_ai.request.choice.count",),
}
_CONTENT: Final = {
    "gen_ai.input.messages": "input_messages",
    "gen_ai.output.messages": "output_messages",
    "gen_ai.tool.definitions": "tool_definitions",
}


def read(span: Span) -> Role | None:
    """What a span of the conventions is."""
    kind = operation(span)
    if kind in names.LLM_OPERATIONS:
        return read_call(span)
    if kind in _AGENT_OPERATIONS:
        name = string(span.attributes.get(_AGENT_OPERATIONS[kind]))
        return Agent(name or span.name.removeprefix(kind).strip() or kind)
    if kind == "execute_tool":
        return Tool(string(span.attributes.get("gen_ai.tool.name")) or span.name)
    return None


def read_call(span: Span) -> Call:
    """A model call, with its bodies rebuilt from the messages."""
    call = read_common(span)
    attributes = span.attributes
    for attribute, what in _CONTENT.items():
        value = attributes.get(attribute)
        if value is not None and not isinstance(genai_messages.structured(value), list):
            call.unparsed.append(f"{what}_text" if isinstance(value, str) else f"{what}_type")
    if names.REQUEST in attributes and names.RESPONSE in attributes:
        return call  # the exact bodies are there
    completion = operation(span) == "text_completion"
    finish = attributes.get(names.FINISH_REASONS)
    reasons = [reason for reason in finish if isinstance(reason, str)] if isinstance(finish, list) else []
    model = string(attributes.get(names.REQUEST_MODEL)) or call.model
    call.request = dump(genai_messages.chat_request(attributes, model, call.sampling, completion=completion))
    response = genai_messages.chat_response(
        attributes, call.response_id, call.model, reasons, completion=completion
    )
    call.response = dump(response)
    if call.finish_reason is None and response is not None and response["choices"]:
        call.finish_reason = response["choices"][0]["finish_reason"]
    return call


def read_common(span: Span) -> Call:
    """What is not content: ids, model, sampling, finish reason, error, agent."""
    attributes = span.attributes
    call = new_call(span)
    call.response_id = response_id(attributes.get(names.RESPONSE_ID))
    call.model = string(attributes.get(names.RESPONSE_MODEL)) or string(attributes.get(names.REQUEST_MODEL))
    call.sampling = _sampling(attributes)
    finish = attributes.get(names.FINISH_REASONS)
    if isinstance(finish, list) and finish:
        chosen = attributes.get(names.CHOICE)
        index = chosen if isinstance(chosen, int) and 0 <= chosen < len(finish) else 0
        call.finish_reason = finish_reason(finish[index])
    elif isinstance(finish, str):
        call.finish_reason = finish_reason(finish)
    call.agent = string(attributes.get(names.AGENT_NAME))
    return call


def _sampling(attributes: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, known in _SAMPLING.items():
        for attribute in known:
            value = attributes.get(attribute)
            if value is not None and value != {}:
                found[name] = value
                break
    return found
