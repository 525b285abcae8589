"""What was said in a call, as chat messages: for text-based training, rewards and exports.

Whatever API the agent spoke (see `wire_forms`), messages are in OpenAI's chat form. They keep role, content, reasoning,
tool calls and their results; what says nothing about the conversation (refusal: null, audio, annotations) goes, so that
the same conversation is the same value wherever it is read from.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agentlightning.trainer.wire_forms import answers_of, messages_of, tools_of

__all__ = [
    "COLUMNS",
    "Exchange",
    "Message",
    "chains",
    "exchanges",
    "extends",
    "read_answer",
    "read_exchange",
    "text_of",
    "with_parsed_arguments",
]

Message = dict[str, Any]

COLUMNS = (
    "rollout_id",
    "attempt",
    "seq",
    "call_id",
    "agent",
    "policy",
    "model",
    "request",
    "response",
    "error",
    "reward",
)
"""Columns of `transitions` that `read_exchange` needs."""

_KEPT = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One answered call."""

    call_id: str
    seq: int
    agent: str | None
    model: str | None
    """The policy's name, or the model's if no policy of ours answered."""
    messages: tuple[Message, ...]
    """What the model saw."""
    tools: tuple[dict[str, Any], ...]
    answer: Message
    """What it said."""
    reward: float | None = None
    """Judged on this very call."""

    @property
    def whole(self) -> tuple[Message, ...]:
        """Messages and answer."""
        return (*self.messages, self.answer)


def read_exchange(row: Mapping[str, Any]) -> Exchange | str:
    """A row of `transitions` as messages, or why it has none: `call_error`, `no_messages`, `no_answer`, …"""
    if row["error"] is not None:
        return "call_error"
    request = _parse(row["request"])
    messages = messages_of(request)
    if isinstance(messages, str):
        return messages
    answer = read_answer(row["response"])
    if isinstance(answer, str):
        return answer
    return Exchange(
        call_id=row["call_id"],
        seq=row["seq"],
        agent=row["agent"],
        model=row["policy"] or row["model"],
        messages=tuple(_message(message) for message in messages),
        tools=tuple(tools_of(request)),
        answer=answer,
        reward=row["reward"],
    )


def read_answer(response: str | None) -> Message | str:
    """The message of a response, or why there is none: `no_answer`, `several_answers`."""
    answers = answers_of(_parse(response))
    if len(answers) != 1:
        return "several_answers" if answers else "no_answer"
    return _message({"role": "assistant", **answers[0]})


def exchanges(rows: Iterable[Mapping[str, Any]]) -> list[Exchange]:
    """The answered calls among the rows of one attempt, in order; those without messages are passed over."""
    read = (read_exchange(row) for row in sorted(rows, key=lambda row: row["seq"]))
    return [exchange for exchange in read if isinstance(exchange, Exchange)]


def chains(calls: Sequence[Exchange]) -> list[Exchange]:
    """The last call of each conversation: those whose messages no later call begins with."""
    return [
        call
        for number, call in enumerate(calls)
        if not any(extends(later.messages, call.whole) for later in calls[number + 1 :])
    ]


def extends(messages: Sequence[Message], beginning: Sequence[Message]) -> bool:
    """Whether the messages begin with these."""
    return len(messages) >= len(beginning) and all(
        _same(left, right) for left, right in zip(messages, beginning, strict=False)
    )


def text_of(message: Message) -> str:
    """A message as one text: what it says, and the tools it calls."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = [
        f"{call['function'].get('name')}({call['function'].get('arguments')})"
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), dict)
    ]
    return "\n".join([*([str(content)] if content else []), *calls])


def with_parsed_arguments(message: Message) -> Message:
    """The arguments of tool calls as objects, which most chat templates expect; what is no JSON stays as the model wrote it."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        with contextlib.suppress(ValueError, TypeError):
            function["arguments"] = json.loads(function.get("arguments") or "{}")
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _same(left: Message, right: Message) -> bool:
    """Equal as conversation: reasoning is commonly not sent back, and no content may be null or empty."""
    return (
        left["role"] == right["role"]
        and (left.get("content") or "") == (right.get("content") or "")
        and [_called(call) for call in left.get("tool_calls") or ()]
        == [_called(call) for call in right.get("tool_calls") or ()]
    )


def _called(call: Mapping[str, Any]) -> tuple[Any, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(
            ValueError
        ):  # not JSON, as models write it sometimes: compared letter by letter
            arguments = json.loads(arguments)
    return function.get("name"), arguments


def _message(message: Mapping[str, Any]) -> Message:
    kept = {name: message[name] for name in _KEPT if message.get(name) not in (None, [], "")}
    kept.setdefault("role", "user")
    kept.setdefault("content", None if "tool_calls" in kept else "")
    if "tool_calls" in kept:
        kept["tool_calls"] = _dicts(kept["tool_calls"])
    return kept


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _parse(text: str | None) -> dict[str, Any]:
    try:
        body = orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}
