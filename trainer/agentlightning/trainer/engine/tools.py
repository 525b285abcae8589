"""Tool calls in the Hermes form: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` inside the model's text.

The same parser reads plain and streamed answers: text goes through at once, unless it may be the beginning of a call;
a call is held back until it is whole. What is no valid call stays content, exactly as the model wrote it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from agentlightning.trainer.engine.text import held_back

__all__ = ["CLOSE", "OPEN", "HermesParser", "ToolCall"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON, letter by letter as the model wrote it: rendered again it gives the same tokens."""


class HermesParser:
    """Splits a growing text into content and calls."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._called = False

    def push(self, text: str) -> Iterator[str | ToolCall]:
        self._held += text
        while True:
            if self._inside:
                end = self._held.find(CLOSE)
                if end < 0:
                    return
                yield from self._call(self._held[:end], CLOSE)
                self._held, self._inside = self._held[end + len(CLOSE) :], False
                continue
            start = self._held.find(OPEN)
            if start < 0:
                cut = len(self._held) - held_back(self._held, OPEN)
                yield from self._content(cut)
                return
            yield from self._content(start)
            # White space between calls was held back; a call has come, so it was only a separator.
            self._held, self._inside = self._held.lstrip()[len(OPEN) :], True

    def flush(self) -> Iterator[str | ToolCall]:
        """The end of the answer. A call that lacks only its closing mark is a call."""
        held, self._held = self._held, ""
        if self._inside:
            yield from self._call(held, "")
        elif held and not (self._called and held.isspace()):
            yield held
        self._inside = False

    def _content(self, cut: int) -> Iterator[str]:
        """Give out the first `cut` characters, unless they may be no more than white space between two calls."""
        text = self._held[:cut]
        if not text or (self._called and text.isspace()):
            return
        self._held = self._held[cut:]
        yield text

    def _call(self, body: str, close: str) -> Iterator[str | ToolCall]:
        call = parse_call(body)
        if call is None:
            yield f"{OPEN}{body}{close}"
        else:
            self._called = True
            yield call


def parse_call(body: str) -> ToolCall | None:
    """The call in a JSON object with `name` and `arguments` (an object); None if it is none."""
    try:
        members = _members(body.strip())
        name = json.loads(members["name"])
        arguments = members["arguments"]
        if not isinstance(name, str) or not name or not isinstance(_strict(arguments), dict):
            return None
    except (ValueError, KeyError, RecursionError):
        return None
    return ToolCall(name, arguments)


def _strict(text: str) -> object:
    """JSON without NaN and Infinity, which Python reads and other languages' clients do not. Raises ValueError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it was written. Raises ValueError."""
    if not isinstance(json.loads(text), dict):
        raise ValueError("not an object")
    decode = json.JSONDecoder().raw_decode
    members: dict[str, str] = {}
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = decode(text, at)
        at = _skip(text, _skip(text, at) + 1)  # over the colon
        _, end = decode(text, at)
        members[key] = text[at:end]
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at
