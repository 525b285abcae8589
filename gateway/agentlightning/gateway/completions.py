"""OpenAI's completions: a prompt in, as text or token ids, and its continuation out."""

from typing import ClassVar, Final

from agentlightning.gateway.answer import MAX_CHOICES, Answer, Choice
from agentlightning.gateway.chat import PASSED_ON, ChatWriter, check_common
from agentlightning.gateway.memory import Memory
from agentlightning.gateway.request import SECRET_FIELDS, Api, ModelRequest, Writer, load
from agentlightning.gateway.rules import (
    ANY,
    BOOLEAN,
    COUNT,
    INTEGER,
    OBJECT,
    TEXT,
    BadRequest,
    Json,
    Table,
    accepted,
    honoured,
    only,
    refused,
)

__all__ = ["Completions"]


class Completions(Api):
    """`POST /v1/completions`."""

    path = "completions"
    engine_path = "/v1/completions"
    operation = "text_completion"
    fields: ClassVar[Table] = {
        "model": honoured("the policy's name, or its base model's", TEXT),
        "prompt": honoured("text, token ids, or a list of either: one record for each answer"),
        "max_tokens": honoured("at most what the run allows", COUNT),
        "n": honoured(f"up to {MAX_CHOICES}; one record for each choice", ANY),
        "stream": honoured("as server-sent events", BOOLEAN),
        "stream_options": honoured("`include_usage`", OBJECT),
        "logprobs": honoured("always asked of the engine; shown to the client that asks", INTEGER),
        **PASSED_ON,
        "echo": only(False, why="the prompt's tokens were not sampled"),
        "best_of": only(1, why="answers that nobody gets cannot be recorded as given"),
        "suffix": refused("the engines continue, they do not fill in"),
        **{name: accepted("taken out: neither forwarded nor recorded") for name in SECRET_FIELDS},
    }

    def parse(self, raw: bytes, memory: Memory) -> ModelRequest:
        body = load(raw)
        if not isinstance(body.get("prompt"), str | list) or not body["prompt"]:
            raise BadRequest("'prompt' must be text, token ids, or a list of either.", "prompt")
        check_common(body, self.fields)
        options = body.get("stream_options")
        return ModelRequest(
            api=self,
            raw=raw,
            body=body,
            chat={key: value for key, value in body.items() if value is not None and key not in _ACCEPTED},
            wants_logprobs=body.get("logprobs") is not None,
            wants_token_ids=bool(body.get("return_token_ids")),
            wants_usage=bool(options and options.get("include_usage")),
        )

    def writer(self, request: ModelRequest) -> Writer:
        return CompletionsWriter(request)


_ACCEPTED: Final = frozenset(name for name, rule in Completions.fields.items() if rule.fate != "honoured")


class CompletionsWriter(ChatWriter):
    """The same chunks, with text for messages."""

    def record(self, answer: Answer, choice: Choice) -> Json:
        item: Json = {"index": choice.index, "text": choice.message.get("content") or ""}
        if self.request.wants_logprobs and choice.logprob_entries is not None:
            entries = choice.logprob_entries
            item["logprobs"] = {
                "tokens": [entry["token"] for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": [entry["top"] for entry in entries],
                "text_offset": [entry["offset"] for entry in entries],
            }
        item["finish_reason"] = choice.finish_reason
        item.update({key: choice.extra[key] for key in sorted(choice.extra)})
        made = {
            "id": answer.head.get("id"),
            "object": "text_completion",
            "created": answer.head.get("created"),
            "model": self.request.model,
            "choices": [item],
        }
        if answer.usage is not None:
            made["usage"] = answer.usage
        return made
