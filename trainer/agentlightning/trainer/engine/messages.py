"""Messages and tools of a request, checked, and in the form that chat templates expect."""

import json
from typing import Any

from agentlightning.trainer.engine.errors import RequestError

__all__ = ["read_message", "read_tool", "with_parsed_arguments"]

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_message(message: Any, where: str) -> dict[str, Any]:
    """A message as templates expect it: content a string, tool calls as the client sent them."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RequestError(f"{where} must be an object with a role of {', '.join(ROLES)}.", param=where)
    known = {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "refusal",
        "audio",
        "function_call",
        "annotations",
    }
    for name, value in message.items():
        if name not in known or (name in ("audio", "function_call", "refusal") and value):
            raise RequestError(f"{where}.{name} is not honoured by this engine.", param=f"{where}.{name}")
    # Templates know no developer; it is the newer name of the same role.
    clean: dict[str, Any] = {"role": "system" if message["role"] == "developer" else message["role"]}
    clean["content"] = _content(message.get("content"), f"{where}.content")
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            clean[name] = message[name]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and message["role"] != "assistant"):
        raise RequestError(
            f"{where}.tool_calls must be a list, in an assistant's message.", param=f"{where}.tool_calls"
        )
    if calls:
        clean["tool_calls"] = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]
    elif message.get("content") is None:
        raise RequestError(f"{where} has neither content nor tool_calls.", param=where)
    return clean


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts.", param=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}.{i} is not a text part; this engine reads text only.", param=f"{where}.{i}"
            )
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str)
    ):
        raise RequestError(
            f"{where} must be a function call with a name, and arguments as a string.", param=where
        )
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }


def read_tool(tool: Any, where: str) -> dict[str, Any]:
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or not isinstance(tool.get("function"), dict)
    ):
        raise RequestError(f'{where} must be an object with type "function" and a function.', param=where)
    if not isinstance(tool["function"].get("name"), str):
        raise RequestError(f"{where}.function.name must be a string.", param=f"{where}.function.name")
    parameters = tool["function"].get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema.", param=f"{where}.function.parameters"
        )
    return tool


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments as an object, as the templates that come with models expect them. Ours keeps the letters."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError:
            arguments = call["function"]["arguments"]
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}
