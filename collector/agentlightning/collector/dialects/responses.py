"""Bodies of OpenAI's Responses API, rewritten as those of the chat API."""

from collections.abc import Mapping
from typing import Any

from agentlightning.collector.bodies import choice, text_of

__all__ = ["answer", "is_response", "messages", "real_id"]


def is_response(value: Any) -> bool:
    """Whether this is a response object."""
    return isinstance(value, Mapping) and isinstance(value.get("output"), list)


def messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request: its instructions, then its input."""
    made: list[dict[str, Any]] = []
    if isinstance(request.get("instructions"), str):
        made.append({"role": "system", "content": request["instructions"]})
    given = request.get("input")
    for item in given if isinstance(given, list) else [given]:
        if isinstance(item, str):
            made.append({"role": "user", "content": item})
        elif isinstance(item, Mapping):
            made.extend(_message(item, made))
    return made


def answer(response: Mapping[str, Any]) -> dict[str, Any]:
    """The one choice that a response is."""
    message: dict[str, Any] = {"role": "assistant", "content": []}
    for item in response["output"]:
        if not isinstance(item, Mapping):
            continue
        match item.get("type"):
            case "message":
                content = item.get("content")
                message["content"].extend(content if isinstance(content, list) else [content])
            case "function_call":
                message.setdefault("tool_calls", []).append(_call(item))
            case "reasoning":
                message["reasoning_content"] = message.get("reasoning_content", "") + _reasoning(item)
    return choice(0, message, _reason(response, calls="tool_calls" in message))


def real_id(response: Mapping[str, Any]) -> Any:
    """Its id; where the Agents SDK made one up, the id that it kept of the provider's."""
    for item in response["output"]:
        data = item.get("provider_data") if isinstance(item, Mapping) else None
        if isinstance(data, Mapping) and data.get("response_id"):
            return data["response_id"]
    return response.get("id")


def _message(item: Mapping[str, Any], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    match item.get("type", "message"):
        case "function_call":
            if before and before[-1].get("role") == "assistant" and before[-1].get("tool_calls"):
                before[-1]["tool_calls"].append(_call(item))  # of one answer
                return []
            return [{"role": "assistant", "content": None, "tool_calls": [_call(item)]}]
        case "function_call_output":
            return [
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": text_of(item.get("output")),
                }
            ]
        case "message":
            return [{"role": item.get("role", "user"), "content": item.get("content")}]
    return []


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": item.get("call_id") or item.get("id"),
        "function": {"name": item.get("name"), "arguments": item.get("arguments")},
    }


def _reason(response: Mapping[str, Any], *, calls: bool) -> Any:
    status = response.get("status")
    if status == "incomplete":
        details = response.get("incomplete_details")
        return (details.get("reason") if isinstance(details, Mapping) else None) or "length"
    if status in ("failed", "cancelled"):
        return "error"
    return "tool_calls" if calls else "stop"


def _reasoning(item: Mapping[str, Any]) -> str:
    parts = [*(item.get("summary") or ()), *(item.get("content") or ())]
    return "".join(text_of(part.get("text")) for part in parts if isinstance(part, Mapping))
