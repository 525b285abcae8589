"""The conversation of a Responses request as chat messages: what the model sees."""

from collections.abc import Iterable
from typing import Any, Final

from agentlightning.gateway.blocks import unsealed
from agentlightning.gateway.memory import Memory
from agentlightning.gateway.rules import BadRequest, Json

__all__ = ["chat_messages", "chat_tools", "input_items", "tool_choice"]

_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Chat templates know no developer."""
_SPACE: Final = "__"
"""Between a namespace and the name of a function in it, as the model sees it."""

ToolNames = dict[str, tuple[str, str]]
"""Namespace and name, by the name that the model sees."""


def input_items(body: Json, memory: Memory) -> list[Any]:
    """The whole conversation: what came before, if the request names it, and its own input. Raises BadRequest."""
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest("'input' must be text or a non-empty array of items.", "input")
    previous = body.get("previous_response_id")
    if previous is None:
        return given
    earlier = memory.items(previous)
    if earlier is None:
        raise BadRequest(
            f"Previous response with id {previous!r} not found.",
            "previous_response_id",
            "previous_response_not_found",
        )
    return [*earlier, *given]


def chat_messages(instructions: str | None, items: list[Any]) -> list[Json]:
    """Instructions and items. Reasoning, text and calls of one answer become one message again."""
    made: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for place, item in enumerate(items):
        where = f"input.{place}"
        if not isinstance(item, dict):
            raise BadRequest(f"{where} must be an object.", where)
        kind = item.get("type", "message")
        match kind:
            case "message":
                _add_message(made, item, where)
            case "reasoning":
                made.append({"role": "assistant", "content": None, "reasoning_content": _reasoning(item)})
            case "function_call":
                _add_call(made, item, where)
            case "function_call_output":
                content = _content(item.get("output"), f"{where}.output")
                made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case _:
                raise BadRequest(
                    f"{where}: an item of type {kind} is not supported: the gateway runs no tools of its own.",
                    where,
                    "unsupported_value",
                )
    return [_tidy(message) for message in made if _says_something(message)]


def chat_tools(tools: Iterable[Any], notes: list[str]) -> tuple[list[Json], ToolNames]:
    """The functions among the tools, and what their names stand for where that is another."""
    made: list[Json] = []
    names: ToolNames = {}
    for place, tool in enumerate(tools):
        where = f"tools.{place}"
        if not isinstance(tool, dict):
            raise BadRequest(f"{where} must be an object.", where)
        match tool.get("type"):
            case "function":
                made.append(_function(tool, where))
            case "namespace":
                for inner, function in enumerate(tool.get("tools") or ()):
                    if not isinstance(function, dict) or function.get("type") != "function":
                        raise BadRequest(f"{where}.tools.{inner} must be a function.", where)
                    shown = _in_namespace(tool.get("name"), function.get("name"))
                    names[shown] = (str(tool.get("name")), str(function.get("name")))
                    made.append(_function({**function, "name": shown}, f"{where}.tools.{inner}"))
            case "custom":
                raise BadRequest(
                    f"{where}.type: custom tools are not supported: a policy calls functions.",
                    f"{where}.type",
                    "unsupported_value",
                )
            case _:
                notes.append("hosted_tools_left_out")
    return made, names


def tool_choice(choice: Any) -> Json:
    """The choice among tools, in the chat API's fields."""
    if choice is None:
        return {}
    if choice in ("auto", "none", "required"):
        return {"tool_choice": choice}
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    raise BadRequest(
        "'tool_choice' must be auto, none, required or a function.", "tool_choice", "unsupported_value"
    )


def _says_something(message: Json) -> bool:
    return (
        any(message.get(name) for name in ("tool_calls", "reasoning_content"))
        or message["content"] is not None
    )


def _tidy(message: Json) -> Json:
    if not message.get("reasoning_content"):
        message.pop("reasoning_content", None)
    if message["content"] is None and not message.get("tool_calls"):
        message["content"] = ""
    return message


def _add_message(made: list[Json], item: Json, where: str) -> None:
    role = _ROLES.get(item.get("role", ""))
    if role is None:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", f"{where}.role")
    content = _content(item.get("content"), f"{where}.content")
    before = made[-1] if made else None
    if role == "assistant" and before is not None and _only_thought(before):
        before["content"] = content
    else:
        made.append({"role": role, "content": content})


def _add_call(made: list[Json], item: Json, where: str) -> None:
    if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
        raise BadRequest(f"{where} must have a name, and arguments as text.", where)
    name = item["name"] if item.get("namespace") is None else _in_namespace(item["namespace"], item["name"])
    function = {"name": name, "arguments": item["arguments"]}
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    before = made[-1] if made else None
    if before is not None and before["role"] == "assistant":  # of the same answer
        before.setdefault("tool_calls", []).append(call)
        before["content"] = before["content"] or None
    else:
        made.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _only_thought(message: Json) -> bool:
    return (
        message["role"] == "assistant"
        and "reasoning_content" in message
        and message["content"] is None
        and "tool_calls" not in message
    )


def _content(content: Any, where: str) -> str | list[Json]:
    """Text alone is a string; with images it stays parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or an array of parts.", where)
    parts: list[Json] = []
    for place, part in enumerate(content):
        at = f"{where}.{place}"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text", "refusal"):
            parts.append({"type": "text", "text": str(part.get("refusal" if kind == "refusal" else "text"))})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            image = {"url": part["image_url"]}
            if part.get("detail"):
                image["detail"] = part["detail"]
            parts.append({"type": "image_url", "image_url": image})
        else:
            raise BadRequest(
                f"{at}: a part of type {kind} is not supported: the gateway keeps no files.",
                at,
                "unsupported_value",
            )
    if all(part["type"] == "text" for part in parts):
        return "".join(str(part["text"]) for part in parts)
    return parts


def _reasoning(item: Json) -> str:
    texts = [part.get("text") for part in item.get("content") or () if isinstance(part, dict)]
    text = "".join(text for text in texts if isinstance(text, str))
    return text or unsealed(item.get("encrypted_content")) or ""


def _function(tool: Json, where: str) -> Json:
    if not isinstance(tool.get("name"), str):
        raise BadRequest(f"{where}.name must be a string.", f"{where}.name")
    function: Json = {"name": tool["name"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    function["parameters"] = tool.get("parameters") or {"type": "object", "properties": {}}
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _in_namespace(namespace: Any, name: Any) -> str:
    return f"{namespace}{_SPACE}{name}"
