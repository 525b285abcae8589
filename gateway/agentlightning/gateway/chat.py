"""OpenAI's chat completions: the API that engines speak, so requests and answers pass as they are.

The engine is always asked for token ids and log-probabilities; what of them the client did not ask for is taken out.
"""

from typing import ClassVar, Final

import orjson

from agentlightning.gateway.answer import MAX_CHOICES, Answer, Choice, message_of
from agentlightning.gateway.errors import ModelError
from agentlightning.gateway.memory import Memory
from agentlightning.gateway.request import SECRET_FIELDS, Api, ModelRequest, Writer, load
from agentlightning.gateway.rules import (
    ANY,
    BOOLEAN,
    COUNT,
    INTEGER,
    ITEMS,
    NUMBER,
    OBJECT,
    TEXT,
    BadRequest,
    Json,
    Rule,
    Table,
    accepted,
    check,
    honoured,
    only,
    refused,
)

__all__ = ["DONE", "PASSED_ON", "Chat", "ChatWriter", "check_common", "encode_event"]

DONE: Final = b"data: [DONE]\n\n"
_ENGINE: Final = "passed to the engine, which honours or refuses it"
_BILLING: Final = "says nothing about the answer"
_SECRET: Final = "taken out: neither forwarded nor recorded"

_HIDDEN_TOP: Final = (
    "prompt_token_ids",
    "model_version",
    "model_versions",
    "prompt_logprobs",
    "kv_transfer_params",
)

PASSED_ON: Final[dict[str, Rule]] = {
    "temperature": honoured("unless the run sets the sampling", NUMBER),
    "top_p": honoured("unless the run sets the sampling", NUMBER),
    "top_k": honoured("unless the run sets the sampling; an extension of the engines", INTEGER),
    "min_p": honoured("unless the run sets the sampling; an extension of the engines", NUMBER),
    "seed": honoured("unless the run sets the sampling", INTEGER),
    "presence_penalty": honoured("unless the run sets the sampling", NUMBER),
    "frequency_penalty": honoured("unless the run sets the sampling", NUMBER),
    "repetition_penalty": honoured("unless the run sets the sampling; an extension of the engines", NUMBER),
    "logit_bias": honoured(_ENGINE, OBJECT),
    "stop": honoured("where to stop"),
    "stop_token_ids": honoured(f"an extension of vLLM, {_ENGINE}", ITEMS),
    "include_stop_str_in_output": honoured(f"an extension of vLLM, {_ENGINE}", BOOLEAN),
    "min_tokens": honoured(f"an extension of vLLM, {_ENGINE}", INTEGER),
    "ignore_eos": honoured(f"an extension of the engines, {_ENGINE}", BOOLEAN),
    "skip_special_tokens": honoured(f"an extension of vLLM, {_ENGINE}", BOOLEAN),
    "spaces_between_special_tokens": honoured(f"an extension of vLLM, {_ENGINE}", BOOLEAN),
    "allowed_token_ids": honoured(f"an extension of vLLM, {_ENGINE}", ITEMS),
    "bad_words": honoured(f"an extension of vLLM, {_ENGINE}", ITEMS),
    "structured_outputs": honoured(f"an extension of vLLM, {_ENGINE}", OBJECT),
    "add_special_tokens": honoured(f"an extension of vLLM, {_ENGINE}", BOOLEAN),
    "priority": honoured(f"an extension of vLLM, {_ENGINE}", INTEGER),
    "return_token_ids": honoured("always asked of the engine; shown to the client that asks", BOOLEAN),
    "user": accepted(_BILLING, TEXT),
}
"""Fields that both of the engines' APIs have."""


