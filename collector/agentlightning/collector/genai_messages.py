"""Messages of the GenAI conventions, rewritten as OpenAI chat bodies.

`gen_ai.input.messages` and its relatives are lists of messages made of parts; they come as JSON text
on spans and as structures on events. Both are read. What a part is not known to be stays in the
content as it is: nothing is dropped.
"""

from collections.abc import Mapping
from typing import Any

import orjson

__all__ = ["chat_request", "chat_response", "finish_reason", "structured"]

_INPUT = "gen_ai.input.messages"
_OUTPUT = "gen_ai.output.messages"
_SYSTEM = "gen_ai.system_instructions"
_TOOLS = "gen_ai.tool.definitions"
_FINISH = {"tool_call": "tool_calls"}  # the conventions' word, OpenAI's word


def chat_request(
    attributes: Mapping[str, Any], model: str | None, sampling: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The request body; None if the span holds no content (it is off by default)."""
    messages = structured(attributes.get(_INPUT))
    system = structured(attributes.get(_SYSTEM))
    if not isinstance(messages, list) and system is None:
        return None
    body: dict[str, Any] = {"model": model, "messages": []}
    if system is not None:
        parts = system if isinstance(system, list) else [system]
        body["messages"].append({"role": "system", "content": _content([_part(part) for part in parts])})
    for message in messages if isinstance(messages, list) else ():
        body["messages"].extend(_messages(message))
    tools = structured(attributes.get(_TOOLS))
    if isinstance(tools, list):
        body["tools"] = [_tool(tool) for tool in tools]
    body.update(sampling)
    if attributes.get("gen_ai.request.stream") is True:
        body["stream"] = True
    return body


def chat_response(
    attributes: Mapping[str, Any], response_id: str | None, model: str | None, finish: list[str]
) -> dict[str, Any] | None:
    """The response body, all choices; None if the span holds no content."""
    outputs = structured(attributes.get(_OUTPUT))
    if not isinstance(outputs, list):
        return None
    choices = []
    for index, output in enumerate(outputs):
        reason = output.get("finish_reason") if isinstance(output, dict) else None
        if index < len(finish):
            reason = finish[index]
        made = _messages(output) or [{"role": "assistant", "content": None}]
        choices.append({"index": index, "message": made[0], "finish_reason": finish_reason(reason)})
    body: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion",
        "model": model,
        "choices": choices,
    }
    prompt, completion = (
        attributes.get("gen_ai.usage.input_tokens"),
        attributes.get("gen_ai.usage.output_tokens"),
    )
    if isinstance(prompt, int) and isinstance(completion, int):
        body["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
    return body


def finish_reason(reason: Any) -> str | None:
    """OpenAI's word for why an answer ended; None if the span does not say."""
    return _FINISH.get(reason, reason) if isinstance(reason, str) and reason else None


def structured(value: Any) -> Any:
    """An attribute that is JSON text on spans and a structure on events; text that is no JSON stays text."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def _messages(message: Any) -> list[dict[str, Any]]:
    """One message of parts is one chat message, but each tool's result is a message of its own."""
    if not isinstance(message, dict):
        return [] if message is None else [{"role": "user", "content": message}]
    parts = message.get("parts")
    if not isinstance(parts, list):
        parts = [] if parts is None else [parts]
    chat: dict[str, Any] = {"role": message.get("role", "user")}
    if message.get("name"):
        chat["name"] = message["name"]
    content: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for item in parts:
        part = _part(item)
        kind = part.get("type")
        if kind == "tool_call":
            calls.append(_tool_call(part))
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result"))
            results.append(
                {"role": "tool", "tool_call_id": part.get("id"), "content": result}
                if isinstance(result, str)
                else {"role": "tool", "tool_call_id": part.get("id"), "content": _text(result)}
            )
        elif kind == "reasoning":
            chat["reasoning_content"] = chat.get("reasoning_content", "") + _text(part.get("content"))
        elif kind == "text":
            content.append({"type": "text", "text": _text(part.get("content"))})
        else:
            content.append(part)
    if results and not content and not calls:
        return results
    chat["content"] = _content(content)
    if calls:
        chat["tool_calls"] = calls
    return [chat, *results]


def _part(part: Any) -> dict[str, Any]:
    return part if isinstance(part, dict) else {"type": "text", "content": part}


def _content(parts: list[dict[str, Any]]) -> Any:
    """Plain text where it is only that, OpenAI's list of parts elsewhere."""
    texts = [
        {"type": "text", "text": part["content"]}
        if part.get("type") == "text" and "content" in part
        else part
        for part in parts
    ]
    if not texts:
        return None
    if len(texts) == 1 and texts[0].get("type") == "text":
        return texts[0].get("text")
    return texts


def _tool_call(part: dict[str, Any]) -> dict[str, Any]:
    # Emitters parse the arguments; the text that the model wrote is lost then.
    arguments = part.get("arguments")
    return {
        "id": part.get("id"),
        "type": "function",
        "function": {
            "name": part.get("name"),
            "arguments": arguments if isinstance(arguments, str) else _text(arguments or {}),
        },
    }


def _tool(tool: Any) -> Any:
    if isinstance(tool, dict) and "function" not in tool and tool.get("type", "function") == "function":
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    return tool


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value, default=repr).decode()
