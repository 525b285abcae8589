"""The conversation of a Messages request as chat messages: what the model sees."""

from collections.abc import Iterable
from typing import Any, Final

from agentlightning.gateway.blocks import unsealed
from agentlightning.gateway.memory import Memory
from agentlightning.gateway.rules import BadRequest, Json

__all__ = ["chat_messages", "chat_tools", "tool_choice"]

_BILLING_HEADER: Final = "x-anthropic-billing-header:"
"""Claude Code puts a line into its system prompt that differs from one request to the next: the model does not see
it, else no call would continue another."""
_TOOL_FIELDS: Final = frozenset(
    {
        "name",
        "description",
        "input_schema",
        "type",
        "strict",
        "cache_control",
        "defer_loading",
        "eager_input_streaming",
        "input_examples",
        "allowed_callers",
    }
)


def chat_messages(body: Json, memory: Memory) -> list[Json]:
    """System prompt and messages. Raises BadRequest with the place of what cannot be told."""
    made: list[Json] = []
    if body.get("system"):
        text = _text(body["system"], "system")
        if text:
            made.append({"role": "system", "content": text})
    for number, message in enumerate(body["messages"]):
        where = f"messages.{number}"
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f"{where}.role must be user, assistant or system.", f"{where}.role")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
            continue
        if not isinstance(content, list):
            raise BadRequest(f"{where}.content must be a string or an array of blocks.", f"{where}.content")
        blocks = [_block(block, f"{where}.content.{place}") for place, block in enumerate(content)]
        if role == "assistant":
            made.append(_assistant(blocks, f"{where}.content", memory))
        elif role == "system":
            made.append({"role": "system", "content": _text(content, f"{where}.content")})
        else:
            made.extend(_user(blocks, f"{where}.content"))
    return made


def chat_tools(tools: Iterable[Any], notes: list[str]) -> list[Json]:
    """The tools that the client runs, as functions."""
    made = []
    for place, tool in enumerate(tools):
        where = f"tools.{place}"
        if not isinstance(tool, dict):
            raise BadRequest(f"{where} must be an object.", where)
        if tool.get("type") not in (None, "custom"):
            notes.append("hosted_tools_left_out")
            continue
        if unknown := sorted(tool.keys() - _TOOL_FIELDS):
            at = f"{where}.{unknown[0]}"
            raise BadRequest(f"{at} is not supported: this gateway does not know it.", at, "unknown_field")
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise BadRequest(f"{where} must have a name and an input_schema.", where)
        function: Json = {"name": tool["name"]}
        if tool.get("description"):
            function["description"] = tool["description"]
        function["parameters"] = tool["input_schema"]
        if tool.get("strict"):
            function["strict"] = True
        made.append({"type": "function", "function": function})
    return made


def tool_choice(choice: Any) -> Json:
    """The choice among tools, in the chat API's fields."""
    if choice is None:
        return {}
    made: Json = {}
    match choice.get("type"):
        case "auto" | "none":
            made["tool_choice"] = choice["type"]
        case "any":
            made["tool_choice"] = "required"
        case "tool" if isinstance(choice.get("name"), str):
            made["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        case _:
            raise BadRequest(
                "'tool_choice' must be of type auto, any, none, or tool with a name.", "tool_choice"
            )
    if choice.get("disable_parallel_tool_use") is not None:
        made["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return made


def _assistant(blocks: list[Json], where: str, memory: Memory) -> Json:
    text: list[str] = []
    calls: list[Json] = []
    reasoning = ""
    for place, block in enumerate(blocks):
        match block["type"]:
            case "text":
                text.append(block["text"])
            case "thinking":
                reasoning += block.get("thinking") or unsealed(block.get("signature")) or ""
            case "tool_use":
                arguments = memory.arguments(block.get("id") or "", block.get("input") or {})
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case other:
                raise _unsupported(other, f"{where}.{place}", "an assistant's message")
    made: Json = {"role": "assistant", "content": "".join(text) or (None if calls else "")}
    if calls:
        made["tool_calls"] = calls
    if reasoning:
        made["reasoning_content"] = reasoning
    return made


def _user(blocks: list[Json], where: str) -> list[Json]:
    """A user's message, and before it the results of tools that it brings."""
    made: list[Json] = []
    parts: list[Json] = []

    def close() -> None:
        if parts:
            made.append({"role": "user", "content": _joined(parts)})
            parts.clear()

    for place, block in enumerate(blocks):
        at = f"{where}.{place}"
        if block["type"] == "tool_result":
            close()
            content = _joined(_result(block, at))
            made.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            parts.append(_part(block, at))
    close()
    return made


def _result(result: Json, where: str) -> list[Json]:
    """What a tool gave back; an error says that it is one."""
    content = result.get("content")
    if content is None or isinstance(content, str):
        parts: list[Json] = [{"type": "text", "text": content or ""}]
    elif isinstance(content, list):
        blocks = [_block(block, f"{where}.content.{place}") for place, block in enumerate(content)]
        parts = [_part(block, f"{where}.content.{place}") for place, block in enumerate(blocks)]
    else:
        raise BadRequest(f"{where}.content must be a string or an array of blocks.", f"{where}.content")
    if result.get("is_error"):
        if not parts or parts[0]["type"] != "text":
            parts.insert(0, {"type": "text", "text": ""})
        parts[0]["text"] = f"Error: {parts[0]['text']}"
    return parts


def _part(block: Json, where: str) -> Json:
    """A block of a user's as a part of a chat message."""
    source = block.get("source") or {}
    match block["type"], source.get("type"):
        case "text", _:
            return {"type": "text", "text": block["text"]}
        case "image", "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": "image_url", "image_url": {"url": url}}
        case "image", "url":
            return {"type": "image_url", "image_url": {"url": source.get("url")}}
        case "document", "text":
            return {"type": "text", "text": str(source.get("data"))}
        case "tool_reference", _:
            return {"type": "text", "text": f"The tool {block.get('tool_name')} is available."}
        case other, kind:
            raise _unsupported(f"{other} ({kind})" if kind else other, where, "a user's message")


def _joined(parts: list[Json]) -> str | list[Json]:
    """Text alone is a string; with images it stays parts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)


def _text(content: Any, where: str) -> str:
    """A system prompt, without the line that is not meant for the model."""
    if isinstance(content, str):
        head, _, rest = content.partition("\n")
        return rest.lstrip("\n") if head.startswith(_BILLING_HEADER) else content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a string or an array of text blocks.", where)
    texts = []
    for place, block in enumerate(content):
        if _block(block, f"{where}.{place}")["type"] != "text":
            raise _unsupported(block["type"], f"{where}.{place}", "a system prompt")
        if not block["text"].startswith(_BILLING_HEADER):
            texts.append(block["text"])
    return "\n".join(texts)


def _block(block: Any, where: str) -> Json:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise BadRequest(f"{where} must be an object with a type.", where)
    if block["type"] == "text" and not isinstance(block.get("text"), str):
        raise BadRequest(f"{where}.text must be a string.", f"{where}.text")
    return block


def _unsupported(kind: str, where: str, place: str) -> BadRequest:
    return BadRequest(
        f"{where}: a block of type {kind} cannot be used in {place}: the gateway runs no tools and reads no files.",
        where,
        "unsupported_value",
    )
