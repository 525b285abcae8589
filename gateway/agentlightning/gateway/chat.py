"""The chat-completions format: what goes to the engine, what comes back, and what of it the client may see.

The engine is always asked for token ids and log-probabilities. `Answer` gathers them, plain or chunk by chunk, into
one and the same record; `hide` takes out of what is relayed all that the client did not ask for.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from agentlightning.proto.packed import pack_floats

__all__ = ["SAMPLING_KEYS", "Answer", "BadAnswer", "BadRequest", "ChatRequest", "Choice", "replay_chunks"]

Json = dict[str, Any]  # Any: JSON that others wrote

SAMPLING_KEYS: Final = ("temperature", "top_p", "top_k", "max_tokens")
"""What a run may set for all calls of its rollouts."""
_SHAPING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields by which an agent changes the distribution that it samples from: replaced as a whole by the run's.
A seed above all: it would make the rollouts of a group the same."""
_RECORDED: Final = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}
_SECRET_FIELDS: Final = ("api_key", "authorization", "extra_headers", "headers")
_HIDDEN_TOP: Final = (
    "prompt_token_ids",
    "model_version",
    "model_versions",
    "prompt_logprobs",
    "kv_transfer_params",
)
MAX_CHOICES: Final = 128


class BadRequest(Exception):
    """A request that cannot be served as it is; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadAnswer(Exception):
    """The engine's answer is not what the format says."""


@dataclass(slots=True)
class ChatRequest:
    """A client's request, and what it asked for."""

    raw: bytes
    body: Json
    model: str
    stream: bool
    n: int
    wants_logprobs: bool
    wants_token_ids: bool
    wants_usage: bool
    digest: str

    @classmethod
    def parse(cls, raw: bytes) -> "ChatRequest":
        """Raises BadRequest with what is wrong. Fields that only the engine knows are left to it."""
        try:
            body = orjson.loads(raw)
        except ValueError as error:
            raise BadRequest(f"The request body is not valid JSON: {error}.") from None
        if not isinstance(body, dict):
            raise BadRequest("The request body must be a JSON object.")
        model, stream, n = body.get("model"), body.get("stream"), body.get("n")
        options = body.get("stream_options")
        if not isinstance(model, str) or not model:
            raise BadRequest("You must provide a model parameter, as a string.", "model")
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise BadRequest("'messages' must be a non-empty array.", "messages")
        if stream not in (None, True, False):
            raise BadRequest("'stream' must be a boolean.", "stream")
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_CHOICES):
            raise BadRequest(f"'n' must be an integer from 1 to {MAX_CHOICES}.", "n")
        if options is not None and (not isinstance(options, dict) or not stream):
            raise BadRequest(
                "'stream_options' must be an object, and needs 'stream': true.", "stream_options"
            )
        for key in ("max_tokens", "max_completion_tokens"):
            limit = body.get(key)
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
                raise BadRequest(f"'{key}' must be a positive integer.", key)
        return cls(
            raw=raw,
            body=body,
            model=model,
            stream=bool(stream),
            n=n or 1,
            wants_logprobs=bool(body.get("logprobs")),
            wants_token_ids=bool(body.get("return_token_ids")),
            wants_usage=bool(options and options.get("include_usage")),
            digest=hashlib.blake2b(raw, digest_size=16).hexdigest(),
        )

    def for_engine(self, model: str, sampling: Mapping[str, Any] | None) -> Json:
        """The body that the engine gets. `sampling`: the run's settings, or None to honour the agent's."""
        body = {key: value for key, value in self.body.items() if key not in _SECRET_FIELDS}
        body["model"] = model
        if sampling:
            for key in _SHAPING:
                body.pop(key, None)
            body.update({key: value for key, value in sampling.items() if key != "max_tokens"})
            if (limit := sampling.get("max_tokens")) is not None:
                asked = [key for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None]
                for key in asked or ["max_tokens"]:
                    body[key] = min(limit, body.get(key) or limit)
        body["return_token_ids"] = True
        body["logprobs"] = True
        if self.stream:
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return body

    def text(self, secret: str | None) -> str:
        """The exact body, for the record, without secrets."""
        raw = self.raw
        if any(key in self.body for key in _SECRET_FIELDS):
            raw = orjson.dumps({key: value for key, value in self.body.items() if key not in _SECRET_FIELDS})
        text = raw.decode()
        return text.replace(secret, "[removed]") if secret is not None else text

    def hide(self, answer: Json) -> Json:
        """Take out of an answer, or of a chunk of one, what the client did not ask for."""
        if not self.wants_token_ids:
            for key in _HIDDEN_TOP:
                answer.pop(key, None)
        answer["model"] = self.model
        for choice in answer.get("choices") or ():
            if not self.wants_token_ids:
                choice.pop("token_ids", None)
                choice.pop("model_versions", None)
            if not self.wants_logprobs:
                choice.pop("logprobs", None)
        return answer


