"""What an engine said, plain or chunk by chunk: both leave one and the same record.

Answers of the chat and of the completions API are read alike; the other APIs are made from these.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.gateway.rules import Json
from agentlightning.proto.packed import pack_floats

__all__ = ["MAX_CHOICES", "Answer", "BadAnswer", "Choice", "message_of"]

MAX_CHOICES: Final = 128


class BadAnswer(Exception):
    """The engine's answer is not what the format says."""


@dataclass(slots=True)
class Choice:
    """One of the answers to a request."""

    index: int
    message: Json = field(default_factory=dict)
    finish_reason: str | None = None
    prompt_ids: list[int] | None = None
    """Where the choices of one answer have prompts of their own."""
    token_ids: list[int] | None = None
    logprob_entries: list[Json] | None = None
    """As the chat API has them: `token`, `logprob`, `bytes`, `top_logprobs`."""
    versions: list[int] = field(default_factory=list)
    """`[start, version, …]` of the sampled tokens."""
    extra: Json = field(default_factory=dict)

    def logprobs(self) -> bytes | None:
        """One per token id, packed. Raises BadAnswer if they are not parallel."""
        if self.token_ids is None or self.logprob_entries is None:
            return None
        if len(self.logprob_entries) != len(self.token_ids):
            raise BadAnswer(
                f"{len(self.token_ids)} token ids came with {len(self.logprob_entries)} log-probabilities."
            )
        try:
            return pack_floats([entry["logprob"] for entry in self.logprob_entries])
        except (KeyError, TypeError) as error:
            raise BadAnswer(f"The log-probabilities cannot be read ({error!r}).") from None


class Answer:
    """The answer to one request, while it comes."""

    def __init__(self) -> None:
        self.head: Json = {}
        self.choices: dict[int, Choice] = {}
        self.prompt_ids: list[int] | None = None
        self.version: int | None = None
        self.usage: Json | None = None

    def read_plain(self, data: Any) -> None:
        """Take in a whole answer. Raises BadAnswer."""
        try:
            self._read_top(data)
            for item in data["choices"]:
                choice = self._choice(item)
                choice.message = dict(item["message"]) if "message" in item else {"content": item["text"]}
                self._read_common(choice, item)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadAnswer(f"The engine's answer is not a completion ({error!r}).") from None
        self.check_complete()

    def read_chunk(self, data: Any) -> None:
        """Take in one chunk of a stream. Raises BadAnswer."""
        try:
            self._read_top(data)
            for item in data["choices"]:
                choice = self._choice(item)
                for key, value in (item.get("delta") or {"content": item.get("text")}).items():
                    if value is not None:
                        _merge(choice.message, key, value)
                self._read_common(choice, item)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadAnswer(f"The engine's chunk is not one of a completion ({error!r}).") from None

    def check_complete(self) -> None:
        """Raises BadAnswer unless every choice has ended."""
        if not self.choices or any(choice.finish_reason is None for choice in self.choices.values()):
            raise BadAnswer("The engine's answer ended before it was complete.")

    def versions_of(self, choice: Choice) -> tuple[int | None, list[int] | None]:
        """Version of the first sampled token; and where it changed, if it did."""
        if len(choice.versions) > 2:
            return choice.versions[1], choice.versions
        return (choice.versions[1] if choice.versions else self.version), None

    def prompt_of(self, choice: Choice | None) -> list[int] | None:
        """Ids of the prompt that a choice answers."""
        return self.prompt_ids if choice is None or choice.prompt_ids is None else choice.prompt_ids

    def only(self) -> Choice:
        """The one choice of an API that has no others."""
        return next(iter(self.choices.values()))

    def reasoning_tokens(self) -> int:
        """How many of the sampled tokens were reasoning, if the engine counts them."""
        found = ((self.usage or {}).get("completion_tokens_details") or {}).get("reasoning_tokens")
        return found if isinstance(found, int) else 0

    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompt, tokens sampled, and how many of the prompt's came from a cache."""
        usage = self.usage or {}
        prompt, sampled = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int):
            prompt = len(self.prompt_ids or ())
        if not isinstance(sampled, int):
            sampled = sum(len(choice.token_ids or ()) for choice in self.choices.values())
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return prompt, sampled, cached if isinstance(cached, int) else 0

    def _read_top(self, data: Json) -> None:
        if "error" in data:
            error = data["error"]
            raise BadAnswer(
                f"The engine reported: {error.get('message') if isinstance(error, dict) else error}"
            )
        if not self.head:
            self.head = {key: data.get(key) for key in ("id", "created", "model")}
        if data.get("prompt_token_ids") is not None:
            self.prompt_ids = data["prompt_token_ids"]
        if data.get("usage"):
            self.usage = data["usage"]
        version = data.get("model_version")
        if isinstance(version, int):
            if self.version is not None and version != self.version:
                for choice in self.choices.values():
                    if choice.token_ids:
                        choice.versions = choice.versions or [0, self.version]
                        choice.versions = [*choice.versions, len(choice.token_ids), version]
            self.version = version

    def _choice(self, item: Json) -> Choice:
        index = item["index"]
        if index not in self.choices:
            if not isinstance(index, int) or not 0 <= index < MAX_CHOICES:
                raise TypeError("index")
            self.choices[index] = Choice(index)
        return self.choices[index]

    def _read_common(self, choice: Choice, item: Json) -> None:
        for key, value in item.items():
            if value is None or key in ("index", "message", "delta", "text"):
                continue
            if key == "token_ids":
                if choice.token_ids is None:
                    choice.token_ids = []
                choice.token_ids += value
            elif key == "logprobs":
                entries = value.get("content") if "tokens" not in value else _entries(value)
                if entries is not None:
                    choice.logprob_entries = (choice.logprob_entries or []) + entries
            elif key == "finish_reason":
                choice.finish_reason = value or choice.finish_reason
            elif key == "model_versions":
                choice.versions = value or choice.versions
            elif key == "prompt_token_ids":
                choice.prompt_ids = value
            else:
                choice.extra[key] = value


