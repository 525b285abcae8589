"""OpenAI chat bodies, in one form whatever dialect told of them.

The invariant: two dialects that tell of one call and both carry a thing, make it equal. So roles and
finish reasons are OpenAI's words; text alone is a string; the content of an assistant's message that
only calls tools is null; a tool's arguments are text; a tool's definition is `{type, function}`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

__all__ = [
    "SAMPLING",
    "chat_message",
    "chat_tool",
    "choice",
    "dump",
    "finish_reason",
    "normal_body",
    "request_body",
    "response_body",
    "sampling_of",
    "structured",
    "text_of",
    "tool_call",
    "unflatten",
    "usage_of",
]

SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "min_p",
    "repetition_penalty",
    "logit_bias",
)
_SAMPLING_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop_sequences": "stop",
}
_ROLES: Final = {
    "human": "user",
    "ai": "assistant",
    "function": "tool",
    "unknown": "assistant",
    "model": "assistant",
}
_FINISH: Final = {
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "function_calls": "tool_calls",
    "end_turn": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "completed": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "incomplete": "length",
    "safety": "content_filter",
    "refusal": "content_filter",
    "failed": "error",
    "unknown": None,
    "none": None,
}
_TEXT_PARTS: Final = ("text", "input_text", "output_text")


def finish_reason(reason: Any) -> str | None:
    """OpenAI's word for why an answer ended; None if it is not said."""
    if not isinstance(reason, str) or not reason:
        return None
    word = reason.rpartition(".")[2].lower()  # `FinishReason.STOP` too
    return _FINISH.get(word, word)


def sampling_of(parameters: Any) -> dict[str, Any]:
    """The sampling settings among request parameters."""
    if not isinstance(parameters, Mapping):
        return {}
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        known = _SAMPLING_NAMES.get(name, name)
        if known in SAMPLING and value is not None and known not in found:
            found[known] = value
    return found