def sampling_attributes(body: Json) -> dict[str, Any]:
    """The settings really in force, as `gen_ai.request.*` attributes."""
    found: dict[str, Any] = {}
    for key, name in _RECORDED.items():
        value = body.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value if key == "top_k" else float(value)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None:
        found["gen_ai.request.max_tokens"] = limit
    if isinstance(seed := body.get("seed"), int):
        found["gen_ai.request.seed"] = seed
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else [item for item in stop or () if isinstance(item, str)]
    if stops:
        found["gen_ai.request.stop_sequences"] = stops
    if (n := body.get("n") or 1) != 1:
        found["gen_ai.request.choice.count"] = n
    if body.get("stream"):
        found["gen_ai.request.stream"] = True
    return found


@dataclass(slots=True)
class Choice:
    """One of the answers to a request."""

    index: int
    message: Json = field(default_factory=dict)
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprob_entries: list[Json] | None = None
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
    """What the engine said, plain or in chunks: both leave the same record."""

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
                choice.message = dict(item["message"])
                self._read_common(choice, item)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadAnswer(f"The engine's answer is not a chat completion ({error!r}).") from None
        self.check_complete()

    def read_chunk(self, data: Any) -> None:
        """Take in one chunk of a stream. Raises BadAnswer."""
        try:
            self._read_top(data)
            for item in data["choices"]:
                choice = self._choice(item)
                for key, value in (item.get("delta") or {}).items():
                    _merge(choice.message, key, value)
                self._read_common(choice, item)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadAnswer(f"The engine's chunk is not one of a chat completion ({error!r}).") from None

    def check_complete(self) -> None:
        """Raises BadAnswer unless every choice has ended."""
        if not self.choices or any(choice.finish_reason is None for choice in self.choices.values()):
            raise BadAnswer("The engine's answer ended before it was complete.")

    def versions_of(self, choice: Choice) -> tuple[int | None, list[int] | None]:
        """Version of the first sampled token; and where it changed, if it did."""
        if len(choice.versions) > 2:
            return choice.versions[1], choice.versions
        return (choice.versions[1] if choice.versions else self.version), None

    def plain(self, model: str, choice: Choice, *, logprobs: bool) -> Json:
        """The record of one choice, as an unstreamed answer."""
        item: Json = {"index": choice.index, "message": _message(choice.message)}
        if logprobs and choice.logprob_entries is not None:
            item["logprobs"] = {"content": choice.logprob_entries}
        item["finish_reason"] = choice.finish_reason
        item.update({key: choice.extra[key] for key in sorted(choice.extra)})
        answer = {
            "id": self.head.get("id"),
            "object": "chat.completion",
            "created": self.head.get("created"),
            "model": model,
            "choices": [item],
        }
        if self.usage is not None:
            answer["usage"] = self.usage
        return answer

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
        if not isinstance(index, int) or not 0 <= index < MAX_CHOICES:
            raise TypeError("index")
        if index not in self.choices:
            self.choices[index] = Choice(index)
        return self.choices[index]

    def _read_common(self, choice: Choice, item: Json) -> None:
        for key, value in item.items():
            if key == "token_ids":
                if value is not None:
                    choice.token_ids = (choice.token_ids or []) + value
            elif key == "logprobs":
                if value is not None and value.get("content") is not None:
                    choice.logprob_entries = (choice.logprob_entries or []) + value["content"]
            elif key == "finish_reason":
                choice.finish_reason = value or choice.finish_reason
            elif key == "model_versions":
                choice.versions = value or choice.versions
            elif key not in ("index", "message", "delta") and value is not None:
                choice.extra[key] = value


def replay_chunks(request: ChatRequest, answers: list[Json]) -> Iterator[bytes]:
    """An answer given before, as the events of a stream; the last one is the terminal event."""
    last: Json = {}
    for answer in answers:
        for item in answer["choices"]:
            delta = dict(item["message"])
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
            head = {"id": answer["id"], "object": "chat.completion.chunk", "created": answer["created"]}
            last = {**head, "model": request.model, "choices": []}
            first = {"index": item["index"], "delta": delta, "finish_reason": None}
            if "logprobs" in item:
                first["logprobs"] = item["logprobs"]
            yield encode_event({**last, "choices": [first]})
            end = {"index": item["index"], "delta": {}, "finish_reason": item["finish_reason"]}
            yield encode_event({**last, "choices": [end]})
    if request.wants_usage:
        yield encode_event({**last, "usage": answers[-1].get("usage")})
    yield DONE


DONE: Final = b"data: [DONE]\n\n"


def encode_event(data: Json) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _merge(message: Json, key: str, value: Any) -> None:
    """Add one field of a delta to the message so far."""
    if value is None:
        return
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


def _message(message: Json) -> Json:
    """One spelling for the same message, however it came: nulls and empty lists left out, fields in order."""
    calls = message.get("tool_calls")
    clean: Json = {"role": message.get("role") or "assistant", "content": message.get("content") or ""}
    if calls:
        clean["content"] = clean["content"] or None
        clean["tool_calls"] = [_tool_call(call) for call in calls]
    for key in sorted(message):
        if key not in clean and message[key] not in (None, [], ""):
            clean[key] = message[key]
    return clean


def _tool_call(call: Json) -> Json:
    function = call.get("function") or {}
    return {
        "id": call.get("id"),
        "type": call.get("type") or "function",
        "function": {"name": function.get("name"), "arguments": function.get("arguments")},
    }
