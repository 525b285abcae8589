"""LangChain's own serialisation of messages and results, which two dialects carry as JSON text."""

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.collector.bodies import choice
from agentlightning.collector.roles import response_id

__all__ = ["chat_messages", "choices", "result_id"]

_ROLES: Final = {
    "SystemMessage": "system",
    "HumanMessage": "user",
    "AIMessage": "assistant",
    "AIMessageChunk": "assistant",
    "ToolMessage": "tool",
    "FunctionMessage": "tool",
    "system": "system",
    "developer": "developer",
    "human": "user",
    "ai": "assistant",
    "AI": "assistant",
    "tool": "tool",
    "function": "tool",
}


def chat_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of `{"messages": [[…]]}`, of a list, or of one message."""
    if isinstance(value, Mapping) and "messages" in value:
        value = value["messages"]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) and not _is_pair(value[0]):
        value = value[0]
    items = value if isinstance(value, list) else [value]
    found = []
    for item in items:
        made = _message(item)
        if made is not None:
            found.append(made)
    return found


def choices(value: Any) -> list[dict[str, Any]]:
    """The answers of a result (`{"generations": [[…]]}`)."""
    made: list[dict[str, Any]] = []
    for generation in _generations(value):
        message = _message(generation.get("message"))
        if message is None:
            message = {"role": "assistant", "content": generation.get("text")}
        information = generation.get("generation_info")
        reason = information.get("finish_reason") if isinstance(information, Mapping) else None
        made.append(choice(len(made), message, reason or _metadata(generation).get("finish_reason")))
    return made


def result_id(value: Any) -> str | None:
    """The provider's response id, if the result still has it."""
    if not isinstance(value, Mapping):
        return None
    output = value.get("llm_output")
    found = response_id(output.get("id")) if isinstance(output, Mapping) else None
    for generation in _generations(value):
        found = found or response_id(_metadata(generation).get("id"))
    return found


def _generations(value: Any) -> list[Mapping[str, Any]]:
    generations = value.get("generations") if isinstance(value, Mapping) else None
    if not isinstance(generations, list):
        return []
    first = generations[0] if generations and isinstance(generations[0], list) else generations
    return [item for item in first if isinstance(item, Mapping)]


def _metadata(generation: Mapping[str, Any]) -> Mapping[str, Any]:
    message = generation.get("message")
    fields = _fields(message) if isinstance(message, Mapping) else {}
    metadata = fields.get("response_metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _fields(message: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("kwargs", "data"):
        inner = message.get(name)
        if isinstance(inner, Mapping):
            return inner
    return message


def _is_pair(value: list[Any]) -> bool:
    return len(value) == 2 and all(isinstance(item, str) for item in value)


def _message(message: Any) -> dict[str, Any] | None:
    if isinstance(message, list) and _is_pair(message):
        return {"role": _ROLES.get(message[0], message[0]), "content": message[1]}
    if not isinstance(message, Mapping):
        return {"role": "user", "content": message} if isinstance(message, str) else None
    fields = _fields(message)
    path = message.get("id")
    kind = path[-1] if isinstance(path, list) and path else fields.get("type", message.get("type"))
    role = _ROLES.get(str(kind)) or fields.get("role")
    if role is None:
        return None
    made: dict[str, Any] = {"role": role, "content": fields.get("content")}
    if fields.get("name"):
        made["name"] = fields["name"]
    if fields.get("tool_call_id"):
        made["tool_call_id"] = fields["tool_call_id"]
    extra = fields.get("additional_kwargs")
    calls = fields.get("tool_calls") or (extra.get("tool_calls") if isinstance(extra, Mapping) else None)
    if isinstance(calls, list) and calls:
        made["tool_calls"] = calls
        if isinstance(made["content"], list):  # providers repeat the calls among the content
            made["content"] = [part for part in made["content"] if not _is_call_part(part)]
    return made


def _is_call_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("tool_use", "function_call", "tool_call")
