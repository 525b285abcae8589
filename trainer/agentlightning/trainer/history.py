"""Why a call continues no chain: told from the messages on the wire, which the ids alone cannot say.

An agent that sends back what the model said, and whose prompt still has other ids, was `retokenised` (the chat template
rendered the tool call differently, or the text tokenises differently). One that changed or summarised what was said
`edited` its history. One that left the common prompt before the model said anything is a `branch`.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from agentlightning.trainer.calls import Call

__all__ = ["CHAINS_COMPARED", "why_broken"]

CHAINS_COMPARED = 8
"""The newest; so an attempt with many chains stays linear."""

Message = tuple[str, str, tuple[tuple[str, str], ...]]  # role, text, tool calls


def why_broken(
    call: Call,
    chains: Sequence[tuple[Call, Call]],
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> str:
    """`retokenised`, `edited`, `branch` or `agent`, by the chain (its first and last call) that is most alike."""
    messages = _request_messages(call)
    if not messages:
        return "retokenised" if decode is not None and _same_text(call, chains, decode) else "edited"
    best, reason = -1, "edited"
    for first, tail in reversed(chains):
        told = _request_messages(tail) + _response_messages(tail)
        common = _common_prefix(messages, told)
        if common <= best:
            continue
        best = common
        if told and common == len(told):
            reason = "retokenised"
        elif common == 0:
            reason = "agent" if call.agent is None else "edited"
        elif common < len(_request_messages(first)):
            reason = "branch"
        else:
            reason = "edited"
    return reason


def _same_text(
    call: Call, chains: Sequence[tuple[Call, Call]], decode: Callable[[Sequence[int]], str]
) -> bool:
    prompt = decode(_ids(call.prompt_ids))
    return any(
        prompt.startswith(decode(_ids(tail.prompt_ids) + _ids(tail.response_ids))) for _, tail in chains
    )


def _ids(array: Any) -> list[int]:
    return [] if array is None else array.tolist()


def _common_prefix(left: list[Message], right: list[Message]) -> int:
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)


def _request_messages(call: Call) -> list[Message]:
    body = _parse(call.request)
    messages = body.get("messages")
    return [_message(m) for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []


def _response_messages(call: Call) -> list[Message]:
    choices = _parse(call.response).get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return []
    message = choices[0].get("message")
    return [_message(message)] if isinstance(message, dict) else []


def _parse(text: str | None) -> dict[str, Any]:
    try:
        body = json.loads(text) if text else {}
    except ValueError:
        return {}  # only a label depends on it
    return body if isinstance(body, dict) else {}


def _message(message: dict[str, Any]) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = message.get("tool_calls")
    return (
        str(message.get("role", "")),
        content if isinstance(content, str) else "",
        tuple(_tool_call(c) for c in calls if isinstance(c, dict)) if isinstance(calls, list) else (),
    )


def _tool_call(call: dict[str, Any]) -> tuple[str, str]:
    """Name and arguments, the same however the client spaced the JSON."""
    function = call.get("function")
    if not isinstance(function, dict):
        return ("", "")
    arguments = function.get("arguments")
    try:
        arguments = json.dumps(json.loads(str(arguments)), sort_keys=True)
    except ValueError:
        arguments = str(arguments)
    return (str(function.get("name", "")), arguments)
