"""A client's request for an answer, as the rest of the gateway sees it, whichever API it came by.

`chat` is what it means to an engine: the body of its chat (or completions) API. `writer` makes the answer that the
client expects. What a run sets for all calls of its rollouts replaces what the agent asked for.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import orjson

from agentlightning.gateway.answer import Answer, Choice
from agentlightning.gateway.errors import ModelError
from agentlightning.gateway.memory import Memory
from agentlightning.gateway.rules import BadRequest, Json, Table
from agentlightning.gateway.spans import Identity

__all__ = ["SECRET_FIELDS", "Api", "ModelRequest", "Writer", "call_seed", "load", "sampling_attributes"]

SECRET_FIELDS: Final = ("api_key", "authorization", "extra_headers", "headers")
"""Fields that some clients put into a body: neither forwarded nor recorded."""
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
A seed above all: it would make the rollouts of a group the same. (The run's seed is made one of each call: `call_seed`.)"""
_RECORDED: Final = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}


class Writer(ABC):
    """Writes one answer in the format of one API."""

    def __init__(self, request: "ModelRequest") -> None:
        self.request = request

    @abstractmethod
    def chunk(self, data: Json, answer: Answer) -> tuple[bytes, bytes]:
        """A chunk of the engine's as the client's events: those that go at once, and those that must wait for the
        record. `answer` has taken it in already; `data` may be changed."""

    @abstractmethod
    def end(self, answer: Answer) -> bytes:
        """What ends the stream, after all that waited."""

    @abstractmethod
    def plain(self, data: Json, answer: Answer) -> bytes:
        """The body of an unstreamed answer, from the engine's own `data`; it may be changed."""

    @abstractmethod
    def record(self, answer: Answer, choice: Choice) -> Json:
        """One choice of the answer as the unstreamed body has it, streamed or not."""

    @abstractmethod
    def error(self, error: ModelError) -> bytes:
        """The event that tells of a failure in the middle of a stream."""

    def response_id(self, answer: Answer) -> str | None:
        """The answer's id, as the client sees it."""
        found = answer.head.get("id")
        return found if isinstance(found, str) else None

    def remember(self, answer: Answer, memory: Memory) -> None:  # noqa: B027  most have nothing to keep
        """Keep what a later request of this client may refer to."""


class Api(ABC):
    """One of the APIs that the gateway serves."""

    path: ClassVar[str]
    """Below `/v1`."""
    engine_path: ClassVar[str] = "/v1/chat/completions"
    operation: ClassVar[str] = "chat"
    """`gen_ai.operation.name`"""
    fields: ClassVar[Table]

    @abstractmethod
    def parse(self, raw: bytes, memory: Memory) -> "ModelRequest":
        """Raises BadRequest with what is wrong."""

    @abstractmethod
    def writer(self, request: "ModelRequest") -> Writer: ...

    def refusal(self, error: ModelError) -> bytes:
        """The body of an answer that is an error."""
        return error.body()


@dataclass(slots=True, kw_only=True)
class ModelRequest:
    """A client's request, and what it asked for."""

    api: Api
    raw: bytes
    body: Json
    """As the client sent it."""
    chat: Json
    """What it means to the engine."""
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    wants_usage: bool = False
    notes: list[str] = field(default_factory=list)
    """Counters of what was done to it."""
    context: Any = None
    """What its API's writer needs to know besides."""
    digest: str = ""
    """Tells requests apart: equal for a client's retry."""

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(self.raw, digest_size=16, person=self.api.path.encode()[:16])
        self.digest = digest.hexdigest()

    @property
    def model(self) -> str:
        return self.body["model"]

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    def for_engine(self, model: str, sampling: Mapping[str, Any] | None) -> Json:
        """The body that the engine gets. `sampling`: the run's settings, or None to honour the agent's."""
        body = {
            key: value
            for key, value in self.chat.items()
            if key not in SECRET_FIELDS and not (sampling and key in _SHAPING)
        }
        body["model"] = model
        if sampling:
            body.update({key: value for key, value in sampling.items() if key != "max_tokens"})
            if (limit := sampling.get("max_tokens")) is not None:
                asked = [key for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None]
                for key in asked or ["max_tokens"]:
                    body[key] = min(limit, body.get(key) or limit)
        body["return_token_ids"] = True
        if self.api.operation == "chat":
            body["logprobs"] = True
        elif body.get("logprobs") is None:
            body["logprobs"] = 0  # the sampled token's own, and no others
        if self.stream:
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return body

    def text(self, secret: str | None) -> str:
        """The exact body, for the record, without secrets."""
        raw = self.raw
        if any(key in self.body for key in SECRET_FIELDS):
            raw = orjson.dumps({key: value for key, value in self.body.items() if key not in SECRET_FIELDS})
        text = raw.decode()
        return text.replace(secret, "[removed]") if secret is not None else text


def load(raw: bytes) -> Json:
    """A request's body, with a model's name in it. Raises BadRequest."""
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.")
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise BadRequest("You must provide a model parameter, as a string.", "model")
    return body


def call_seed(seed: int, identity: Identity, place: int) -> int:
    """The seed of one call: its own in its run, and the same when the run is repeated."""
    text = f"{seed}/{identity.rollout_id}/{identity.attempt}/{place}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 33


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