class Chat(Api):
    """`POST /v1/chat/completions`."""

    path = "chat/completions"
    fields: ClassVar[Table] = {
        "model": honoured("the policy's name, or its base model's", TEXT),
        "messages": honoured("passed to the engine, images and all"),
        "max_tokens": honoured("at most what the run allows", COUNT),
        "max_completion_tokens": honoured("at most what the run allows", COUNT),
        "n": honoured(f"up to {MAX_CHOICES}; one record for each choice", ANY),
        "stream": honoured("as server-sent events", BOOLEAN),
        "stream_options": honoured("`include_usage`", OBJECT),
        "logprobs": honoured("always asked of the engine; shown to the client that asks", BOOLEAN),
        "top_logprobs": honoured("needs `logprobs`", INTEGER),
        "tools": honoured(_ENGINE, ITEMS),
        "tool_choice": honoured(_ENGINE),
        "parallel_tool_calls": honoured(_ENGINE, BOOLEAN),
        "response_format": honoured(_ENGINE, OBJECT),
        "reasoning_effort": honoured(_ENGINE, TEXT),
        "include_reasoning": honoured(f"an extension of vLLM, {_ENGINE}", BOOLEAN),
        **PASSED_ON,
        "chat_template_kwargs": honoured(f"an extension of vLLM, {_ENGINE}", OBJECT),
        "add_generation_prompt": honoured(f"an extension of vLLM, {_ENGINE}", BOOLEAN),
        "continue_final_message": honoured(f"an extension of vLLM, {_ENGINE}", BOOLEAN),
        "documents": honoured(f"an extension of vLLM, {_ENGINE}", ITEMS),
        "mm_processor_kwargs": honoured(f"an extension of vLLM, {_ENGINE}", OBJECT),
        "thinking_token_budget": honoured(f"an extension of vLLM, {_ENGINE}", INTEGER),
        "modalities": only(["text"], why="policies answer in text"),
        "safety_identifier": accepted(_BILLING),
        "prompt_cache_key": accepted(_BILLING),
        "prompt_cache_retention": accepted(_BILLING),
        "prompt_cache_options": accepted(_BILLING),
        "metadata": accepted(_BILLING),
        "store": accepted("the record is kept anyhow"),
        "service_tier": accepted(_BILLING),
        **{name: accepted(_SECRET) for name in SECRET_FIELDS},
        "verbosity": only("medium", why="policies have no such setting"),
        "audio": refused("policies answer in text"),
        "functions": refused("use tools"),
        "function_call": refused("use tool_choice"),
        "prediction": refused("the engines cannot use predicted text"),
        "web_search_options": refused("the gateway reaches no other service"),
        "moderation": refused("the gateway moderates nothing"),
    }

    def parse(self, raw: bytes, memory: Memory) -> ModelRequest:
        body = load(raw)
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise BadRequest("'messages' must be a non-empty array.", "messages")
        check_common(body, self.fields)
        options = body.get("stream_options")
        return ModelRequest(
            api=self,
            raw=raw,
            body=body,
            chat={key: value for key, value in body.items() if value is not None and key not in _ACCEPTED},
            wants_logprobs=bool(body.get("logprobs")),
            wants_token_ids=bool(body.get("return_token_ids")),
            wants_usage=bool(options and options.get("include_usage")),
        )

    def writer(self, request: ModelRequest) -> Writer:
        return ChatWriter(request)


_ACCEPTED: Final = frozenset(name for name, rule in Chat.fields.items() if rule.fate in ("accepted", "only"))


class ChatWriter(Writer):
    """Relays the engine's own chunks, less what was not asked for."""

    def chunk(self, data: Json, answer: Answer) -> tuple[bytes, bytes]:
        choices = data["choices"]
        if not self.request.wants_usage:
            data.pop("usage", None)
            if not choices:
                return b"", b""
        event = encode_event(self._hide(data))
        for choice in choices:
            if not choice.get("finish_reason"):
                return event, b""
        return b"", event

    def end(self, answer: Answer) -> bytes:
        return DONE

    def plain(self, data: Json, answer: Answer) -> bytes:
        return orjson.dumps(self._hide(data))

    def record(self, answer: Answer, choice: Choice) -> Json:
        item: Json = {"index": choice.index, "message": message_of(choice)}
        if self.request.wants_logprobs and choice.logprob_entries is not None:
            item["logprobs"] = {"content": choice.logprob_entries}
        item["finish_reason"] = choice.finish_reason
        item.update({key: choice.extra[key] for key in sorted(choice.extra)})
        made = {
            "id": answer.head.get("id"),
            "object": "chat.completion",
            "created": answer.head.get("created"),
            "model": self.request.model,
            "choices": [item],
        }
        if answer.usage is not None:
            made["usage"] = answer.usage
        return made

    def error(self, error: ModelError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def _hide(self, data: Json) -> Json:
        """Take out of an answer, or of a chunk of one, what the client did not ask for."""
        request = self.request
        if not request.wants_token_ids:
            for key in _HIDDEN_TOP:
                data.pop(key, None)
        data["model"] = request.model
        for choice in data["choices"]:
            if not request.wants_token_ids:
                choice.pop("token_ids", None)
                choice.pop("model_versions", None)
                choice.pop("prompt_token_ids", None)
            if not request.wants_logprobs:
                choice.pop("logprobs", None)
        return data


def check_common(body: Json, fields: Table) -> None:
    """What the two APIs of the engines have in common. Raises BadRequest."""
    check(body, fields)
    n, options = body.get("n"), body.get("stream_options")
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_CHOICES):
        raise BadRequest(f"'n' must be an integer from 1 to {MAX_CHOICES}.", "n")
    if options is not None:
        if not body.get("stream"):
            raise BadRequest(
                "'stream_options' must be an object, and needs 'stream': true.", "stream_options"
            )
        check(options, _STREAM_OPTIONS, "stream_options.")


_STREAM_OPTIONS: Final[Table] = {
    "include_usage": honoured("the last chunk tells the tokens", BOOLEAN),
    "include_obfuscation": accepted("nothing is padded"),
    "continuous_usage_stats": honoured(f"an extension of vLLM, {_ENGINE}", BOOLEAN),
}


def encode_event(data: Json) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
