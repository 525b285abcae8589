"""A model call's bodies as chat messages, whichever API they went by: what a reader of a record is shown."""

from collections.abc import Mapping
from typing import Any

from agentlightning.collector.dialects import responses

__all__ = ["answers", "messages"]


def messages(request: Any) -> list[Any] | None:
    """The messages of a chat, Messages or Responses request; None if it is none of these."""
    if not isinstance(request, Mapping):
        return None
    if isinstance(found := request.get("messages"), list):
        system = request.get("system")
        said = [{"role": "system", "content": _content(system)}] if system else []
        return said + [_message(message) for message in found]
    if "input" in request:
        return responses.messages(request)
    return None


def answers(response: Any) -> list[Any] | None:
    """The messages that are the answer; None if this is none."""
    if not isinstance(response, Mapping):
        return None
    if isinstance(choices := response.get("choices"), list):
        return [choice.get("message") or {} for choice in choices if isinstance(choice, Mapping)]
    if responses.is_response(response):
        return [responses.answer(response)["message"]]
    if response.get("type") == "message":
        return [_message(response)]
    return None


def _message(message: Any) -> Any:
    """A message of the Messages API as one of the chat API; any other stays as it is."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    blocks = [block for block in message["content"] if isinstance(block, Mapping)]
    made: dict[str, Any] = {
        **{key: message[key] for key in ("role", "name", "tool_call_id") if key in message},
        "content": _content([b for b in blocks if b.get("type") not in ("tool_use", "thinking")]),
    }
    if thoughts := [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]:
        made["reasoning_content"] = "".join(thoughts)
    calls = [
        {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": block.get("input")}}
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    calls += message.get("tool_calls") or []
    return {**made, "tool_calls": calls} if calls else made


def _content(content: Any) -> Any:
    """Blocks of text as text."""
    if not isinstance(content, list):
        return content
    texts = [block.get("text") for block in content if isinstance(block, Mapping)]
    told = [text for text in texts if isinstance(text, str)]
    return "\n".join(told) if len(told) == len(content) else content
