"""A chat message as blocks in order – reasoning, text, tool calls –, as the Responses and the Messages API have it.

The one translation of a stream: chunks of the engine's become blocks that open and grow. All blocks are closed at the
end, when the call is on record, so that no client acts on a tool call before; and what came late for an earlier block
still belongs to it. Hence a streamed answer says exactly what an unstreamed one does.
"""

import base64
import binascii
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.request import ModelRequest, Writer
from agentlightning.gateway.rules import Json

__all__ = ["Block", "BlockWriter", "blocks_of", "reasoning_of", "sealed", "typed_event", "unsealed"]

_SEAL: Final = "alr1:"


@dataclass(slots=True)
class Block:
    """One part of an answer."""

    kind: Literal["reasoning", "text", "tool"]
    index: int
    """Its place in the answer."""
    text: str = ""
    """Reasoning, text, or a tool call's arguments: as the model wrote them."""
    call_id: str = ""
    name: str = ""


class BlockWriter(Writer):
    """Writes the one answer of a request as blocks. Subclasses give the events' form."""

    shows_reasoning = True

    def __init__(self, request: ModelRequest) -> None:
        super().__init__(request)
        self._opened: dict[Any, Block] = {}
        self._begun = False

    @abstractmethod
    def begin(self, answer: Answer) -> bytes:
        """What starts a stream."""

    @abstractmethod
    def open(self, block: Block) -> bytes: ...

    @abstractmethod
    def grow(self, block: Block, text: str, entries: list[Json]) -> bytes:
        """More of a block. `entries`: log-probabilities that came with it."""

    @abstractmethod
    def close(self, block: Block, answer: Answer) -> bytes: ...

    @abstractmethod
    def finish(self, answer: Answer) -> bytes:
        """What ends a stream whose blocks are closed."""

    @abstractmethod
    def whole(self, answer: Answer) -> Json:
        """The unstreamed answer."""

    def chunk(self, data: Json, answer: Answer) -> tuple[bytes, bytes]:
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            events.append(self.begin(answer))
        for item in data["choices"]:
            delta = item.get("delta") or {}
            entries = (item.get("logprobs") or {}).get("content") or []
            if self.shows_reasoning and (text := reasoning_of(delta)):
                events.append(self._grow("reasoning", "reasoning", text, []))
            if content := delta.get("content"):
                events.append(self._grow("text", "text", content, entries))
            for part in delta.get("tool_calls") or ():
                function = part.get("function") or {}
                name, arguments = function.get("name") or "", function.get("arguments") or ""
                events.append(self._grow(part.get("index", 0), "tool", arguments, [], part.get("id"), name))
        return b"".join(events), b""

    def end(self, answer: Answer) -> bytes:
        events = [] if self._begun else [self.begin(answer)]
        self._begun = True
        choice = answer.only()
        missing = [b for b in self.blocks(choice) if b.kind == "text"] if not self._opened else []
        for block in missing:  # an answer without a word has an empty block, in some APIs
            self._opened["text"] = block
            events.append(self.open(block))
        events += [self.close(block, answer) for block in self._opened.values()]
        events.append(self.finish(answer))
        return b"".join(events)

    def blocks(self, choice: Choice) -> list[Block]:
        """What an answer consists of, in the order that the client gets it: in a stream, that of their opening."""
        found = blocks_of(choice, reasoning=self.shows_reasoning)
        order = [(block.kind, block.call_id) for block in self._opened.values()]
        found.sort(key=lambda b: order.index((b.kind, b.call_id)) if (b.kind, b.call_id) in order else 99)
        for index, block in enumerate(found):
            block.index = index
        return found

    def plain(self, data: Json, answer: Answer) -> bytes:
        return orjson.dumps(self.whole(answer))

    def record(self, answer: Answer, choice: Choice) -> Json:
        return self.whole(answer)

    def _grow(
        self,
        key: Any,
        kind: Literal["reasoning", "text", "tool"],
        text: str,
        entries: list[Json],
        call_id: str | None = None,
        name: str = "",
    ) -> bytes:
        events = b""
        block = self._opened.get(key)
        if block is None:
            block = Block(kind, len(self._opened), "", call_id or "", name)
            self._opened[key] = block
            events = self.open(block)
        if not text:
            return events
        block.text += text
        return events + self.grow(block, text, entries)


def blocks_of(choice: Choice, *, reasoning: bool) -> list[Block]:
    """The blocks of a whole message, in their usual order; empty text is no block."""
    message, made = choice.message, []
    if reasoning and (text := reasoning_of(message)):
        made.append(Block("reasoning", 0, text))
    if content := message.get("content"):
        made.append(Block("text", 0, content))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        made.append(Block("tool", 0, function.get("arguments") or "", call.get("id") or "", function["name"]))
    return made


def reasoning_of(message: Json) -> str:
    """What a message or a delta has of the model's reasoning: engines have two names for it."""
    text = message.get("reasoning_content") or message.get("reasoning")
    return text if isinstance(text, str) else ""


def sealed(text: str) -> str:
    """Reasoning as the opaque text that a client keeps and gives back."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def unsealed(value: Any) -> str | None:
    """The reasoning that `sealed` hid; None if this is not of our making."""
    if not isinstance(value, str) or not value.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(value.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def typed_event(data: Json) -> bytes:
    """A server-sent event that says its type twice, as both APIs do."""
    return b"event: " + data["type"].encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
