"""Messages of the GenAI conventions, rewritten as OpenAI bodies.

`gen_ai.input.messages` and its relatives are lists of messages made of parts; they come as JSON text
on spans and as structures on events. Both are read. What a part is not known to be stays in the
content as it is: nothing is dropped.
"""

from collections.abc import Mapping
from typing import Any

from agentlightning.collector.bodies import (
    choice,
    finish_reason,
    request_body,
    response_body,
    structured,
    text_of,
    tool_call,
    usage_of,
)

__all__ = ["chat_request", "chat_response", "finish_reason", "messages_of", "structured"]

_INPUT = "gen_ai.input.messages"
_OUTPUT = "gen_ai.output.messages"
_SYSTEM = "gen_ai.system_instructions"
_TOOLS = "gen_ai.tool.definitions"


def chat_request(
    attributes: Mapping[str, Any], model: str | None, sampling: Mapping[str, Any], *, completion: bool = False
) -> dict[str, Any] | None:
    """The request body; None if the span holds no content (it is off by default).

    Args:
        completion: it was the completions API, whose prompt the conventions spell as messages.
    """
    messages = structured(attributes.get(_INPUT))
    system = structured(attributes.get(_SYSTEM))
    if not isinstance(messages, list) and system is None:
        return None
    stream = attributes.get("gen_ai.request.stream") is True or attributes.get("gen_ai.is_streaming") is True
    if completion and isinstance(messages, list):
        body = {"model": model, "prompt": _prompt(messages), **sampling}
        return {**body, "stream": True} if stream else body
    chat: list[dict[str, Any]] = []
    if system is not None:
        chat.extend(
            messages_of({"role": "system", "parts": system if isinstance(system, list) else [system]})
        )
    for message in messages if isinstance(messages, list) else ():
        chat.extend(messages_of(message))
    tools = structured(attributes.get(_TOOLS))
    return request_body(model, chat, tools if isinstance(tools, list) else (), sampling, stream=stream)


def chat_response(
    attributes: Mapping[str, Any],
    response_id: str | None,
    model: str | None,
    finish: list[str],
    *,
    completion: bool = False,
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
        made = messages_of(output) or [{"role": "assistant", "content": None}]
        answer = choice(index, made[0], reason)
        if completion:
            answer = {
                "index": index,
                "text": answer["message"]["content"] or "",
                "finish_reason": answer["finish_reason"],
            }
        choices.append(answer)
    usage = usage_of(
        attributes.get("gen_ai.usage.input_tokens"), attributes.get("gen_ai.usage.output_tokens")
    )
    return response_body(response_id, model, choices, usage)


def messages_of(message: Any) -> list[dict[str, Any]]:
    """One message of parts is one chat message, but each tool's result is a message of its own."""
    if not isinstance(message, dict):
        return [] if message is None else [{"role": "user", "content": message}]
    if "parts" not in message and ("content" in message or "tool_calls" in message):
        return [{key: value for key, value in message.items() if key != "finish_reason"}]  # OpenAI's own form
    parts = message.get("parts")
    if not isinstance(parts, list):
        parts = [] if parts is None else [parts]
    chat: dict[str, Any] = {"role": message.get("role") or "user"}
    if message.get("name"):
        chat["name"] = message["name"]
    content: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for item in parts:
        part = item if isinstance(item, dict) else {"type": "text", "content": item}
        kind = part.get("type")
        if kind == "tool_call":
            # Emitters parse the arguments; the text that the model wrote is lost then.
            calls.append(tool_call(part))
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result"))
            results.append({"role": "tool", "tool_call_id": part.get("id"), "content": text_of(result)})
        elif kind in ("reasoning", "thinking"):
            chat["reasoning_content"] = chat.get("reasoning_content", "") + text_of(part.get("content"))
        elif kind == "text":
            content.append({"type": "text", "text": text_of(part.get("content", part.get("text")))})
        else:
            content.append(part)
    if results and not content and not calls:
        return results
    chat["content"] = content
    if calls:
        chat["tool_calls"] = calls
    return [chat, *results]


def _prompt(messages: list[Any]) -> Any:
    """The prompt that was spelt as messages: text, or token ids that came as one part each."""
    pieces = [
        part.get("content") if isinstance(part, dict) else part
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("parts"), list)
        for part in message["parts"]
    ]
    if pieces and all(isinstance(piece, int) for piece in pieces):
        return pieces
    texts = [text_of(piece) for piece in pieces]
    return texts[0] if len(texts) == 1 else texts
