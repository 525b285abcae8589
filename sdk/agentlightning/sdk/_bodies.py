"""What a model call's JSON bodies say, as span attributes.

Reads the three OpenAI-shaped interfaces and, in their answers, the token ids and log-probabilities
that engines add: at the top or inside a choice, as vLLM and the embedded engine write them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentlightning.proto import attributes as names
from agentlightning.proto.packed import pack_floats, pack_ids
from agentlightning.sdk._losses import count

__all__ = [
    "API_BY_PATH",
    "api_of",
    "choices_of",
    "dumps",
    "loads",
    "loads_plainly",
    "looks_like_call",
    "request_attributes",
    "response_attributes",
]

API_BY_PATH = {"/chat/completions": "chat", "/completions": "completions", "/responses": "responses"}
"""Longest first: a path that ends with the first ends with the second too."""

_OPERATION = {"chat": "chat", "completions": "text_completion", "responses": "chat"}
_MARKS = {
    "chat": ("messages",),
    "completions": ("prompt",),
    "responses": ("input", "prompt", "previous_response_id", "conversation"),
}
_SAMPLING = {
    "temperature": ("gen_ai.request.temperature", float),
    "top_p": ("gen_ai.request.top_p", float),
    "top_k": ("gen_ai.request.top_k", int),
    "max_tokens": ("gen_ai.request.max_tokens", int),
    "max_completion_tokens": ("gen_ai.request.max_tokens", int),
    "max_output_tokens": ("gen_ai.request.max_tokens", int),
    "frequency_penalty": ("gen_ai.request.frequency_penalty", float),
    "presence_penalty": ("gen_ai.request.presence_penalty", float),
    "seed": ("gen_ai.request.seed", int),
    "n": ("gen_ai.request.choice.count", int),
}

_orjson_loads: Callable[[bytes], Any] | None
_orjson_dumps: Callable[[Any], bytes] | None
try:
    # Several times faster, where the program has it.
    from orjson import dumps as _orjson_dumps
    from orjson import loads as _orjson_loads
except ImportError:
    _orjson_loads = _orjson_dumps = None


def loads(data: bytes) -> Any:
    """Parse JSON; None if it is none."""
    if _orjson_loads is not None:
        try:
            return _orjson_loads(data)
        except ValueError:
            pass  # stricter than json, which takes NaN as some servers write it
    try:
        return json.loads(data)
    except ValueError:  # JSONDecodeError and UnicodeDecodeError
        return None


def dumps(value: Any) -> str | None:
    """JSON quickly; None where that is not to be had (no orjson, half a character, a number beyond 64 bits)."""
    if _orjson_dumps is None:
        return None
    try:
        return _orjson_dumps(value).decode()
    except TypeError:
        return None


def loads_plainly(data: bytes) -> Any:
    """Parse JSON as the HTTP clients do, so that its outcome can stand for theirs; None if it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return None


def api_of(path: str) -> str | None:
    """Which interface a request's path belongs to; None if it is no model call."""
    for ending, api in API_BY_PATH.items():
        if path.endswith(ending):
            return api
    return None


def looks_like_call(api: str, body: Any) -> bool:
    """Whether a request body is one of this interface; other services have such paths too."""
    return isinstance(body, dict) and any(mark in body for mark in _MARKS[api])


def request_attributes(api: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """GenAI attributes of a request, for a span of our own."""
    attributes: dict[str, Any] = {names.OPERATION_NAME: _OPERATION[api], names.PROVIDER_NAME: "openai"}
    if isinstance(body.get("model"), str):
        attributes[names.REQUEST_MODEL] = body["model"]
    for field, (name, kind) in _SAMPLING.items():
        value = body.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool):
            attributes[name] = kind(value)
    stop = body.get("stop")
    if stop:
        attributes["gen_ai.request.stop_sequences"] = (
            [stop] if isinstance(stop, str) else [str(text) for text in stop]
        )
    if body.get("stream"):
        attributes["gen_ai.request.stream"] = True
    return attributes


def response_attributes(body: Mapping[str, Any]) -> dict[str, Any]:
    """GenAI attributes of an answer, for a span of our own."""
    attributes: dict[str, Any] = {}
    if isinstance(body.get("id"), str):
        attributes[names.RESPONSE_ID] = body["id"]
    if isinstance(body.get("model"), str):
        attributes[names.RESPONSE_MODEL] = body["model"]
    usage = body.get("usage")
    if isinstance(usage, dict):
        for name, fields in (
            (names.USAGE_INPUT, ("prompt_tokens", "input_tokens")),
            (names.USAGE_OUTPUT, ("completion_tokens", "output_tokens")),
        ):
            value = next((usage[field] for field in fields if isinstance(usage.get(field), int)), None)
            if value is not None:
                attributes[name] = value
    choices = body.get("choices")
    if isinstance(choices, list):
        reasons = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]
        if any(reasons):
            attributes[names.FINISH_REASONS] = [str(reason or "") for reason in reasons]
    elif isinstance(body.get("status"), str):  # the Responses interface
        attributes[names.FINISH_REASONS] = [body["status"]]
    return attributes


def choices_of(body: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each answer of a response with its exact tokens: (index, attributes). Responses have one."""
    choices = body.get("choices")
    if not isinstance(choices, list):
        yield 0, _exact(body, body, _responses_logprobs(body))
        return
    for position, choice in enumerate(choices):
        if isinstance(choice, dict):
            index = choice.get("index")
            yield (
                index if isinstance(index, int) else position,
                _exact(body, choice, _choice_logprobs(choice)),
            )


def _exact(body: Mapping[str, Any], choice: Mapping[str, Any], logprobs: list[Any] | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    prompt = body.get("prompt_token_ids")
    if prompt is None:
        prompt = choice.get("prompt_token_ids")
    response = choice.get("token_ids")
    for name, ids in ((names.PROMPT_TOKEN_IDS, prompt), (names.RESPONSE_TOKEN_IDS, response)):
        if isinstance(ids, list):
            try:
                attributes[name] = pack_ids(ids)
            except (OverflowError, TypeError):
                count("token_ids_unreadable")
    if isinstance(response, list) and logprobs is not None:
        if len(logprobs) != len(response):
            count("logprobs_not_parallel")
        else:
            try:
                attributes[names.RESPONSE_LOGPROBS] = pack_floats(logprobs)
            except TypeError:
                count("logprobs_unreadable")
    version = body.get("model_version")
    if isinstance(version, int):
        attributes[names.MODEL_VERSION] = version
    versions = choice.get("model_versions")
    if isinstance(versions, list) and versions and all(isinstance(item, int) for item in versions):
        attributes[names.MODEL_VERSIONS] = versions
    return attributes


def _choice_logprobs(choice: Mapping[str, Any]) -> list[Any] | None:
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    content = logprobs.get("content")
    if isinstance(content, list):  # chat
        return [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]
    plain = logprobs.get("token_logprobs")  # completions
    return plain if isinstance(plain, list) else None


def _responses_logprobs(body: Mapping[str, Any]) -> list[Any] | None:
    found: list[Any] = []
    for item in body.get("output") or ():
        for part in (item.get("content") if isinstance(item, dict) else None) or ():
            entries = part.get("logprobs") if isinstance(part, dict) else None
            if isinstance(entries, list):
                found.extend(entry.get("logprob") if isinstance(entry, dict) else None for entry in entries)
    return found or None
