"""Sampled tokens → the JSON of a chat completion, plain or in chunks. Both are built by the same code."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from agentlightning.trainer.engine.chat import ChatRequest
from agentlightning.trainer.engine.sequence import Emitted
from agentlightning.trainer.engine.text import TokenNames
from agentlightning.trainer.engine.tools import HermesParser, ToolCall

__all__ = ["Answer"]

Json = dict[str, Any]


@dataclass(slots=True)
class _Choice:
    """What is known of one choice; each `add` says what is new."""

    index: int
    parser: HermesParser | None
    content: str = ""
    calls: list[Json] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """[start, version, start, version, …] in tokens of this answer."""
    finish: str | None = None

    def add(self, emitted: Emitted) -> Json:
        if not self.versions or self.versions[-1] != emitted.version:
            self.versions += [len(self.token_ids), emitted.version]
        self.token_ids.append(emitted.token)
        pieces: list[str | ToolCall] = [emitted.text] if emitted.text else []
        if self.parser is not None:
            pieces = [*self.parser.push(emitted.text), *(self.parser.flush() if emitted.finish else ())]
        text, calls = "", []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                function = {"name": piece.name, "arguments": piece.arguments}
                calls.append(
                    {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
                )
            else:
                text += piece
        new: Json = {}
        if text:
            self.content += text
            new["content"] = text
        if calls:
            new["tool_calls"] = [{"index": len(self.calls) + i} | call for i, call in enumerate(calls)]
            self.calls += calls
        if emitted.finish:
            # Truncated stays truncated, even if a call was whole before.
            self.finish = "tool_calls" if self.calls and emitted.finish == "stop" else emitted.finish
        return new


class Answer:
    """The answer to one request, while its tokens come."""

    def __init__(self, request: ChatRequest, *, model: str, names: TokenNames) -> None:
        self.request = request
        self._names = names
        self._head: Json = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._choices = [
            _Choice(index, HermesParser() if request.parse_tools else None)
            for index in range(request.choices)
        ]
        self._version: int | None = None
        self._cached = 0

    @property
    def finished(self) -> bool:
        return all(choice.finish for choice in self._choices)

    def add(self, index: int, batch: list[Emitted], cached: int) -> Json:
        """Take in some tokens of a choice; returns the chunk that tells of them."""
        choice = self._choices[index]
        first = self._version is None
        if first:
            self._version, self._cached = batch[0].version, cached
        delta: Json = {} if choice.token_ids else {"role": "assistant", "content": ""}
        logprobs: list[Json] = []
        for emitted in batch:
            new = choice.add(emitted)
            if "content" in new:
                delta["content"] = delta.get("content", "") + new["content"]
            if "tool_calls" in new:
                delta.setdefault("tool_calls", []).extend(new["tool_calls"])
            if self.request.logprobs:
                logprobs.append(self._logprob(emitted))
        choice.logprobs += logprobs
        told: Json = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if self.request.logprobs else None,
            "finish_reason": choice.finish,
        }
        if self.request.return_token_ids:
            told["token_ids"] = [emitted.token for emitted in batch]
        if choice.finish:
            told |= self._changes(choice)
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [told]}
        if first:
            chunk["model_version"] = self._version
            if self.request.return_token_ids:
                chunk["prompt_token_ids"] = self.request.prompt
        if self.request.include_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self) -> Json:
        return self._head | {"object": "chat.completion.chunk", "choices": [], "usage": self._usage()}

    def plain(self) -> Json:
        """The whole answer."""
        body = self._head | {
            "object": "chat.completion",
            "choices": [self._plain(choice) for choice in self._choices],
            "usage": self._usage(),
            "model_version": self._version,
        }
        if self.request.return_token_ids:
            body["prompt_token_ids"] = self.request.prompt
        return body

    def _plain(self, choice: _Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.calls:
            message |= {"content": choice.content or None, "tool_calls": choice.calls}
        told: Json = {
            "index": choice.index,
            "message": message,
            "logprobs": {"content": choice.logprobs, "refusal": None} if self.request.logprobs else None,
            "finish_reason": choice.finish,
        }
        if self.request.return_token_ids:
            told["token_ids"] = choice.token_ids
        return told | self._changes(choice)

    def _changes(self, choice: _Choice) -> Json:
        """The versions, where `model_version` alone does not say them."""
        return {} if choice.versions == [0, self._version] else {"model_versions": choice.versions}

    def _usage(self) -> Json:
        prompt = len(self.request.prompt)
        completion = sum(len(choice.token_ids) for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    def _logprob(self, emitted: Emitted) -> Json:
        def named(token: int, logprob: float) -> Json:
            text, spelled = self._names(token)
            return {"token": text, "logprob": logprob, "bytes": spelled}

        return named(emitted.token, emitted.logprob) | {"top_logprobs": [named(*top) for top in emitted.top]}