def chat_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the one form. What it has besides stays."""
    role = message.get("role")
    role = _ROLES.get(role, role) if isinstance(role, str) and role else "user"
    made: dict[str, Any] = {"role": role, "content": _content(message.get("content"))}
    for name, value in message.items():
        if name not in ("role", "content", "tool_calls", "function_call") and value not in (None, {}, []):
            made[name] = value
    calls = [tool_call(call) for call in _items(message.get("tool_calls"))]
    function = message.get("function_call")
    if isinstance(function, Mapping) and function.get("name") and not calls:
        calls = [tool_call({"function": function})]
    if calls:
        made["tool_calls"] = calls
    if made["content"] in (None, "", []):
        made["content"] = None if calls else ""
    return made


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call, from OpenAI's form or a flat one. Parsed arguments become text again."""
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    arguments = function.get("arguments", function.get("args"))
    if not isinstance(arguments, str) or not arguments:
        arguments = text_of(arguments or {})
    return {
        "id": call.get("id") or None,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def chat_tool(tool: Any) -> Any:
    """A tool's definition as `{type, function}`; what is no function stays as it is."""
    if not isinstance(tool, Mapping):
        return tool
    function = tool.get("function")
    if isinstance(function, Mapping):
        made = {key: value for key, value in function.items() if value is not None}
    elif tool.get("type", "function") == "function" and "name" in tool:
        made = {key: value for key, value in tool.items() if key != "type" and value is not None}
        if "input_schema" in made and "parameters" not in made:
            made["parameters"] = made.pop("input_schema")
    else:
        return tool
    made["parameters"] = structured(made.get("parameters"))
    if made["parameters"] is None:
        del made["parameters"]
    return {"type": "function", "function": made}


def request_body(
    model: Any,
    messages: Iterable[Mapping[str, Any]],
    tools: Iterable[Any] = (),
    sampling: Mapping[str, Any] | None = None,
    *,
    stream: bool = False,
) -> dict[str, Any]:
    """A request of the chat API."""
    body: dict[str, Any] = {"model": model, "messages": [chat_message(message) for message in messages]}
    _match_results(body["messages"])
    made = [chat_tool(tool) for tool in tools]
    if made:
        body["tools"] = made
    body.update(sampling or {})
    if stream:
        body["stream"] = True
    return body


def choice(index: int, message: Mapping[str, Any], reason: Any) -> dict[str, Any]:
    """One answer of a response."""
    role = message.get("role") or "assistant"
    return {
        "index": index,
        "message": chat_message({**message, "role": role}),
        "finish_reason": finish_reason(reason),
    }


def response_body(
    response_id: str | None, model: Any, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A response of the chat API (or, of choices with text, of the completions API)."""
    kind = "text_completion" if any("text" in item for item in choices) else "chat.completion"
    body: dict[str, Any] = {"id": response_id, "object": kind, "model": model, "choices": choices}
    if usage is not None:
        body["usage"] = usage
    return body


def usage_of(prompt: Any, completion: Any) -> dict[str, Any] | None:
    """Token counts; None if they are not there."""
    if not isinstance(prompt, int) or not isinstance(completion, int):
        return None
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def normal_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request or response body of the chat or completions API, its messages, tools and reasons normal."""
    made = dict(body)
    if isinstance(made.get("messages"), list):
        made["messages"] = [chat_message(item) for item in _items(made["messages"])]
    if isinstance(made.get("tools"), list):
        made["tools"] = [chat_tool(tool) for tool in made["tools"]]
    if isinstance(made.get("choices"), list):
        made["choices"] = [
            {
                **item,
                **(
                    {"message": choice(0, item["message"], None)["message"]}
                    if isinstance(item.get("message"), dict)
                    else {}
                ),
                "finish_reason": finish_reason(item.get("finish_reason")),
            }
            for item in _items(made["choices"])
        ]
    return made


def structured(value: Any) -> Any:
    """An attribute that is JSON text on spans and a structure on events; text that is no JSON stays text."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def text_of(value: Any) -> str:
    """Anything as text: what is no text as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value, default=repr).decode()


def dump(body: dict[str, Any] | None) -> str | None:
    """A body as the tables hold it."""
    return None if body is None else orjson.dumps(body, default=repr).decode()


def unflatten(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The list that attributes like `prefix.0.role` spell out: one tree per index, numbers as lists."""
    tree = _Tree()
    for key, value in attributes.items():
        if not key.startswith(prefix):
            continue
        place = tree
        *way, last = key[len(prefix) :].lstrip(".").split(".")
        for step in way:
            inner = place.setdefault(step, _Tree())
            if not isinstance(inner, _Tree):  # a value and a tree of one name: the tree wins
                inner = place[step] = _Tree()
            place = inner
        place.setdefault(last, value)
    listed = _listed(tree)
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


class _Tree(dict[str, Any]):
    """What keys spell out, as opposed to a structure that is an attribute's value."""


def _listed(tree: Any) -> Any:
    if not isinstance(tree, _Tree):
        return tree
    if tree and all(key.isdecimal() for key in tree):
        return [_listed(tree[key]) for key in sorted(tree, key=int)]
    return {key: _listed(value) for key, value in tree.items()}


def _content(content: Any) -> Any:
    """Plain text where it is only that, OpenAI's list of parts elsewhere."""
    if not isinstance(content, list):
        return content if content is None or isinstance(content, str) else text_of(content)
    parts: list[Any] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
            parts.append({"type": "text", "text": text_of(part.get("text", part.get("content")))})
        else:
            parts.append(part)
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].get("type") == "text":
        return parts[0]["text"]
    return parts or None


def _match_results(messages: list[dict[str, Any]]) -> None:
    """Give tool calls the ids that their results name, where a dialect has written another (`fc_…`)."""
    for index, message in enumerate(messages):
        calls = message.get("tool_calls")
        if not calls:
            continue
        results = []
        for follower in messages[index + 1 :]:
            if follower["role"] != "tool":
                break
            results.append(follower.get("tool_call_id"))
        known = [call["id"] for call in calls]
        if len(results) == len(calls) and all(results) and not any(result in known for result in results):
            for call, result in zip(calls, results, strict=True):
                call["id"] = result


def _items(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
