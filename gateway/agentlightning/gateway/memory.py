"""What later requests of an agent may refer to: answers by their ids, and the letters of tool calls.

`previous_response_id` names an earlier answer instead of repeating it. And an agent of the Messages API gives back a
tool call's input as an object, when the model wrote text: with the text at hand, the prompt that is made of it has
the very tokens that were sampled. Bounded; the oldest are forgotten.
"""

from collections import OrderedDict
from typing import Any, Final

import orjson

__all__ = ["Memory", "Recollections"]

MAX_BYTES: Final = 64 << 20


class Recollections:
    """The memory of all attempts. Kept as JSON text, which is small."""

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()
        self._size = 0

    def of(self, owner: str) -> "Memory":
        return Memory(self, owner)

    def put(self, key: tuple[str, str, str], value: Any) -> None:
        self._forget(key)
        self._kept[key] = orjson.dumps(value)
        self._size += len(self._kept[key])
        while self._size > self._limit:
            self._forget(next(iter(self._kept)))

    def get(self, key: tuple[str, str, str]) -> Any | None:
        found = self._kept.get(key)
        return None if found is None else orjson.loads(found)

    def _forget(self, key: tuple[str, str, str]) -> None:
        if (old := self._kept.pop(key, None)) is not None:
            self._size -= len(old)


class Memory:
    """One attempt's part: no other can read it."""

    def __init__(self, kept: Recollections, owner: str) -> None:
        self._kept = kept
        self._owner = owner

    def keep_items(self, response_id: str, items: list[Any]) -> None:
        """The conversation up to and with an answer, as items of the Responses API."""
        self._kept.put((self._owner, "items", response_id), items)

    def items(self, response_id: str) -> list[Any] | None:
        return self._kept.get((self._owner, "items", response_id))

    def keep_arguments(self, call_id: str, text: str) -> None:
        """The text of a tool call's arguments, as the model wrote it."""
        self._kept.put((self._owner, "arguments", call_id), text)

    def arguments(self, call_id: str, value: Any) -> str:
        """The text that the model wrote, if it says `value`; else `value` as JSON."""
        text = self._kept.get((self._owner, "arguments", call_id))
        if text is not None:
            try:
                if orjson.loads(text or "{}") == value:
                    return text
            except ValueError:
                pass
        return orjson.dumps(value).decode()
