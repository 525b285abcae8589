"""OpenAI's embeddings: passed to an engine and back. Nothing is sampled, so nothing is recorded."""

from typing import ClassVar

from agentlightning.gateway.chat import Chat
from agentlightning.gateway.memory import Memory
from agentlightning.gateway.request import ModelRequest, load
from agentlightning.gateway.rules import COUNT, TEXT, BadRequest, Table, accepted, check, honoured

__all__ = ["Embeddings"]


class Embeddings(Chat):
    """`POST /v1/embeddings`."""

    path = "embeddings"
    engine_path = "/v1/embeddings"
    operation = "embeddings"
    fields: ClassVar[Table] = {
        "model": honoured("the policy's name, or its base model's", TEXT),
        "input": honoured("text, token ids, or a list of either"),
        "dimensions": honoured("passed to the engine, which honours or refuses it", COUNT),
        "encoding_format": honoured("passed to the engine, which honours or refuses it", TEXT),
        "user": accepted("says nothing about the answer", TEXT),
    }

    def parse(self, raw: bytes, memory: Memory) -> ModelRequest:
        body = load(raw)
        if not isinstance(body.get("input"), str | list) or not body["input"]:
            raise BadRequest("'input' must be text, token ids, or a list of either.", "input")
        check(body, self.fields)
        chat = {key: value for key, value in body.items() if value is not None and key != "user"}
        return ModelRequest(api=self, raw=raw, body=body, chat=chat)
