"""Streamed answers: where one ends, and the plain answer that it amounts to.

The bytes of a stream are kept as they pass and read once, at the end; in between, a search for the
terminal event is all that is done, so a chunk is never held up.
"""

import re
from collections.abc import Iterator
from typing import Any

from agentlightning.sdk._bodies import loads

__all__ = ["events", "look", "rebuild"]

_TERMINAL = re.compile(
    rb"(?:^|[\r\n])(?:data: ?\[DONE\]"
    rb"|(?:event: ?response\.(?:completed|failed|incomplete)|data: ?\{\"type\": ?\"response\.(?:completed|failed|incomplete)\")"
    rb"[^\r\n]*(?:\r?\n|\r)(?:[^\r\n]+(?:\r?\n|\r))*(?:\r?\n|\r))"
)
"""`[DONE]` of chat and completions, or a whole final event of Responses. JSON holds no raw line ends, so
what a model writes cannot look like it."""

_SET_ONCE = frozenset({"id", "type", "role", "object", "model", "index", "finish_reason", "stop_reason"})

_DONE = (b"[DONE]",)
_SIGNS = {
    "chat": _DONE,
    "completions": _DONE,
    "responses": (b"response.completed", b"response.failed", b"response.incomplete"),
}
_LONGEST = max(len(sign) for signs in _SIGNS.values() for sign in signs)


def look(api: str, data: bytearray, start: int = 0) -> tuple[bool, int]:
    """Whether the terminal event is in what has come so far, and where to look on when more has.

    What has been looked at is not looked at again, so a stream costs the same per byte however long it is.
    """
    while True:
        found = [at for sign in _SIGNS[api] if (at := data.find(sign, start)) >= 0]
        if not found:
            return False, max(start, len(data) - _LONGEST)  # a sign may be cut in two
        at = min(found)
        begin = max(data.rfind(b"\n\n", 0, at), data.rfind(b"\n\r\n", 0, at), 0)
        if _TERMINAL.search(data, begin) is not None:
            return True, at
        ends = [end for blank in (b"\n\n", b"\n\r\n") if (end := data.find(blank, at)) >= 0]
        if not ends:
            return False, at  # the event is not whole yet
        start = min(ends)  # a model wrote it


def events(data: bytes) -> Iterator[Any]:
    """The JSON of each event of a stream, as far as it is readable."""
    parts: list[bytes] = []
    for line in [*data.splitlines(), b""]:
        if line.startswith(b"data:"):
            parts.append(line[5:].removeprefix(b" "))
        elif not line and parts:
            body, parts = b"\n".join(parts), []
            if body != b"[DONE]":
                event = loads(body)
                if event is not None:
                    yield event


def rebuild(api: str, data: bytes) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The plain answer that a stream amounts to, and the error that the server reported in it."""
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    error: dict[str, Any] | None = None
    for event in events(data):
        if not isinstance(event, dict):
            continue
        if event.get("error"):
            error = event["error"] if isinstance(event["error"], dict) else {"message": str(event["error"])}
        elif api == "responses":
            if isinstance(event.get("response"), dict):
                answer = event["response"]  # each such event holds the whole state so far
                if isinstance(answer.get("error"), dict):
                    error = answer["error"]
            elif event.get("type") == "error":
                error = event
        else:
            _merge_chunk(answer, choices, event)
    for choice in choices.values():
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("index", None)  # only a stream needs it
    if choices:
        answer["choices"] = [choices[index] for index in sorted(choices)]
    if answer.get("object") == "chat.completion.chunk":
        answer["object"] = "chat.completion"
    return answer, error


def _merge_chunk(answer: dict[str, Any], choices: dict[int, dict[str, Any]], chunk: dict[str, Any]) -> None:
    for name, value in chunk.items():
        if name == "choices":
            for part in value or ():
                if isinstance(part, dict):
                    index = part.get("index", 0)
                    _merge_choice(choices.setdefault(index, {"index": index}), part)
        elif value is not None and (name == "usage" or name not in answer):
            answer[name] = value  # the first chunk names the answer; usage may be counted up


def _merge_choice(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if value is None or name == "index":
            continue
        if name == "delta":
            _merge(choice.setdefault("message", {}), value)
        elif name in ("token_ids", "prompt_token_ids", "model_versions") and isinstance(value, list):
            if name == "token_ids":
                choice.setdefault(name, []).extend(value)
            else:
                choice[name] = value
        else:
            _merge(choice, {name: value})


def _merge(target: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta: texts and lists grow, objects merge, tool calls merge by their index."""
    for name, value in delta.items():
        if value is None:
            continue
        present = target.get(name)
        if name == "tool_calls" and isinstance(value, list):
            _merge_tool_calls(target.setdefault(name, []), value)
        elif present is None:
            target[name] = (
                list(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else value
            )
        elif name in _SET_ONCE:
            target[name] = value or present
        elif isinstance(present, str) and isinstance(value, str):
            target[name] = present + value
        elif isinstance(present, list) and isinstance(value, list):
            present.extend(value)
        elif isinstance(present, dict) and isinstance(value, dict):
            _merge(present, value)
        else:
            target[name] = value


def _merge_tool_calls(calls: list[dict[str, Any]], deltas: list[Any]) -> None:
    for delta in deltas:
        if not isinstance(delta, dict):
            continue
        index = delta.get("index", len(calls))
        call = next((call for call in calls if call.get("index") == index), None)
        if call is None:
            call = {"index": index}
            calls.append(call)
        _merge(call, {name: value for name, value in delta.items() if name != "index"})