def message_of(choice: Choice) -> Json:
    """One spelling for the same message, however it came: nulls and empty lists left out, fields in order."""
    message = choice.message
    calls = message.get("tool_calls")
    clean: Json = {"role": message.get("role") or "assistant", "content": message.get("content") or ""}
    if calls:
        clean["content"] = clean["content"] or None
        clean["tool_calls"] = [_tool_call(call) for call in calls]
    for key in sorted(message):
        if key not in clean and message[key] not in (None, [], ""):
            clean[key] = message[key]
    return clean


def _merge(message: Json, key: str, value: Any) -> None:
    """Add one field of a delta to the message so far."""
    if key == "tool_calls":
        calls = message.setdefault("tool_calls", [])
        for part in value:
            position = part.get("index", 0)
            if not isinstance(position, int) or not 0 <= position <= len(calls):
                raise TypeError("tool_calls[].index")
            if position == len(calls):
                calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
            call = calls[position]
            function = part.get("function") or {}
            call["id"] = part.get("id") or call["id"]
            call["type"] = part.get("type") or call["type"]
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""
    elif isinstance(value, str) and key != "role":
        message[key] = message.get(key, "") + value
    else:
        message[key] = value


def _tool_call(call: Json) -> Json:
    function = call.get("function") or {}
    return {
        "id": call.get("id"),
        "type": call.get("type") or "function",
        "function": {"name": function.get("name"), "arguments": function.get("arguments")},
    }


def _entries(logprobs: Json) -> list[Json]:
    """The log-probabilities of the completions API as the chat API has them."""
    tokens = logprobs["tokens"]
    rest = [logprobs.get(name) or [None] * len(tokens) for name in ("top_logprobs", "text_offset")]
    return [
        {"token": token, "logprob": value, "top": top, "offset": offset}
        for token, value, top, offset in zip(tokens, logprobs["token_logprobs"], *rest, strict=True)
    ]
