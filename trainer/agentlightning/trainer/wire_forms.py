"""Bodies of the APIs that agents speak, as chat messages: OpenAI's chat completions and Responses, Anthropic's Messages.

The data set holds each body as it was on the wire. Here they are only read, so a part of a kind that is not known is
left out rather than refused: the gateway has refused what the model could not be told.
"""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["answers_of", "messages_of", "tools_of"]

Json = dict[str, Any]

_ROLES = {"developer": "system", "human": "user", "ai": "assistant"}


def messages_of(request: Mapping[str, Any]) -> list[Json] | str:
    """What the model saw, or why that is not known: `no_messages`, `continues_stored_response`."""
    if "input" in request and "messages" not in request:
        if request.get("previous_response_id") is not None:
            return "continues_stored_response"  # what came before stands in other calls
        messages = _from_items(_items(request["input"]))
        if request.get("instructions"):
            messages.insert(0, {"role": "system", "content": request["instructions"]})
        return messages or "no_messages"
    messages = []
    if request.get("system"):
        messages.append({"role": "system", "content": _text(request["system"])})
    for message in _dicts(request.get("messages")):
        messages += _from_blocks(message)
    return messages or "no_messages"


def answers_of(response: Mapping[str, Any]) -> list[Json]:
    """The assistant's messages in a response: one, or as many as were asked for."""
    if "choices" in response:
        return _dicts([choice.get("message") for choice in _dicts(response["choices"])])
    if isinstance(response.get("output"), list):
        return _from_items(response["output"])
    if isinstance(response.get("content"), list):
        return _from_blocks({"role": "assistant", "content": response["content"]})
    return []


def tools_of(request: Mapping[str, Any]) -> list[Json]:
    """The functions among the tools, in OpenAI's chat form."""
    tools = []
    for tool in _dicts(request.get("tools")):
        if isinstance(tool.get("function"), dict):
            tools.append(tool)
        elif isinstance(tool.get("name"), str) and tool.get("type") in (None, "function", "custom"):
            function = {"name": tool["name"], "description": tool.get("description")}
            function["parameters"] = tool.get("input_schema") or tool.get("parameters")
            kept = {name: value for name, value in function.items() if value is not None}
            tools.append({"type": "function", "function": kept})
    return tools


def _from_blocks(message: Json) -> list[Json]:
    """A message whose content may be Anthropic's blocks; results of tools become messages of their own."""
    content = message.get("content")
    blocks = _dicts(content)
    if not any(block.get("type") in ("tool_use", "tool_result", "thinking") for block in blocks):
        role = message.get("role", "user")
        text_alone = isinstance(content, list) and all(block.get("type") == "text" for block in blocks)
        joined = "".join(str(block.get("text", "")) for block in blocks)
        return [{**message, "role": _ROLES.get(role, role), **({"content": joined} if text_alone else {})}]
    made: list[Json] = []
    texts, thoughts, calls = [], "", []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(str(block.get("text", "")))
            case "thinking":
                thoughts += str(block.get("thinking") or "")
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                calls.append(_call(block.get("id"), block.get("name"), arguments))
            case "tool_result":
                result = _text(block.get("content"))
                made.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.get("tool_use_id"),
                        "content": f"Error: {result}" if block.get("is_error") else result,
                    }
                )
    if texts or thoughts or calls:
        own: Json = {"role": message.get("role", "user"), "content": "\n".join(texts) or None}
        own |= {"reasoning_content": thoughts} if thoughts else {}
        made.append(own | ({"tool_calls": calls} if calls else {}))
    return made


def _from_items(items: list[Any]) -> list[Json]:
    """Items of the Responses API; what one answer is made of is one message."""
    made: list[Json] = []
    fresh = True  # whether the next item of an assistant's begins a message
    for item in _dicts(items):
        kind = item.get("type", "message")
        role = _ROLES.get(item.get("role", ""), item.get("role") or "user")
        if kind == "function_call_output":
            made.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
            )
            fresh = True
        elif kind == "message" and role != "assistant":
            made.append({"role": role, "content": _text(item.get("content"))})
            fresh = True
        elif kind in ("message", "reasoning", "function_call"):
            if fresh or (kind != "function_call" and made[-1].get("tool_calls")):
                made.append({"role": "assistant", "content": None})
            fresh = False
            _add(made[-1], kind, item)
    return made


def _add(message: Json, kind: str, item: Json) -> None:
    match kind:
        case "message":
            message["content"] = (message["content"] or "") + _text(item.get("content"))
        case "reasoning":
            thought = _text(item.get("content")) or _text(item.get("summary"))
            if thought:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
        case "function_call":
            call = _call(item.get("call_id") or item.get("id"), item.get("name"), item.get("arguments"))
            message.setdefault("tool_calls", []).append(call)


def _call(call_id: Any, name: Any, arguments: Any) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _items(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) else []


def _text(content: Any) -> str:
    """The text of content in any form."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or part.get("refusal") or "") for part in _dicts(content))
    return content if isinstance(content, str) else ""


def _dicts(value: Any) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
